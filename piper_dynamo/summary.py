"""What a plan comes to, rank by rank, as numbers and as tables.

Terms: on a rank a parameter is *whole*, *sharded* (a block of its rows) or *absent* (other ranks
hold it); a *gather* makes sharded parameters whole, a *reduction* sums gradients over replicas, an
*exchange* brings rows to their experts or back. A column is there only if some rank has something
in it.

Signature: all ranks' programs -> records; -> text.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from piper_dynamo.errors import PiperSyntaxError
from piper_dynamo.footprint import RankMemory, held_spec
from piper_dynamo.ir.flops import show_flops
from piper_dynamo.ir.joint import Arg, ArgKind, Recomputed
from piper_dynamo.ir.program import (
    COLLECTIVES,
    REDUCTIONS,
    ROW_EXCHANGES,
    Group,
    Instr,
    Op,
    RankProgram,
)
from piper_dynamo.ir.spec import short, show_bytes
from piper_dynamo.ir.task import RegionId, TaskName
from piper_dynamo.tables import table
from piper_dynamo.timeline import CATEGORIES, INSIDE

NONE = "-"
_ALWAYS = ("rank", "regions", "tasks", "step peak")
# Of the step itself: the loss is a number, and its reduction says nothing of a strategy.
LOSS = "loss"
MEMORY_TITLE = "memory when each rank holds most"
_LISTED = 20  # rows of a table whose length grows with the plan
COLUMNS = {  # what those of the first table say
    "regions": "the tagged parts of the model that it runs; x3: cut into 3 pieces",
    "parameters": "bytes of those that it holds whole",
    "sharded": "bytes of its blocks of those that replicas share out (ZeRO, experts)",
    "absent": "bytes of those that other ranks hold",
    "buffers": "bytes of those that it holds",
    "tasks": "its forwards and backwards, of all microbatches",
    "sends": "messages to other ranks, and the bytes of all",
    "exchanges": "rows brought to experts and back, and the bytes of all",
    "gathers": "sharded parameters made whole before they are used, and the bytes of all",
    "reductions": "gradients summed over replicas, and the bytes of all",
    "step peak": "most bytes that the step adds to what it holds before, but for 'inside tasks'",
}
HELD_COLUMNS = {  # what those of the table of memory say
    "optimizer state": "of the parameters that it holds",
    "gradients": "of its parameters, and what is added to them",
    "activations": "what forwards leave for backwards",
    "gathered parameters": "sharded ones while they are whole",
    "communication": "what is sent or has come, until it is used",
    INSIDE: "what a task needs only while it runs, at its most",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Some transfers of a rank's step: how many, and the bytes of all."""

    count: int
    nbytes: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Traffic":
        """Of transfers of these sizes."""
        return cls(count=len(sizes), nbytes=sum(sizes))

    def __str__(self) -> str:
        return f"{self.count} ({show_bytes(self.nbytes)})" if self.count else NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a rank holds, runs and exchanges in a step; sizes in bytes.

    Attributes:
        rank: Which.
        regions: The regions it runs, and into how many pieces each is cut.
        parameters: Of parameters that it holds whole.
        sharded: Of its blocks of others.
        absent: Of those that it does not hold.
        buffers: Of its buffers.
        tasks: How many tasks it runs.
        sends: Its messages.
        exchanges: Rows that come to it.
        gathers: What its gathers make.
        reductions: What its reductions sum.
        step_peak: Predicted peak of the step, beside what it holds before.
    """

    rank: int
    regions: str
    parameters: int
    sharded: int
    absent: int
    buffers: int
    tasks: int
    sends: Traffic
    exchanges: Traffic
    gathers: Traffic
    reductions: Traffic
    step_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Messages of one kind of task: what a rank sends to others, of all microbatches.

    Attributes:
        source: The rank that sends.
        targets: The ranks that it sends to.
        after: The task that makes the values, without its microbatch.
        each: Bytes of one message; of the largest, where they differ.
        messages: Their number and bytes.
    """

    source: int
    targets: tuple[int, ...]
    after: str
    each: int
    messages: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A communicator, and what one of its ranks does with it in a step."""

    stream: str
    ranks: tuple[int, ...]
    collectives: Traffic


def summarize(  # noqa: PLR0913
    programs: Sequence[RankProgram],
    args: Sequence[Arg],
    *,
    world_size: int,
    replicas: int,
    num_microbatches: int,
    training: bool,
    untagged: Sequence[tuple[str, RegionId]],
    communicators: Sequence[Group] = (),
    recomputed: Mapping[RegionId, Recomputed] | None = None,
    memories: Sequence[RankMemory] = (),
    shared: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    replicated: Sequence[str] = (),
) -> str:
    """Ranks, what they hold, run, send, gather and reduce per step, and predicted memory.

    Args:
        programs: Of all ranks, or of one of replicas that are alike.
        args: The captured call's arguments.
        world_size: How many ranks.
        replicas: How many ranks run each task.
        num_microbatches: Per replica.
        training: Whether there is a backward.
        untagged: Lines of operators without a tag, and the region they joined.
        communicators: What ranks create before the first step, in that order.
        recomputed: Of regions that make something again, what that saves and costs.
        memories: What each rank holds at its peak.
        shared: Parameters that several device groups hold, and these.
        replicated: Directives that say what replicas share.
    """
    heading = [
        _many(world_size, "rank"),
        *([_many(replicas, "replica")] if replicas > 1 else []),
        _many(num_microbatches, "microbatch", "es"),
        "training" if training else "forward only",
    ]
    rows = [_row(facts(program, args)) for program in programs]
    heads = [h for h in rows[0] if h in _ALWAYS or any(row[h] != NONE for row in rows)]
    lines = ["plan of " + ", ".join(heading)]
    lines += table(heads, [[row[head] for head in heads] for row in rows], left=("regions",))
    if len(programs) < world_size:
        lines.append(f"one of {replicas} replicas is shown: all are alike")
    if "exchanges" in heads:
        lines.append(
            f"exchanges of a step, with the bytes of the rows that come{_if_even(programs)}"
        )
    if "gathers" in heads or "reductions" in heads:
        lines.append("gathers and reductions of a step, with the bytes of what they make or sum")
    lines += _trained_lines(args)
    lines += _shared_lines(shared or {})
    lines += [f"replicas by {directive}" for directive in replicated]
    lines += _recomputed_lines(recomputed or {})
    lines += _dtype_lines(programs)
    lines += _memory_lines(memories)
    unique = {key for program in programs for _, key in program.chunks}
    lines.append(f"{_many(len(unique), 'chunk')} to compile")
    lines += _edge_lines(edges(programs))
    lines += _use_lines(uses(programs, communicators))
    if untagged:
        lines.append("untagged operators, and the region they joined:")
        lines += [
            f"  {where or 'no source line'} -> {region}"
            for where, region in dict.fromkeys(untagged)
        ]
    return "\n".join(lines)


def facts(program: RankProgram, args: Sequence[Arg]) -> RankFacts:
    """One rank's figures.

    Args:
        program: The rank's.
        args: The captured call's arguments.
    """
    runs = [i for i in program.instrs if i.op is Op.RUN]
    whole, sharded, absent = _parameters(program, args)
    buffers = [args[p].spec for _, p in program.state if args[p].kind is ArgKind.BUFFER]

    def traffic(is_meant: Callable[[Instr], bool]) -> Traffic:
        return Traffic.of([moved_bytes(i) for i in program.instrs if is_meant(i)])

    return RankFacts(
        rank=program.rank,
        regions=_regions(runs),
        parameters=whole,
        sharded=sharded,
        absent=absent,
        buffers=sum(spec.nbytes for spec in buffers if spec is not None),
        tasks=len(runs),
        sends=traffic(lambda i: i.op is Op.SEND),
        exchanges=traffic(lambda i: i.op in ROW_EXCHANGES),
        gathers=traffic(lambda i: i.op is Op.ALL_GATHER),
        reductions=traffic(_is_reduction),
        step_peak=program.peak_bytes,
    )


def legend(text: str) -> str:
    """What the columns of a summary's first table say, a line for each that it has."""
    heads = next(line for line in text.splitlines() if line.split()[:2] == ["rank", "regions"])
    rows = [(head, says) for head, says in COLUMNS.items() if f" {head}" in heads]
    rows.append(("chunks", "the operators of a task, compiled as one; equal ones only once"))
    lines = text.splitlines()
    held = next((h for t, h in pairwise(lines) if t.startswith(MEMORY_TITLE)), "")
    rows += [(head, says) for head, says in HELD_COLUMNS.items() if f" {head}" in held]
    width = max(len(head) for head, _ in rows)
    return "\n".join(["of a rank, and in one step:", *(f"  {a:<{width}} {b}" for a, b in rows)])


def tasks(programs: Sequence[RankProgram]) -> str:
    """Each rank's tasks in the order in which it runs them, a line per rank."""
    rows = [
        f"  rank {program.rank}: {' '.join(i.task for i in program.instrs if i.op is Op.RUN)}"
        for program in programs
    ]
    return "\n".join(["tasks in the order in which ranks run them", *rows])


def _row(found: RankFacts) -> dict[str, str]:
    return {
        "rank": str(found.rank),
        "regions": found.regions,
        "parameters": _bytes(found.parameters),
        "sharded": _bytes(found.sharded),
        "absent": _bytes(found.absent),
        "buffers": _bytes(found.buffers),
        "tasks": str(found.tasks),
        "sends": str(found.sends),
        "exchanges": str(found.exchanges),
        "gathers": str(found.gathers),
        "reductions": str(found.reductions),
        "step peak": show_bytes(found.step_peak),
    }


def edges(programs: Sequence[RankProgram]) -> list[Edge]:
    """What ranks send each other in a step, by rank and task."""
    sizes: dict[tuple[int, str], list[int]] = {}
    targets: dict[tuple[int, str], set[int]] = {}
    for program in programs:
        for instr in program.instrs:
            if instr.op is Op.SEND:
                key = (program.rank, _of_any_microbatch(instr.task))
                sizes.setdefault(key, []).append(moved_bytes(instr))
                targets.setdefault(key, set()).add(instr.peer)
    return [
        Edge(
            source=source,
            targets=tuple(sorted(targets[source, after])),
            after=after,
            each=max(found),
            messages=Traffic.of(found),
        )
        for (source, after), found in sizes.items()
    ]


def _of_any_microbatch(task: str) -> str:
    with suppress(PiperSyntaxError):  # what is no task's has a label: the loss, a gradient
        return str(replace(TaskName.parse(task), mb=None))
    return task


def uses(programs: Sequence[RankProgram], communicators: Sequence[Group]) -> list[Use]:
    """What a step does with each communicator."""
    found: dict[Group, list[int]] = {group: [] for group in communicators}
    for program in programs:
        for instr in program.instrs:
            if instr.op in COLLECTIVES and program.rank == instr.group[0]:
                found.setdefault(instr.communicator, []).append(moved_bytes(instr))
    return [
        Use(stream=stream, ranks=ranks, collectives=Traffic.of(sizes))
        for (stream, ranks), sizes in found.items()
    ]


def _recomputed_lines(found: Mapping[RegionId, Recomputed]) -> list[str]:
    """A table of what regions keep less of and compute again, pieces of one region together."""
    stages: dict[str, list[Recomputed]] = {}
    for region, one in found.items():
        stages.setdefault(str(RegionId(tags=region.tags)), []).append(one)
    rows = []
    for stage, parts in stages.items():
        kept, without = (sum(getattr(p, f) for p in parts) for f in ("kept_bytes", "kept_without"))
        name = stage if len(parts) == 1 else f"{stage} x{len(parts)}"
        again, flops = sum(p.matmuls for p in parts), sum(p.flops for p in parts)
        row = [name, show_bytes(kept), show_bytes(without), show_bytes(without - kept)]
        rows.append([*row, show_flops(flops), str(again)])
    if not rows:
        return []
    heads = ["region", "kept", "without", "saved", "added", "products again"]
    title = "recomputation: what a microbatch keeps for its backward, and what that does again"
    return [title, *table(heads, rows[:_LISTED], left=("region",)), *_rest(rows)]


def _trained_lines(args: Sequence[Arg]) -> list[str]:
    """How many parameters there are, and how many of them are frozen."""
    found = [a for a in args if a.kind is ArgKind.PARAMETER and a.spec is not None]
    frozen = [a for a in found if not a.requires_grad]

    def size(args: Sequence[Arg]) -> str:
        return show_bytes(sum(a.spec.nbytes for a in args if a.spec is not None))

    rest = f", {len(frozen)} of them frozen ({size(frozen)})" if frozen else ""
    return [f"{_many(len(found), 'parameter')} ({size(found)}){rest}"] if found else []


def _shared_lines(shared: Mapping[str, Sequence[tuple[int, ...]]]) -> list[str]:
    """Parameters of several stages, whose copies get the sum of all their gradients."""
    by_holders: dict[str, list[str]] = {}
    for name, groups in shared.items():
        ranks = " and ".join(f"{'rank' if len(g) == 1 else 'ranks'} {listed(g)}" for g in groups)
        by_holders.setdefault(ranks, []).append(name)
    lines = []
    for ranks, names in by_holders.items():
        one = len(names) == 1
        who = f"{names[0]} is" if one else f"{len(names)} parameters ({names[0]}, ...) are"
        lines.append(f"{who} held by {ranks}: the sum of their gradients goes to each")
    return lines


def _memory_lines(found: Sequence[RankMemory]) -> list[str]:
    """What ranks hold at their peaks, by category; a column where some rank has something in it."""
    if not found:
        return []
    heads = [c for c in (*CATEGORIES, INSIDE) if any(one.held.get(c) for one in found)]
    rows = [
        [str(one.rank), *(_bytes(one.held.get(c, 0)) for c in heads), show_bytes(one.total)]
        for one in found[:_LISTED]
    ]
    is_told = any("optimizer state" in one.held for one in found)
    title = MEMORY_TITLE + (
        "" if is_told else "; the optimizer's state, which a plan does not know, comes on top"
    )
    return [title, *table(["rank", *heads, "all"], rows), *_rest(found)]


def _edge_lines(found: Sequence[Edge]) -> list[str]:
    """A table of messages; none where there are none."""
    rows = [
        [str(e.source), listed(e.targets), e.after, str(e.messages), show_bytes(e.each)]
        for e in found[:_LISTED]
    ]
    if not rows:
        return []
    heads = ["from", "to", "value of", "messages", "each"]
    return ["messages of a step", *table(heads, rows, left=("value of",)), *_rest(found)]


def _dtype_lines(programs: Sequence[RankProgram]) -> list[str]:
    """A table of what gathers and reductions carry, where values are cast for them; else none."""
    if not any(i.op is Op.CAST for program in programs for i in program.instrs):
        return []
    found: dict[tuple[str, str], list[int]] = {}
    for program in programs:
        for instr in program.instrs:
            if instr.op in REDUCTIONS | {Op.ALL_GATHER} and instr.task != LOSS:
                for index, spec in enumerate(instr.specs):
                    one = replace(instr, specs=(spec,), nbytes=instr.nbytes[index : index + 1])
                    found.setdefault((instr.op.value, short(spec.dtype)), []).append(
                        moved_bytes(one)
                    )
    rows = [[op, dtype, str(Traffic.of(sizes))] for (op, dtype), sizes in sorted(found.items())]
    title = "dtypes of gathers and reductions, by parameter, of all ranks"
    return [title, *table(["collective", "dtype", "values"], rows, left=("dtype",))] if rows else []


def _use_lines(found: Sequence[Use]) -> list[str]:
    rows = [[use.stream, listed(use.ranks), str(use.collectives)] for use in found[:_LISTED]]
    if not rows:
        return []
    heads = ["stream", "ranks", "collectives"]
    title = "communicators, in the order in which ranks create them"
    return [title, *table(heads, rows, left=("stream", "ranks")), *_rest(found)]


def _rest(found: Sequence[object]) -> list[str]:
    return [f"... and {len(found) - _LISTED} more"] if len(found) > _LISTED else []


def listed(ranks: Sequence[int]) -> str:
    """Ranks as text: 0-3 where they follow each other."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:6]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > 6 else shown


def _if_even(programs: Sequence[RankProgram]) -> str:
    """What the bytes of rows depend on, if they do."""
    counted = any(i.op is Op.EXCHANGE_COUNTS for program in programs for i in program.instrs)
    return " if experts are used evenly" if counted else ""


def _regions(runs: Sequence[Instr]) -> str:
    """The regions, and into how many pieces each is cut."""
    names = dict.fromkeys(TaskName.parse(i.task).region for i in runs)
    pieces = Counter(str(RegionId(tags=region.tags)) for region in names)
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in pieces.items())


def _parameters(program: RankProgram, args: Sequence[Arg]) -> tuple[int, int, int]:
    """Bytes of parameters that are whole, of the blocks of others, and of those that are absent."""
    blocks = {position for position, _ in (*program.shards, *program.experts)}
    held = {position for _, position in program.state}
    whole = sharded = absent = 0
    for arg in args:
        if arg.kind is not ArgKind.PARAMETER or arg.spec is None:
            continue
        if arg.position in blocks:
            block = held_spec(program, arg)
            sharded += block.nbytes if block is not None else 0
        elif arg.position in held:
            whole += arg.spec.nbytes
        else:
            absent += arg.spec.nbytes
    return whole, sharded, absent


def _is_reduction(instr: Instr) -> bool:
    return instr.op in REDUCTIONS and instr.task != LOSS


def moved_bytes(instr: Instr) -> int:
    """Bytes of a message, or of the whole values that a collective makes or sums, filled up."""
    size = len(instr.group)
    match instr.op:
        case Op.SEND:
            return instr.spec.nbytes if instr.spec is not None else 0
        case Op.ALL_GATHER:
            return sum(instr.nbytes)
        case Op.REDUCE_SCATTER:
            return sum(size * spec.nbytes for spec in instr.specs)
        case _:
            return sum(spec.nbytes for spec in instr.specs)


def _bytes(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else NONE


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}" + (plural if count != 1 else "")
