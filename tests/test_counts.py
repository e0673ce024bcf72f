"""What a step does, pinned: a change of these counts is a regression unless it is meant.

Exact on every machine, since they are read from the plan. Time and memory: `make bench-pipeline`.
"""

import pytest

from benchmarks.counts import Counts, counts_of
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.train.config import Config

# Two ranks, four microbatches, four layers.
SMALL = {"dim": 32, "layers": 4, "heads": 2, "kv_heads": 1, "seq": 8, "batch": 4, "microbatches": 4}
WANT = {
    "gpipe": Counts(instructions=130, frees=99, messages=9, bytes=8196, matmuls=348, chunks=4),
    "one_f_one_b": Counts(
        instructions=130, frees=99, messages=9, bytes=8196, matmuls=348, chunks=4
    ),
    "interleaved_1f1b": Counts(
        instructions=210, frees=147, messages=25, bytes=24580, matmuls=348, chunks=6
    ),
    "zb_h1": Counts(instructions=134, frees=103, messages=9, bytes=8196, matmuls=348, chunks=5),
    "zbv": Counts(instructions=190, frees=143, messages=17, bytes=16388, matmuls=348, chunks=8),
    "dualpipev": Counts(
        instructions=181, frees=134, messages=17, bytes=16388, matmuls=348, chunks=10
    ),
    # Each rank sends the other its part of every gradient.
    "dualpipe": Counts(
        instructions=557, frees=366, messages=89, bytes=534796, matmuls=348, chunks=4
    ),
}


def test_every_schedule_is_counted() -> None:
    assert WANT.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("schedule", WANT)
def test_counts(schedule: str) -> None:
    assert counts_of(Config(schedule=schedule, **SMALL)) == WANT[schedule]


def test_schedules_change_neither_the_work_nor_its_messages() -> None:
    """What is computed does not depend on the order; what is sent only on the placement."""
    assert len({w.matmuls for w in WANT.values()}) == 1
    line = [WANT[s] for s in ("gpipe", "one_f_one_b", "zb_h1")]
    assert len({(w.messages, w.bytes) for w in line}) == 1
    vee = [WANT[s] for s in ("zbv", "dualpipev")]
    assert len({(w.messages, w.bytes) for w in vee}) == 1
