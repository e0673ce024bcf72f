"""What a plan comes to, rank by rank, as a table.

Terms: on a rank a parameter is *whole*, *sharded* (a block of its rows) or *absent* (other ranks
hold it); a *gather* makes sharded parameters whole, a *reduction* sums gradients over replicas, an
*exchange* brings rows to their experts or back. A column is there only if some rank has something
in it.

Signature: all ranks' programs -> text.
"""

from collections import Counter
from collections.abc import Sequence

from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import REDUCTIONS, ROW_EXCHANGES, Instr, Op, RankProgram
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.ir.task import RegionId, TaskName

NONE = "-"
_ALWAYS = ("rank", "regions", "tasks", "step peak")
# Of the step itself: the loss is a number, and its reduction says nothing of a strategy.
_LOSS = "loss"


def summarize(
    programs: Sequence[RankProgram],
    args: Sequence[Arg],
    *,
    replicas: int,
    num_microbatches: int,
    training: bool,
    untagged: Sequence[tuple[str, RegionId]],
) -> str:
    """Ranks, what they hold, run, send, gather and reduce per step, and predicted memory.

    Args:
        programs: Of all ranks.
        args: The captured call's arguments.
        replicas: How many ranks run each task.
        num_microbatches: Per replica.
        training: Whether there is a backward.
        untagged: Lines of operators without a tag, and the region they joined.
    """
    heading = [
        _many(len(programs), "rank"),
        *([_many(replicas, "replica")] if replicas > 1 else []),
        _many(num_microbatches, "microbatch", "es"),
        "training" if training else "forward only",
    ]
    rows = [_row(program, args) for program in programs]
    heads = [h for h in rows[0] if h in _ALWAYS or any(row[h] != NONE for row in rows)]
    table = [heads, *([row[head] for head in heads] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["plan of " + ", ".join(heading)]
    for cells in table:
        padded = [
            cell.ljust(width) if head == "regions" else cell.rjust(width)
            for head, cell, width in zip(heads, cells, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    if "exchanges" in heads:
        lines.append(
            f"exchanges of a step, with the bytes of the rows that come{_if_even(programs)}"
        )
    if "gathers" in heads or "reductions" in heads:
        lines.append("gathers and reductions of a step, with the bytes of what they make or sum")
    unique = {key for program in programs for _, key in program.chunks}
    lines.append(f"{_many(len(unique), 'chunk')} to compile")
    if untagged:
        lines.append("untagged operators, and the region they joined:")
        lines += [
            f"  {where or 'no source line'} -> {region}"
            for where, region in dict.fromkeys(untagged)
        ]
    return "\n".join(lines)


def _row(program: RankProgram, args: Sequence[Arg]) -> dict[str, str]:
    runs = [i for i in program.instrs if i.op is Op.RUN]
    whole, sharded, absent = _parameters(program, args)
    buffers = [args[p].spec for _, p in program.state if args[p].kind is ArgKind.BUFFER]
    return {
        "rank": str(program.rank),
        "regions": _regions(runs),
        "parameters": _bytes(whole),
        "sharded": _bytes(sharded),
        "absent": _bytes(absent),
        "buffers": _bytes(sum(spec.nbytes for spec in buffers if spec is not None)),
        "tasks": str(len(runs)),
        "sends": _traffic([i.spec.nbytes for i in program.instrs if i.op is Op.SEND and i.spec]),
        "exchanges": _traffic([_moved(i) for i in program.instrs if i.op in ROW_EXCHANGES]),
        "gathers": _traffic([_moved(i) for i in program.instrs if i.op is Op.ALL_GATHER]),
        "reductions": _traffic([_moved(i) for i in program.instrs if _is_reduction(i)]),
        "step peak": show_bytes(program.peak_bytes),
    }


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
    shards, experts = dict(program.shards), dict(program.experts)
    held = {position for _, position in program.state}
    whole = sharded = absent = 0
    for arg in args:
        if arg.kind is not ArgKind.PARAMETER or arg.spec is None:
            continue
        groups = [g[arg.position] for g in (experts, shards) if arg.position in g]
        if groups:
            spec = arg.spec
            for group in groups:
                spec = block_spec(spec, len(group))
            sharded += spec.nbytes
        elif arg.position in held:
            whole += arg.spec.nbytes
        else:
            absent += arg.spec.nbytes
    return whole, sharded, absent


def _is_reduction(instr: Instr) -> bool:
    return instr.op in REDUCTIONS and instr.task != _LOSS


def _moved(instr: Instr) -> int:
    """Bytes of the whole values that a collective makes or sums, filled up to equal blocks."""
    size = len(instr.group)
    match instr.op:
        case Op.ALL_GATHER:
            return sum(instr.nbytes)
        case Op.REDUCE_SCATTER:
            return sum(size * spec.nbytes for spec in instr.specs)
        case _:
            return sum(spec.nbytes for spec in instr.specs)


def _traffic(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} ({show_bytes(sum(sizes))})" if sizes else NONE


def _bytes(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else NONE


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}" + (plural if count != 1 else "")
