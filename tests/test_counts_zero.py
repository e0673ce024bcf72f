"""What replicas send in a step and hold of gathered parameters, pinned for a tiny model.

Exact on every machine, since they are read from the plan. Time and memory: `make bench-zero`.
"""

from typing import Any

import pytest

import piper_dynamo as piper
from benchmarks.zero_counts import Collectives, collectives, residency
from benchmarks.zero_memory import largest
from benchmarks.zero_sides import Job
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build

# Two stages on two replicas each, four microbatches, two layers per stage.
JOB = Job(
    config=Config(dim=32, layers=4, heads=2, kv_heads=1, seq=8, batch=4, microbatches=4), replicas=2
)
EMBEDDING = 256 * 32 * 4
HEAD = EMBEDDING + 32 * 4  # with its norm
LAYER = (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32) * 4
MODEL = EMBEDDING + HEAD + 4 * LAYER
BUCKETS = 2 * 3  # per replica


def plan_of(zero: int, **options: Any) -> piper.Plan:
    return piper.plan(build(JOB.config), JOB.strategy(zero, **options), JOB.batch(0), JOB.ranks)


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"),
    [(0, 0, 1), (1, 1, 1), (2, 1, 4)],
    ids=["zero 0", "zero 1", "zero 2"],
)
def test_gathers_and_reductions(zero: int, gathers: int, reductions: int) -> None:
    """Whole once per step from level 1 on; reduced once, from level 2 on once per microbatch."""
    assert collectives(plan_of(zero)) == Collectives(
        gathers=gathers * 2 * BUCKETS,
        gathered_bytes=gathers * 2 * MODEL,
        reductions=reductions * 2 * BUCKETS,
        reduced_bytes=reductions * 2 * MODEL,
        peak_buckets=gathers * BUCKETS // 2,
        peak_bytes=gathers * (HEAD + 2 * LAYER),
    )


def test_level_3_gathers_per_use() -> None:
    """Once per forward and backward of a microbatch; the embedding's backward does not read it."""
    assert collectives(plan_of(3)) == Collectives(
        gathers=2 * 4 * (2 * BUCKETS - 1),
        gathered_bytes=2 * 4 * (2 * MODEL - EMBEDDING),
        reductions=4 * 2 * BUCKETS,
        reduced_bytes=4 * 2 * MODEL,
        peak_buckets=2,
        peak_bytes=2 * LAYER,
    )


@pytest.mark.parametrize(("keep", "most"), [("chunk", 1), (1, 1), (2, 2), ("step", 3)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_residency_is_what_keep_says(keep: Any, most: int, prefetch: int) -> None:
    """As many buckets as `keep` says, at most those gathered ahead on top; none at the end."""
    for program in plan_of(3, keep=keep, prefetch=prefetch).programs:
        alive = residency(program)
        peak = max(buckets for buckets, _ in alive)
        assert most <= peak <= min(most + prefetch, BUCKETS // 2)
        assert alive[-1] == (0, 0)


@pytest.mark.parametrize("limit", range(40))
def test_search_of_the_largest(limit: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert largest(fits, 4, most=32) == min(limit, 32)
    assert len(tried) == len(set(tried)) <= 9
