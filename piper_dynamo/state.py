"""Parameters on a rank, held or absent; the hand-over of gradients to autograd.

Terms: a parameter is *held* by the ranks whose regions use it; elsewhere it is *absent*: it keeps
its name, shape and dtype, costs four bytes, and raises when touched.

State hangs on the Parameter objects themselves, so that training, evaluation and every shape of one
model share it, and two models that share one compiled program do not.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperAbsentError, PiperRuntimeError, format_error
from piper_dynamo.garbage import freed
from piper_dynamo.ir.joint import Unjoined
from piper_dynamo.ir.program import RankProgram, Watch
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.loss_scaling import Scaler
from piper_dynamo.sharding import Block

ANCHOR = "_piper_anchor"  # name of the empty parameter of a rank that holds none

_FIELDS = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize"),
    *("requires_grad", "grad", "grad_fn", "is_meta"),
)
_METHODS = ("is_floating_point", "is_complex", "size", "dim", "numel", "nelement", "element_size")
METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in (*_FIELDS, "is_sparse", "is_nested")),
    *(getattr(torch.Tensor, name) for name in (*_METHODS, "stride")),
}


def _refuse(
    func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """The `__torch_function__` of an absent tensor: metadata only."""
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    absent = next((a for a in _flat(args, kwargs) if isinstance(a, _Raises)), None)
    raise PiperAbsentError(getattr(absent, "_piper_why", "this tensor is not on this rank"))


class _RefusesOutsideTracing:
    """Dynamo sees an ordinary tensor type, everybody else one that refuses.

    A `__torch_function__` that Dynamo could see would be traced through at every use of the
    parameter, and torch's Python functions (`F.rms_norm`) cannot be traced that way.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return compat.no_torch_function if compat.is_tracing() else _refuse


class _Raises:
    """Raises on everything but metadata; Dynamo may look."""

    _piper_why: str
    __torch_function__ = _RefusesOutsideTracing()


class AbsentParameter(_Raises, nn.Parameter):
    """A parameter that another rank holds."""


class AbsentOutput(_Raises, Tensor):
    """An output of the model that another rank owns, or that no rank has."""


def _flat(args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    found: list[Any] = []
    stack = [*args, *(kwargs or {}).values()]
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple):
            stack += item
        else:
            found.append(item)
    return found


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Record:
    """What is known of one parameter on this rank.

    Attributes:
        name: The user's name.
        spec: Shape, dtype and layout before it was released.
        holders: The ranks that hold it, whole or a block of it.
        held: Whether this rank is one.
        counts: Whether this rank counts it (its block of it) in norms.
        owner: The state it belongs to.
        block: This rank's DTensor; None where the optimizer steps the module's own parameter.
        groups: The ranks over which its gradient is reduced, by the collective that does it.
        pending: This rank's gradients of steps that put their reduction off.
    """

    name: str
    spec: TensorSpec
    holders: tuple[int, ...]
    held: bool
    counts: bool
    owner: "StepState"
    block: Block | None = None
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    pending: Tensor | None = None

    def stepped(self, param: nn.Parameter) -> nn.Parameter:
        """What the optimizer steps in place of the module's `param`."""
        return self.block.param if self.block is not None else param


_records: dict[int, tuple[weakref.ref[Tensor], Record]] = {}


def record_of(tensor: Tensor) -> Record | None:
    """The record of a parameter that has been placed, else None."""
    found = _records.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of another device that a plan takes for one on the meta device.

    Instead of a parameter it is one number, however large the parameter is.
    """
    spec = replace(TensorSpec.of(tensor), device=str(device))
    made: Tensor
    if isinstance(tensor, nn.Parameter):
        one = torch.zeros((), dtype=tensor.dtype, device=device)
        made = nn.Parameter(one.expand(tensor.shape), requires_grad=tensor.requires_grad)
    else:
        made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        made.requires_grad_(tensor.requires_grad)
    made.__dict__["_piper_stands_for"] = spec
    return made


def spec_of_arg(tensor: Tensor) -> TensorSpec:
    """The spec of an argument where it is held: what is absent, or stood for, has its own."""
    record = record_of(tensor)
    if record is not None:
        return record.spec
    spec: TensorSpec | None = tensor.__dict__.get("_piper_stands_for")
    return spec if spec is not None else TensorSpec.of(tensor)


def absent_output(spec: TensorSpec, label: str, owners: Sequence[int]) -> Tensor:
    """A stand-in for an output that other ranks own."""
    why = format_error(
        f"{label} is not on this rank",
        {"owned by": f"rank {', '.join(map(str, owners))}"},
        hint='use it there, or ask for it everywhere: options={"outputs": "everywhere"}',
    )
    return _not_there(spec, why)


def unjoined_output(output: Unjoined, label: str) -> Tensor:
    """A stand-in for an output to which the microbatches' cannot be joined."""
    why = format_error(
        f"{label} cannot be joined from those of microbatches",
        {"of the batch": output.spec, "of a microbatch": output.part},
        hint="it grows with the batch in several dims: make it outside of the model from outputs "
        "that grow in one, or use one microbatch",
    )
    return _not_there(output.spec, why)


def _not_there(spec: TensorSpec, why: str) -> Tensor:
    value = torch.zeros((), dtype=spec.dtype).expand(spec.shape).as_subclass(AbsentOutput)
    value._piper_why = why
    return value


class Dump(Protocol):
    """What is shown tasks of a step: the probe of the program that it runs."""

    def watch(self, plan: Any, program: RankProgram, watch: Watch, /) -> Watch:
        """What to look at in the step that begins, beside what is looked at already."""

    def enter(self, index: int, values: Sequence[Any], bundle: Sequence[Any], /) -> None:
        """See `runtime.executor.Probe`."""

    def leave(self, index: int, results: Sequence[Any], /) -> None:
        """See `runtime.executor.Probe`."""

    def finish(self) -> None:
        """See `runtime.executor.Probe`."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepState:
    """What one model's programs share on this rank.

    Attributes:
        rank: This rank.
        world_size: Of how many.
        data_rank: Which shard of the data this rank loads.
        data_world: Of how many.
        anchor: An empty parameter for ranks that hold none, so that the loss and the optimizer
            work there.
        outstanding: Gradients not yet handed over, oldest first.
        comm: The communicator.
        last: The last plan that was run or prepared (for `explain`).
        loss: Of a loss named by its path: the graph's number of outputs, and its index.
        buffers: By identity, buffers that some program changes, and the ranks that follow.
        readers: By identity, the other buffers that some program reads, and the ranks that do.
        recorder: Takes a step whose timeline is wanted, when it has ended; see `measure.recorder`.
        dump: Is shown tasks of the next step; see `piper_dynamo.debug`.
        stops: Before which instructions of a program a debugger is entered; None: before none.
        sync: Whether steps reduce their gradients where they may choose; see `no_sync`.
        empty: What a checkpoint is to give values, and its version without them.
        init: The option `init_fn`.
        scaler: The loss scale.
    """

    rank: int
    world_size: int
    comm: Any
    data_rank: int = 0
    data_world: int = 1
    anchor: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.zeros(0)))
    outstanding: deque["Gradients"] = field(default_factory=deque)
    last: Any = None
    recorder: Callable[..., None] | None = None
    dump: "Dump | None" = None
    stops: Callable[[RankProgram], frozenset[int]] | None = None
    loss: tuple[int, int] | None = None
    sync: bool = True
    buffers: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...]]] = field(default_factory=dict)
    empty: list[tuple[str, Tensor, int]] = field(default_factory=list)
    init: Callable[[str, Tensor], Any] | None = None
    scaler: Scaler = field(default_factory=Scaler)
    readers: dict[int, tuple[weakref.ref[Tensor], tuple[int, ...]]] = field(default_factory=dict)

    def adopt(
        self,
        param: Tensor,
        name: str,
        holders: tuple[int, ...],
        *,
        counts: bool,
        spec: TensorSpec | None = None,
        fill: Callable[[], bool] | None = None,
        block: Callable[[], Block] | None = None,
        groups: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Record:
        """Record where a parameter is held, and release what of it is not here.

        Args:
            param: The module's parameter.
            name: The user's name of it.
            holders: The ranks that hold it.
            counts: Whether this rank counts it in norms.
            spec: What it is where it has its values; None if that is as it is.
            fill: Makes its values where it is held and has none; whether it could.
            block: Makes this rank's DTensor from the parameter, where its parameters are such.
            groups: The ranks over which its gradient is reduced, by collective.

        Raises:
            PiperRuntimeError: A program needs it on a rank that has released it.
        """
        record = record_of(param)
        held = self.rank in holders
        if record is not None:
            if held and not record.held:
                raise PiperRuntimeError(
                    format_error(
                        f"parameter {name!r} is needed on rank {self.rank}, which released it",
                        {"held by": record.holders},
                        hint="place what uses it on the same ranks in every mode of the model",
                    )
                )
            return record
        is_filled = fill() if held and fill is not None else True
        record = Record(
            name=name,
            spec=spec or TensorSpec.of(param),
            holders=holders,
            held=held,
            counts=counts,
            owner=self,
            block=block() if held and block is not None else None,
            groups=groups or {},
        )
        key = id(param)
        _records[key] = (weakref.ref(param, lambda _: _records.pop(key, None)), record)
        if not held or (record.block is not None and record.block.home is not None):
            _release(param, record)
            freed(record.spec.nbytes)
        if not is_filled:
            self.lacks(name, param if record.block is None else record.block.param)
        return record

    def lacks(self, name: str, tensor: Tensor) -> None:
        """Remember that a checkpoint is to give a tensor its values before a step runs."""
        local = compat.local_tensor(tensor)
        if local.numel():
            self.empty.append((name, local, local._version))

    def refuse_empty(self) -> None:
        """A step needs values.

        Raises:
            PiperRuntimeError: No checkpoint gave some of them; names the tensors.
        """
        if not self.empty:
            return
        missing = [name for name, local, version in self.empty if local._version == version]
        if missing:
            more = [f"and {len(missing) - 8} more"] if len(missing) > 8 else []
            raise PiperRuntimeError(
                format_error(
                    "the model was built on the meta device, and nothing gave it values",
                    {"on this rank": self.rank, "without": "\n".join([*missing[:8], *more])},
                    hint="load a state dict first (piper.load_state_dict), give piper.compile an "
                    "init_fn, or build the model under piper.deferred_init()",
                )
            )
        self.empty.clear()

    def adopt_buffer(
        self,
        buffer: Tensor,
        name: str,
        ranks: tuple[int, ...],
        *,
        changes: bool,
        fill: Callable[[], bool] | None = None,
    ) -> None:
        """Record where a buffer follows a program's changes; refuse to read a stale one.

        Args:
            buffer: The module's buffer.
            name: The user's name of it.
            ranks: The ranks that read it.
            changes: Whether the program changes it.
            fill: Makes its values where it has none; whether it could.

        Raises:
            PiperRuntimeError: A program reads it on a rank that has not followed its changes.
        """
        found = self.buffers.get(id(buffer))
        known = found[1] if found is not None and found[0]() is buffer else None
        if known is not None and self.rank in ranks and self.rank not in known:
            raise PiperRuntimeError(
                format_error(
                    f"buffer {name!r} is read on rank {self.rank}, where its value is old",
                    {"kept up to date on": f"rank {', '.join(map(str, known))}"},
                    hint="place what reads it on the same ranks in every mode of the model",
                )
            )
        if fill is not None and self.rank in ranks and not fill():
            self.lacks(name, buffer)
        (self.buffers if changes else self.readers)[id(buffer)] = (weakref.ref(buffer), ranks)

    def buffer_ranks(self, buffer: Tensor) -> tuple[int, ...]:
        """The ranks that have the last value of a buffer; those of one that no program knows: 0."""
        for known in (self.buffers, self.readers):
            found = known.get(id(buffer))
            if found is not None and found[0]() is buffer:
                return found[1]
        return (0,)


def _release(param: Tensor, record: Record) -> None:
    """Free the memory. The class changes, not the object: names and ties stay as they are."""
    title = "is not on this rank" if not record.held else "is not whole on this rank"
    why = format_error(
        f"parameter {record.name!r} {title}",
        {"held by": f"rank {', '.join(map(str, record.holders))}", "this rank": record.owner.rank},
        hint="use piper.parameters(step) or piper.named_parameters(step) for what this rank holds",
    )
    fill = float("nan") if param.dtype.is_floating_point or param.dtype.is_complex else 0
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # it may have no values yet
        param.data = torch.full((), fill, dtype=param.dtype, device=param.device).expand(
            param.shape
        )
        param.grad = None
    param.__class__ = AbsentParameter
    param.__dict__.pop("_piper_source", None)  # where its values would have come from
    param._piper_why = why  # type: ignore[attr-defined]


class Gradients:
    """One step's gradients on their way to autograd; given away once.

    `make` gives them, from what comes in at the outputs: ready-made ones times the loss's gradient,
    or a backward that has yet to run.
    """

    def __init__(self, make: Callable[[Sequence[Tensor]], Sequence[Tensor | None]]) -> None:
        self._make: Callable[[Sequence[Tensor]], Sequence[Tensor | None]] | None = make
        self._gone = ""

    def take(self, incoming: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients, which are forgotten here.

        Raises:
            PiperRuntimeError: They were handed over before, or dropped for a later step's.
        """
        if self._make is None:
            raise PiperRuntimeError(self._gone)
        make, self._make = self._make, None
        self._gone = (
            "backward was called twice on one loss of a compiled step; its gradients were "
            "handed over the first time: call the step again"
        )
        return make(incoming)

    def drop(self) -> None:
        """Free the gradients of a loss that nobody called backward on."""
        if self._make is not None:
            self._make = None
            self._gone = (
                "the gradients of this loss were dropped: two later steps ran before its backward; "
                "call backward on each loss before the second next step"
            )


class _HandOver(torch.autograd.Function):
    """`outputs = apply(gradients, outputs, *parameters)`: the outputs, differentiable."""

    @staticmethod
    def forward(ctx: Any, gradients: Gradients, outputs: list[Tensor], *params: Tensor) -> Any:
        ctx.gradients = gradients
        # In a list, they are results and not inputs: not views of anything, free to be changed.
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        grads = ctx.gradients.take(incoming)
        wanted = ctx.needs_input_grad[2:]
        given = (g if w else None for g, w in zip(grads, wanted, strict=True))
        return (None, None, *given)


def attach(
    state: StepState,
    loss: Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    deliver: Callable[[list[Tensor]], list[Tensor | None]],
    *,
    scale: float = 1.0,
) -> Tensor:
    """The loss, differentiable: its backward gives `grads`, times what comes in, to `params`.

    `grads` are divided by `scale`; `deliver` makes of the result what the parameters get.
    """
    if not params:
        params, grads, deliver = [state.anchor], [torch.zeros_like(state.anchor)], list

    def scaled(incoming: Sequence[Tensor]) -> Sequence[Tensor | None]:
        (factor,) = incoming
        if scale != 1.0:  # a loss in few bits would round what is no power of two
            factor = factor.to(torch.promote_types(factor.dtype, torch.float32)) / scale
        if factor.device.type != "cpu" or factor.item() != 1.0:
            torch._foreach_mul_(grads, factor)
        return deliver(grads)

    (result,) = attach_outputs(state, [loss], params, scaled)
    return result


def attach_outputs(
    state: StepState,
    outputs: list[Tensor],
    params: list[Tensor],
    backward: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
) -> list[Tensor]:
    """The outputs, differentiable: `backward` makes the gradients of `params` from theirs."""
    gradients = Gradients(backward)
    state.outstanding.append(gradients)
    if len(state.outstanding) > 2:
        state.outstanding.popleft().drop()
    with torch.enable_grad():
        apply: Any = _HandOver.apply
        results = apply(gradients, outputs, *params)
    return [results] if isinstance(results, Tensor) else list(results)
