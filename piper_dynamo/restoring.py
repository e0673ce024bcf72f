"""Looking at a model runs nothing of it: what its forward does to Python's objects is taken back.

Dynamo's code of a call applies to attributes, lists and dicts what forward does to them, also where
the backend computed nothing. A model that does something else in its first call is to do so in the
first that trains.

Signature: a model, objects that a call changes -> the same, as they were.
"""

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import isgetsetdescriptor, ismemberdescriptor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.seen import plain_values

_MISSING = object()


def _fill_dict(one: Any, before: dict[Any, Any]) -> None:
    """Only what is another is touched: other threads may be reading it."""
    kind = OrderedDict if isinstance(one, OrderedDict) else dict  # which has an order of its own
    for key in [key for key in kind.keys(one) if key not in before]:
        kind.__delitem__(one, key)
    if list(kind.keys(one)) != list(before):
        kind.clear(one)
    for key, value in before.items():
        if dict.get(one, key, _MISSING) is not value:
            kind.__setitem__(one, key, value)


# How containers get their content again: not by functions of their own, which may refuse it.
_FILLED: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    list: (list, lambda one, before: (list.clear(one), list.extend(one, before))),
    deque: (list, lambda one, before: (deque.clear(one), deque.extend(one, before))),
    set: (list, lambda one, before: (set.clear(one), set.update(one, before))),
    dict: (lambda one: dict(dict.items(one)), _fill_dict),
}


class Kept:
    """Things as they were when they were first handed over."""

    def __init__(self) -> None:
        # By identity and name: the thing itself, so that it lives on, and what puts it back.
        self._undo: dict[tuple[int, str], tuple[Any, Callable[[], object]]] = {}

    def add(self, changes: Iterable[dynamo.Change]) -> None:
        """Keep what calls change, but modules, which `unchanged` has."""
        for one in changes:
            if isinstance(one.owner, nn.Module):
                continue
            for name in one.names:
                self._attribute(one.owner, name)
            if not one.names:
                self.content(one.owner)

    def content(self, one: Any) -> None:
        """Keep what is in a container, or the state of a random generator."""
        if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):
            self._keep(one, "", partial(one.setstate, one.getstate()))
        kind = next((kind for kind in _FILLED if isinstance(one, kind)), None)
        if kind is not None and (id(one), "") not in self._undo:
            copy, fill = _FILLED[kind]
            self._keep(one, "", partial(fill, one, copy(one)))

    def _attribute(self, owner: Any, name: str) -> None:
        """Keep an attribute, a global of a dict of globals, or the content of a closure's cell."""
        own = _own(owner, name)
        put: Callable[[str, Any], object]
        drop: Callable[[str], object]
        if isinstance(owner, dict):
            put, drop = owner.__setitem__, owner.__delitem__
        elif isinstance(owner, threading.local):
            put, drop = partial(setattr, owner), partial(delattr, owner)
        else:  # not by functions of its own, which may refuse it
            of = type if isinstance(owner, type) else object
            put, drop = partial(of.__setattr__, owner), partial(of.__delattr__, owner)
        undo = partial(put, name, own[name]) if name in own else partial(_drop, owner, name, drop)
        self._keep(owner, name, undo)

    def _keep(self, one: Any, name: str, undo: Callable[[], object]) -> None:
        self._undo.setdefault((id(one), name), (one, undo))

    def restore(self) -> None:
        """Put all of it back; what cannot be hinders no other."""
        with ExitStack() as stack:
            for _, undo in reversed(self._undo.values()):
                stack.callback(undo)


def _own(owner: Any, name: str) -> Mapping[str, Any]:
    """What an object itself has under a name: in its dict, a slot or a cell; globals: as a dict."""
    own = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    if name in own:
        return {name: own[name]}
    slot: Any = getattr(type(owner), name, None)
    try:
        is_slot = isgetsetdescriptor(slot) or ismemberdescriptor(slot)
        return {name: slot.__get__(owner)} if is_slot else {}
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return {}


def _drop(owner: Any, name: str, drop: Callable[[str], object]) -> None:
    """Take back what was not there."""
    if name in _own(owner, name):
        drop(name)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back attributes of modules, their parts, hooks, and what lists, sets and dicts here hold.

    Not of lazy modules: they are given their shapes by whatever calls them first, for good.
    """
    kept = Kept()
    modules = [one for one in model.modules() if not isinstance(one, LazyModuleMixin)]
    for module in modules:
        own = module.__dict__, module._parameters, module._buffers, module._modules
        for table in (*own, *dynamo.hook_tables(module)):
            kept.content(table)
    for one in plain_values(modules):
        kept.content(one)
    try:
        yield
    finally:
        kept.restore()


@contextmanager
def same_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back what tensors hold; needs as much memory again."""
    kept = [(one, one.detach().clone()) for one in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, value in kept:
                if not torch.equal(one, value):
                    one.copy_(value)
