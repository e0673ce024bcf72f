"""What a plan must fulfil beside being safe: checks of the strategy against the lowered model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperPlanError, format_error
from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.task import Pass


def find_weighers(
    weigh: Callable[..., Any],
    programs: Sequence[RankProgram],
    args: Sequence[Arg],
    replicas: Mapping[int, int],
) -> tuple[int, ...]:
    """Which ranks call a loss weight function for all, one of each replica, by replica.

    Args:
        weigh: The function.
        programs: Those of all ranks.
        args: The captured call's arguments.
        replicas: Which replica each rank belongs to.

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
    first: dict[int, int] = {}
    for rank in able:
        first.setdefault(replicas[rank], rank)
    if len(first) == len(set(replicas.values())):
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
