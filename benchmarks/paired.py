"""The protocol of every benchmark here: two variants measured in turn, compared pair by pair.

Machines drift by ten per cent and more, so absolute times mean little. Variants run A B B A A B
B A ...; each pair gives a ratio A/B; the median ratio is reported with a bootstrap interval. A bar
counts as held when the interval's far end is within 3 % of it.
"""

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

PAIRS = 15
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Paired times of two variants.

    Attributes:
        first_s: Times of A, in seconds.
        second_s: Times of B, pair by pair.
    """

    first_s: tuple[float, ...]
    second_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A/B of each pair."""
        return [a / b for a, b in zip(self.first_s, self.second_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median ratio."""
        return statistics.median(self.ratios)

    def interval(self, resamples: int = 2000) -> tuple[float, float]:
        """Bootstrap 95 % interval of the median ratio; deterministic."""
        draw = random.Random(0)
        ratios = self.ratios
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples)
        )
        return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]

    def holds(self, bar: float) -> bool:
        """Whether the ratio is at most `bar`."""
        return self.interval()[1] <= bar * (1 + TOLERANCE)

    def __str__(self) -> str:
        low, high = self.interval()
        first, second = statistics.median(self.first_s), statistics.median(self.second_s)
        return (
            f"{first * 1e3:8.1f} ms against {second * 1e3:8.1f} ms   "
            f"ratio {self.ratio:.3f} [{low:.3f}, {high:.3f}]"
        )


def compare(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    pairs: int = PAIRS,
    before: Callable[[], object] | None = None,
) -> Comparison:
    """Time two variants in turn.

    Args:
        first: A; called once per pair.
        second: B.
        pairs: How many pairs.
        before: Called before each timing, e.g. a barrier.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            if before is not None:
                before()
            start = time.perf_counter()
            (first, second)[which]()
            times[which].append(time.perf_counter() - start)
    return Comparison(first_s=tuple(times[0]), second_s=tuple(times[1]))


def machine() -> str:
    """What a figure was measured on."""
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} thread(s) per rank"
    )


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Rows of (what, figures, verdict) with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows
    )
