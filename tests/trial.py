"""A training on the ranks of this process, and what must come out: that of one process.

Only torch and piper are used here: the text of this file, a model and a `Trial` are a script that
runs alone, which `make fuzz-train` writes where a training goes wrong.

Terms: a *call* is one of the step; an update comes after some of them. A *twin* is the same step on
one rank alone, with the strategy's rounding and random numbers, which no eager model has.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import piper_dynamo as piper

CLIP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training.

    Attributes:
        build: Makes the model; every call gives equal values.
        strategy: How it is distributed.
        world: Over how many ranks.
        replicas: Among how many replicas the batch is divided.
        data: The whole batch, by argument, of so many rows and with such numbers.
        dims: Along which dim arguments are sliced; the others are not.
        rows: Of the whole batch, by update.
        calls: Before an update.
        style: How arguments are given: as "args", "kwargs", or in one "dict".
        optimizer: "sgd" or "adamw".
        norm: The p of the norm by which gradients are clipped.
        evaluates: Whether a call without gradients follows.
        spares: Whether ranks get nothing of the inputs that they do not use.
        deferred: Whether the ranks build the model under `piper.deferred_init`.
        options: Of `piper.compile`.
        eager: How near to the eager model it must come; None: it need not. Of a strategy that
            rounds, only losses and norms.
        twin: How near to its twin it must come; None: there is none.
    """

    build: Callable[[], nn.Module]
    strategy: piper.Strategy
    world: int
    replicas: int
    data: Callable[[int, int], dict[str, Any]]
    dims: Mapping[str, int]
    rows: tuple[int, ...]
    calls: int = 1
    style: str = "args"
    optimizer: str = "sgd"
    norm: float = 2.0
    evaluates: bool = False
    spares: bool = False
    deferred: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    eager: float | None = 1e-9
    twin: float | None = None

    @property
    def split(self) -> piper.Split:
        return self.strategy.of(piper.Split)[0]

    def batches(self) -> list[list[dict[str, Any]]]:
        """The whole batches, by update and call."""
        return [
            [self.data(rows, 10 * step + call) for call in range(self.calls)]
            for step, rows in enumerate(self.rows)
        ]

    def part(self, batch: Mapping[str, Any], at: int, of: int) -> dict[str, Any]:
        """One of equal parts of a batch: a replica's, or a microbatch of it."""
        return {
            name: value.chunk(of, self.dims[name])[at].contiguous() if name in self.dims else value
            for name, value in batch.items()
        }

    def given(self, batch: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How the model is called."""
        if self.style == "kwargs":
            return (), dict(batch)
        return ((dict(batch),) if self.style == "dict" else tuple(batch.values())), {}

    def stepper(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":  # eps: gradients that are zero but for rounding stay small
            return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3, foreach=True)
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)


@dataclass(slots=True, kw_only=True)
class Run:
    """What a rank, or one process, ends with.

    Attributes:
        losses: By call.
        norms: Of the gradients before clipping, by update.
        outputs: By call, those other than the loss that it has.
        values: Its part of every parameter that it holds.
        whole: The parameters as `piper.state_dict` puts them together.
        blocks: Which block of how many of a parameter that is, one after the other.
        buffers: Those that it changes.
        replica: Which one it belongs to.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    replica: int = 0


def check(trial: Trial) -> None:
    """Train it on its ranks, and compare.

    Raises:
        PiperError: It is refused, or fails.
        AssertionError: Names what differs, on which rank and by how much.
    """
    ranks = train(trial)
    if trial.twin is not None:
        compare(ranks, _of_twin(train(twin_of(trial))[0], trial.replicas), trial.twin, "its twin")
    if trial.eager is not None:
        is_rounded = bool(trial.strategy.of(piper.Precision))
        compare(ranks, alone(trial), trial.eager, "one process", numbers_only=is_rounded)


def train(trial: Trial) -> list[Run]:
    """Updates with clipped gradients, on every rank."""

    def rank() -> Run:
        with piper.deferred_init() if trial.deferred else nullcontext():
            model = trial.build()
        batches = trial.batches()
        args, kwargs = trial.given(trial.part(batches[0][0], 0, trial.replicas))
        step = piper.compile(model, trial.strategy, kwargs or args, **trial.options)
        run = Run(replica=piper.data_rank(step))
        assert piper.data_world(step) == trial.replicas, piper.data_world(step)
        optimizer = trial.stepper(piper.parameters(step))
        torch.manual_seed(5)  # of the masks, whatever building the model has drawn
        used = _used(trial, step) if trial.spares else set(batches[0][0])

        def call(batch: dict[str, Any]) -> Tensor:
            mine = trial.part(batch, run.replica, trial.replicas)
            mine = {name: v if name in used else _poison(v) for name, v in mine.items()}
            args, kwargs = trial.given(mine)
            loss, others = _outputs(step(*args, **kwargs))
            run.losses.append(loss.item())
            run.outputs.append(others)
            return loss

        for several in batches:
            for number, batch in enumerate(several):
                later: AbstractContextManager[None] = nullcontext()
                if number < len(several) - 1:
                    later = piper.no_sync(step)
                with later:
                    (call(batch) / (number + 1)).backward()
            run.norms.append(float(piper.clip_grad_norm_(step, CLIP, trial.norm)))
            optimizer.step()
            optimizer.zero_grad()
        _keep_state(run, step)
        if trial.evaluates:
            with torch.no_grad():
                call(batches[0][0])
        return run

    torch._dynamo.reset()  # it keeps at most eight programs per line of code
    with warnings.catch_warnings():
        tells = "ignore" if trial.spares else "error"
        warnings.filterwarnings(tells, "ranks of one replica were given different inputs")
        return list(piper.launch(rank, trial.world, engine="inprocess"))


def _used(trial: Trial, step: Any) -> set[str]:
    """The inputs that this rank needs, from the plan: those of its regions, and of weights."""
    plan = piper.explain(step)
    names = {arg.position: arg.name for arg in plan.args}
    read = {names[position] for _, position in plan.programs[piper.rank()].data}
    if callable(trial.split.loss):
        read.add("y")
    return {name.removeprefix("batch['").removesuffix("']") for name in read}


def _poison(value: Any) -> Any:
    """The same shape and type, with values that must not be looked at."""
    if not isinstance(value, Tensor):
        return value
    return torch.full_like(value, float("nan") if value.is_floating_point() else 10**6)


def _keep_state(run: Run, step: Any) -> None:
    """What this rank has of the model, and which part of the whole that is, from the plan."""
    plan = piper.explain(step)
    names = {arg.position: arg.name for arg in plan.args}
    program = plan.programs[piper.rank()]
    for position, group in (*program.experts, *program.shards):
        block = (group.index(piper.rank()), len(group))
        run.blocks.setdefault(names[position], []).append(block)
    for name, param in piper.named_parameters(step):
        if param.numel():
            run.values[name] = getattr(param, "_local_tensor", param).detach().clone()
    run.whole = piper.state_dict(step)
    buffers = dict(step.named_buffers())
    for position, _ in program.buffers:
        name = names[position]
        run.buffers[name] = buffers.get(name, buffers.get(f"_orig_mod.{name}")).detach().clone()


def _outputs(found: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss, and copies of the other outputs that this rank has."""
    if isinstance(found, Tensor):
        return found, {}
    others = {}
    for name, value in found.items():
        try:
            others[name] = value.detach().clone() if isinstance(value, Tensor) else value
        except piper.PiperAbsentError:
            continue
    loss: Tensor = found["loss"]
    del others["loss"]
    return loss, others


def twin_of(trial: Trial) -> Trial:
    """All microbatches of all replicas on one rank, in the order of their numbers."""
    one = trial.split
    split = piper.Split(
        {},
        num_microbatches=one.num_microbatches * trial.replicas,
        inputs=one.inputs,
        loss=one.loss,
    )
    rounding = trial.strategy.of(piper.Precision)
    strategy = piper.Strategy(
        split, piper.Place({"PP": "*"}, devices=[0]), *rounding, loss=trial.strategy.loss
    )
    options = {"compile": trial.options.get("compile")}
    return replace(trial, strategy=strategy, world=1, replicas=1, deferred=False, options=options)


def _of_twin(twin: Run, replicas: int) -> list[Run]:
    """What each replica has of its outputs."""
    parts = []
    for at in range(replicas):
        outputs = [
            {name: _share(value, at, replicas) for name, value in one.items()}
            for one in twin.outputs
        ]
        parts.append(replace(twin, outputs=outputs, replica=at))
    return parts


def _share(value: Any, at: int, of: int) -> Any:
    """A replica's part of an output."""
    return value.chunk(of)[at] if isinstance(value, Tensor) and of > 1 else value


def alone(trial: Trial) -> list[Run]:
    """The eager model on all microbatches, one after the other; a run for each replica.

    Replicas have buffers of their own, and one set of parameters.
    """
    copies = [trial.build() for _ in range(trial.replicas)]
    params = list(copies[0].parameters())
    optimizer = trial.stepper(params)
    runs = [Run(replica=at) for at in range(trial.replicas)]

    def call(batch: dict[str, Any], share: float) -> None:
        total = 0.0
        for run, copy, pieces in zip(runs, copies, _pieces(trial, batch), strict=True):
            found: list[dict[str, Any]] = []
            for piece, weight in pieces:
                args, kwargs = trial.given(piece)
                loss, others = _outputs(copy(*args, **kwargs))
                found.append(others)
                loss = loss * weight
                total += loss.item()
                if share:
                    (loss * share).backward()
            run.outputs.append({name: _joined([one[name] for one in found]) for name in found[0]})
        for run in runs:
            run.losses.append(total)

    for several in trial.batches():
        for number, batch in enumerate(several):
            call(batch, 1.0 / (number + 1))
        for copy in copies[1:]:
            for ours, theirs in zip(params, copy.parameters(), strict=True):
                if theirs.grad is not None and ours.grad is not None:
                    ours.grad += theirs.grad
                theirs.grad = None
        norm = _clip([p.grad for p in params if p.grad is not None], trial.norm)
        optimizer.step()
        optimizer.zero_grad()
        for copy in copies[1:]:
            for ours, theirs in zip(params, copy.parameters(), strict=True):
                theirs.data.copy_(ours.data)
        for run in runs:
            run.norms.append(norm)
    for run, copy in zip(runs, copies, strict=True):
        run.values = {name: p.detach().clone() for name, p in copies[0].named_parameters()}
        run.buffers = {name: b.clone() for name, b in copy.named_buffers()}
    if trial.evaluates:
        with torch.no_grad():
            call(trial.batches()[0][0], 0.0)
    return runs


def _pieces(
    trial: Trial, batch: Mapping[str, Any]
) -> list[list[tuple[dict[str, Any], float | Tensor]]]:
    """By replica, its microbatches with what each counts in the loss."""
    count, rule = trial.split.num_microbatches, trial.split.loss
    parts = [trial.part(batch, at, trial.replicas) for at in range(trial.replicas)]
    pieces = [[trial.part(part, mb, count) for mb in range(count)] for part in parts]
    if rule == "sum":
        return [[(piece, 1.0) for piece in some] for some in pieces]
    if rule == "mean":
        return [[(piece, 1.0 / (count * len(parts))) for piece in some] for some in pieces]
    assert callable(rule)
    weights = [[float(rule(piece["y"])) for piece in some] for some in pieces]
    total = sum(map(sum, weights))
    return [
        [(piece, w / total if total else 0.0) for piece, w in zip(some, ws, strict=True)]
        for some, ws in zip(pieces, weights, strict=True)
    ]


def _joined(values: list[Any]) -> Any:
    """An output of all microbatches; one alone is as it is."""
    if not isinstance(values[0], Tensor) or len(values) == 1:
        return values[0]
    return torch.cat(values) if values[0].dim() else torch.stack(values)


def _clip(grads: Sequence[Tensor], p: float) -> float:
    """As `piper.clip_grad_norm_`: the norm is not rounded to few bits."""
    norm = torch.stack([g.double().norm(p) for g in grads]).norm(p).item() if grads else 0.0
    for grad in grads:
        grad.mul_(torch.tensor(min(CLIP / (norm + 1e-6), 1.0), dtype=torch.float64).to(grad.dtype))
    return norm


def compare(
    ranks: Sequence[Run],
    replicas: Sequence[Run],
    tolerance: float,
    whose: str,
    *,
    numbers_only: bool = False,
) -> None:
    """Losses, norms, outputs, parameters and buffers are the replicas', and every one is held.

    Raises:
        AssertionError: Names what differs, and by how much.
    """
    for rank, got in enumerate(ranks):
        want, where = replicas[got.replica], f"rank {rank} and {whose}:"
        _close(got.losses, want.losses, f"{where} losses", tolerance)
        _close(got.norms, want.norms, f"{where} gradient norms", tolerance)
        if numbers_only:
            continue
        for call, (outputs, theirs) in enumerate(zip(got.outputs, want.outputs, strict=True)):
            for name, value in outputs.items():
                other, is_number = theirs[name], getattr(value, "shape", ()) == ()
                if is_number and isinstance(other, Tensor) and other.shape == (1,):
                    other = other[0]  # of a twin, whose microbatches are more: a list of numbers
                _close(value, other, f"{where} output {name} of call {call}", tolerance)
        for name, value in got.values.items():
            whole = want.values[name]
            for index, count in got.blocks.get(name, ()):
                parts = whole.chunk(count)
                whole = parts[index] if index < len(parts) else whole[:0]
            # An update is as small as gradients are clipped.
            _close(value, whole, f"{where} parameter {name}", min(tolerance, 5e-3))
        for name, value in got.whole.items():
            if name in want.values:
                _close(value, want.values[name], f"{where} whole {name}", min(tolerance, 5e-3))
        for name, value in got.buffers.items():
            _close(value, want.buffers[name], f"{where} buffer {name}", tolerance)
    if numbers_only:
        return
    missing = set(replicas[0].values).difference(*(got.values for got in ranks))
    assert not missing, f"no rank holds {sorted(missing)}"
    for want in replicas:
        mine = [got for got in ranks if got.replica == want.replica]
        for call, outputs in enumerate(want.outputs):
            missing = set(outputs).difference(*(got.outputs[call] for got in mine))
            assert not missing, f"no rank of replica {want.replica} has {sorted(missing)}"


def _close(got: Any, want: Any, what: str, tolerance: float) -> None:
    if want is None or got is None:
        assert got is want, f"{what}: {got}, want {want}"
        return
    got, want = (torch.as_tensor(v).to(torch.float64) for v in (got, want))
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    off = (got - want).abs() - tolerance * want.abs().clamp(min=1.0)
    worst = off.max().item() + tolerance if off.numel() else 0.0
    is_near = not off.numel() or off.max().item() <= 0.0
    assert is_near, f"{what}: off by {worst:.3g}\ngot  {got}\nwant {want}"
