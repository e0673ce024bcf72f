"""What tasks cost: the one model of time that simulation and emulated devices share."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from piper_dynamo.ir.program import Op, RankProgram
from piper_dynamo.ir.task import Pass, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a task costs, in any unit of time.

    Attributes:
        F: Forward of one region for one microbatch.
        BI: Input gradient. An unsplit B costs what its non-empty halves cost.
        BW: Weight gradient.
        comm: A message, from its send to its arrival.
        of: Instead of F, BI and BW: the cost of a task, as a function of its name and what of
            it is there.
    """

    F: float = 1.0
    BI: float = 1.0
    BW: float = 1.0
    comm: float = 0.0
    of: Callable[[TaskName], float] | None = None


def durations(
    programs: Sequence[RankProgram], costs: Costs, halves: Mapping[str, tuple[bool, bool]]
) -> dict[str, float]:
    """How long each task's RUN instruction takes; chunks of one (PP, MB, PASS) share its cost.

    Args:
        programs: All ranks' programs: chunks of one task may be on several ranks.
        costs: What things cost.
        halves: For each region: whether it has input-gradient work, and weight-gradient work.
    """
    texts = dict.fromkeys(i.task for p in programs for i in p.instrs if i.op is Op.RUN)
    names = {text: TaskName.parse(text) for text in texts}
    sharers = Counter(_shared_by(name) for name in names.values())
    return {
        text: _cost(name, costs, halves) / sharers[_shared_by(name)] for text, name in names.items()
    }


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
