"""What of a model and of the settings around it decides how a call of it is traced.

Dynamo guards what it has seen, attribute by attribute, and traces again where a guard fails. For
the speed of steps it leaves out what rarely changes: hooks that come later, parameters in a dict
that nobody has assigned to since (one of them may be frozen now), functions in the place of those
of a class. A call that is only looked at has time to compare all of these.

Signature: model -> a value that is equal only where calls of the model are traced alike, as far as
Dynamo's guards do not say so themselves.
"""

import weakref
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo


class _Same:
    """One object, equal to itself alone, and to nothing once it is gone; not kept alive."""

    __slots__ = ("_ref",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, one: Any) -> None:
        self._ref = weakref.ref(one)

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
    classes = {type(one): None for one in model.modules()}
    functions = [(_same(kind), _functions(kind)) for kind in classes]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), compat.trace_settings()
    return (*modules, *held, *functions, *map(_same, dynamo.global_hooks()), modes)


def _module(name: str, one: nn.Module) -> tuple[Any, ...]:
    own = [(key, _same(value)) for key, value in sorted(vars(one).items()) if callable(value)]
    hooks = [(*how, _same(hook)) for hook, *how in dynamo.hooks_of(one)]
    return (name, _same(type(one)), one.training, own, hooks)


def _functions(kind: type) -> list[tuple[Any, ...]]:
    """What a class and its bases define, which may be other functions than they were written as."""
    return [
        (key, _same(value), value.__code__)
        for base in kind.__mro__
        if base is not nn.Module
        for key, value in vars(base).items()
        if isinstance(value, FunctionType)
    ]


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    if nn.parameter.is_lazy(tensor):
        return (object(),)  # its shape is not known, and will be another
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    what = tensor.shape, stride, tensor.dtype, tensor.device, tensor.layout
    return (_same(type(tensor)), *what, tensor.requires_grad)


def _same(one: Any) -> object:
    try:
        return _Same(one)
    except TypeError:  # nothing tells whether it is gone, so nothing is equal to it
        return object()
