"""Running a model over ranks and on one process, and comparing the two.

Terms: a *reference* is the eager model on one process, trained with gradient accumulation over the
microbatches (`microbatches=1`: on whole batches). A *trace* is what a run leaves behind: losses,
gradient norms, the parameters and buffers that the rank holds. The ranks of one test run as
threads of this process that take turns, so closures and lists are enough to collect results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import piper_dynamo as piper

Placement = dict[int, list[int]]
ONE: Placement = {0: [0], 1: [0]}
LINE2: Placement = {0: [0], 1: [1]}
LINE4: Placement = {0: [0], 1: [1], 2: [2], 3: [3]}
LOOP2: Placement = {0: [0], 1: [1], 2: [0], 3: [1]}
V2: Placement = {0: [0], 1: [1], 2: [1], 3: [0]}
LOOP3ON2: Placement = {0: [0], 1: [1], 2: [0]}

CLIP = 0.05
STEPS = 3
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: tuple[Optimizer, ...] = (
    lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a run leaves behind, on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def world(placement: Placement) -> int:
    return 1 + max(rank for ranks in placement.values() for rank in ranks)


def run_ranks(fn: Callable[[], Any], ranks: int) -> list[Any]:
    """What `fn()` returns on each rank.

    Dynamo keeps at most eight programs per line of code: each job starts without those of others.
    """
    torch._dynamo.reset()
    return list(piper.launch(fn, ranks, engine="inprocess"))


def orders(schedule: str, placement: Placement, microbatches: int) -> list[piper.Order]:
    """The built-in schedule of that name; none for ""."""
    if not schedule:
        return []
    return list(getattr(piper.schedules, schedule)(placement, microbatches))


def places(placement: Placement, schedule: str = "", microbatches: int = 1) -> list[piper.Place]:
    """As that schedule wants the stages; without one, a Place per stage."""
    if schedule:
        return piper.strategies.places(schedule, placement, microbatches)
    return [piper.Place({"PP": stage}, devices=ranks) for stage, ranks in placement.items()]


def uses(strategy: piper.Strategy) -> Placement:
    """The ranks that run each stage, for some or all of the microbatches."""
    found: Placement = {}
    for one in strategy.of(piper.Place):
        stage = one.filter.tags["PP"]
        assert isinstance(stage, int)
        found.setdefault(stage, []).extend(one.devices)
    return found


def strategy(
    placement: Placement,
    microbatches: int,
    schedule: str = "gpipe",
    *,
    inputs: Mapping[str, Any] | None = None,
    reduction: Any = "mean",
    **named: Any,
) -> piper.Strategy:
    """A split, a place per stage and a schedule; `named` goes to piper.Strategy."""
    return piper.Strategy(
        piper.Split({}, dim="MB", num_microbatches=microbatches, inputs=inputs, loss=reduction),
        *places(placement, schedule, microbatches),
        *orders(schedule, placement, microbatches),
        **named,
    )


def by_hand(*ranks: str) -> list[piper.Order]:
    """Orders from a short text per rank: "F0.1" is the forward of stage 0, microbatch 1."""
    made = []
    for text in ranks:
        tasks = []
        for word in text.split():
            kind = word.rstrip("0123456789.")
            stage, microbatch = word[len(kind) :].split(".")
            tasks.append({"PP": int(stage), "MB": int(microbatch), "PASS": kind})
        made.append(piper.Order(tasks))
    return made


def poison(value: Any) -> Any:
    """The same shape and type, with values that must not be looked at."""
    if not isinstance(value, Tensor):
        return value
    wrong = float("nan") if value.is_floating_point() else 10**6
    return torch.full_like(value, wrong)


def given_to(
    rank: int, batch: Sequence[Any], needs: Sequence[Iterable[int]], placement: Placement
) -> tuple[Any, ...]:
    """The batch as one rank may get it: what only other ranks' stages use is poisoned."""
    mine = {stage for stage, ranks in placement.items() if rank in ranks}
    return tuple(
        value if mine & set(stages) else poison(value)
        for value, stages in zip(batch, needs, strict=True)
    )


def slices(batch: Sequence[Any], microbatches: int) -> list[tuple[Any, ...]]:
    """The microbatches: tensors cut along dim 0, everything else repeated."""
    columns = [
        value.chunk(microbatches)
        if isinstance(value, Tensor) and value.dim()
        else [value] * microbatches
        for value in batch
    ]
    return list(zip(*columns, strict=True))


def accumulate(
    model: nn.Module,
    batch: Sequence[Any],
    microbatches: int,
    loss_of: Callable[[Any], Tensor] = lambda output: output,
) -> float:
    """Add up the gradients of the mean of the microbatches' losses; returns that mean."""
    total = 0.0
    for piece in slices(batch, microbatches):
        loss = loss_of(model(*piece)) / microbatches
        total += loss.item()
        if loss.requires_grad:
            loss.backward()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def reference(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    microbatches: int = 1,
    *,
    clip: float = CLIP,
    loss_of: Callable[[Any], Tensor] = lambda output: output,
) -> Trace:
    """The eager run: `batches` once with each of the optimizers, one after the other."""
    trace = Trace()
    for make in OPTIMIZERS:
        optimizer = make(model.parameters())
        for batch in batches:
            trace.losses.append(accumulate(model, batch, microbatches, loss_of))
            trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    trace.params.update({n: p.detach().clone() for n, p in model.named_parameters()})
    trace.buffers.update({n: b.clone() for n, b in model.named_buffers()})
    return trace


def train(
    step: Any,
    batches: Sequence[Sequence[Any]],
    *,
    clip: float = CLIP,
    loss_of: Callable[[Any], Tensor] = lambda output: output,
    optimizers: Sequence[Optimizer] = OPTIMIZERS,
    held_by: "Callable[[Any], dict[str, Tensor]] | None" = None,
) -> Trace:
    """The same run of a compiled step, on this rank; `held_by` says what it has of parameters."""
    trace = Trace()
    for make in optimizers:
        optimizer = make(piper.parameters(step))
        for batch in batches:
            loss = loss_of(step(*batch))
            loss.backward()
            trace.losses.append(loss.item())
            trace.norms.append(float(piper.clip_grad_norm_(step, clip)))
            optimizer.step()
            optimizer.zero_grad()
    trace.params.update((held_by or held)(step))
    return trace


def held(step: Any) -> dict[str, Tensor]:
    """Copies of the model's parameters on this rank; an empty anchor is none of them."""
    return {n: p.detach().clone() for n, p in piper.named_parameters(step) if p.numel()}


def compare(ranks: Sequence[Trace], want: Trace, tolerance: float = 1e-12) -> None:
    """Every rank's losses, norms and parameters are the reference's, and nothing is missing.

    Raises:
        AssertionError: Names what differs, on which rank and by how much.
    """
    names: set[str] = set()
    for rank, got in enumerate(ranks):
        where = f"rank {rank}: "
        close(got.losses, want.losses, where + "losses", tolerance)
        close(got.norms, want.norms, where + "gradient norms", tolerance)
        for name, value in got.params.items():
            assert name in want.params, f"{where}holds {name!r}, which the model does not have"
            close(value, want.params[name], f"{where}parameter {name}", tolerance)
        for name, value in got.buffers.items():
            close(value, want.buffers[name], f"{where}buffer {name}", tolerance)
        names |= set(got.params)
    assert names == set(want.params), f"no rank holds {sorted(set(want.params) - names)}"
    for name in sorted(names):
        copies = [got.params[name] for got in ranks if name in got.params]
        assert all(torch.equal(copies[0], copy) for copy in copies), f"copies of {name} differ"


def close(got: Any, want: Any, what: str, tolerance: float = 1e-12) -> None:
    got, want = (torch.as_tensor(v, dtype=torch.float64) for v in (got, want))
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    difference = (got - want).abs().max().item() if got.numel() else 0.0
    assert difference <= tolerance, f"{what}: off by {difference:.3g}\ngot  {got}\nwant {want}"


def refusal(call: Callable[[], Any], kind: type[BaseException] = piper.PiperError) -> str:
    """The text of the error that `call` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing was refused; expected a {kind.__name__}")


def mentions(text: str, *words: str) -> None:
    """All the words are in the text, in any case."""
    missing = [word for word in words if word.lower() not in text.lower()]
    assert not missing, f"the message does not mention {missing}:\n{text}"


def grads(step: Any) -> dict[str, Tensor]:
    """Copies of the gradients on this rank."""
    held = piper.named_parameters(step)
    return {n: p.grad.clone() for n, p in held if p.grad is not None and p.numel()}


def check_grads(ranks: Sequence[dict[str, Tensor]], want: nn.Module) -> None:
    """The ranks' gradients are the eager model's, and every one of them is there."""
    expected = {n: p.grad for n, p in want.named_parameters() if p.grad is not None}
    assert {name for got in ranks for name in got} == set(expected)
    for rank, got in enumerate(ranks):
        for name, grad in got.items():
            close(grad, expected[name], f"rank {rank}: gradient of {name}")


def touched(
    touches: Mapping[str, Callable[[nn.Module], Any]],
    model: nn.Module,
    kind: type[Exception] = piper.PiperAbsentError,
) -> dict[str, str]:
    """What each touch of a model was told, or that it was told nothing, or by another error."""
    found = {}
    for name, touch in touches.items():
        try:
            touch(model)
        except kind as error:
            found[name] = str(error)
        except Exception as error:
            found[name] = f"{type(error).__name__} instead: {error}"
        else:
            found[name] = "nothing raised"
    return found


def check_masks(build: Callable[[], nn.Module], schedule: str) -> None:
    """Dropout of a model of loss and output on two stages: one mask forward and backward.

    Masks differ between microbatches, and a job that is run again has the same ones.
    """

    def job() -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(5)
        x = torch.ones(8, 4, dtype=torch.float64, requires_grad=True)
        wanted = strategy(LINE2, 4, schedule, reduction="sum", loss=0)
        step = piper.compile(build(), wanted, example_inputs=(x,), outputs="everywhere")
        found = []
        for _ in range(2):
            loss, y = step(x)
            (grad,) = torch.autograd.grad(loss, x) if piper.rank() == 0 else (y,)
            found.append((y.detach(), grad))
        return found

    first, again = run_ranks(job, 2)[0], run_ranks(job, 2)[0]
    for (y, grad), (other, _) in zip(first, again, strict=True):
        assert torch.equal(y == 0, grad == 0)
        assert 0 < int((y == 0).sum()) < y.numel()
        assert torch.equal(y, other)
    masks = [part == 0 for y, _ in first for part in y.chunk(4)]
    assert all(not torch.equal(masks[0], mask) for mask in masks[1:])
