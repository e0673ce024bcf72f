"""Predicted step times beside measured ones, and the search's winner beside the rest of its best.

make bench-predict
make bench-predict ARGS="--only steps --json results.json"

A profile is made of the chunks of some configurations; others, held out, are predicted from it and
measured on two gloo ranks that really compute, in turn with the chunks and the links. A step is
forward, backward and communication: clipping and the optimizer come after it. The machine must be
idle.
"""

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from tqdm import trange

import piper_dynamo as piper
from benchmarks import command
from benchmarks.paired import TOLERANCE, seconds
from benchmarks.report import Row
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.predict.links import Links, ratios, slowdown_of
from piper_dynamo.predict.measuring import machine, measurable, measure_host, pair_of
from piper_dynamo.predict.profile import Profile
from piper_dynamo.runtime.world import rank
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

RANKS = 2
JOB = Config(dim=256, layers=4, heads=4, kv_heads=2, seq=64, batch=16, pp=2, microbatches=4)
# What is measured of one device: rows per microbatch 1, 4 and 16, layers per chunk 1 to 6.
FITTED = (
    *(
        replace(JOB, layers=layers, pp=1, schedule="gpipe", microbatches=microbatches)
        for layers, microbatches in ((1, 16), (2, 4), (3, 16), (6, 4), (2, 1))
    ),
    replace(JOB, layers=2, schedule="zb_h1"),
    replace(JOB, layers=6, schedule="zb_h1"),
)
ALONE = replace(JOB, pp=1, schedule="gpipe", microbatches=1)
REPLICAS = replace(JOB, pp=1, dp=2, schedule="gpipe")
HELD_OUT = (
    replace(JOB, schedule="gpipe"),
    replace(JOB, schedule="one_f_one_b", microbatches=8),
    replace(JOB, schedule="zb_h1", layers=8),
    replace(JOB, schedule="interleaved_1f1b", microbatches=2),
    replace(JOB, schedule="zbv", layers=8, microbatches=8),
    replace(JOB, schedule="one_f_one_b", layers=12, microbatches=8),
    replace(REPLICAS, zero=0, microbatches=2),
    replace(REPLICAS, zero=1, layers=6),
    replace(REPLICAS, zero=2, layers=10, microbatches=2),
    replace(REPLICAS, zero=3, layers=8, microbatches=2),
)
BAR_ERROR, BAR_RANKED = 0.10, 9
BAR_WINNER = 1.05
WARM, ROUNDS = 2, 15
MEASURED = f"median of {ROUNDS} rounds"
TOP = 10


def batch_of(rows: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; which does not change how long they take."""
    tokens = (torch.arange(rows * seq) % 251).reshape(rows, seq)
    return tokens, tokens.roll(1, 1)


@functools.cache
def planned(config: Config) -> piper.Plan:
    """The plan of a configuration."""
    batch = batch_of(config.batch // config.dp, config.seq)
    return piper.plan(build(config), config.strategy(), batch)


def compiled(
    model: nn.Module, strategy: piper.Strategy, batch: tuple[torch.Tensor, torch.Tensor]
) -> Callable[[], None]:
    """A step of this rank: forward, backward, and gradients dropped."""
    step: Any = piper.compile(model, strategy, batch)

    def run() -> None:
        step(*batch).backward()
        for parameter in piper.parameters(step):
            parameter.grad = None

    for _ in range(WARM):
        run()
    return run


def held_out_and_profile() -> tuple[list[float], dict[str, Any]]:
    """What each held-out configuration's step takes the slowest rank, and the profile's fields.

    In turn, and the medians: the speed of a machine drifts, and what is predicted from the one is
    compared with the other. Call it on every rank.
    """
    host, links = measure_host(), Links()
    runs = [step_of(config) for config in HELD_OUT]
    chunks = measurable(fitted(), "aten") if rank() == 0 else []
    took: list[list[float]] = []
    alone: list[list[float]] = []
    shared: list[list[float]] = []
    for _ in trange(ROUNDS, desc="rounds", leave=False, disable=None if rank() == 0 else True):
        took.append([seconds(run, dist.barrier) for run in runs])
        shared.append(ratios())
        links.sample()
        alone.append([chunk.once() for chunk in chunks])
    medians = [statistics.median(column) for column in zip(*alone, strict=True)]
    times = tuple(chunk.time(median) for chunk, median in zip(chunks, medians, strict=True))
    fields = pair_of(links, host) | {"chunks": times, "slowdown": slowdown_of(shared)}
    return [statistics.median(column) for column in zip(*took, strict=True)], fields


def step_of(config: Config) -> Callable[[], None]:
    """A step of a configuration on this rank."""
    batch = batch_of(config.batch // config.dp, config.seq)
    return compiled(build(config), config.strategy(), batch)


def fitted() -> dict[str, Chunk]:
    """The chunks that are measured, none of which a held-out configuration has; by key."""
    held_out = {c.key for config in HELD_OUT for c in planned(config).chunks.values()}
    chunks = {c.key: c for config in FITTED for c in planned(config).chunks.values()}
    return {key: chunk for key, chunk in chunks.items() if key not in held_out}


def measured_in_turn(strategies: Sequence[tuple[str, int]]) -> list[float]:
    """A step of each strategy, as JSON and with a replica's rows, on the slowest rank."""
    runs = [
        compiled(build(ALONE, 0), piper.Strategy.from_json(text), batch_of(rows, ALONE.seq))
        for text, rows in strategies
    ]
    rounds = [[seconds(run, dist.barrier) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


@functools.cache
def measured() -> tuple[Profile, list[float]]:
    """The machine's profile, and what the held-out configurations took."""
    took, fields = piper.launch(held_out_and_profile, RANKS)[0]
    found = Profile(machine=machine(), compile="aten", **fields)
    click.echo(str(found))
    return found, took


def steps() -> Iterator[Row]:
    """Every held-out configuration, then how they are ranked."""
    profile, took = measured()
    predicted = [planned(config).simulate(profile).makespan for config in HELD_OUT]
    for config, guess, real in zip(HELD_OUT, predicted, took, strict=True):
        error = guess / real - 1
        yield Row(
            section="steps",
            what=named(config),
            figures=f"predicted {guess * 1e3:7.1f} ms, measured {real * 1e3:7.1f} ms: {error:+.1%}",
            bar=f"within {BAR_ERROR:.0%}",
            held=abs(error) <= BAR_ERROR,
            data={"ours": guess, "other": real, "unit": "s", "measured": MEASURED},
        )
    right = [ranked_right(i, predicted, took) for i in range(len(took))]
    yield Row(
        section="steps",
        what="ranking",
        figures=f"{sum(right)} of {len(right)} are on the right side of all others",
        bar=f">= {BAR_RANKED}",
        held=sum(right) >= BAR_RANKED,
        data={"ours": sum(right), "other": len(right), "unit": "configurations"}
        | {"measured": MEASURED},
    )


def named(config: Config) -> str:
    """A configuration in short."""
    how = f"{config.dp} replicas zero {config.zero}" if config.dp > 1 else config.schedule
    return f"{how}, {config.layers} layers, {config.microbatches} microbatches"


def ranked_right(one: int, predicted: Sequence[float], took: Sequence[float]) -> bool:
    """Whether it is predicted faster and slower than the same others as it is measured.

    Those whose measured times differ by less than measurements do are on either side.
    """
    return all(
        (predicted[one] < predicted[other]) == (took[one] < took[other])
        for other in range(len(took))
        if abs(took[one] - took[other]) > TOLERANCE * max(took[one], took[other])
    )


def winner() -> Iterator[Row]:
    """The search's best ten, measured in turn, and the first of them beside the fastest."""
    rows = JOB.batch
    batch = batch_of(rows, ALONE.seq)
    found = piper.search(build(ALONE, 0), batch, RANKS, costs=measured()[0], top=TOP)
    click.echo(str(found))
    asked = [(one.strategy.to_json(), rows // one.choice.dp) for one in found.best]
    took: list[float] = piper.launch(functools.partial(measured_in_turn, asked), RANKS)[0]
    for one, real in zip(found.best, took, strict=True):
        yield Row(
            section="winner",
            what=str(one.choice),
            figures=f"predicted {one.seconds * 1e3:7.1f} ms, measured {real * 1e3:7.1f} ms",
            data={"ours": one.seconds, "other": real, "unit": "s", "measured": MEASURED},
        )
    ratio = took[0] / min(took)
    yield Row(
        section="winner",
        what=f"the first of {len(took)} beside the fastest",
        figures=f"{ratio:.3f}",
        bar=f"<= {BAR_WINNER}",
        held=ratio <= BAR_WINNER,
        data={"ours": took[0], "theirs": min(took), "unit": "s", "limit": BAR_WINNER}
        | {"measured": MEASURED},
    )


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {"steps": steps, "winner": winner}


if __name__ == "__main__":
    command.of_sections(SECTIONS)()
