"""What ranks hold over a step, by what it is.

Terms: a *category* is one of `timeline.CATEGORIES`. Parameters and buffers are there before a step,
and so is the optimizer's state, which depends on an optimizer that no plan knows: it is counted
where the user says which. What a task needs while it runs, beside what it takes and leaves, is a
category of its own.

Signature: a program, its step's curve -> bytes by category.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.timeline import BEFORE, CATEGORIES, INSIDE, STEP
from piper_dynamo.values import is_whole

# How many values of a parameter's shape and dtype torch's optimizers keep.
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
Optimizer = str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What a rank holds when its step holds most.

    Attributes:
        rank: Which.
        held: Bytes by category, and while tasks run; without "optimizer state" where no optimizer
            was named.
    """

    rank: int
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.held.values())


def states_of(optimizer: Optimizer) -> int | None:
    """How many values an optimizer keeps of each element of a parameter; None: not told.

    Raises:
        PiperError: It is no known optimizer, nor a number of values.
    """
    if optimizer is None:
        return None
    if is_whole(optimizer) and optimizer >= 0:
        return optimizer
    found = STATES.get(str(optimizer).lower())
    if found is None:
        raise PiperError(
            f"optimizer={optimizer!r} is not known; name one of {', '.join(STATES)}, or say how "
            "many values it keeps of each parameter's element"
        )
    return found


def held_before(
    program: RankProgram, args: Sequence[Arg], optimizer: Optimizer = None
) -> tuple[int, int, int]:
    """Bytes of parameters, buffers and optimizer state (0 where it is not told) on a rank."""
    parameters = buffers = trained = 0
    for position in dict.fromkeys(position for _, position in program.state):
        arg, spec = args[position], held_spec(program, args[position])
        nbytes = spec.nbytes if spec is not None else 0
        if arg.kind is not ArgKind.PARAMETER:
            buffers += nbytes
            continue
        parameters += nbytes
        trained += nbytes if arg.requires_grad else 0
    return parameters, buffers, trained * (states_of(optimizer) or 0)


def held_spec(program: RankProgram, arg: Arg) -> TensorSpec | None:
    """What a rank holds of an argument that it needs: all of it, or a block of rows."""
    spec = arg.spec
    for held in (program.experts, program.shards):
        group = dict(held).get(arg.position)
        if group and spec is not None:
            spec = block_spec(spec, len(group))
    return spec


def at_peak(
    program: RankProgram,
    args: Sequence[Arg],
    history: Sequence[tuple[int, ...]],
    highest: Sequence[int],
    optimizer: Optimizer = None,
) -> RankMemory:
    """What a rank holds at its peak.

    Args:
        program: The rank's.
        args: The captured call's arguments.
        history: What its step holds after each instruction, by the categories of `STEP`.
        highest: The most that it holds while each runs and after it.
        optimizer: Whose state is counted: a name of `STATES`, or a number of values.
    """
    before = dict(zip(BEFORE, held_before(program, args, optimizer), strict=True))
    if states_of(optimizer) is None:
        del before["optimizer state"]
    most, step = max(zip(highest, history, strict=True), default=(0, (0,) * len(STEP)))
    held = before | dict(zip(STEP, step, strict=True))
    known = {c: held[c] for c in CATEGORIES if c in held}
    return RankMemory(rank=program.rank, held=known | {INSIDE: most - sum(step)})
