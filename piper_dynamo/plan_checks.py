"""What a plan must fulfil beside being safe: checks of the strategy against the lowered model."""

from collections.abc import Callable, Sequence
from typing import Any

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperPlanError, format_error
from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.task import Pass


def check_weight_inputs(
    weigh: Callable[..., Any], programs: Sequence[RankProgram], args: Sequence[Arg]
) -> None:
    """A loss weight function runs where the loss is made: that rank must be given what it asks for.

    Raises:
        PiperPlanError: It asks for an argument that such a rank does not use, and so may not have.
    """
    wanted = compat.parameter_names(weigh)
    for program in programs:
        have = {args[position].name for _, position in program.data}
        missing = [name for name in wanted if name not in have]
        if program.weights and missing:
            raise PiperPlanError(
                format_error(
                    "the loss weight function asks for what its rank is not given",
                    {"rank": program.rank, "asks for": ", ".join(missing), "has": ", ".join(have)},
                    hint="use the argument in the region that makes the loss, or weigh by another",
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
