"""Jobs that are started again: training on as many ranks as there are, saved after each step.

The functions are started in other processes, by every engine alike.
"""

import os
import signal
from pathlib import Path

import piper_dynamo as piper
from piper_dynamo.runtime.world import restarts
from tests import jobs, replicas, resuming
from tests.resuming import MIXED, Layout, Run

STEPS = 5
DIES = 3  # steps are saved before
# By the number of ranks: two stages, replicas of one stage that shard it, one process.
LAYOUTS: dict[int, Layout] = {
    2: resuming.layout(jobs.LINE2),
    1: resuming.layout({0: [0]}),
}
SHARDED: dict[int, Layout] = {
    2: resuming.layout(replicas.PAIR, zero=3),
    4: resuming.layout(replicas.LINE, zero=1),
}

Trace = list[tuple[float, float]]


def train(
    folder: str, layouts: dict[int, Layout] = LAYOUTS, *, kills: bool = True
) -> tuple[int, int, Trace]:
    """Train to the end; in the first start the last rank is killed.

    Returns:
        The ranks there are, after how many steps this start went on, and (loss, norm) since then.
    """
    print(f"rank {piper.rank()} of {piper.world_size()}, start {restarts()}")
    print(f"rank 0 is at {os.environ['MASTER_ADDR']}")
    run = Run.start(MIXED, layouts[piper.world_size()])
    done = run.load(Path(folder))["steps"] if (Path(folder) / ".metadata").exists() else 0
    found: Trace = []
    for number in range(done, STEPS):
        is_last = piper.rank() == piper.world_size() - 1
        if kills and number == DIES and is_last and not restarts():
            os.kill(os.getpid(), signal.SIGKILL)
        found += run.train(number, 1)
        run.save(Path(folder), number + 1)
    return piper.world_size(), done, found


def check(results: list[tuple[int, int, Trace]], ranks: int) -> None:
    """What the last start returned: it went on where the first was killed, with the same numbers.

    Raises:
        AssertionError: It did not.
    """
    want = resuming.unbroken(MIXED, STEPS)[DIES:]
    assert [(world, done) for world, done, _ in results] == [(ranks, DIES)] * len(results)
    for rank, (_, _, got) in enumerate(results):
        jobs.close(got, want, f"rank {rank}", 1e-9)


def refused() -> None:
    """A job that no restart would save."""
    print(f"start {restarts()}")
    raise piper.PiperStrategyError("as it was asked for, this cannot be")


def told() -> tuple[int, int, str]:
    """What a rank knows of itself."""
    print(f"rank {piper.rank()} was here")
    return piper.rank(), piper.world_size(), os.environ["LOCAL_RANK"]
