"""What a plan must fulfil beside being safe: checks of the strategy against the lowered model."""

from collections.abc import Callable, Sequence
from typing import Any

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperPlanError, PiperStrategyError, format_error
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.task import Pass
from piper_dynamo.strategy import Order, Split, Strategy


def find_weighers(
    weigh: Callable[..., Any],
    programs: Sequence[RankProgram],
    args: Sequence[Arg],
    groups: Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    """Which ranks call a loss weight function for all, one of each replica, by replica.

    Args:
        weigh: The function.
        programs: Those of all ranks, or of one replica that the others are like.
        args: The captured call's arguments.
        groups: The device groups.

    Returns:
        Nothing where each rank that needs the weights is given what the function asks for: the rank
        that makes the loss mostly is, one that makes an auxiliary loss of an early stage may not.

    Raises:
        PiperPlanError: No rank of a replica is given all that the function asks for.
    """
    wanted = compat.parameter_names(weigh)
    given = {p.rank: {args[position].name for _, position in p.data} for p in programs}
    able = [rank for rank, names in sorted(given.items()) if set(wanted) <= names]
    if all(program.rank in able for program in programs if program.weights):
        return ()
    replicas = replicas_of(groups)
    first: dict[int, int] = {}
    for rank in able:
        first.setdefault(replicas[rank], rank)
    if len(first) == len({replicas[program.rank] for program in programs}):
        if len(first) == 1:  # in its group are those that do the same in the other replicas
            (rank,) = first.values()
            return next(group for group in groups if rank in group)
        return tuple(first[replica] for replica in sorted(first))
    have = {f"rank {rank} is given": ", ".join(sorted(names)) for rank, names in given.items()}
    raise PiperPlanError(
        format_error(
            "no rank is given all that the loss weight function asks for",
            {"asks for": ", ".join(wanted), **have},
            hint="use the arguments in one region, or weigh by others",
        )
    )


def check_two_programs(dag: Dag, world_size: int) -> None:
    """A step without a loss runs all forwards, gives its outputs, and runs all backwards later.

    Raises:
        PiperPlanError: An order wants a backward before a forward, or there are several ranks: only
            the ranks that own an output could start its backward.
    """
    hint = "return a scalar loss from forward, so that it is made inside the step"
    if world_size > 1:
        raise PiperPlanError(
            format_error(
                "no output of the model can be the loss, and the step is placed on several ranks",
                {"ranks": world_size, "orders": "need the loss inside the step"},
                hint=hint,
            )
        )
    for before, after, where in dag.orders:
        first, second = task_of(before).name, task_of(after).name
        if first and second and first.which is not Pass.F and second.which is Pass.F:
            raise PiperPlanError(
                format_error(
                    "no output of the model can be the loss, but an order interleaves backwards",
                    {"order": f"{first} before {second}, at {where}"},
                    hint=hint,
                )
            )


def refuse_unsupported(strategy: Strategy, split: Split) -> None:
    """Refuse directives that this version does not apply, rather than ignore them."""
    faults = []
    for directive in strategy.directives:
        if isinstance(directive, Order) and directive.stream is not None:
            faults.append(f"Order(stream={directive.stream!r}) at {directive.where}")
    if split.dim != "MB":
        faults.append(f"Split(dim={split.dim!r}): the microbatch tag is 'MB' for now")
    if split.filter.items:
        faults.append(
            f"Split({split.filter!r}): only the whole model can be split for now; "
            "use Split({}, ...)"
        )
    if faults:
        raise PiperStrategyError(
            format_error(
                "the strategy asks for what this version does not do",
                {"directives": "\n".join(faults)},
                hint="supported: Split({}), Place, Replicate, Shard, Recompute, Precision, Order",
            )
        )
