"""What tasks and messages cost: the one model of time.

The scheduler, the simulator and emulated devices share it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from piper_dynamo.errors import PiperStrategyError, format_error
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Instr, Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.ir.task import Kind, Pass, TaskName
from piper_dynamo.ir.work import Work, work_by_operator


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
        chunks: Instead of these: the cost of each chunk, by its key, whatever runs it.
        skew: What a collective takes beside `comm`, since its ranks do not start it at once.
        per_value: How long each value of a collective takes its link beside its bytes.
        host: What issuing an instruction takes of its rank, by what it does (`Op`).
        host_value: What each value of a collective takes of its rank beside that, by what it does.
        host_byte: The same of each byte that it makes, sends, takes or adds.
        call: What a step takes a rank beside its program; it counts before the first instruction.
        call_shard: The same of each gradient that a rank with shards hands over.
        slowdown: How much longer chunks take while 1, 2, ... ranks compute, where these share a
            machine; for more of them, as the last says. Empty: each has its own.

    Raises:
        PiperStrategyError: `comm`, `skew`, `per_value`, `call`, `call_shard` or one of the host's
            is negative or not finite, or names no instruction, `bandwidth` is not above 0, a
            slowdown is below 1, or `of` and `chunks` are both there.
    """

    F: float = 1.0
    BI: float = 1.0
    BW: float = 1.0
    comm: float = 0.0
    bandwidth: float | None = None
    of: Callable[[TaskName], float] | None = None
    chunks: Mapping[str, float] | None = None
    skew: float = 0.0
    per_value: float = 0.0
    host: Mapping[Op, float] = field(default_factory=dict)
    host_value: Mapping[Op, float] = field(default_factory=dict)
    host_byte: Mapping[Op, float] = field(default_factory=dict)
    call: float = 0.0
    call_shard: float = 0.0
    slowdown: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse links that carry nothing, and times that cannot be."""
        names = ("comm", "skew", "per_value", "call", "call_shard")
        times = {name: getattr(self, name) for name in names}
        ofs = {n: getattr(self, n) for n in ("host", "host_value", "host_byte")}
        times |= {f"{n} of {op}": time for n, of in ofs.items() for op, time in of.items()}
        for name, time in times.items():
            if not 0 <= time < math.inf:
                raise PiperStrategyError(f"Costs: {name} is {time!r}; give a time, 0 or above")
        unknown = [(n, op) for n, of in ofs.items() for op in of if op not in set(Op)]
        for name, op in unknown[:1]:
            raise PiperStrategyError(
                f"Costs: {name} names {op!r}, which is no instruction; there are: {', '.join(Op)}"
            )
        if any(not 1 <= factor < math.inf for factor in self.slowdown):
            raise PiperStrategyError(
                f"Costs: slowdown is {self.slowdown!r}; give factors of at least 1"
            )
        if self.of is not None and self.chunks is not None:
            raise PiperStrategyError("Costs: of and chunks both say what tasks take; give one")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise PiperStrategyError(
                f"Costs: bandwidth is {self.bandwidth!r}; give bytes per unit of time, above 0, or "
                "None where size does not matter"
            )

    @classmethod
    def roofline(
        cls,
        chunks: Mapping[str, Chunk],
        *,
        flops: float,
        memory_bandwidth: float,
        alpha: float = 0.0,
        bandwidth: float | None = None,
        skew: float = 0.0,
    ) -> "Costs":
        """Costs of what the hardware is said to do at best (Williams et al. 2009, roofline).

        An operator takes as long as its arithmetic or its memory traffic, whichever is longer, and
        a chunk the sum of its operators: of a fused chunk, whose operators share their traffic,
        that is too much.

        Args:
            chunks: Those of the plan, `plan.chunks`.
            flops: Floating-point operations that a device does in a unit of time.
            memory_bandwidth: Bytes that it reads and writes in a unit of time.
            alpha: What a message or collective takes whatever its size.
            bandwidth: Bytes that a link carries in a unit of time; None: any number.
            skew: What a collective takes beside that.

        Raises:
            PiperStrategyError: A rate is not above 0, or a time is below 0.
        """
        for name, rate in (("flops", flops), ("memory_bandwidth", memory_bandwidth)):
            if not rate > 0:
                raise PiperStrategyError(
                    f"Costs.roofline: {name} is {rate!r}; give a number per unit of time, above 0"
                )

        def time(work: Work) -> float:
            return max(work.flops / flops, work.nbytes / memory_bandwidth)

        took = {c.key: sum(map(time, work_by_operator(c.graph))) for c in chunks.values()}
        return cls(chunks=took, comm=alpha, bandwidth=bandwidth, skew=skew)

    def to_issue(self, program: RankProgram) -> list[float]:
        """How long each instruction takes its rank, beside what its chunk takes."""
        coming: dict[str, Sequence[TensorSpec]] = {}  # what handles stand for
        sizes: dict[str, int] = {}  # of what came
        found = []
        for instr in program.instrs:
            if instr.op is Op.WAIT:
                specs = coming.pop(instr.inputs[0])
                sizes |= {out: s.nbytes for out, s in zip(instr.outputs, specs, strict=True)}
            elif instr.specs:
                coming[instr.outputs[0]] = instr.specs
            elif instr.op is Op.POST:
                assert instr.spec is not None
                coming[instr.outputs[0]] = [instr.spec]
            values = len(instr.specs) * self.host_value.get(instr.op, 0.0)
            nbytes = _moved(instr, sizes) if instr.op in self.host_byte else 0
            of_bytes = nbytes * self.host_byte.get(instr.op, 0.0)
            found.append(self.host.get(instr.op, 0.0) + values + of_bytes)
        return found

    def of_call(self, program: RankProgram) -> float:
        """What a step takes the rank beside its program."""
        of_shards = self.call_shard * len(program.grads) if self.call_shard else 0.0
        return self.call + (of_shards if program.shards or program.experts else 0.0)

    def on_link(self, nbytes: float, values: int = 0) -> float:
        """How long a link is taken by so many bytes, and so many values of a collective."""
        carried = nbytes / self.bandwidth if self.bandwidth is not None else 0.0
        return carried + values * self.per_value

    def after_link(self, kind: Kind) -> float:
        """How long a transfer that has been carried takes to arrive."""
        return self.comm + (self.skew if kind is not Kind.SEND else 0.0)


def _moved(instr: Instr, sizes: Mapping[str, int]) -> int:
    """The bytes that an instruction makes, sends, takes or adds."""
    if instr.specs:
        return sum(spec.nbytes for spec in instr.specs)
    if instr.op is Op.ACCUMULATE:  # what chunks make they add themselves; a first part is kept
        return sizes.get(instr.inputs[-1], 0) if len(instr.inputs) > 1 else 0
    return instr.spec.nbytes if instr.spec is not None else sum(instr.nbytes)


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


def tasks_run(programs: Sequence[RankProgram]) -> dict[TaskName, str]:
    """The tasks of all ranks, each once, and the key of the chunk that each runs."""
    keys: dict[str, str] = {}
    for program in programs:
        of = dict(program.chunks)
        keys |= {i.task: of[i.target] for i in program.instrs if i.op is Op.RUN}
    return {TaskName.parse(text): key for text, key in keys.items()}


def durations(
    tasks: Mapping[TaskName, str], costs: Costs, halves: Mapping[str, tuple[bool, bool]]
) -> dict[str, float]:
    """How long each task takes; chunks of one (PP, MB, PASS) share its cost.

    Args:
        tasks: Those of all ranks that do something, and the key of the chunk that each runs.
        costs: What things cost.
        halves: For each region: whether it has input-gradient work, and weight-gradient work.

    Raises:
        PiperStrategyError: A task would take no finite time of at least 0, or the costs are by
            chunk and lack one.
    """
    if costs.chunks is not None:
        _refuse_unknown(tasks, costs.chunks)
        found = {str(name): costs.chunks[key] for name, key in tasks.items()}
    else:
        sharers = Counter(map(_shared_by, tasks))
        found = {str(n): _cost(n, costs, halves) / sharers[_shared_by(n)] for n in tasks}
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


def _refuse_unknown(tasks: Mapping[TaskName, str], chunks: Mapping[str, float]) -> None:
    missing = [f"{task}: {key}" for task, key in tasks.items() if key not in chunks]
    if missing:
        raise PiperStrategyError(
            format_error(
                "the costs are by chunk, and say nothing of some",
                {"tasks": "\n".join(missing[:5] + ["..."] * (len(missing) > 5))},
                hint="make the costs of this plan's chunks, plan.chunks, or of a profile",
            )
        )


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
