"""`piper.deferred_init`: a model is built without memory, and what would fill it is recorded.

Inside the block new tensors are on the meta device while they say that they are where they would
be. Operators on them are recorded (`recording.py`); what looks at values (`.item()`, `if tensor`,
`.tolist()`) makes them on the spot. Random operators also run once on scratch memory, so that the
generators stand afterwards where they would stand after building the model.

What becomes of parameters and buffers when the block ends is in `pending.py`.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.garbage import freed
from piper_dynamo.pending import refuse_lazy, settle
from piper_dynamo.recording import (
    Constant,
    Memory,
    Operation,
    View,
    caller,
    drawn_on,
    give_memory,
    memory_of,
    values,
)

# In place, all of the tensor, whatever was there.
_FILLS = frozenset({"zero_", "fill_", "copy_"})
_RANDOM_FILLS = frozenset(
    {
        *("normal_", "uniform_", "random_", "bernoulli_.float", "exponential_", "cauchy_"),
        *("log_normal_", "geometric_"),
    }
)
_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})  # of the layout alone


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model without its memory: `with piper.deferred_init(): model = Model()`.

    Every parameter and buffer gets exactly the values that it would have been given by the same
    code without the block, when a rank comes to hold it (`piper.compile`, `piper.prepare`, the
    first step) or in `piper.materialize`. The random generators are left as they would have been.

    Raises:
        PiperError: The model's code does what cannot be recorded; names its line.
    """
    seen = _Modules()
    with ExitStack() as stack:
        stack.enter_context(seen.watched())
        stack.enter_context(compat.DispatchMode(_dispatch))
        stack.enter_context(_Pretends())
        yield
    modules = seen.found()
    refuse_lazy(modules)
    settle(modules)


class _Modules:
    """The modules that this thread gives parameters, buffers or children to."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._found: dict[int, weakref.ref[nn.Module]] = {}

    def _saw(self, module: nn.Module, _: str, value: Any) -> None:
        if threading.get_ident() == self._thread:
            for one in (module, value):
                if isinstance(one, nn.Module):
                    self._found[id(one)] = weakref.ref(one)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what modules are given."""
        handles = [
            nn_module.register_module_parameter_registration_hook(self._saw),
            nn_module.register_module_buffer_registration_hook(self._saw),
            nn_module.register_module_module_registration_hook(self._saw),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def found(self) -> list[nn.Module]:
        """Those that are still there."""
        return [module for ref in self._found.values() if (module := ref()) is not None]


def _name(func: Any) -> str:
    """`copy_` for aten.copy_.default, `bernoulli_.float` for an overload that matters."""
    name: str = func._schema.name.rpartition("::")[2]
    return f"{name}.{func._overloadname}" if name == "bernoulli_" else name


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator without values and record it."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    deferred = [tensor for tensor in tensors if memory_of(tensor) is not None]
    if not tensors and compat.takes(func, "device"):
        return _factory(func, args, kwargs)
    if not deferred:
        return func(*args, **kwargs)
    for tensor in tensors:
        if memory_of(tensor) is None and compat.is_on_meta(tensor):
            raise _refusal(f"{func} reads a tensor on the meta device, which has no values")
    written = _written(func, args, kwargs)
    real = [tensor for tensor in written if memory_of(tensor) is None]
    if real and len(real) < len(written):
        raise _refusal(f"{func} writes to tensors with memory and to others without")
    if real or _name(func) in _LOOKS:
        return func(*_with_values(args), **_with_values(kwargs))
    if _only_a_view(func):
        return func(*args, **kwargs)
    return _record(func, args, kwargs, written)


# Operators whose result is a number for the model's code.
_LOOKS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "is_same_size", "allclose"})


def _only_a_view(func: Any) -> bool:
    """In-place changes of shape alone: nothing is written."""
    return torch.Tag.inplace_view in func.tags and _name(func) not in ("resize_", "resize_as_")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args)}  # noqa: B905 (defaults are left out)
    given.update(kwargs)
    changed = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


def _with_values(tree: Any) -> Any:
    """The arguments with real tensors in place of deferred ones, each in memory of its own."""
    return tree_map(
        lambda leaf: (
            values(View.of(leaf))
            if isinstance(leaf, Tensor) and memory_of(leaf) is not None
            else leaf
        ),
        tree,
    )


def _factory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A new tensor from nothing."""
    asked = torch.device(kwargs.get("device") or "cpu")
    device = torch.device("cpu") if asked.type == "meta" else asked
    kwargs = kwargs | {"device": device}
    without = kwargs | {"device": torch.device("meta")}
    without.pop("pin_memory", None)
    made = func(*args, **without)
    if compat.takes(func, "dtype"):  # the default dtype may be another one later
        kwargs["dtype"] = made.dtype
    state = _draw(func, args, kwargs) if _is_random(func) else None
    _refuse_layouts([made])
    view = give_memory(made, device)
    view.memory.last = Operation(
        func=func,
        args=args,
        kwargs=kwargs,
        outputs={0: view},
        before=(),
        memories=(view.memory,),
        state=state,
        where=caller(),
    )
    return made


def _record(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
) -> Any:
    """An operator on deferred tensors: its result without values, and how to make them."""
    leaves, tree = tree_flatten((args, kwargs))
    kept = [_kept(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    views = [leaf for leaf in kept if isinstance(leaf, View)]
    device = torch.device(kwargs.get("device") or views[0].memory.device)
    total = _overwrites(func, written)
    state = _draw(func, args, kwargs) if _is_random(func) else None
    before = {
        view.memory.last: None
        for view in views
        if view.memory.last is not None and view.memory is not total
    }
    try:
        results = _without_values(func, leaves, tree)
    except NotImplementedError:  # how large the result is depends on values
        if written:
            returned = list(written) if func._schema.returns else []
            results = returned[0] if len(returned) == 1 else tuple(returned) or None
        else:
            return func(*_with_values(args), **_with_values(kwargs))
    found = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    _refuse_layouts(found)
    outputs = {
        index: give_memory(made, device)
        for index, made in enumerate(found)
        if memory_of(made) is None
    }
    if not outputs and not written:
        return results  # a view
    changed = [memory_of(tensor) for tensor in written]
    made_here = [view.memory for view in outputs.values()]
    operation = Operation(
        func=func,
        args=tree_unflatten(kept, tree)[0],
        kwargs=tree_unflatten(kept, tree)[1],
        outputs=outputs,
        before=tuple(before),
        memories=tuple(dict.fromkeys([*(view.memory for view in views), *made_here])),
        state=state,
        where=caller(),
    )
    for memory in (*changed, *made_here):
        assert memory is not None
        memory.last = operation
    return results


def _kept(tensor: Tensor) -> View | Constant:
    """How an operation remembers a tensor."""
    return View.of(tensor) if memory_of(tensor) is not None else Constant.of(tensor)


def _without_values(func: Any, leaves: Sequence[Any], tree: Any) -> Any:
    """Run an operator on the meta device."""

    def without(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and memory_of(leaf) is None:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return leaf

    args, kwargs = tree_unflatten([without(leaf) for leaf in leaves], tree)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
        kwargs.pop("pin_memory", None)
    return func(*args, **kwargs)


def _overwrites(func: Any, written: Sequence[Tensor]) -> Memory | None:
    """The memory whose earlier contents an operator does not need."""
    if len(written) != 1 or _name(func) not in _FILLS | _RANDOM_FILLS:
        return None
    view = View.of(written[0])
    return view.memory if view.is_all else None


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Run a random operator for what it takes from its generator.

    Returns:
        The generator's state before.
    """
    if _name(func) in _RANDOM_FILLS | _RANDOM_LIKE:
        args, kwargs = tree_map_only(Tensor, _scratch, (args, kwargs))
    else:  # what it takes may depend on values
        args, kwargs = _with_values((args, kwargs))
    given = [g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
    generator = given[0] if given else compat.generator_of(drawn_on(args, kwargs))
    state = generator.get_state()
    used = [leaf for leaf in tree_leaves((args, func(*args, **kwargs))) if isinstance(leaf, Tensor)]
    nbytes = max(leaf.nbytes for leaf in used)
    del args, kwargs, used
    freed(nbytes)
    return state


def _scratch(tensor: Tensor) -> Tensor:
    return View.of(tensor).scratch() if memory_of(tensor) is not None else tensor


def _refuse_layouts(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else f"of layout {tensor.layout}"
            raise _refusal(f"a tensor is made that is {kind}")


def _refusal(why: str) -> PiperError:
    return PiperError(
        format_error(
            "piper.deferred_init cannot record this",
            {"at": caller(), "why": why},
            hint="do it after the model is prepared, or build the model without deferred_init",
        )
    )


class _Pretends(TorchFunctionMode):
    """Deferred tensors say that they are where they would be, and show their values."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_meta(kwargs.get("device")):
            raise _refusal(f"{getattr(func, '__name__', func)} is asked for a tensor on meta")
        if func is torch.tensor:
            return _constant(func(*args, **kwargs))
        answer = _ANSWERS.get(func)
        if answer is not None and args and isinstance(args[0], Tensor):
            return answer(func, *args, **kwargs)
        return func(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    """Whether the model's own code names it: what it makes there has no values to be recorded."""
    return isinstance(device, str | torch.device) and torch.device(device).type == "meta"


def _constant(value: Tensor) -> Tensor:
    """A deferred tensor of values that are there."""
    if memory_of(value) is not None or compat.is_on_meta(value):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if memory_of(made) is None:
        view = give_memory(made, value.device)
    else:  # the recorder is at work
        view = View.of(made)
        view.memory.device = value.device
    view.memory.last = Operation(
        func=None,
        args=(Constant.of(value),),
        kwargs={},
        outputs={0: view},
        before=(),
        memories=(view.memory,),
        state=None,
        where=caller(),
    )
    return made.requires_grad_(value.requires_grad)


def _answer(found: Callable[[Memory], Any]) -> Callable[..., Any]:
    """An attribute that is asked of the memory."""

    def answer(func: Any, tensor: Tensor) -> Any:
        memory = memory_of(tensor)
        return func(tensor) if memory is None else found(memory)

    return answer


def _to(func: Any, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    """`.to` a device where a tensor would be already must not copy it."""
    memory = memory_of(tensor)
    if memory is None:
        return func(tensor, *args, copy=copy, **kwargs)
    if args and isinstance(args[0], Tensor):
        other = memory_of(args[0])
        device, dtype = (other.device if other is not None else args[0].device), args[0].dtype
        layout: Any = kwargs.get("memory_format")
    else:
        device, dtype, _, layout = compat.parse_to(*args, **kwargs)
    named = {"dtype": tensor.dtype if dtype is None else dtype, "copy": copy}
    if layout is not None:
        named["memory_format"] = layout
    if device is not None and not _same_device(device, memory.device):
        named["device"] = device
    return func(tensor, **named)


def _same_device(one: torch.device, other: torch.device) -> bool:
    """`cuda` is the current one of several."""
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    current = torch.get_device_module(one).current_device()
    indices = [current if device.index is None else device.index for device in (one, other)]
    return indices[0] == indices[1]


def _cpu(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(torch.Tensor.to, tensor, torch.device("cpu"))


def _cuda(func: Any, tensor: Tensor, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    named = device if device is not None else torch.device("cuda")
    return _to(
        torch.Tensor.to,
        tensor,
        torch.device("cuda", named) if isinstance(named, int) else torch.device(named),
    )


def _shown(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A look at values that cannot change them."""
    if memory_of(tensor) is None:
        return func(tensor, *args, **kwargs)
    return func(values(View.of(tensor.detach())), *args, **kwargs)


def _array(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A numpy array of values: read-only, since a write to it could not be recorded."""
    found = _shown(func, tensor, *args, **kwargs)
    if memory_of(tensor) is not None:
        found.flags.writeable = False
    return found


def _set_data(func: Any, tensor: Tensor, value: Tensor) -> None:
    """`a.data = b` shares b's memory."""
    if memory_of(tensor) is None and memory_of(value) is not None:
        raise _refusal("`.data` of a tensor that has memory is set to one that has none yet")
    if memory_of(tensor) is not None:
        value = _constant(value)
    func(tensor, value)


def _refused(what: str) -> Callable[..., Any]:
    def refuse(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if memory_of(tensor) is None:
            return func(tensor, *args, **kwargs)
        raise _refusal(f"{what} asks for memory, which the tensor does not have yet")

    return refuse


def _get(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _get("device"): _answer(lambda memory: memory.device),
    _get("is_meta"): _answer(lambda memory: False),
    _get("is_cpu"): _answer(lambda memory: memory.device.type == "cpu"),
    _get("is_cuda"): _answer(lambda memory: memory.device.type == "cuda"),
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.tolist: _shown,
    torch.Tensor.__repr__: _shown,
    torch.Tensor.__format__: _shown,
    torch.Tensor.numpy: _array,
    torch.Tensor.__array__: _array,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    **{
        getattr(torch.Tensor, name): _refused(f".{name}()")
        for name in ("data_ptr", "share_memory_", "__dlpack__", "storage")
    },
}
