"""What of a model and of the settings around it decides how a call of it is traced.

Dynamo guards what it has seen, attribute by attribute, and traces again where a guard fails. For
the speed of steps it leaves out what rarely changes: hooks that come later, parameters in a dict
that nobody has assigned to since (one of them may be frozen now), functions in the place of those
of a class, a module's or a plain object's that a module holds. A call that is only looked at has
time to compare all of these.

Signature: model -> a value that is equal only where calls of the model are traced alike, as far as
Dynamo's guards do not say so themselves.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, hooks and the like
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_NONE = object()  # in None's place, which is what is left of what is gone


class _Same:
    """One object, equal to itself alone, and to nothing once it is gone.

    It is kept alive only if nothing else would tell whether it is gone.
    """

    __slots__ = ("_ref",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, one: Any) -> None:
        one = _NONE if one is None else one
        try:
            self._ref: Any = weakref.ref(one)
        except TypeError:
            self._ref = lambda: one

    def __eq__(self, other: object) -> bool:
        one = self._ref()
        return one is not None and isinstance(other, _Same) and one is other._ref()


def seen(model: nn.Module) -> tuple[Any, ...]:
    """Modules, with their classes, functions, hooks and modes; tensors; settings."""
    numbers: dict[int, int] = {}  # tensors that are one have one number
    modules = [_module(name, one) for name, one in model.named_modules(remove_duplicate=False)]
    held = [
        (which, name, *_tensor(tensor), numbers.setdefault(id(tensor), len(numbers)))
        for which, named in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        )
        for name, tensor in named
    ]
    plain = list(plain_values(model.modules()))
    everything = (*model.modules(), *plain)
    classes = {one if isinstance(one, type) else type(one): None for one in everything}
    functions = [
        *((_Same(kind), found) for kind in classes if (found := _functions(kind))),
        *((_Same(one), _function(one)) for one in plain if isinstance(one, FunctionType)),
    ]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), compat.trace_settings()
    return (*modules, *held, *functions, *map(_Same, dynamo.global_hooks()), modes)


def _module(name: str, one: nn.Module) -> tuple[Any, ...]:
    own = [(key, _Same(value)) for key, value in sorted(vars(one).items()) if callable(value)]
    hooks = [(*how, _Same(hook)) for hook, *how in dynamo.hooks_of(one)]
    return (name, _Same(type(one)), one.training, own, hooks)


def plain_values(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What modules hold beside parameters, buffers and modules, in lists, tuples and dicts too.

    Not what objects in there hold. What is in a container comes once, however often that is held.
    """
    met = set[int]()
    for module in modules:
        left = [value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE]
        while left:
            one = left.pop()
            yield one
            if isinstance(one, _CONTAINERS) and id(one) not in met:
                met.add(id(one))  # one may hold itself
                left += one.values() if isinstance(one, dict) else one


def _functions(kind: type) -> list[tuple[Any, ...]]:
    """What a class and its bases define, which may be other functions than they were written as."""
    return [
        (key, _Same(value), *_function(value))
        for base in kind.__mro__
        if base is not nn.Module
        for key, value in vars(base).items()
        if isinstance(value, FunctionType)
    ]


def _function(one: FunctionType) -> tuple[Any, ...]:
    """What may be another in a function that is the same."""
    named = [(name, _Same(value)) for name, value in (one.__kwdefaults__ or {}).items()]
    return (one.__code__, [_Same(value) for value in one.__defaults__ or ()], named)


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    if nn.parameter.is_lazy(tensor):
        return (object(),)  # its shape is not known, and will be another
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    what = tensor.shape, stride, tensor.dtype, tensor.device, tensor.layout
    return (_Same(type(tensor)), *what, tensor.requires_grad)
