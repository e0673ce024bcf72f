"""Budgets: how much regions may keep of their forward for their backward.

Signature: a strategy's Recomputes -> records that `piper_dynamo.passes` reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from piper_dynamo.filters import Filter
from piper_dynamo.ir.task import RegionId
from piper_dynamo.strategy import Recompute, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much some regions may keep.

    Attributes:
        filter: Which regions.
        budget: 0 keeps a region's inputs alone, 1 what it keeps without a budget.
        label: The directive, for a message.
    """

    filter: Filter
    budget: float
    label: str = field(compare=False)

    def covers(self, region: RegionId) -> bool:
        """Whether it is for a region."""
        return self.filter.matches(dict(region.tags))


def budget_of(budgets: Sequence[Budget], region: RegionId) -> float | None:
    """The budget of a region; None where none is given."""
    return min((one.budget for one in budgets if one.covers(region)), default=None)


def budgets_of(strategy: Strategy) -> tuple[Budget, ...]:
    """Which regions the strategy's Recomputes bound, and to what they may keep."""
    return tuple(
        Budget(filter=one.filter, budget=one.budget, label=one.label)
        for one in strategy.of(Recompute)
    )
