"""Parameters and buffers whose values are made when a rank comes to hold them.

Terms: a *pending* tensor has its name, shape, dtype and device, costs a few bytes, and knows how
its values are to be made: by what `piper.deferred_init` recorded, or, of a *bare* tensor, which was
built on the meta device, by an `init_fn` or a checkpoint. Pending parameters and bare buffers raise
when touched; other buffers are made when touched, since every rank may look at buffers.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperAbsentError, PiperError, PiperRuntimeError, format_error
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.recording import View, memory_of, recipe, values
from piper_dynamo.seen import plain_values
from piper_dynamo.sharding import digest
from piper_dynamo.state import METADATA, spec_of_arg

InitFn = Callable[[str, Tensor], Any]

# What a model's owner may still say of a tensor without values.
_SETTINGS = {torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_}  # type: ignore[attr-defined]


@dataclass(slots=True, kw_only=True, eq=False)
class Source:
    """How the values of a pending tensor are to be made.

    Attributes:
        name: The user's name of it.
        spec: Shape, dtype, layout and device.
        kind: Its class.
        view: What was recorded of it; None where it is bare.
    """

    name: str
    spec: TensorSpec
    kind: type
    view: View | None = None


def _touched(
    func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """The `__torch_function__` of pending tensors."""
    kwargs = kwargs or {}
    if func in METADATA or func in _SETTINGS:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    for leaf in tree_leaves((list(args), kwargs)):
        source = source_of(leaf)
        if source is not None:
            if isinstance(leaf, nn.Parameter) or source.view is None:
                raise PiperAbsentError(_no_values(source))
            fill(leaf)
    return func(*args, **kwargs)


def _no_values(source: Source) -> str:
    if source.view is not None:
        return format_error(
            f"parameter {source.name!r} has no values yet",
            {"why": "the model was built under piper.deferred_init"},
            hint="its values are made when a step is prepared (piper.compile, piper.prepare); "
            "change them inside the with block, or make them all here: piper.materialize(model)",
        )
    return format_error(
        f"{source.name!r} has no values yet",
        {"why": "the model was built on the meta device"},
        hint="give piper.compile an init_fn, or load them into the prepared step "
        "(piper.load_state_dict)",
    )


class _TouchedOutsideTracing:
    """Dynamo sees an ordinary tensor type, everybody else one that is looked after."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return compat.no_torch_function if compat.is_tracing() else _touched


class _Pending:
    __torch_function__ = _TouchedOutsideTracing()


class PendingParameter(_Pending, nn.Parameter):
    """A parameter without values."""


class PendingBuffer(_Pending, Tensor):
    """A buffer without values."""


def source_of(tensor: Any) -> Source | None:
    """How a tensor's values are to be made, if it is pending."""
    if not isinstance(tensor, _Pending):
        return None
    found: Source = tensor.__dict__["_piper_source"]
    return found


def settle(modules: Iterable[nn.Module]) -> None:
    """Make what modules hold of deferred tensors pending: parameters and buffers.

    Other attributes get their values at once.

    Raises:
        PiperError: A parameter cannot be pending; names it.
    """
    known = list(modules)
    children = {id(child) for module in known for child in module.children()}
    taken: dict[int, list[tuple[str, View]]] = {}  # by memory
    found: list[nn.Module] = []
    for root in known:
        if id(root) in children:
            continue
        for path, module in root.named_modules():
            for name, tensor in _state(module):
                if memory_of(tensor) is not None:
                    full = f"{path}.{name}" if path else name
                    view = View.of(tensor)
                    _refuse_hooks(full, tensor)
                    beside = taken.setdefault(id(view.memory), [])
                    _refuse_overlap(full, view, beside)
                    beside.append((full, view))
                    _postpone(full, tensor, view=view, spec=view.spec)
            found.append(module)
    _make_attributes(found)


def settle_bare(module: nn.Module, device: torch.device) -> None:
    """Make parameters and buffers on the meta device pending, as tensors of another device."""
    for path, part in module.named_modules():
        for name, tensor in _state(part):
            if compat.is_on_meta(tensor) and memory_of(tensor) is None:
                full = f"{path}.{name}" if path else name
                _refuse_hooks(full, tensor)
                spec = replace(TensorSpec.of(tensor), device=str(device))
                _postpone(full, tensor, spec=spec)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers; those of lazy modules only once they have a shape."""
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                yield name, tensor


def refuse_lazy(modules: Iterable[nn.Module]) -> None:
    """A parameter without a shape cannot be recorded.

    Raises:
        PiperError: There is one.
    """
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and nn.parameter.is_lazy(tensor):
                raise _cannot_wait(name, "its shape is not known before the first call")


def _refuse_hooks(name: str, tensor: Tensor) -> None:
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise _cannot_wait(name, "it has a hook, which would be lost")
    if not tensor.is_leaf:
        raise _cannot_wait(name, "it is computed from other parameters, with a gradient")


def _cannot_wait(name: str, why: str) -> PiperError:
    return PiperError(
        format_error(
            f"{name!r} cannot get its values later",
            {"why": why},
            hint="build the model without piper.deferred_init, or register hooks after "
            "piper.prepare",
        )
    )


def _refuse_overlap(name: str, view: View, taken: Sequence[tuple[str, View]]) -> None:
    """Values made apart would no longer be shared; `taken` are views of the same memory."""
    for other, theirs in taken:
        (first, end), (their_first, their_end) = _ends(view), _ends(theirs)
        if first < their_end and their_first < end:
            raise PiperError(
                format_error(
                    f"{other!r} and {name!r} are two tensors that share memory",
                    {"why": "values made later would not be shared"},
                    hint="tie them by assigning the parameter itself: a.weight = b.weight",
                )
            )


def _ends(view: View) -> tuple[int, int]:
    """The first byte of a view, and the first behind it."""
    if 0 in view.shape:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
    size = view.dtype.itemsize
    return view.offset * size, (view.offset + last + 1) * size


def _postpone(name: str, tensor: Tensor, **source: Any) -> None:
    """Make a tensor pending: the same object, of the same shape, without memory."""
    found = Source(name=name, kind=type(tensor), **source)
    is_parameter = isinstance(tensor, nn.Parameter)
    compat.swap_contents(tensor, _stand_in(found.spec, tensor.requires_grad, is_parameter))
    tensor.__class__ = PendingParameter if is_parameter else PendingBuffer
    tensor._piper_source = found  # type: ignore[attr-defined]


def _stand_in(spec: TensorSpec, requires_grad: bool, is_parameter: bool) -> Tensor:
    """One element in place of all elements of a parameter.

    A buffer may be changed in place where it is traced, so its elements must be apart: they get
    memory that nobody writes to, of which large pieces take no pages.
    """
    if not is_parameter:
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        return made.requires_grad_(requires_grad)
    fill = float("nan") if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
    one = torch.full((1,), fill, dtype=spec.dtype, device=spec.device)
    made = torch.empty(0, dtype=spec.dtype, device=spec.device)
    made.set_(one.untyped_storage(), 0, spec.shape, (0,) * len(spec.shape))
    return nn.Parameter(made, requires_grad=requires_grad)


def _make_attributes(modules: Iterable[nn.Module]) -> None:
    """Tensors in modules' other attributes, in lists, tuples and dicts too."""
    for tensor in plain_values(modules):
        if isinstance(tensor, Tensor) and memory_of(tensor) is not None and tensor.is_leaf:
            made = values(View.of(tensor)).requires_grad_(tensor.requires_grad)
            compat.swap_contents(tensor, made)


def fill(tensor: Tensor, init: InitFn | None = None) -> bool:
    """Make the values of a pending tensor, in whole.

    Args:
        tensor: The tensor.
        init: Makes the values of a bare one; without it, they are NaN (or zero).

    Returns:
        Whether it has values now: a checkpoint is to give them if not.

    Raises:
        PiperRuntimeError: They cannot be made.
    """
    source = source_of(tensor)
    assert source is not None
    if source.view is not None:
        made = values(source.view)
        if 2 * source.spec.nbytes < source.view.nbytes and 0 not in source.spec.stride:
            made = source.view.scratch().copy_(made)  # a small part of a large memory
    else:
        made = _blank(source.spec)
        if init is not None:
            _initialise(source, made, init)
    tensor.__class__ = source.kind
    del tensor._piper_source  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor.data = made
    return source.view is not None or init is not None


def _blank(spec: TensorSpec) -> Tensor:
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return made.fill_(float("nan"))
    return made.zero_()


def _initialise(source: Source, made: Tensor, init: InitFn) -> None:
    """Call the user's function, from a random state of the seed and the name alone."""
    text = f"{torch.initial_seed()} {source.name}"
    seed = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    before = made._version
    devices = [] if made.device.type == "cpu" else [made.device]
    with torch.random.fork_rng(devices, device_type=made.device.type), torch.no_grad():
        torch.manual_seed(seed)
        init(source.name, made)
    if made._version == before:
        raise PiperRuntimeError(
            format_error(
                f"init_fn gave {source.name!r} no values",
                {"init_fn": _name_of(init), "tensor": source.spec},
                hint="change the tensor that it is given in place, for every name",
            )
        )


def _name_of(init: InitFn) -> str:
    return getattr(init, "__qualname__", type(init).__name__)


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of an argument of a step, where it is held and has its values."""
    source = source_of(tensor)
    return source.spec if source is not None else spec_of_arg(tensor)


def identity(tensor: Tensor, init: InitFn | None) -> str:
    """A short text, equal where two tensors have equal values or would be given such."""
    source = source_of(tensor)
    if source is None:
        return digest([tensor])[0]
    if source.view is not None:
        return f"deferred {recipe(source.view)}"
    if init is not None:
        return f"init_fn {_name_of(init)}, seed {torch.initial_seed()}"
    return "a checkpoint's"


def filling(tensor: Tensor, init: InitFn | None) -> Callable[[], bool] | None:
    """What makes a tensor's values, if it has none: `fill`."""
    return functools.partial(fill, tensor, init) if source_of(tensor) is not None else None


def refuse_idle_init(init: InitFn | None, tensors: Iterable[Any]) -> None:
    """An `init_fn` must have something to do.

    Raises:
        PiperRuntimeError: No tensor is bare.
    """
    sources = [source_of(tensor) for tensor in tensors]
    if init is not None and not any(
        source is not None and source.view is None for source in sources
    ):
        raise PiperRuntimeError(
            format_error(
                "init_fn has nothing to do: the model's parameters have values",
                hint="leave init_fn out, or build the model on the meta device: "
                'with torch.device("meta"): model = Model()',
            )
        )


def refuse_meta(args: Sequence[Arg], values: Sequence[Any]) -> None:
    """A call needs values.

    Raises:
        PiperRuntimeError: Arguments are on the meta device.
    """
    on_meta = [isinstance(value, Tensor) and value.is_meta for value in values]
    found = [arg.name for arg, is_meta in zip(args, on_meta, strict=True) if is_meta]
    if found:
        raise PiperRuntimeError(
            format_error(
                "tensors on the meta device have no values",
                {"arguments": ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")},
                hint="call piper.prepare(step, *example_inputs) with real inputs, then load a "
                "state dict; or build the model under piper.deferred_init()",
            )
        )


def materialize(module: nn.Module) -> None:
    """Give every parameter and buffer of a model built under `piper.deferred_init` its values here.

    For using the model without Piper, or looking at it; a prepared step does it by itself, for
    what its rank holds.

    Raises:
        PiperError: It is a model on the meta device, whose values are not known.
    """
    settle([module])
    for tensor in (*module.parameters(), *module.buffers()):
        source = source_of(tensor)
        if source is not None:
            if source.view is None:
                raise PiperError(_no_values(source))
            fill(tensor)
