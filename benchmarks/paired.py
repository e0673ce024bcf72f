"""The protocol of every benchmark here: two variants measured in turn, compared pair by pair.

Machines drift by ten per cent and more, so absolute times mean little. Variants run A B B A A B
B A ...; each pair gives a ratio A/B; the median ratio is reported with a bootstrap interval. A bar
counts as held when the interval's far end is within 3 % of it.

A comparison has 15 pairs. Where every measurement is a job of its own processes, or as long as one,
it has fewer unless `--pairs` says how many, since each takes up to minutes: steps under each engine
8, steps beside a save 9, compile times and peaks of memory 3. What is wanted of a few pairs is no
less: the interval of three is their range, so that the bar has to be held in each. Peaks hardly
differ from run to run: those of 1F1B by 0.2 %, and what torch allocates not at all (`steady.py`).
Where the median of a ratio of times is beyond its bar, all three are below it once in eight times.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

PAIRS = 15
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Paired measurements of two variants.

    Attributes:
        first: Of A, in seconds or bytes.
        second: Of B, pair by pair.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """A/B of each pair."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]

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

    def holds(self, bar: float, tolerance: float = TOLERANCE) -> bool:
        """Whether the ratio is at most `bar`.

        Args:
            bar: The most that it may be.
            tolerance: By how much of the bar the interval's far end may be beyond it.
        """
        return self.interval()[1] <= bar * (1 + tolerance)

    def text(self, scale: float = 1e3, unit: str = "ms") -> str:
        """Medians of both, the ratio and its interval."""
        low, high = self.interval()
        first, second = statistics.median(self.first), statistics.median(self.second)
        return (
            f"{first * scale:8.1f} {unit} against {second * scale:8.1f} {unit}   "
            f"ratio {self.ratio:.3f} [{low:.3f}, {high:.3f}]"
        )

    def figures(self, unit: str = "s", limit: float | None = None) -> dict[str, object]:
        """For a file of results.

        Args:
            unit: Of the measurements.
            limit: The most that the ratio may be; None: there is no bar.
        """
        return {
            "first": self.first,
            "second": self.second,
            "ours": statistics.median(self.first),
            "theirs": statistics.median(self.second),
            "unit": unit,
            "ratio": self.ratio,
            "interval": self.interval(),
            "limit": limit,
        }


def compare(
    first: Callable[[], float],
    second: Callable[[], float],
    *,
    pairs: int = PAIRS,
    show: str | None = None,
) -> Comparison:
    """Measure two variants in turn.

    Args:
        first: A; called once per pair, gives one measurement.
        second: B.
        pairs: How many pairs.
        show: What to call it in a progress bar; None shows none.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for pair in tqdm(range(pairs), desc=show, leave=False, disable=None if show else True):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            found[which].append((first, second)[which]())
    return Comparison(first=tuple(found[0]), second=tuple(found[1]))


def seconds(call: Callable[[], object], meet: Callable[[], object]) -> float:
    """How long a call takes on the slowest rank: the ranks meet before it and after."""
    meet()
    start = time.perf_counter()
    call()
    meet()
    return time.perf_counter() - start
