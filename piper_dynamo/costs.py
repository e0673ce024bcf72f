"""What tasks and messages cost: the one model of time.

The scheduler, the simulator and emulated devices share it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, Pass, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a task costs, in any unit of time.

    Attributes:
        F: Forward of one region for one microbatch.
        BI: Input gradient. An unsplit B costs what its non-empty halves cost.
        BW: Weight gradient.
        comm: A message or collective, from its start to its arrival, whatever its size.
        bandwidth: Bytes that a link carries in a unit of time; None: any number. Each channel
            between two ranks and each communicator is a link, which has one transfer at a time
            and does not slow the others.
        of: Instead of F, BI and BW: the cost of a task, as a function of its name and what of
            it is there.

    Raises:
        PiperStrategyError: `comm` is negative or not finite, or `bandwidth` is not above 0.
    """

    F: float = 1.0
    BI: float = 1.0
    BW: float = 1.0
    comm: float = 0.0
    bandwidth: float | None = None
    of: Callable[[TaskName], float] | None = None

    def __post_init__(self) -> None:
        """Refuse links that carry nothing."""
        if not 0 <= self.comm < math.inf:
            raise PiperStrategyError(f"Costs: comm is {self.comm!r}; give a time, 0 or above")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise PiperStrategyError(
                f"Costs: bandwidth is {self.bandwidth!r}; give bytes per unit of time, above 0, or "
                "None where size does not matter"
            )

    def on_link(self, nbytes: float) -> float:
        """How long a link is taken by so many bytes."""
        return nbytes / self.bandwidth if self.bandwidth is not None else 0.0


def sent_bytes(kind: Kind, specs: Sequence[TensorSpec], size: int) -> float:
    """What one rank sends for a message, or for a collective over `size` ranks.

    Collectives as rings and pairwise exchanges do them: every rank sends its share to each other
    (Thakur et al. 2005); rows of experts at an even share.

    Args:
        kind: What it is.
        specs: Of the message, or of the collective's results; of an exchange's counts nothing.
        size: Ranks that take part.
    """
    nbytes = sum(spec.nbytes for spec in specs)
    match kind:
        case Kind.SEND:
            return nbytes
        case Kind.ALL_REDUCE:
            return 2 * nbytes * (size - 1) / size
        case Kind.REDUCE_SCATTER:  # the results are blocks
            return nbytes * (size - 1)
        case Kind.ALL_GATHER | Kind.ALL_TO_ALL | Kind.EXCHANGE | Kind.UNEXCHANGE:
            return nbytes * (size - 1) / size
        case (
            Kind.COMPUTE
            | Kind.SLICE
            | Kind.ACCUMULATE
            | Kind.SUM
            | Kind.CAST
            | Kind.LOSS
            | Kind.CONCAT
            | Kind.RECV
            | Kind.EXCHANGE_COUNTS
        ):
            return 0.0
        case _:
            assert_never(kind)


def tasks_run(programs: Sequence[RankProgram]) -> list[TaskName]:
    """The tasks of all ranks, each once."""
    texts = dict.fromkeys(i.task for p in programs for i in p.instrs if i.op is Op.RUN)
    return [TaskName.parse(text) for text in texts]


def durations(
    tasks: Iterable[TaskName], costs: Costs, halves: Mapping[str, tuple[bool, bool]]
) -> dict[str, float]:
    """How long each task takes; chunks of one (PP, MB, PASS) share its cost.

    Args:
        tasks: Those of all ranks that do something, each once.
        costs: What things cost.
        halves: For each region: whether it has input-gradient work, and weight-gradient work.

    Raises:
        PiperStrategyError: A task would take no finite time of at least 0.
    """
    names = list(tasks)
    sharers = Counter(_shared_by(name) for name in names)
    found = {str(name): _cost(name, costs, halves) / sharers[_shared_by(name)] for name in names}
    wrong = [f"{task}: {time!r}" for task, time in found.items() if not 0 <= time < math.inf]
    if wrong:
        raise PiperStrategyError(
            format_error(
                "the costs give tasks a time that cannot be",
                {"tasks": "\n".join(wrong[:5] + ["..."] * (len(wrong) > 5))},
                hint="give times (seconds, on emulated devices), finite and at least 0",
            )
        )
    return found


def _shared_by(name: TaskName) -> tuple[object, ...]:
    """Regions without PP stand for themselves."""
    tags = dict(name.tags)
    return (tags.get("PP", str(name.region)), name.mb, name.which)


def _cost(name: TaskName, costs: Costs, halves: Mapping[str, tuple[bool, bool]]) -> float:
    if costs.of is not None:
        return float(costs.of(name))
    has_input, has_weight = halves.get(str(name.region), (True, True))
    match name.which:
        case Pass.F:
            return costs.F
        case Pass.BI:
            return costs.BI
        case Pass.BW:
            return costs.BW
        case Pass.B:
            return costs.BI * has_input + costs.BW * has_weight
