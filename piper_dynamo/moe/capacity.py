"""How many rows an expert takes where `piper.Shard` is given a capacity, and how many it drops.

Terms: a *routing* is one `dispatch` of one rank's microbatch; *rows* are its n * k assignments.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from piper_dynamo.errors import PiperStrategyError, format_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What bounds how many rows an expert takes of one routing.

    Attributes:
        amount: Rows, or a factor of the even share.
        is_factor: Which of both: 2 rows are not 2.0 even shares.
    """

    amount: Fraction
    is_factor: bool

    @classmethod
    def of(cls, given: int | float) -> "Capacity":
        """What `piper.Shard` was given; a factor is taken as it is written: 1.1 is 11/10."""
        is_factor = isinstance(given, float)
        return cls(
            amount=Fraction(repr(given)) if is_factor else Fraction(given), is_factor=is_factor
        )

    def slots_per_expert(self, rows: int, experts: int) -> int:
        """The most rows that one expert takes of one routing.

        Args:
            rows: Of the routing.
            experts: Among how many they go.

        Returns:
            No more than there are rows, but at least 1.
        """
        most = self.amount * rows / experts if self.is_factor else self.amount
        return max(1, min(-(-most.numerator // most.denominator), rows))


def dropped(counts: Tensor, capacity: int | float) -> Tensor:
    """How many rows are dropped, from what `dispatch` says was asked for.

    Args:
        counts: `Routing.counts` or `Routed.load` of one routing, [E], or of several that have
            equally many rows, [..., E], such as one per microbatch.
        capacity: As `piper.Shard` was given it.

    Returns:
        Rows of each routing, [...], int64. Copied to the host and back.

    Raises:
        PiperStrategyError: The routings do not have equally many rows.
    """
    rows = counts.sum(-1)
    fewest, most = (int(rows.min()), int(rows.max())) if rows.numel() else (0, 0)
    if fewest != most:
        raise PiperStrategyError(
            format_error(
                "piper.moe.dropped takes routings of equally many rows",
                {"counts": tuple(counts.shape), "rows": f"from {fewest} to {most}"},
                hint="call it once for each size of microbatch",
            )
        )
    slots = Capacity.of(capacity).slots_per_expert(most, counts.shape[-1])
    return (counts.to(torch.int64) - slots).clamp(min=0).sum(-1)
