"""How many rows an expert takes where `piper.Shard` is given a capacity, and how many it drops.

Terms: a *routing* is one `dispatch` of one rank's microbatch; *rows* are its n * k assignments.
"""

from fractions import Fraction

import torch
from torch import Tensor


def written(capacity: int | float) -> str:
    """A capacity as it is written, in which 2 is not 2.0."""
    return repr(float(capacity) if isinstance(capacity, float) else int(capacity))


def room(capacity: int | float, rows: int, experts: int) -> int:
    """The most rows that one expert takes of one routing.

    A factor is taken as it is written: 1.1 is 11/10.

    Args:
        capacity: Rows (int), or a factor of the even share (float).
        rows: Of the routing.
        experts: Among how many they go.

    Returns:
        No more than there are rows, but at least 1.
    """
    if isinstance(capacity, float):
        share = Fraction(written(capacity)) * rows / experts
        capacity = -(-share.numerator // share.denominator)
    return max(1, min(capacity, rows))


def dropped(counts: Tensor, capacity: int | float) -> Tensor:
    """How many rows are dropped, from what `dispatch` says was asked for.

    Args:
        counts: `Routing.counts` or `Routed.load` of one routing, [E], or of several that have
            equally many rows, [..., E], such as one per microbatch.
        capacity: As `piper.Shard` was given it.

    Returns:
        Rows of each routing, [...], int64. Copied to the host and back.
    """
    rows = counts.sum(-1)
    most = room(capacity, int(rows.max()), counts.shape[-1]) if rows.numel() else 0
    return (counts.to(torch.int64) - most).clamp(min=0).sum(-1)
