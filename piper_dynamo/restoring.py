"""Looking at a model runs nothing of it: what its forward does to Python's objects is taken back.

Dynamo's code of a call applies to attributes, lists and dicts what forward does to them, also where
the backend computed nothing. A model that does something else in its first call is to do so in the
first that trains.

Signature: a model, objects that a call changes -> the same, as they were.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from piper_dynamo.seen import plain_values


def _fill_dict(one: Any, before: dict[Any, Any]) -> None:
    kind = OrderedDict if isinstance(one, OrderedDict) else dict  # which has an order of its own
    kind.clear(one)
    for key, value in before.items():
        kind.__setitem__(one, key, value)


def _fill_slots(one: Any, before: dict[str, Any]) -> None:
    for name in _slots(one):
        if name in before:
            object.__setattr__(one, name, before[name])
        elif hasattr(one, name):
            object.__delattr__(one, name)


# How containers get their content again: not by functions of their own, which may refuse it.
_FILLED: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    list: (list, lambda one, before: (list.clear(one), list.extend(one, before))),
    deque: (list, lambda one, before: (deque.clear(one), deque.extend(one, before))),
    set: (list, lambda one, before: (set.clear(one), set.update(one, before))),
    dict: (lambda one: dict(dict.items(one)), _fill_dict),
}


def _slots(one: Any) -> list[str]:
    """Attributes that an object has without a dict."""
    found = [vars(base).get("__slots__", ()) for base in type(one).__mro__]
    names = [name for some in found for name in ((some,) if isinstance(some, str) else some)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


class Kept:
    """Objects as they were when they were first handed over."""

    def __init__(self) -> None:
        # By identity: the object, what fills it, and what was in it.
        self._contents: dict[int, tuple[Any, Callable[[Any, Any], object], Any]] = {}

    def add(self, objects: Iterable[Any]) -> None:
        """Keep what is in containers, and what attributes other objects have."""
        for one in objects:
            kind = next((kind for kind in _FILLED if isinstance(one, kind)), None)
            if kind is not None:
                copy, fill = _FILLED[kind]
                self._contents.setdefault(id(one), (one, fill, copy(one)))
                continue
            own = getattr(one, "__dict__", None)
            if isinstance(own, dict):  # a class has a proxy of one
                self.add([own])
            slots = {name: getattr(one, name) for name in _slots(one) if hasattr(one, name)}
            if slots:
                self._contents.setdefault(id(one), (one, _fill_slots, slots))

    def restore(self) -> None:
        """Put all of it back."""
        for one, fill, before in self._contents.values():
            fill(one, before)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back attributes of modules, buffers, and what lists, sets and dicts of these hold."""
    kept = Kept()
    for module in model.modules():
        kept.add([module.__dict__, module._buffers])
        kept.add(one for one in plain_values(module) if isinstance(one, tuple(_FILLED)))
    try:
        yield
    finally:
        kept.restore()
