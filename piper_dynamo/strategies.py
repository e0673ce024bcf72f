"""Whole strategies in one call.

Signature: a few numbers -> a strategy.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import assert_never

from piper_dynamo import foreign
from piper_dynamo.directives import (
    Keep,
    Loss,
    Order,
    Place,
    Recompute,
    Replicate,
    Rule,
    Shard,
    Split,
)
from piper_dynamo.mesh import Mesh
from piper_dynamo.schedules import SCHEDULES, Schedule, Shape, name_of, stages_by_rank
from piper_dynamo.strategy import LossPath, Strategy
from piper_dynamo.values import Faults, is_whole, maker, user_line

UNSCALED = (
    "fp16 also asks Megatron-LM and DeepSpeed to scale the loss, by a scale that they find; a "
    'strategy has none: compile it by piper.compile(..., loss_scale="dynamic"), or with what they '
    "say of it in piper.LossScale(...), or gradients below 6e-8 are lost"
)
_NEEDED = ("pp", "dp")  # axes that a mesh has whatever their size


def placement(
    schedule: str | Schedule, ranks: int, stages: int | None = None, *, replicas: int = 1
) -> dict[int, list[int]]:
    """Where a schedule wants its stages: a line, one or both ways, a loop or a V.

    Args:
        schedule: Its name in `piper.schedules`, or that function. One of your own: `from_orders`.
        ranks: Pipeline ranks.
        stages: Stages in all; None: as few as the schedule can have. Only gpipe and
            interleaved_1f1b can have more, a multiple of `ranks`.
        replicas: Devices per pipeline rank; pipeline rank r has devices r*replicas and following.

    Returns:
        Devices of each stage; for dualpipe, of the first half of the microbatches.

    Raises:
        PiperStrategyError: Lists every argument that is not allowed.
    """
    faults = Faults(maker() or "piper.strategies.placement", user_line())
    name = name_of(schedule, faults)
    faults.whole("ranks", ranks, 1)
    faults.whole("replicas", replicas, 1)
    if stages is not None:
        faults.whole("stages", stages, 1)
    faults.check()
    shape = SCHEDULES[name][1]
    match shape:
        case Shape.LINE | Shape.TWO_WAY:
            count, fits, must = ranks, stages == ranks, f"must be {ranks}, one per rank"
        case Shape.VEE:
            count, fits, must = 2 * ranks, stages == 2 * ranks, f"must be {2 * ranks}, two per rank"
        case Shape.LOOP:
            count, fits = 2 * ranks, stages is not None and stages % ranks == 0 and stages > ranks
            must = f"must be a multiple of ranks={ranks}, at least {2 * ranks}"
        case None:
            count, fits = ranks, stages is not None and stages % ranks == 0
            must = f"must be a multiple of ranks={ranks}"
        case _:
            assert_never(shape)
    if stages is not None and not fits:
        faults.add("stages", stages, f"{must}, for {name}")
        faults.check()
    stages = count if stages is None else stages
    on = [min(s, 2 * ranks - 1 - s) if shape is Shape.VEE else s % ranks for s in range(stages)]
    return {s: list(range(r * replicas, (r + 1) * replicas)) for s, r in enumerate(on)}


def places(
    schedule: str | Schedule, placement: Mapping[int, Sequence[int]], num_microbatches: int
) -> list[Place]:
    """The directives that put a schedule's stages on their devices.

    One Place per stage. dualpipe has two: stage s of p is on its own devices for the first half of
    the microbatches, and on those of stage p-1-s for the second half.

    Args:
        schedule: Its name in `piper.schedules`, or that function. One of your own: `from_orders`.
        placement: Devices of each stage, as the schedule takes it.
        num_microbatches: How many microbatches the batch is split into.

    Returns:
        The directives, by stage.

    Raises:
        PiperStrategyError: There is no such schedule, or it does not take these arguments.
    """
    faults = Faults("piper.strategies.places", user_line())
    name = name_of(schedule, faults)
    faults.check()
    stages_by_rank(name, placement, num_microbatches)
    if SCHEDULES[name][1] is not Shape.TWO_WAY:
        return [Place({"PP": stage}, devices=group) for stage, group in placement.items()]
    half, last = num_microbatches // 2, len(placement) - 1
    return [
        Place({"PP": stage, "MB": microbatches}, devices=placement[of])
        for stage in sorted(placement)
        for microbatches, of in (
            (range(half), stage),
            (range(half, num_microbatches), last - stage),
        )
    ]


def pipeline(  # noqa: PLR0913  (each has its place in one of the directives)
    schedule: str | Schedule = "one_f_one_b",
    *,
    ranks: int,
    num_microbatches: int,
    stages: int | None = None,
    replicas: int = 1,
    zero: int = 0,
    bucket_mb: float | None = None,
    prefetch: int = 1,
    keep: Keep = "chunk",
    shard_ranks: int | None = None,
    expert_ranks: int = 1,
    capacity: int | float | None = None,
    recompute: float | None = None,
    inputs: Mapping[str, Rule] | None = None,
    combine: Loss = "mean",
    loss: LossPath | None = None,
    regions: Mapping[str, Mapping[str, int]] | None = None,
    order: Sequence[str] | None = None,
) -> Strategy:
    """A pipeline over regions `PP=0` to `PP=stages-1`, placed as the schedule needs it.

    Args:
        schedule: Its name in `piper.schedules`, or that function. One of your own: `from_orders`.
        ranks: Pipeline ranks.
        num_microbatches: How many microbatches the batch is split into.
        stages: Stages in all; None: as few as the schedule can have, see `placement`.
        replicas: Data-parallel copies of the pipeline; the world is ranks * replicas.
        zero: What the replicas shard, see `Replicate`; so the next three.
        bucket_mb: Size of the pieces that are gathered and reduced.
        prefetch: How many uses ahead parameters are gathered.
        keep: How long gathered parameters stay.
        shard_ranks: Over how many neighbouring replicas state is sharded, a divisor of `replicas`;
            along the others there are copies of it. None: over all.
        expert_ranks: How many of the replicas share the experts (regions tagged "EP") of one copy;
            a divisor of `replicas`.
        capacity: How many rows an expert takes of one rank's microbatch, see `Shard`.
        recompute: How much stages keep of their forward, see `Recompute`; None: what pays.
        inputs: How each argument is split, see `Split`.
        combine: How the microbatches' losses combine, see `Split`.
        loss: Which output is the loss, see `Strategy`.
        regions: Tags by module path, see `Strategy`.
        order: How ranks are numbered, by the axes "pp", "copy" (of the shards, see `shard_ranks`),
            "dp" and "ep", as in `Mesh`: the last ones stay within a host. Those of one rank may be
            left out. None: in this order, which keeps the replicas of a stage together.

    Returns:
        The strategy.

    Raises:
        PiperStrategyError: An argument is not allowed here, by the schedule, or by a directive.
    """
    faults = Faults("piper.strategies.pipeline", user_line())
    faults.whole("replicas", replicas, 1)
    _check_zero(replicas, zero, faults)
    if not callable(combine) and combine not in ("mean", "sum"):
        faults.add(
            "combine", combine, 'must be "mean", "sum" or a weight function, see piper.Split'
        )
    if replicas == 1:
        for argument, value, default in (
            ("bucket_mb", bucket_mb, None),
            ("prefetch", prefetch, 1),
            ("keep", keep, "chunk"),
        ):
            if value != default:
                faults.add(argument, value, "needs replicas, which gather and reduce; there is 1")
    if shard_ranks is not None and not zero:
        faults.add("shard_ranks", shard_ranks, "needs something to shard; zero is 0")
    faults.whole("expert_ranks", expert_ranks, 1)
    sharers = replicas if shard_ranks is None else shard_ranks
    if is_whole(replicas) and is_whole(expert_ranks) and expert_ranks > 0:
        if replicas % expert_ranks:
            what = f"must divide replicas={replicas}, which share the experts"
            faults.add("expert_ranks", expert_ranks, what)
        elif not is_whole(sharers) or sharers < 1 or replicas % sharers or sharers % expert_ranks:
            both = f"replicas={replicas}, and be a multiple of expert_ranks={expert_ranks}"
            faults.add("shard_ranks", shard_ranks, f"must divide {both}")
    faults.check()
    on = placement(schedule, ranks, stages)
    name = name_of(schedule, faults)
    build, shape = SCHEDULES[name]
    if shape is Shape.TWO_WAY and ranks % 2:
        faults.add("ranks", ranks, f"must be even, for {name}")
    faults.check()
    has_shard = expert_ranks > 1 or capacity is not None
    copies, blocks = replicas // sharers, sharers // expert_ranks
    sizes = {"pp": ranks, "copy": copies, "dp": blocks, "ep": expert_ranks}
    grid = _grid(sizes, order, faults)
    devices = {stage: grid.ranks(pp=r) for stage, (r,) in on.items()}
    mesh, axes, shard_axes = None, None, None
    # Without copies of experts or of shards a group is all devices of a region.
    if copies > 1 or (has_shard and blocks > 1):
        names = [n for n, s in sizes.items() if n in _NEEDED or s > 1 or (n == "ep" and has_shard)]
        kept = [name for name in grid.order if name in names]
        mesh, axes = Mesh([sizes[n] for n in names], names, kept), tuple(names[1:])
        shard_axes = axes[1:] if copies > 1 else None
    how = Replicate(
        {"PP": "*"},
        axes=axes,
        shard_axes=shard_axes,
        zero=zero,
        bucket_mb=bucket_mb,
        prefetch=prefetch,
        keep=keep,
    )
    shard = Shard({"EP": "*"}, axes=None if mesh is None else ("ep",), capacity=capacity)
    return Strategy(
        Split({}, dim="MB", num_microbatches=num_microbatches, inputs=inputs, loss=combine),
        *places(name, devices, num_microbatches),
        *([how] if replicas > 1 else []),
        *([shard] if has_shard else []),
        *([] if recompute is None else [Recompute({"PP": "*"}, budget=recompute)]),
        *build(devices, num_microbatches),
        mesh=mesh,
        loss=loss,
        regions=regions,
    )


def _check_zero(replicas: int, zero: int, faults: Faults) -> None:
    if replicas == 1 and zero:
        faults.add("zero", zero, "needs replicas to shard over; replicas is 1")


def _grid(sizes: Mapping[str, int], order: Sequence[str] | None, faults: Faults) -> Mesh:
    """The ranks by all axes; those of one rank need not be in the order."""
    if order is not None and faults.names("order", order):
        wanted = [name for name, size in sizes.items() if size > 1 or name in order]
        if sorted(wanted) != sorted(order):
            needed = ", ".join(name for name, size in sizes.items() if size > 1) or "none"
            faults.add("order", order, f"must have the axes of several ranks: {needed}")
    faults.check()
    given = tuple(sizes) if order is None else tuple(order)
    return Mesh(
        tuple(sizes.values()), tuple(sizes), (*given, *(n for n in sizes if n not in given))
    )


def from_orders(
    orders: Sequence[Order], *, replicas: int = 1, zero: int = 0, loss: LossPath | None = None
) -> Strategy:
    """A pipeline that runs these orders, such as those of a table of actions.

    Args:
        orders: One per pipeline rank, each task by PP and MB; every stage in one of them.
        replicas: Data-parallel copies of the pipeline; pipeline rank r has devices r*replicas and
            following.
        zero: What the replicas shard, see `Replicate`.
        loss: Which output is the loss, see `Strategy`.

    Returns:
        The strategy: a Split into as many microbatches as the orders name, a Place per stage, a
        Replicate where there are replicas, and the orders.

    Raises:
        PiperStrategyError: An argument is not allowed.
    """
    faults = Faults("piper.strategies.from_orders", user_line())
    faults.whole("replicas", replicas, 1)
    _check_zero(replicas, zero, faults)
    is_sequence = isinstance(orders, Sequence) and not isinstance(orders, str)
    if not is_sequence or not all(isinstance(order, Order) for order in orders):
        faults.add("orders", orders, "must be a sequence of piper.Order, one per pipeline rank")
        faults.check()
    of_rank: dict[int, int] = {}
    microbatches: set[int] = set()
    for rank, order in enumerate(orders):
        for task in (task for group in order.groups for task in group):
            stage, micro = task.tags.get("PP"), task.tags.get("MB")
            if not is_whole(stage) or not is_whole(micro):
                faults.say(f"orders[{rank}]: {task!r} names no single stage and microbatch")
            elif of_rank.setdefault(stage, rank) != rank:
                faults.say(
                    f"orders[{rank}]: {task!r} is of a stage of orders[{of_rank[stage]}]; write "
                    "its Places by microbatch, as piper.strategies.places does for dualpipe"
                )
            else:
                microbatches.add(micro)
    if not orders:
        faults.add("orders", orders, "is empty; name each rank's tasks")
    faults.check()
    devices = {rank: range(rank * replicas, (rank + 1) * replicas) for rank in range(len(orders))}
    return Strategy(
        Split({}, dim="MB", num_microbatches=max(microbatches) + 1),
        *(Place({"PP": stage}, devices=devices[of_rank[stage]]) for stage in sorted(of_rank)),
        *([Replicate({"PP": "*"}, zero=zero)] if replicas > 1 else []),
        *orders,
        loss=loss,
    )


def from_torchtitan(
    parallelism: Mapping[str, object],
    *,
    world_size: int,
    local_batch_size: int | None = None,
    regions: Mapping[str, Mapping[str, int]] | None = None,
    inputs: Mapping[str, Rule] | None = None,
    loss: LossPath | None = None,
) -> Strategy:
    """The strategy of a torchtitan job.

    Args:
        parallelism: The `[parallelism]` table of its configuration.
        world_size: How many ranks.
        local_batch_size: Rows that a replica is given, of `[training]`; a pipeline needs it.
        regions: The stages by module path, as many as a looped schedule is to have, instead of
            `module_fqns_per_model_part`; None: those of that, or the model's own annotations.
        inputs: How each argument is split, see `Split`.
        loss: Which output is the loss, see `Strategy`.

    Raises:
        PiperStrategyError: Lists every argument that has no counterpart here.
    """
    sizes = {} if local_batch_size is None else {"local_batch_size": local_batch_size}
    faults = _job("from_torchtitan", world_size, **sizes)
    meaning = foreign.torchtitan(
        parallelism, faults, world_size=world_size, local_batch_size=local_batch_size
    )
    return _foreign(meaning, faults, regions, inputs, loss)


def from_megatron(
    arguments: Mapping[str, object],
    *,
    world_size: int,
    regions: Mapping[str, Mapping[str, int]] | None = None,
    inputs: Mapping[str, Rule] | None = None,
    loss: LossPath | None = None,
) -> Strategy:
    """The strategy of a Megatron-LM job.

    Args:
        arguments: Its arguments of parallelism, batch sizes, recomputation and precision, by the
            names that they have in `args`: `pipeline_model_parallel_size`, ...
        world_size: How many ranks.
        regions: The stages by module path; None: the model's own annotations.
        inputs: How each argument is split, see `Split`.
        loss: Which output is the loss, see `Strategy`.

    Warns:
        UserWarning: Of `fp16`, whose scale of the loss is an option of `piper.compile`.

    Raises:
        PiperStrategyError: Lists every argument that has no counterpart here.
    """
    faults = _job("from_megatron", world_size)
    meaning = foreign.megatron(arguments, faults, world_size=world_size)
    return _foreign(meaning, faults, regions, inputs, loss)


def from_deepspeed(
    config: Mapping[str, object],
    *,
    world_size: int,
    stages: int = 1,
    expert_ranks: int = 1,
    regions: Mapping[str, Mapping[str, int]] | None = None,
    inputs: Mapping[str, Rule] | None = None,
    loss: LossPath | None = None,
) -> Strategy:
    """The strategy of a DeepSpeed job.

    Args:
        config: Its configuration, without what belongs into the loop (optimizer, clipping).
        world_size: How many ranks.
        stages: `PipelineModule(num_stages=)`.
        expert_ranks: `MoE(ep_size=)`.
        regions: The stages by module path; None: the model's own annotations.
        inputs: How each argument is split, see `Split`.
        loss: Which output is the loss, see `Strategy`.

    Warns:
        UserWarning: Of `fp16`, whose scale of the loss is an option of `piper.compile`.

    Raises:
        PiperStrategyError: Lists every entry that has no counterpart here.
    """
    faults = _job("from_deepspeed", world_size, stages=stages, expert_ranks=expert_ranks)
    meaning = foreign.deepspeed(
        config, faults, world_size=world_size, stages=stages, expert_ranks=expert_ranks
    )
    return _foreign(meaning, faults, regions, inputs, loss)


def _job(name: str, world_size: int, **sizes: int) -> Faults:
    """Faults of one of the functions above, whose own numbers are checked first."""
    faults = Faults(f"piper.strategies.{name}", user_line())
    for argument, value in {"world_size": world_size, **sizes}.items():
        faults.whole(argument, value, 1)
    faults.check()
    return faults


def _foreign(
    meaning: foreign.Meaning,
    faults: Faults,
    regions: Mapping[str, Mapping[str, int]] | None,
    inputs: Mapping[str, Rule] | None,
    loss: LossPath | None,
) -> Strategy:
    """The strategy of what another system's arguments mean."""
    if regions is not None and "regions" in meaning.pipeline:
        faults.say("module_fqns_per_model_part and regions= both say the stages; leave out one")
    faults.check()
    asked = dict(meaning.pipeline)
    if regions is not None:
        asked["regions"] = regions
        if asked.get("stages") is None:
            asked["stages"] = _stages_said(regions, asked["schedule"], asked["ranks"])
    elif asked["ranks"] == 1:
        asked.setdefault("regions", {"*": {"PP": 0}})
    made = pipeline(**asked, inputs=inputs, loss=loss)
    if meaning.precision is None:
        return made
    if meaning.precision.param == "fp16":  # there the scale is found by itself, without an argument
        warnings.warn(UNSCALED, stacklevel=3)
    return Strategy(
        *made.directives, meaning.precision, mesh=made.mesh, loss=made.loss, regions=made.regions
    )


def _stages_said(regions: Mapping[str, Mapping[str, int]], schedule: str, ranks: int) -> int | None:
    """How many stages regions name, of a schedule that may have more than its smallest number."""
    shape = SCHEDULES[schedule][1]
    if shape not in (Shape.LOOP, None):
        return None
    said = [tags for tags in regions.values() if isinstance(tags, Mapping) and "PP" in tags]
    count = len({tags["PP"] for tags in said if is_whole(tags["PP"])})  # Strategy refuses others
    return count if count > (2 * ranks if shape is Shape.LOOP else ranks) else None
