"""What a plan does with one task, one parameter or one rank, in words.

Signature: a plan, a subject -> text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches

from torch.fx.node import Node

from piper_dynamo.errors import PiperError, PiperSyntaxError, format_error
from piper_dynamo.ir.flops import show_flops
from piper_dynamo.ir.graph import is_pick, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import COLLECTIVES, Instr, Op
from piper_dynamo.ir.spec import short, show_bytes
from piper_dynamo.ir.task import Kind, Pass, TaskName
from piper_dynamo.planning import Plan
from piper_dynamo.tables import table

_MOST = 8  # modules that are listed
_PASSES = {"F": "forward", "B": "backward", "BI": "input gradient", "BW": "weight gradient"}


def explain(plan: Plan, subject: str) -> str:
    """What there is to say about a subject.

    Args:
        plan: The plan.
        subject: A task such as `F.PP1.MB0` (`F.PP1`: of the first microbatch), a parameter's name,
            or a rank such as `1`.

    Raises:
        PiperError: The plan has nothing of that name; near ones are listed.
    """
    if subject.isdigit() and int(subject) < plan.world_size:
        return _rank(plan, int(subject))
    if any(arg.name == subject and arg.kind is ArgKind.PARAMETER for arg in plan.args):
        return _parameter(plan, subject)
    tasks = {str(task_of(node).name): node for node in plan.dag.tasks()}
    node = tasks.get(subject) or tasks.get(_first(subject))
    if node is not None:
        return _task(plan, node)
    names = [arg.name for arg in plan.args if arg.kind is ArgKind.PARAMETER]
    near = get_close_matches(subject, [*tasks, *names], n=5, cutoff=0.5)
    raise PiperError(
        format_error(
            f"the plan has no {subject!r}",
            {"near": ", ".join(near)} if near else {"ranks": f"0 to {plan.world_size - 1}"},
            hint="name a task (F.PP0.MB0), a parameter, or a rank by its number",
        )
    )


def _first(subject: str) -> str:
    """The task of the first microbatch, where the subject names none."""
    if not _is_task(subject):
        return subject
    name = TaskName.parse(subject)
    return str(replace(name, mb=0)) if name.mb is None else subject


def _task(plan: Plan, node: Node) -> str:
    """Where a task runs, when, on what, and what becomes of its results."""
    task = task_of(node)
    assert task.name is not None
    name, rank = str(task.name), task.devices[0]
    lines = [f"{name}: {_PASSES[task.name.which.value]} of region {task.name.region}"]
    if task.where:
        lines.append(f"  starts at   {task.where}")
    modules = dict.fromkeys(one.module for one in plan.dag.sources.get(task.name.region, ()))
    if any(modules):
        lines.append(f"  modules     {_listed([name for name in modules if name])}")
    copies = ", each on its own data" if len(task.devices) > 1 else ""
    lines.append(f"  runs on     {_ranks(task.devices)}{copies}")
    order = [i.task for i in plan.programs[rank].instrs if i.op is Op.RUN]
    if name not in order:
        return "\n".join([*lines, _idle(task.name.which)])
    at = order.index(name)
    before = f"after {order[at - 1]}" if at else "first"
    after = f"before {order[at + 1]}" if at + 1 < len(order) else "last"
    lines.append(f"  its turn    {at + 1} of {len(order)} on rank {rank}: {before}, {after}")
    chunk = plan.chunks[str(node.target)]
    equal = sum(other.key == chunk.key for other in plan.chunks.values())
    same = f", compiled once with {equal - 1} equal ones" if equal > 1 else ""
    products = f"{chunk.matmuls} matrix product" + "s" * (chunk.matmuls != 1)
    lines.append(f"  chunk       {node.target}: {products}{same}")
    again = plan.recomputed.get(task.name.region)
    if again is not None and task.name.which in (Pass.F, Pass.B, Pass.BI):
        kept = f"keeps {show_bytes(again.kept_bytes)} of {show_bytes(again.kept_without)}"
        done = f"does {again.matmuls} products again, {show_flops(again.flops)}"
        lines.append(f"  recompute   {kept if task.name.which is Pass.F else done}")
    lines += _sized("takes", _inputs(node))
    lines += _sized("makes", _results(node))
    starts = plan.simulate()
    mine = [e for e in starts.timeline.events if e.name == name and e.stream == "compute"]
    if mine:
        start, end = mine[0].start_s, mine[0].end_s
        lines.append(f"  simulated   {start:g} to {end:g} of {starts.makespan:g}, {UNIFORM}")
    return "\n".join(lines)


UNIFORM = "where F, BI and BW take 1 each"


def _idle(which: Pass) -> str:
    """Why a pass has nothing to run."""
    reason = {
        Pass.F: "all that it gives is there already",
        Pass.BI: "nothing before it needs a gradient",
        Pass.BW: "it has no parameter that needs a gradient",
    }.get(which, "nothing in it or before it needs a gradient")
    return f"  does nothing: {reason}, so no chunk is run"


def _inputs(node: Node) -> Iterable[tuple[str, int]]:
    for given in node.all_input_nodes:
        spec = given.meta.get("spec")
        yield f"{_value(given)} from {_origin(given)}", spec.nbytes if spec is not None else 0


def _results(node: Node) -> Iterable[tuple[str, int]]:
    for value in [user for user in node.users if is_pick(user)] or [node]:
        spec = value.meta.get("spec")
        users = ", ".join(dict.fromkeys(_end(user) for user in value.users)) or "nobody"
        yield f"{_value(value)} for {users}", spec.nbytes if spec is not None else 0


def _value(node: Node) -> str:
    return node.name if node.meta.get("spec") is not None else f"{node.name} (a bundle)"


def _origin(node: Node) -> str:
    """What made a value, in the user's terms."""
    if node.op == "placeholder":
        return "the caller"
    source = node.args[0] if is_pick(node) else node
    assert isinstance(source, Node)
    task = task_of(source)
    if task.kind is Kind.RECV:
        return f"{_ranks(_peers(source))} by message"
    return str(task)


def _end(node: Node) -> str:
    """Where a value goes."""
    if node.op == "output":
        return "the caller"
    if "task" not in node.meta:
        return node.name
    task = task_of(node)
    if task.kind is Kind.SEND:
        targets = {rank for user in node.users for rank in task_of(user).devices}
        return f"{_ranks(targets)} by message"
    return str(task)


def _peers(node: Node) -> set[int]:
    given = [one for one in node.all_input_nodes if "task" in one.meta]
    return {rank for one in given for rank in task_of(one).devices}


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _listed(names: Sequence[str]) -> str:
    rest = [f"... and {len(names) - _MOST} more"] if len(names) > _MOST else []
    return ", ".join([*names[:_MOST], *rest])


def _sized(title: str, values: Iterable[tuple[str, int]]) -> list[str]:
    lines: list[str] = []
    for text, nbytes in values:
        head = title if not lines else ""
        lines.append(f"  {head:<10}  {text}" + (f", {show_bytes(nbytes)}" if nbytes else ""))
    return lines


def _parameter(plan: Plan, name: str) -> str:
    """Who holds a parameter, how, and what is communicated for it."""
    (arg,) = [a for a in plan.args if a.name == name and a.kind is ArgKind.PARAMETER]
    assert arg.spec is not None
    size = show_bytes(arg.spec.nbytes)
    trained = "" if arg.requires_grad else ", frozen"
    lines = [f"{name}: parameter, {arg.spec}, {size}{trained}"]
    holders = set(plan.holders().get(arg.position, ()))
    for program in [one for one in plan.distinct if one.rank in holders]:
        rank, spec, how = program.rank, arg.spec, "whole"
        for held in (program.experts, program.shards):
            group = dict(held).get(arg.position)
            if group:
                spec = block_spec(spec, len(group))
                how = f"block {group.index(rank) + 1} of {len(group)}, {spec}"
        registers = {reg for reg, position in program.state if position == arg.position}
        casts = [i for i in program.instrs if i.op is Op.CAST and registers & set(i.inputs)]
        registers.update(i.outputs[0] for i in casts)
        users = [i for i in program.instrs if registers & set(i.inputs)]
        tasks = dict.fromkeys(_region(i.task) for i in users if i.op is Op.RUN)
        gathers = [i.task for i in users if i.op is Op.ALL_GATHER]
        lines.append(f"  rank {rank}  {how}, {show_bytes(spec.nbytes)}")
        lines += [
            f"          cast to {short(i.spec.dtype)} once a step, {show_bytes(i.spec.nbytes)}"
            for i in casts
            if i.spec is not None
        ]
        if tasks:
            lines.append(f"          used by {', '.join(tasks)}")
        if gathers:
            uses = ", ".join(dict.fromkeys(_region(_user(label)) for label in gathers))
            lines.append(f"          gathered {len(gathers)} times a step, for {uses}")
        summed = dict(program.contributors).get(arg.position)
        if summed and len(summed) > 1:
            lines.append(
                f"          its gradient is the sum of ranks {', '.join(map(str, summed))}"
            )
    if len(lines) == 1:
        lines.append("  no rank holds it: nothing uses it")
    elif len(plan.distinct) < plan.world_size:
        lines.append("  one replica is shown: all are alike")
    return "\n".join(lines)


def _user(label: str) -> str:
    """The task that a gather is for, whose name its label ends with."""
    parts = label.split(".")
    tails = (".".join(parts[at:]) for at in range(len(parts)))
    return next((tail for tail in tails if _is_task(tail)), label)


def _is_task(text: str) -> bool:
    try:
        TaskName.parse(text)
    except PiperSyntaxError:
        return False
    return True


def _region(task: str) -> str:
    return str(replace(TaskName.parse(task), mb=None)) if _is_task(task) else task


def _rank(plan: Plan, rank: int) -> str:
    """What a rank does, in order: tasks, and what it waits for and sends."""
    program, found = plan.programs[rank], plan.simulate()
    starts = found.starts_of(rank)
    rows = [
        [f"{start:g}", _doing(instr), instr.task, _size(instr)]
        for start, instr in zip(starts, program.instrs, strict=True)
        if _doing(instr)
    ]
    head = (
        f"rank {rank} of {plan.world_size}: {len(rows)} of its {len(program.instrs)} instructions, "
        f"with the time at which each starts, {UNIFORM}"
    )
    return "\n".join([head, *table(["time", "does", "task", "size"], rows, left=("does", "task"))])


def _doing(instr: Instr) -> str:
    """What an instruction does in words; nothing for those that only keep house."""
    if instr.op is Op.RUN:
        return "runs"
    if instr.op is Op.SEND:
        return f"sends to rank {instr.peer}"
    if instr.op is Op.WAIT and instr.peer >= 0:
        return f"waits for rank {instr.peer}"
    if instr.op in COLLECTIVES:
        others = ", ".join(map(str, instr.group))
        return f"starts {instr.op.value.replace('_', ' ')} over ranks {others}"
    return ""


def _size(instr: Instr) -> str:
    specs: Sequence[object] = instr.specs or ((instr.spec,) if instr.spec is not None else ())
    total = sum(getattr(spec, "nbytes", 0) for spec in specs)
    return show_bytes(total) if total else ""
