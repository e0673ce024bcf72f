"""A strategy's directives as the records that passes read, with what they leave open decided.

Signature: strategy -> cuts, capacities, replications, shardings.
"""

from piper_dynamo.budgets import budgets_of
from piper_dynamo.filters import Filter
from piper_dynamo.moe.capacity import Capacity
from piper_dynamo.options import FUSED
from piper_dynamo.passes.capacity import Bound
from piper_dynamo.passes.pieces import Cuts
from piper_dynamo.passes.replicate import Replication
from piper_dynamo.passes.shard import Sharding
from piper_dynamo.strategy import Replicate, Shard, Strategy


def cuts_of(strategy: Strategy, compile_mode: str) -> Cuts:
    """What cuts the strategy's regions: buckets, and blocks.

    These where compiling each once pays, and where they are computed again: all of a stage at once
    would need as much memory as was saved.
    """
    buckets = tuple(
        (one.filter, int(one.bucket_mb * 2**20))
        for one in strategy.of(Replicate)
        if one.bucket_mb is not None
    )
    again = tuple(one.filter for one in budgets_of(strategy) if one.budget < 1)
    return Cuts(buckets=buckets, blocks=(Filter({}),) if compile_mode in FUSED else again)


def replications(strategy: Strategy) -> list[Replication]:
    """The strategy's Replicates, with what they leave to Piper decided."""
    found = []
    mesh = strategy.mesh.laid_out() if strategy.mesh is not None else None
    for one in strategy.of(Replicate):
        axes = one.axes
        if axes is None and one.shard_axes is not None and mesh is not None:
            axes = mesh.names
        found.append(
            Replication(
                filter=one.filter,
                zero=one.zero,
                label=one.label,
                reduce_stream=one.reduce_stream or "reduce",
                gather_stream=one.gather_stream or "gather",
                prefetch=one.prefetch,
                keep=one.keep,
                axes=axes,
                shard_axes=one.shard_axes or one.axes,
                mesh=mesh,
            )
        )
    return found


def shardings(strategy: Strategy) -> list[Sharding]:
    """The strategy's Shards, with what they leave to Piper decided."""
    mesh = strategy.mesh.laid_out() if strategy.mesh is not None else None
    return [
        Sharding(
            filter=one.filter,
            label=one.label,
            is_static=one.capacity is not None,
            stream=one.stream or "ep",
            axes=one.axes,
            mesh=mesh,
        )
        for one in strategy.of(Shard)
    ]


def capacities_of(strategy: Strategy) -> tuple[Bound, ...]:
    """Which of the strategy's Shards bound what an expert takes, and to how many rows."""
    return tuple(
        Bound(
            filter=one.filter,
            capacity=Capacity.of(one.capacity),
            label=one.label,
        )
        for one in strategy.of(Shard)
        if one.capacity is not None
    )
