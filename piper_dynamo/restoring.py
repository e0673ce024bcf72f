"""Looking at a model runs nothing of it: what its forward does to Python's objects is taken back.

Dynamo's code of a call applies to attributes, lists and dicts what forward does to them, also where
the backend computed nothing. A model that does something else in its first call is to do so in the
first that trains.

Signature: a model, objects that a call changes -> the same, as they were.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from piper_dynamo.seen import plain_values

# What is emptied and filled again: how.
_FILLED: dict[type, Callable[[Any, Any], object]] = {
    list: lambda one, before: one.extend(before),
    deque: lambda one, before: one.extend(before),
    set: lambda one, before: one.update(before),
    dict: lambda one, before: one.update(before),
}


class Kept:
    """Objects as they were when they were first handed over.

    Attributes:
        _contents: By identity: the object, what fills it, and what was in it.
    """

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Any, Callable[[Any, Any], object], Any]] = {}

    def add(self, objects: Iterable[Any]) -> None:
        """Keep what is in containers, and what attributes other objects have."""
        for one in objects:
            kind = next((kind for kind in _FILLED if isinstance(one, kind)), None)
            own = getattr(one, "__dict__", None)
            if kind is not None:
                before = dict(one) if kind is dict else list(one)
                self._contents.setdefault(id(one), (one, _FILLED[kind], before))
            if isinstance(own, dict):  # a class has a proxy of one
                self._contents.setdefault(id(own), (own, _FILLED[dict], dict(own)))

    def restore(self) -> None:
        """Put all of it back."""
        for one, fill, before in self._contents.values():
            one.clear()
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
