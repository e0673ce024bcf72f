"""Whole models of kinds that users have, and the check that ranks train them as one process does.

Terms: a *subject* is a model, and what each replica is given in each step. Its reference is the
eager model in one process: the mean over replicas and their microbatches, one after the other, so
that statistics of a batch (BatchNorm, contrastive losses) are those of a microbatch there, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo.access import module_of
from piper_dynamo.planning import split_of
from piper_dynamo.state import record_of
from tests import jobs
from tests.jobs import CLIP, STEPS, Optimizer
from tests.replicas import OPTIMIZERS

Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and its data.

    Attributes:
        build: Makes the model, with equal values at every call.
        batch: What a replica is given in a step, by argument.
        loss_of: The loss in the model's output.
        whole: Arguments that are not split into microbatches.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss_of: Callable[[Any], Tensor] = lambda output: output
    whole: tuple[str, ...] = ()

    def calls(self, *, training: bool, count: int = 2) -> tuple[nn.Module, list[Any]]:
        """The model, in training or evaluation, and calls of it."""
        return self.build().train(training), [((), dict(self.batch(k, 0))) for k in range(count)]


@dataclass(slots=True, kw_only=True)
class Trace:
    """What a run leaves.

    Attributes:
        losses: Of the steps.
        norms: Of the gradients, before they are clipped.
        params: Of each parameter the rows that are here, with the number of the first.
        buffers: As they are here. Of a reference: those of all replicas, each on its own data.
        replica: Whose data it had.
        first: Of a reference: the buffers before the first step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    replica: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)


def doubled(value: Any) -> Any:
    """Tensors of floating point in float64."""
    return tree_map(
        lambda v: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v, value
    )


def microbatches(subject: Subject, batch: Batch, count: int) -> list[Batch]:
    """The batch as `count` slices of every tensor that is split."""
    parts = {
        name: value.chunk(count)
        if isinstance(value, Tensor) and value.dim() and name not in subject.whole
        else [value] * count
        for name, value in batch.items()
    }
    return [{name: part[k] for name, part in parts.items()} for k in range(count)]


def reference(
    subject: Subject,
    replicas: int,
    count: int,
    *,
    steps: int = STEPS,
    optimizers: Sequence[Optimizer] = OPTIMIZERS,
    factor: float = 1.0,
) -> Trace:
    """The eager run; `factor` on the gradients makes a wrong one for the controls."""
    model = subject.build()
    trace = Trace(first=buffers_of(model))
    own = [buffers_of(model) for _ in range(replicas)]
    for make in optimizers:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        for k in range(steps):
            total = 0.0
            for replica in range(replicas):
                for name, buffer in model.named_buffers():
                    buffer.copy_(own[replica][name])
                for part in microbatches(subject, subject.batch(k, replica), count):
                    loss = subject.loss_of(model(**part)) / (replicas * count)
                    (loss * factor).backward()
                    total += loss.item()
                own[replica] = buffers_of(model)
            trace.losses.append(total)
            trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    trace.params = {n: (0, p.detach()) for n, p in model.named_parameters()}
    trace.buffers = {n: torch.stack([kept[n] for kept in own]) for n in trace.first}
    return trace


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train(
    subject: Subject,
    wanted: piper.Strategy,
    *,
    steps: int = STEPS,
    optimizers: Sequence[Optimizer] = OPTIMIZERS,
    **options: Any,
) -> Trace:
    """The run of one rank."""
    step = piper.compile(subject.build(), wanted, subject.batch(0, 0), **options)
    at = piper.data_rank(step)
    trace = Trace(replica=at)
    for make in optimizers:
        optimizer = make(piper.parameters(step))
        for k in range(steps):
            loss = subject.loss_of(step(**subject.batch(k, at)))
            loss.backward()
            trace.losses.append(loss.item())
            trace.norms.append(float(piper.clip_grad_norm_(step, CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    for name, param in module_of(step).named_parameters():
        record = record_of(param)
        if record is not None and record.held:
            first = record.block.start if record.block is not None else 0
            trace.params[name] = first, compat.local_tensor(record.stepped(param)).clone()
    trace.buffers = buffers_of(module_of(step))
    return trace


def run(subject: Subject, wanted: piper.Strategy, **options: Any) -> list[Trace]:
    """The traces of all ranks that the strategy places something on."""
    ranks = 1 + max(d for place in wanted.of(piper.Place) for d in place.devices)
    return jobs.run_ranks(lambda: train(subject, wanted, **options), ranks)


def check(
    subject: Subject, wanted: piper.Strategy, *, tolerance: float = 1e-12, **options: Any
) -> list[Trace]:
    """Ranks under this strategy train as one process does, and not as with other gradients.

    Args:
        subject: The model and its data.
        wanted: The strategy.
        tolerance: The largest difference that is none.
        options: Of `train`.
    """
    ranks = run(subject, wanted, **options)
    replicas = max(len(place.devices) for place in wanted.of(piper.Place))
    count = split_of(wanted).num_microbatches
    same = {name: options[name] for name in ("steps", "optimizers") if name in options}
    compare(ranks, reference(subject, replicas, count, **same), tolerance)
    with pytest.raises(AssertionError, match="off by"):
        compare(ranks, reference(subject, replicas, count, factor=1.01, **same), tolerance)
    return ranks


def compare(ranks: Sequence[Trace], want: Trace, tolerance: float) -> None:
    """Losses and norms are the reference's on all ranks, and so are all rows of every parameter.

    A buffer is that of its replica in the reference on the ranks that run what changes it, of which
    each replica has one, and as it was at first on the others.

    Raises:
        AssertionError: Names what differs, on which rank and by how much.
    """
    seen = {
        name: torch.zeros(value.shape[0] if value.dim() else 1, dtype=torch.bool)
        for name, (_, value) in want.params.items()
    }
    for rank, got in enumerate(ranks):
        where = f"rank {rank}: "
        jobs.close(got.losses, want.losses, where + "losses", tolerance)
        jobs.close(got.norms, want.norms, where + "gradient norms", tolerance)
        for name, (first, rows) in got.params.items():
            whole = want.params[name][1]
            count = rows.shape[0] if rows.dim() else 1
            seen[name][first : first + count] = True
            part = whole[first : first + count] if whole.dim() else whole
            jobs.close(rows, part, f"{where}rows of {name}", tolerance)
        for name, value in got.buffers.items():
            if not torch.equal(value, want.first[name]):
                own = want.buffers[name][got.replica]
                jobs.close(value, own, f"{where}buffer {name}", tolerance)
    missing = [name for name, rows in seen.items() if not bool(rows.all())]
    assert not missing, f"no rank holds all of {missing}"
    for name, first in want.first.items():
        followed = {got.replica for got in ranks if not torch.equal(got.buffers[name], first)}
        changed = {r for r, own in enumerate(want.buffers[name]) if not torch.equal(own, first)}
        assert followed == changed, f"buffer {name}: changed for replicas {followed}, not {changed}"


def leaves(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    return [v for v in tree_leaves(output) if isinstance(v, Tensor)]
