"""What real steps send, beside the least that their strategy has to."""

from benchmarks import sent
from benchmarks.sent import JOBS, bound
from tests.pool import Pool


def on_one_rank(job: str) -> tuple[int, int]:
    return sent.measured(JOBS[job])


def check_steps(pool: Pool, job: str) -> None:
    """What is handed to torch.distributed is the least; sockets carry it, and gloo's headers."""
    outcomes = pool.run(on_one_rank, job)
    assert not any(one.error for one in outcomes), outcomes
    handed, sockets = (sum(column) for column in zip(*(one.value for one in outcomes), strict=True))
    least = sum(bound(JOBS[job]).values())
    assert handed == least
    assert least <= sockets < 1.5 * least
