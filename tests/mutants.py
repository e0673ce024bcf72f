"""Wrong programs: single changes of a plan's programs, and whether the proof refuses them.

Terms: a *mutant* is a plan's programs with one thing changed; it is *told* if the proof refuses it
for the right reason, and *equal* if it is accepted and, run, ends with the plan's own results: then
the change meant nothing (two sums exchanged, a slice taken later). Accepted and not equal is a gap
in the proof. A mutant is written down as edits of instructions, by which a script makes it again.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.binding import bind, executor_of
from piper_dynamo.errors import PiperError, PiperPlanError
from piper_dynamo.ir.alike import replicas_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.program import (
    COLLECTIVES,
    REDUCTIONS,
    ROW_EXCHANGES,
    UNWATCHED,
    Instr,
    Op,
    RankProgram,
    Watch,
)
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.chunks import ChunkFn, compile_chunks
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.runtime.local import LocalWorld, current

Programs = Sequence[RankProgram]
Edit = tuple[int, list[Instr]]  # a rank, and its instructions

# What the proof may say of each kind of mutant; one of these must be there.
ORDER = ("in order", "each of", "differs between", "deadlocks")
READ = ("is read before it is written", "made and never used", "written twice", "never written")
SUMMED = ("not reduced over", "to be reduced over", "reduced again", "adds what", "other rows")
TASK = ("its input ", "its bundle is", "it runs ", "are primals", "inputs, expected")
RESULT = ("the loss '", "the output '", "the buffer '", "the gradient '")
VALUE = (*SUMMED, *TASK, *RESULT, "gives")
SUMS = ("is added or reduced here", "adds to", "while it is", "never uses it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A plan's programs with one thing changed.

    Attributes:
        kind: What was done.
        at: To which instruction, for a message.
        edits: The instructions of the ranks that have others.
        reasons: What a refusal may say.
    """

    kind: str
    at: str
    edits: tuple[Edit, ...]
    reasons: tuple[str, ...]

    def of(self, plan: Plan) -> tuple[RankProgram, ...]:
        programs = list(plan.programs)
        for rank, instrs in self.edits:
            programs[rank] = replace(programs[rank], instrs=tuple(instrs))
        return tuple(programs)

    def script(self, plan: Plan) -> str:
        """Python that makes the mutant of `plan` and asks the proof."""
        lines = [
            "from dataclasses import replace",
            "",
            "from piper_dynamo.ir.program import Instr",
            "from piper_dynamo.ir.verify import verify",
            "from piper_dynamo.ir.alike import replicas_of",
            "",
            f"# {self.kind}: {self.at}",
            "programs = list(plan.programs)",
        ]
        for rank, instrs in self.edits:
            old = list(plan.programs[rank].instrs)
            first, last = _differing(old, instrs)
            other = instrs[first : len(instrs) - last]
            new = "".join(f"    Instr.parse({str(i)!r}),\n" for i in other)
            lines += [
                f"instrs = list(programs[{rank}].instrs)",
                f"instrs[{first}:{len(old) - last}] = [\n{new}]",
                f"programs[{rank}] = replace(programs[{rank}], instrs=tuple(instrs))",
            ]
        return "\n".join([*lines, "verify(programs, plan.meaning, replicas_of(plan.groups))"])


def _differing(old: list[Instr], new: list[Instr]) -> tuple[int, int]:
    """How many instructions are equal at the start and, of the others, at the end."""
    least = min(len(old), len(new))
    first = next((i for i in range(least) if old[i] != new[i]), least)
    last = 0
    while last < least - first and old[-1 - last] == new[-1 - last]:
        last += 1
    return first, last


def mutants(plan: Plan, count: int, draw: random.Random) -> Iterator[Mutant]:
    """So many random ones, of all kinds in turn; fewer where the plan has none of a kind."""
    kinds = list(KINDS.items())
    draw.shuffle(kinds)
    for number in range(count):
        kind, (make, reasons) = kinds[number % len(kinds)]
        found = make(plan, draw)
        if found is not None:
            at, edits = found
            if any(list(plan.programs[rank].instrs) != instrs for rank, instrs in edits):
                yield Mutant(kind=kind, at=at, edits=tuple(edits), reasons=reasons)


def judge(plan: Plan, mutant: Mutant) -> bool:
    """Whether the proof refuses a mutant; one that it accepts must do what the plan does.

    Raises:
        AssertionError: The mutant is accepted and does something else, or is refused for a reason
            that has nothing to do with it.
    """
    programs = mutant.of(plan)
    try:
        verify(programs, plan.meaning, replicas_of(plan.groups))
    except PiperPlanError as error:
        text = str(error)
        assert any(reason in text for reason in mutant.reasons), (
            f"{mutant.kind} at {mutant.at} is refused for another reason:\n{text}"
        )
        return True
    try:
        same = is_same(run(plan, plan.programs), run(plan, programs))
    except PiperError as error:
        raise AssertionError(
            f"{mutant.kind} at {mutant.at} is accepted, but fails: {error}"
        ) from error
    assert same, f"{mutant.kind} at {mutant.at} is accepted, but its results are others"
    return False


# Running programs that are no plan's.


def run(
    plan: Plan, programs: Programs, executor: Callable[..., Executor] = executor_of
) -> list[list[Tensor]]:
    """What each rank ends with on made-up parameters and data.

    Args:
        plan: Whose chunks these are.
        programs: Of all ranks.
        executor: Makes what runs a program, of that, its bound chunks and the rank's communicator.
    """
    functions = compile_chunks(dict(plan.chunks), "aten")

    def body() -> list[Tensor]:
        comm = current()
        assert comm is not None
        return run_rank(plan, programs[comm.rank], functions, comm, executor)

    return LocalWorld(plan.world_size).run(body)


def run_rank(
    plan: Plan,
    program: RankProgram,
    functions: Mapping[str, ChunkFn],
    comm: Communicator,
    executor: Callable[..., Executor],
    watch: Watch = UNWATCHED,
) -> list[Tensor]:
    """What one rank ends with; see `run`."""
    whole = _values(plan)
    parts = replicas_of(plan.groups)
    count = len(set(parts.values()))
    running = executor(program, bind(program, plan.chunks, functions), comm)
    state = [_held(program, whole[position], position) for _, position in program.state]
    data = [
        whole[position].chunk(count, plan.dims[position])[parts[comm.rank]].contiguous()
        if position in plan.dims
        else whole[position]
        for _, position in program.data
    ]
    weights = [torch.tensor(0.5 + k, dtype=torch.float64) for k in range(len(program.weights))]
    results = running.run(
        [value.clone() for value in state],
        [value.clone() for value in data],
        weights,
        watch=watch,
    )
    found = [results.loss] if results.loss is not None else []
    return [*found, *results.outputs, *results.grads, *results.buffers]


def _values(plan: Plan) -> dict[int, Tensor]:
    """A value for every argument: data of all replicas, whole parameters."""
    generator = torch.Generator().manual_seed(0)
    count = len(plan.groups[0])
    found = {}
    for arg in plan.args:
        if arg.spec is None:
            continue
        shape = list(arg.spec.shape)
        if arg.kind is ArgKind.DATA and arg.position in plan.dims:
            shape[plan.dims[arg.position]] *= count
        value = torch.rand(shape, generator=generator, dtype=torch.float64)
        found[arg.position] = value.to(arg.spec.dtype)
    return found


def _held(program: RankProgram, whole: Tensor, position: int) -> Tensor:
    """A rank's block of a parameter, filled up."""
    for groups in (dict(program.experts), dict(program.shards)):
        if position in groups:
            group = groups[position]
            size = -(-whole.shape[0] // len(group))
            padded = torch.zeros(size * len(group), *whole.shape[1:], dtype=whole.dtype)
            padded[: whole.shape[0]] = whole
            whole = padded.chunk(len(group))[group.index(program.rank)]
    return whole


def is_same(have: list[list[Tensor]], want: list[list[Tensor]]) -> bool:
    """Equal up to the order of sums."""
    pairs = [
        pair
        for mine, theirs in zip(have, want, strict=True)
        for pair in zip(mine, theirs, strict=True)
    ]
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


# Kinds of mutants. Each takes a plan and says what it did and to whom; None where it cannot.

Found = tuple[str, list[Edit]] | None
Kind = Callable[[Plan, random.Random], Found]
# (plan, generator, rank, place of the instruction, a copy of the rank's instructions)
Change = Callable[[Plan, random.Random, int, int, list[Instr]], Found]


def _pick(
    plan: Plan, draw: random.Random, wanted: Callable[[Instr], bool]
) -> tuple[int, int, list[Instr]] | None:
    """A random instruction of a kind: its rank, its place, a copy of the rank's instructions."""
    places = [
        (p.rank, index)
        for p in plan.programs
        for index, instr in enumerate(p.instrs)
        if wanted(instr)
    ]
    if not places:
        return None
    rank, index = draw.choice(places)
    return rank, index, list(plan.programs[rank].instrs)


def at_one(wanted: Callable[[Instr], bool]) -> Callable[[Change], Kind]:
    """A kind of mutant that changes something at a random instruction of those wanted."""

    def of(change: Change) -> Kind:
        def make(plan: Plan, draw: random.Random) -> Found:
            picked = _pick(plan, draw, wanted)
            return None if picked is None else change(plan, draw, *picked)

        return make

    return of


def _at(rank: int, index: int, instr: Instr) -> str:
    return f"rank {rank} #{index} {instr.op} {instr.task}"


def dropped(*ops: Op) -> Kind:
    @at_one(lambda instr: instr.op in ops)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        gone = instrs.pop(index)
        return _at(rank, index, gone), [(rank, instrs)]

    return make


def doubled(*ops: Op) -> Kind:
    @at_one(lambda instr: instr.op in ops)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        instrs.insert(index, instrs[index])
        return _at(rank, index, instrs[index]), [(rank, instrs)]

    return make


def changed(
    wanted: Callable[[Instr], bool], change: Callable[[Instr, random.Random], Mapping[str, Any]]
) -> Kind:
    """Another value of some fields of an instruction."""

    @at_one(wanted)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        at = _at(rank, index, instrs[index])
        instrs[index] = replace(instrs[index], **change(instrs[index], draw))
        return at, [(rank, instrs)]

    return make


def exchanged(wanted: Callable[[Instr], bool], same: Callable[[Instr], object]) -> Kind:
    """Two instructions of a rank that have something in common change places."""

    @at_one(wanted)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        others = [
            i
            for i, instr in enumerate(instrs)
            if i != index and wanted(instr) and same(instr) == same(instrs[index])
        ]
        if not others:
            return None
        other = draw.choice(others)
        at = f"{_at(rank, index, instrs[index])} and {_at(rank, other, instrs[other])}"
        instrs[index], instrs[other] = instrs[other], instrs[index]
        return at, [(rank, instrs)]

    return make


@at_one(lambda instr: instr.op is Op.SEND)
def sent_otherwise(
    plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]
) -> Found:
    """Two sends of a channel exchange their values and keep their numbers, on both ends' names."""
    one = instrs[index]
    others = [
        i
        for i, instr in enumerate(instrs)
        if instr.op is Op.SEND and instr.peer == one.peer and instr.spec == one.spec and i != index
    ]
    if not others:
        return None
    other = draw.choice(others)
    at = f"{_at(rank, index, one)} and #{other}"
    a, b = instrs[index].inputs, instrs[other].inputs
    instrs[index] = replace(instrs[index], inputs=b)
    instrs[other] = replace(instrs[other], inputs=a)
    return at, [(rank, instrs)]


@at_one(lambda i: bool(i.inputs) and i.op not in (Op.FREE, Op.WAIT, Op.DRAIN))
def read_another(
    plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]
) -> Found:
    """An instruction reads another register that is there: mostly one of the same shape."""
    program = plan.programs[rank]
    alive = dict.fromkeys(sorted(program.sources()))
    handles: set[str] = set()
    for instr in instrs[:index]:
        if instr.op is Op.FREE:
            for reg in instr.inputs:
                alive.pop(reg, None)
            continue
        if instr.op is Op.POST or instr.op in COLLECTIVES:
            handles.update(instr.outputs)
        alive.update(dict.fromkeys(reg for reg in instr.outputs if reg != "_"))
    one = instrs[index]
    place = draw.randrange(len(one.inputs))
    stem = one.inputs[place].split("_MB")[0]
    others = [reg for reg in alive if reg not in (*one.inputs, *handles)]
    alike = [reg for reg in others if reg.split("_MB")[0] == stem]
    if not others:
        return None
    reg = draw.choice(alike or others)
    inputs = (*one.inputs[:place], reg, *one.inputs[place + 1 :])
    instrs[index] = replace(one, inputs=inputs)
    return f"{_at(rank, index, one)}: {one.inputs[place]} -> {reg}", [(rank, instrs)]


@at_one(lambda instr: instr.op is Op.FREE)
def freed_early(
    plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]
) -> Found:
    """A register is freed before its last use."""
    reg = draw.choice(instrs[index].inputs)
    made = next((i for i, instr in enumerate(instrs) if reg in instr.writes()), None)
    users = [i for i, instr in enumerate(instrs[:index]) if reg in instr.reads()]
    if made is None or not users:
        return None
    left = tuple(r for r in instrs[index].inputs if r != reg)
    at = f"{reg} of {_at(rank, index, instrs[index])}"
    instrs[index : index + 1] = [replace(instrs[index], inputs=left)] if left else []
    early = draw.randrange(made, users[-1]) + 1
    instrs.insert(early, Instr(op=Op.FREE, task=instrs[users[-1]].task, inputs=(reg,)))
    return at, [(rank, instrs)]


@at_one(lambda instr: instr.op is not Op.FREE)
def moved(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
    """An instruction goes to another place of its rank's program."""
    one = instrs.pop(index)
    to = min(max(index + draw.choice([-8, -4, -2, -1, 1, 2, 4, 8]), 0), len(instrs))
    instrs.insert(to, one)
    return f"{_at(rank, index, one)} to #{to}", [(rank, instrs)]


def regrouped(everywhere: bool) -> Kind:
    """A collective is over other ranks, on one of its members or on all of them."""

    @at_one(lambda instr: instr.op in COLLECTIVES)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        one = instrs[index]
        others = [r for r in range(plan.world_size) if r not in one.group]
        wider = tuple(sorted((*one.group, draw.choice(others)))) if others else one.group[:-1]
        group = draw.choice([wider, one.group[1:]])
        if rank not in group or not group:
            return None
        ranks = [r for r in one.group if r in group] if everywhere else [rank]
        edits: list[Edit] = []
        for other in ranks:
            theirs = list(plan.programs[other].instrs)
            at = next((i for i, x in enumerate(theirs) if _is_end(x, one)), None)
            if at is None:
                return None
            theirs[at] = replace(theirs[at], group=group)
            edits.append((other, theirs))
        return f"{_at(rank, index, one)} over {group}", edits

    return make


@at_one(lambda instr: instr.op in REDUCTIONS)
def widened(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
    """Two groups reduce together what each is to reduce for itself; all of their ranks agree."""
    one = instrs[index]
    others = [
        instr
        for program in plan.programs
        for instr in program.instrs
        if (instr.op, instr.stream, instr.specs) == (one.op, one.stream, one.specs)
        and not set(instr.group) & set(one.group)
    ]
    if not others:
        return None
    other = draw.choice(others)
    group = tuple(sorted((*one.group, *other.group)))
    edits: list[Edit] = []
    for member in group:
        theirs = list(plan.programs[member].instrs)
        mine = one if member in one.group else other
        at = next(i for i, x in enumerate(theirs) if _is_end(x, mine))
        theirs[at] = replace(theirs[at], group=group, task=one.task)
        edits.append((member, theirs))
    return f"{_at(rank, index, one)} together with {other.task} over {group}", edits


def _is_end(instr: Instr, one: Instr) -> bool:
    return (instr.op, instr.task, instr.communicator) == (one.op, one.task, one.communicator)


def bypassed(*ops: Op) -> Kind:
    """Every member uses what it gives a collective instead of what that makes of it."""

    @at_one(lambda instr: instr.op in ops)
    def make(plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]) -> Found:
        one = instrs[index]
        edits: list[Edit] = []
        for member in one.group:
            theirs = list(plan.programs[member].instrs)
            start = next((i for i, x in enumerate(theirs) if _is_end(x, one)), None)
            if start is None:
                return None
            edits.append((member, _without(plan.programs[member], start)))
        return _at(rank, index, one), edits

    return make


def _without(program: RankProgram, start: int) -> list[Instr]:
    """A rank's instructions without a collective, in which its results have the inputs' values."""
    begin = program.instrs[start]
    end = next(
        i
        for i, x in enumerate(program.instrs)
        if i > start and x.op is Op.WAIT and x.inputs == begin.outputs
    )
    copies = [
        Instr(op=Op.ADD, task=begin.task, outputs=(result,), inputs=(value,), nbytes=(0,))
        for result, value in zip(program.instrs[end].outputs, begin.inputs, strict=False)
        if result != "_"
    ]
    instrs: list[Instr] = []
    for i, instr in enumerate(program.instrs):
        if i == start:
            instrs += copies
        elif i != end:
            left = tuple(reg for reg in instr.inputs if reg not in begin.outputs)
            if instr.op is not Op.FREE or left:
                instrs.append(replace(instr, inputs=left) if instr.op is Op.FREE else instr)
    # What was freed behind the wait alone is freed where it was.
    return instrs


@at_one(lambda instr: instr.op is Op.RUN and len(instr.outputs) > 1)
def outputs_exchanged(
    plan: Plan, draw: random.Random, rank: int, index: int, instrs: list[Instr]
) -> Found:
    """A task's results go to each other's registers."""
    one = instrs[index]
    a, b = draw.sample(range(len(one.outputs)), 2)
    outputs = list(one.outputs)
    outputs[a], outputs[b] = outputs[b], outputs[a]
    instrs[index] = replace(one, outputs=tuple(outputs))
    return f"{_at(rank, index, one)}: results {a} and {b}", [(rank, instrs)]


def _is(*ops: Op) -> Callable[[Instr], bool]:
    return lambda instr: instr.op in ops


def _other_part(instr: Instr, draw: random.Random) -> dict[str, Any]:
    return {"part": draw.choice([p for p in range(instr.parts) if p != instr.part])}


def _other_shape(instr: Instr, draw: random.Random) -> dict[str, Any]:
    assert instr.spec is not None
    spec = replace(instr.spec, shape=(*instr.spec.shape, 1), stride=(*instr.spec.stride, 1))
    return {"spec": spec}


def _other_task(instr: Instr, draw: random.Random) -> dict[str, Any]:
    return {"task": instr.task.replace("MB0", "MB1") if "MB0" in instr.task else instr.task + "x"}


KINDS: dict[str, tuple[Callable[[Plan, random.Random], Found], tuple[str, ...]]] = {
    "a send dropped": (dropped(Op.SEND), ORDER),
    "a post dropped": (dropped(Op.POST), (*ORDER, *READ)),
    "a wait dropped": (dropped(Op.WAIT), (*ORDER, *READ)),
    "a drain dropped": (dropped(Op.DRAIN), ORDER),
    "a task dropped": (dropped(Op.RUN), READ),
    "a sum dropped": (dropped(Op.ACCUMULATE, Op.ADD), (*READ, *VALUE)),
    "a collective dropped": (dropped(*COLLECTIVES), (*ORDER, *READ)),
    "a slice dropped": (dropped(Op.SLICE), READ),
    "a free dropped": (dropped(Op.FREE), ("never freed",)),
    "something done twice": (
        doubled(*(op for op in Op if op is not Op.FREE)),
        (*ORDER, *READ, *VALUE, *SUMS, "again"),
    ),
    "two sends exchanged": (exchanged(_is(Op.SEND), lambda i: i.peer), (*ORDER, *READ)),
    "two posts exchanged": (exchanged(_is(Op.POST), lambda i: i.peer), (*ORDER, *READ)),
    "two sends' values exchanged": (sent_otherwise, (*VALUE, *READ)),
    "two collectives exchanged": (
        exchanged(_is(*COLLECTIVES), lambda i: i.communicator),
        (*ORDER, *READ, *SUMS),
    ),
    "two tasks exchanged": (exchanged(_is(Op.RUN), lambda i: i.target), (*READ, *ORDER, *VALUE)),
    "moved": (moved, (*READ, *ORDER, *VALUE, *SUMS, "waits by", "waits for")),
    "another register read": (
        read_another,
        (*READ, *VALUE, *SUMS, "says how many", "experts", "evenly", "block"),
    ),
    "freed early": (freed_early, READ),
    "a collective over others on one rank": (
        regrouped(everywhere=False),
        (*ORDER, "is not in its group"),
    ),
    "a reduction over two groups": (widened, SUMMED),
    "a collective over others": (
        regrouped(everywhere=True),
        (*ORDER, *VALUE, "is not in its group", "evenly", "their blocks", "counts were over"),
    ),
    "a reduction left out": (bypassed(*REDUCTIONS), (*VALUE, *SUMS, *READ)),
    "a gather left out": (bypassed(Op.ALL_GATHER), ("before its gather", *READ)),
    "an exchange left out": (
        bypassed(*ROW_EXCHANGES),
        (*VALUE, *READ, "rows are exchanged", "says how many"),
    ),
    "results exchanged": (outputs_exchanged, (*READ, *VALUE, *SUMS)),
    "another microbatch": (
        changed(lambda i: i.op is Op.SLICE and i.parts > 1, _other_part),
        ("its input ", *RESULT),
    ),
    "another shape": (changed(_is(Op.SEND, Op.POST), _other_shape), ("differs",)),
    "another number": (
        changed(lambda i: i.peer >= 0, lambda i, d: {"message": i.message + 1}),
        (*ORDER, "waits by"),
    ),
    "another task's name": (changed(_is(Op.RUN), _other_task), (*VALUE, "no such task")),
    "another random seed": (
        changed(lambda i: i.seed is not None, lambda i, d: {"seed": (i.seed[0] + 1, 0)}),
        ("with seed",),
    ),
    "a chunk that no longer adds": (
        changed(lambda i: bool(i.adds), lambda i, d: {"adds": ()}),
        (*READ, *VALUE),
    ),
}
