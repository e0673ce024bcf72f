"""Every private or version-dependent name of torch that Piper uses (torch 2.11 - 2.14)."""

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._dynamo import assume_constant_result as _assume_constant_result
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards, maybe_mark_dynamic
from torch._dynamo import mark_dynamic as _mark_dynamic
from torch._dynamo.exc import (
    BackendCompilerFailed,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    TorchRuntimeError,
)
from torch._functorch import config as functorch_config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

__all__ = [
    "BackendCompilerFailed",
    "CheckpointPolicy",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "PrefixStore",
    "ShapeEnv",
    "TCPStore",
    "TensorifyScalarRestartAnalysis",
    "TorchDynamoException",
    "TorchRuntimeError",
    "all_gather_single",
    "annotate",
    "assume_constant_result",
    "aten_backend",
    "boxed_codegen",
    "default_store",
    "drop_graph",
    "example_of",
    "fake_tracing",
    "fixed_size",
    "generator_of",
    "hint_of",
    "is_marked_backward",
    "is_marked_dynamic",
    "is_on_meta",
    "is_python_float",
    "is_tracing",
    "keep_progress_local",
    "local_tensor",
    "mark_dynamic",
    "mesh_of",
    "min_cut_partition",
    "new_storage",
    "no_autocast",
    "no_modes",
    "no_torch_function",
    "output_nodes",
    "parameter_names",
    "parse_to",
    "quiet_fake_tensors",
    "raise_recompile_limit",
    "recompile_for_unknown_reasons",
    "reduce_scatter_single",
    "source_chain",
    "source_name",
    "swap_contents",
    "takes",
    "target_name",
    "trace_forward",
    "trace_joint",
    "trace_settings",
    "unmark_dynamic",
    "weakly_mark_dynamic",
    "with_bits",
]

_marked: list[weakref.ref[torch.Tensor]] = []

F = TypeVar("F", bound=Callable[..., Any])


def annotate(tags: dict[str, Any]) -> Any:
    """Torch's annotation: writes `tags` into the `meta["custom"]` of what is traced."""
    return fx_traceback.annotate(tags)


def assume_constant_result(fn: F) -> F:
    """Dynamo calls `fn` while tracing and burns its result into the graph."""
    return _assume_constant_result(fn)  # type: ignore[no-untyped-call,no-any-return]


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make `dim` of `tensor` symbolic in the next trace; being specialised is then an error."""
    if not hasattr(tensor, "_dynamo_dynamic_indices"):
        _marked.append(weakref.ref(tensor))
    _mark_dynamic(tensor, dim)


def source_name(source: Any) -> str:
    """The expression of a Dynamo source, e.g. `L['self']._parameters['w']`."""
    name = source.name
    return str(name() if callable(name) else name)


def source_chain(source: Any) -> list[Any]:
    """A Dynamo source and its bases, outermost first."""
    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return chain


@contextmanager
def fake_tracing(mode: FakeTensorMode) -> Iterator[None]:
    """A tracing context of `mode`, which AOTAutograd and the partitioner ask for."""
    with tracing(TracingContext(mode)):
        yield


class _Captured(Exception):
    """Carries the traced graph out of AOTAutograd, before it compiles anything."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__("captured")
        self.gm = gm


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nothing is compiled while capturing")


# What tracing says of a node and neither passes nor partitioner ask for: more than the graph is.
_PROVENANCE = (
    "from_node",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "fwd_nn_module_stack",
    "original_aten",
    "tensor_meta",  # `val` says it
)


def _flat_graph(gm: fx.GraphModule) -> fx.Graph:
    """A plain copy of the graph: raw joints have a pytree calling convention."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, values)
    for node in graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k not in _PROVENANCE}
    for node in graph.find_nodes(op="get_attr"):
        # Constants (torch.tensor([...]) in forward) travel with their node into every chunk.
        node.meta["constant"] = getattr(gm, str(node.target))
    node = graph.output(output)
    node.meta.update(gm.graph.find_nodes(op="output")[0].meta)
    return graph


def _backward_without_autocast() -> Any:
    """Autocast is around the call, as in eager, and not around `loss.backward()`."""
    if hasattr(functorch_config, "backward_pass_autocast"):
        return functorch_config.patch(backward_pass_autocast="off")
    return nullcontext()


def trace_joint(gm: fx.GraphModule, args: list[Any], mode: FakeTensorMode) -> fx.Graph:
    """The joint forward-backward graph of `gm` on fake `args`: functional, undecomposed.

    Placeholders are `primals_*` then `tangents_*`; the output node's `meta["desc"]` says what each
    output is.
    """

    def capture(joint: fx.GraphModule, *unused: Any, **kwargs: Any) -> Any:
        raise _Captured(joint)

    try:
        with fake_tracing(mode), torch.enable_grad(), _backward_without_autocast():
            aot_module_simplified(
                gm, args, fw_compiler=_unused, bw_compiler=_unused, partition_fn=capture
            )
    except _Captured as captured:
        return _flat_graph(captured.gm)
    raise AssertionError("AOTAutograd did not partition")


def trace_forward(gm: fx.GraphModule, args: list[Any], mode: FakeTensorMode) -> fx.Graph:
    """The forward graph of `gm` under no_grad, in the form of `trace_joint`."""

    def capture(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise _Captured(gm)

    try:
        with fake_tracing(mode), torch.no_grad():
            aot_module_simplified(
                gm, args, fw_compiler=capture, bw_compiler=_unused, inference_compiler=capture
            )
    except _Captured as captured:
        return _flat_graph(captured.gm)
    raise AssertionError("AOTAutograd did not compile")


def knapsack(weights: Sequence[float], values: Sequence[float], most: float) -> list[int]:
    """The items worth most together that weigh at most `most`, by torch's knapsack solver.

    Args:
        weights: Of each item, as parts of 1; they are rounded to ten-thousandths.
        values: Of each item.
        most: As the weights.
    """
    return sorted(dp_knapsack(list(weights), list(values), most)[1])


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """Torch's formula for the FLOPs of an operator: called with its arguments and `out_val=`."""
    packet = getattr(target, "overloadpacket", None)
    found: Callable[..., Any] | None = flop_registry.get(packet)
    return found


def min_cut_partition(
    joint: fx.GraphModule, inputs: list[Any], num_fwd_outputs: int, mode: FakeTensorMode
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's min-cut partitioner; recomputes a matmul only if a checkpoint asks for it."""
    # The ban on recomputing what is materialised for the backward keeps values that are one cheap
    # kernel away: lifting
    # it cuts the saved bytes of a Llama block by a third and recomputes no matmul.
    with (
        fake_tracing(mode),
        functorch_config.patch(recompute_views=True, ban_recompute_materialized_backward=False),
    ):
        return min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=[]
        )


def drop_graph(graph: fx.Graph) -> None:
    """Free the nodes of a graph that nobody needs any more: they hold each other, as do names."""
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph._graph_namespace._obj_to_name.clear()


def default_store() -> Any:
    """The key-value store that the default process group was started with."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def keep_progress_local() -> None:
    """Tqdm's lock, which fx takes, would be a semaphore that a killed process leaves behind."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def unmark_dynamic() -> None:
    """Take back every `mark_dynamic`: guards ask only that later marks were traced."""
    names = (
        "_dynamo_dynamic_indices",
        "_dynamo_weak_dynamic_indices",
        "_dynamo_dynamic_range",
        "_dynamo_hint_overrides",
        "_specialize_on",
        "_has_dynamo_dim_marking",
    )
    while _marked:
        tensor = _marked.pop()()
        for name in names:
            if tensor is not None and hasattr(tensor, name):
                delattr(tensor, name)


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Operators may fail on fake tensors here: that is told in another way than torch's log."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def boxed_codegen() -> Any:
    """FX code generation for functions that take one list and empty it."""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


def is_marked_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Whether `mark_dynamic` was called for this dim."""
    return dim in getattr(tensor, "_dynamo_dynamic_indices", ())


def is_marked_backward(node: fx.Node) -> bool:
    """Whether torch says that autograd has made a node for its backward; 2.11 says it of none."""
    return bool(node.meta.get("autograd_backward"))


def raise_recompile_limit() -> None:
    """Make room for many compiled steps of one model class.

    Dynamo counts entries per code object, and two steps of one class (another strategy, the state
    released, evaluation) share it; past the limit, 8, it would silently run the model eagerly.
    """
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 256)
    dynamo_config.accumulated_recompile_limit = max(dynamo_config.accumulated_recompile_limit, 4096)


def recompile_for_unknown_reasons() -> None:
    """Let Dynamo trace a call anew where it fails at telling why it has to.

    One tensor in two places that had two is such a reason. Dynamo words it by looking up all places
    of tensors in the earlier call, and raises where the new call lacks one, as another model of the
    class may (pytorch issue 176211, in 2.11 to 2.14).
    """
    told = guards.recompilation_reason_for_no_tensor_aliasing_guard

    @wraps(told)
    def tell(guard_manager: Any, scope: Any) -> list[str]:
        try:
            return told(guard_manager, scope)
        except (AttributeError, LookupError, TypeError) as error:
            return [f"Duplicate tensors found; not looked for, {error!r}"]

    if not hasattr(told, "__wrapped__"):
        guards.recompilation_reason_for_no_tensor_aliasing_guard = tell


def aten_backend(simplify: Callable[[fx.Graph], None]) -> Any:
    """AOTAutograd with the min-cut partitioner; operators run one by one.

    Args:
        simplify: Rewrites each graph before it runs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def run(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        simplify(gm.graph)
        gm.recompile()
        return boxed_nop(gm, inputs)

    # Input mutations stay outside the graphs: inside (keep_inference_input_mutations), torch 2.13
    # recomputes a buffer's update in the backward from the buffer that the forward changed.
    return aot_autograd(
        fw_compiler=run,
        bw_compiler=run,
        partition_fn=min_cut_rematerialization_partition,
    )


def parameter_names(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters."""
    return list(inspect.signature(fn).parameters)


def output_nodes(gm: fx.GraphModule) -> list[Any]:
    """The nodes (or constants) that a Dynamo graph returns."""
    (output,) = gm.graph.find_nodes(op="output")
    found = output.args[0]
    return list(found) if isinstance(found, tuple | list) else [found]


def target_name(target: Any) -> str:
    """A stable name of what an FX node calls."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


# The older names warn from torch 2.13 on.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
no_torch_function = torch._C._disabled_torch_function_impl


def local_tensor(value: Any) -> Tensor:
    """The memory behind a DTensor on this rank, without autograd."""
    local: Tensor = value._local_tensor if isinstance(value, DTensor) else value
    return local.detach()


def mesh_of(
    rows: Sequence[Sequence[int]], rank: int, device: str, groups: Sequence[Any]
) -> DeviceMesh:
    """A mesh of rows of ranks, without the dim of rows where there is one.

    Args:
        rows: Ranks.
        rank: This rank.
        device: Device type.
        groups: This rank's process group of each dim; none in an in-process job, whose meshes
            cannot communicate.
    """
    table = torch.tensor(rows if len(rows) > 1 else rows[0])
    if groups:
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device)
        names = ("copy", "shard")
        return DeviceMesh.from_group(list(groups), device, mesh=table, mesh_dim_names=names)
    return DeviceMesh(device, table, _init_backend=False, _rank=rank)


def is_tracing() -> bool:
    """Whether Dynamo or AOTAutograd is at work in this thread."""
    return TracingContext.try_get() is not None


def fixed_size(size: Any) -> int | None:
    """The number that a traced size is, or that the model fixed it to; None while it is free."""
    if isinstance(size, int):
        return size
    expression = size.node.expr  # int(size) would fix it
    return int(expression) if expression.is_number else None


def is_profiling() -> bool:
    """Whether a profiler looks at what runs now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


@contextmanager
def no_autocast() -> Iterator[None]:
    """No automatic casts inside."""
    if not torch._C._is_any_autocast_enabled():
        yield
        return
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def trace_settings() -> str:
    """What beside a graph decides which operators a trace of it has, for a cache key."""
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    casts = " ".join(f"{k}:{torch.get_autocast_dtype(k)}" for k in kinds)
    kernels: Any = torch.backends.cuda  # of attention; the same switches choose those of the CPU
    switches = (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return f"{casts} {switches} {torch.get_default_dtype()} {torch.get_default_device()}"


def weakly_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Make `dim` symbolic in the next trace, and let it be specialised."""
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        _marked.append(weakref.ref(tensor))
    maybe_mark_dynamic(tensor, dim)


def is_python_float(placeholder: fx.Node) -> bool:
    """Whether a graph's tensor argument stands for a float of the caller's."""
    grapharg = placeholder.meta.get("grapharg")
    return bool(getattr(grapharg, "pass_arg_as_tensor", False))


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor has no memory, whatever it says of its device."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operators on a device draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]


@contextmanager
def no_modes() -> Iterator[None]:
    """Operators run as they would outside of every mode."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class DispatchMode(_TorchDispatchMode):
    """Gives every operator that this thread runs to `take`, if wanted also those on graphs."""

    def __init__(
        self,
        take: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        *,
        higher_order: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take = take
        self.supports_higher_order_operators = higher_order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._take(func, tuple(args), dict(kwargs or {}))


def new_storage(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    """Memory with any contents."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]


def with_bits(tensor: Tensor, *, is_conj: bool, is_neg: bool) -> Tensor:
    """The tensor read as its conjugate, or its negative, without a copy."""
    if is_conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if is_neg else tensor


def takes(func: Any, name: str) -> bool:
    """Whether an operator has a parameter of that name."""
    return any(argument.name == name for argument in func._schema.arguments)


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Device, dtype, non_blocking and memory format of arguments to `Tensor.to`."""
    found: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return found


def swap_contents(one: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, but not the objects: who refers to one finds the other.

    `torch.utils.swap_tensors` refuses objects that are referred to weakly, as RNNs do.
    """
    torch._C._swap_tensor_impl(one, other)


def example_of(placeholder: fx.Node) -> Any:
    """What a graph's argument was at the traced call; None if it is unknown."""
    return getattr(placeholder.meta.get("grapharg"), "example", None)


def hint_of(size: Any) -> int:
    """The number that a size was at the traced call, symbolic or not; it is not fixed by asking."""
    return size if isinstance(size, int) else int(size.node.hint)


def storage_info(file: str, start: int, num_bytes: int) -> Any:
    """Where a checkpoint's value lies, as torch's own reader expects it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, num_bytes)
