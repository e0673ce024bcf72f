"""The plan against one process: the largest difference of each parameter and its gradient.

Terms: a *reference* is the untouched model in this process, on whole batches: the mean (sum, or
weighted mean, as the Split says) over the replicas' batches. Ranks run as threads of this process.
A difference is relative to the largest absolute value of the reference.

Signature: a target -> differences.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo.access import clip_grad_norm_, data_rank, data_world, module_of, parameters
from piper_dynamo.api import compile as piper_compile
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.ir.alias import draws
from piper_dynamo.look.target import Target, doubled
from piper_dynamo.planning import Plan, split_of
from piper_dynamo.runtime.launch import launch
from piper_dynamo.state import record_of
from piper_dynamo.strategy import Precision, Shard
from piper_dynamo.train.compare import relative_difference

CLIP, RATE, MOMENTUM = 1.0, 0.05, 0.9
# What rounding can explain of a whole tensor: sums in another order, over several steps.
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one parameter came to.

    Attributes:
        name: The user's name.
        shape: Of the whole parameter.
        ranks: Those that hold it, or a block of it.
        gradient: Largest difference of the first step's gradient; infinity where it is missing.
        value: Largest difference after the last step.
        allowed: What rounding explains in its dtype.
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    gradient: float
    value: float
    allowed: float

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains both."""
        return self.gradient <= self.allowed and self.value <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a comparison came to.

    Attributes:
        steps: How many steps were taken.
        loss: Largest relative difference of a step's loss, over all ranks.
        norm: Largest relative difference of a step's gradient norm.
        allowed: What rounding explains of both.
        differences: Of each parameter.
    """

    steps: int
    loss: float
    norm: float
    allowed: float
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains all of it."""
        scalars = self.loss <= self.allowed and self.norm <= self.allowed
        return scalars and all(one.is_equal for one in self.differences)


@dataclass(slots=True, kw_only=True)
class _Trace:
    """What a run leaves: rows of tensors by name, with the number of the first row."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    params: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    loss_at: int = 0
    replicas: int = 1


def compare(target: Target, *, steps: int = 3, float64: bool = False) -> Comparison:
    """Train the target for some steps under its plan, and in one process, and compare.

    Args:
        target: What is compared.
        steps: How many steps, with clipping and SGD with momentum.
        float64: Do both in float64, where rounding explains next to nothing.

    Raises:
        PiperError: The plan is refused, or the two would differ for a reason that is no fault.
    """
    plan = target.plan()
    _refuse_what_must_differ(target, plan)
    convert = doubled if float64 else _same

    def job() -> _Trace:
        return _train(target, plan, steps, convert)

    traces: list[_Trace] = launch(job, plan.world_size, engine="inprocess")
    want = _reference(target, traces[0], steps, convert)
    names = [name for name, _ in _model(target, convert).named_parameters()]
    dtypes = {one.dtype for _, one in want.params.values()}
    grads, params = (
        max((_size(v) for _, v in rows.values()), default=0.0) for rows in (want.grads, want.params)
    )
    return Comparison(
        steps=steps,
        loss=_largest([(t.losses, want.losses) for t in traces]),
        norm=_largest([(t.norms, want.norms) for t in traces]),
        allowed=max(ALLOWED.get(dtype, 0.0) for dtype in dtypes),
        differences=tuple(
            _difference(name, traces, want, (grads, params))
            for name in names
            if name in want.params
        ),
    )


def _refuse_what_must_differ(target: Target, plan: Plan) -> None:
    if not plan.dag.training or plan.dag.loss is None:
        raise PiperError(
            format_error(
                "there is no gradient to compare: the model has no loss",
                hint="return a scalar loss from forward; name it with Strategy(loss=...)",
            )
        )
    if any(draws(node) for chunk in plan.chunks.values() for node in chunk.graph.nodes):
        raise PiperError(
            format_error(
                "the model draws random numbers: a microbatch's are not those of a whole batch",
                hint="switch dropout off in model(), for example with model.eval()",
            )
        )
    dropping = [one for one in target.strategy.of(Shard) if one.capacity is not None]
    if dropping:
        raise PiperError(
            format_error(
                "experts with a capacity drop rows, which one process does not",
                {"directive": dropping[0].label},
                hint="compare without capacity=",
            )
        )
    rounding = target.strategy.of(Precision)
    if rounding:
        raise PiperError(
            format_error(
                "piper.Precision rounds, which one process does not",
                {"directive": rounding[0].label},
                hint="compare without it",
            )
        )


def _same(value: Any) -> Any:
    return value


def _model(target: Target, convert: Any) -> nn.Module:
    made: nn.Module = convert(target.model())
    return made


def _call(model: Any, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=MOMENTUM)


def _train(target: Target, plan: Plan, steps: int, convert: Any) -> _Trace:
    """The run of one rank."""
    replicas = max(map(len, plan.groups), default=1)
    example = convert(target.batches(0, 0, replicas))
    chosen = {} if target.compile is None else {"compile": target.compile}
    step = piper_compile(_model(target, convert), target.strategy, example, **chosen)
    at, trace = data_rank(step), _Trace(replicas=data_world(step))
    optimizer = _optimizer(parameters(step))
    for number in range(steps):
        leaves = tree_leaves(_call(step, convert(target.batches(number, at, trace.replicas))))
        trace.loss_at, loss = next((i, v) for i, v in enumerate(leaves) if v.requires_grad)
        loss.backward()
        trace.losses.append(loss.item())
        if number == 0:
            trace.grads = _rows(step, is_gradient=True)
        trace.norms.append(clip_grad_norm_(step, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.params = _rows(step, is_gradient=False)
    return trace


def _rows(step: Any, *, is_gradient: bool) -> dict[str, tuple[int, Tensor]]:
    """Copies of the rows of each parameter, or of its gradient, that this rank holds."""
    found = {}
    for name, param in module_of(step).named_parameters():
        record = record_of(param)
        if record is None or not record.held:
            continue
        stepped = record.stepped(param)
        value = stepped.grad if is_gradient else stepped
        if value is not None:
            first = record.block.start if record.block is not None else 0
            found[name] = first, compat.local_tensor(value).detach().clone()
    return found


def _reference(target: Target, ranks: _Trace, steps: int, convert: Any) -> _Trace:
    """The same steps of the untouched model."""
    model, trace = _model(target, convert), _Trace()
    optimizer = _optimizer(model.parameters())
    for number in range(steps):
        batches = [
            convert(target.batches(number, r, ranks.replicas)) for r in range(ranks.replicas)
        ]
        losses = [tree_leaves(_call(model, batch))[ranks.loss_at] for batch in batches]
        weights = _weights(target, model, batches)
        loss: Any = sum(weight * one for weight, one in zip(weights, losses, strict=True))
        loss.backward()
        trace.losses.append(loss.item())
        if number == 0:
            trace.grads = {
                n: (0, p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None
            }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        trace.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    trace.params = {n: (0, p.detach()) for n, p in model.named_parameters()}
    return trace


def _weights(target: Target, model: nn.Module, batches: list[Any]) -> list[Any]:
    """What each replica's loss counts in the whole batch's."""
    rule = split_of(target.strategy).loss
    if rule == "sum":
        return [1.0] * len(batches)
    if not callable(rule):
        return [1.0 / len(batches)] * len(batches)
    signature, wanted = inspect.signature(model.forward), compat.parameter_names(rule)
    found = []
    for batch in batches:
        is_named = isinstance(batch, Mapping)
        bound = signature.bind(**batch) if is_named else signature.bind(*batch)
        found.append(rule(**{name: bound.arguments[name] for name in wanted}))
    return [one / sum(found) for one in found]


def _largest(pairs: list[tuple[list[float], list[float]]]) -> float:
    return max(
        relative_difference(h, w) for have, want in pairs for h, w in zip(have, want, strict=True)
    )


def _size(value: Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def _difference(
    name: str, traces: list[_Trace], want: _Trace, largest: tuple[float, float]
) -> Difference:
    """`largest`: gradient and value of all parameters.

    Beside these, what rounding leaves of nothing counts for nothing: the bias of attention's keys
    has no gradient but for rounding.
    """
    whole = want.params[name][1]
    ranks = tuple(rank for rank, trace in enumerate(traces) if name in trace.params)
    is_used = bool(ranks) or name in want.grads  # else nobody computes with it
    allowed = ALLOWED.get(whole.dtype, 0.0)
    return Difference(
        name=name,
        shape=tuple(whole.shape),
        ranks=ranks,
        gradient=_of_rows(name, [t.grads for t in traces], want.grads, allowed * largest[0]),
        value=_of_rows(name, [t.params for t in traces], want.params, allowed * largest[1])
        if is_used
        else 0.0,
        allowed=allowed,
    )


def _of_rows(
    name: str,
    ranks: list[dict[str, tuple[int, Tensor]]],
    want: Mapping[str, tuple[int, Tensor]],
    least: float = 0.0,
) -> float:
    """The largest difference of any rank's rows; infinity where rows are missing or NaN.

    Relative to the parameter's own largest value, or to `least` where that is more.
    """
    if name not in want:
        return 0.0 if not any(name in rank for rank in ranks) else math.inf
    whole = want[name][1].double()
    scale = max(_size(whole), least)
    worst, seen = 0.0, torch.zeros(whole.shape[0] if whole.dim() else 1, dtype=torch.bool)
    for rank in ranks:
        if name not in rank:
            continue
        first, rows = rank[name]
        count = rows.shape[0] if rows.dim() else 1
        part = whole.narrow(0, first, count) if whole.dim() else whole
        seen[first : first + count] = True
        if rows.numel():
            off = (rows.double() - part).abs().max().item()
            worst = max(worst, off if off == off else math.inf)
    if not bool(seen.all()):
        return math.inf
    return worst / scale if scale else worst
