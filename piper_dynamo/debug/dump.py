"""Inputs and outputs of tasks, written by the ranks that run them.

Terms: a *dump* is a folder with a file per rank, `rank-0.pt`, that `torch.load` reads with
`weights_only=True`: lists, numbers, texts and tensors on the CPU. A *record* is one task's part.

Signature: a step, tasks, folder -> the next step writes a dump; folder -> its records.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.access import state_of
from piper_dynamo.debug.find import Tasks, matching, plan_of, wanted
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import written_whole
from piper_dynamo.filters import Filter
from piper_dynamo.ir.program import Instr, Op, RankProgram, Watch
from piper_dynamo.ir.task import TaskName
from piper_dynamo.planning import Plan
from piper_dynamo.state import StepState

log = logging.getLogger("piper.dump")
FORMAT = 1
FOLDER = "piper-dump"  # in the working directory, where no other is named
Values = list[tuple[str, Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one task was given and gave on one rank.

    Attributes:
        task: Its name.
        rank: Whose.
        replica: Which of the ranks that run it, each on its own data.
        start: When it starts in the simulated step where F, BI and BW take 1 each: an order of
            execution that all ranks agree on.
        chunk: The key of its code: equal for equal code.
        where: The first line of the model that it runs.
        inputs: By name, in the chunk's order, its bundle and the sums that it adds to last.
        outputs: By name, its bundle last; empty where it failed.
        adds: Which outputs are sums that it added to, by their place.
    """

    task: str
    rank: int
    replica: int
    start: float
    chunk: str
    where: str
    inputs: Values
    outputs: Values
    adds: list[int]


def dump(step: Any, tasks: Tasks, folder: str | Path | None = None) -> Path:
    """Have the next step write inputs and outputs of tasks.

    Every rank must call it, and writes `folder/rank-<its number>.pt`, replaced as a whole once the
    step has ended; where the step fails, what was seen up to then. A step whose backward comes
    later (no output is its loss) writes again after that. Values are copied to the CPU, so the step
    takes longer and more memory. One dump is asked for at a time: a later call before the step
    takes the place of an earlier one.

    Args:
        step: A compiled step that has been prepared or run.
        tasks: A filter such as `{"PP": 1, "MB": 0}`, `{}` for all tasks, or a task's name.
        folder: Where to; made if it is not there. Earlier dumps in it are replaced. None:
            `piper-dump` in the working directory; each rank logs where that is.

    Returns:
        The folder, as an absolute path.

    Raises:
        PiperError: The step is not prepared, or its plan has no such task.
        PiperStrategyError: It is no filter.
    """
    state = state_of(step)
    where = Path(FOLDER if folder is None else folder).absolute()
    state.dump = _Dump(state, wanted(plan_of(step), tasks), where, is_told=folder is None)
    return where


@dataclass(slots=True)
class _Seen:
    """What a task was given and gave."""

    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Dump:
    """The probe of one step."""

    state: StepState
    tasks: Filter
    folder: Path
    is_told: bool
    plan: Plan | None = None
    program: RankProgram | None = None
    seen: dict[int, _Seen] = field(default_factory=dict)

    def watch(self, plan: Plan, program: RankProgram, watch: Watch) -> Watch:
        self.plan, self.program = plan, program
        self.state.dump = None  # of this step alone
        return replace(watch, probed=matching(program, self.tasks))

    def enter(self, index: int, values: Sequence[Any], bundle: Sequence[Any]) -> None:
        assert self.program is not None
        instr = self.program.instrs[index]
        count = len(instr.inputs)  # the bundle goes between the inputs and the sums
        self.seen[index] = _Seen(_kept([*values[:count], *bundle, *values[count:]]))

    def leave(self, index: int, results: Sequence[Any]) -> None:
        flat: list[Any] = []
        for value in results:
            flat += value if isinstance(value, list) else [value]
        self.seen[index].outputs = _kept(flat)

    def finish(self) -> None:
        assert self.plan is not None
        assert self.program is not None
        names = names_of(self.plan, self.program)
        starts = self.plan.simulate().starts_of(self.program.rank)
        rows = [
            self._row(self.program.instrs[index], names, starts[index], seen)
            for index, seen in sorted(self.seen.items())
        ]
        _write(
            self.folder,
            self.program.rank,
            {
                "piper_dump": FORMAT,
                "plan": self.plan.fingerprint(),
                "world_size": self.plan.world_size,
                "rank": self.program.rank,
                "records": rows,
            },
        )
        if self.is_told:
            log.warning("rank %d dumped %d tasks to %s", self.program.rank, len(rows), self.folder)

    def _row(
        self, instr: Instr, names: Mapping[str, str], start: float, seen: _Seen
    ) -> dict[str, Any]:
        assert self.plan is not None
        assert self.program is not None
        taken = [names.get(reg, reg) for reg in instr.inputs]
        sums = [f"sum {reg}" for reg in instr.sums]
        given = [names.get(reg, reg) for reg in instr.outputs]
        between = len(seen.inputs) - len(taken) - len(sums)
        return {
            "task": instr.task,
            "replica": self.plan.replica(self.program.rank)[0],
            "start": float(start),
            "chunk": dict(self.program.chunks)[instr.target],
            "where": instr.where,
            "adds": list(instr.adds),
            "inputs": _pairs([*taken, *_saved(between), *sums], seen.inputs),
            "outputs": _pairs([*given, *_saved(len(seen.outputs) - len(given))], seen.outputs),
        }


def _saved(count: int) -> list[str]:
    return [f"saved {i}" for i in range(count)]


def _pairs(names: Sequence[str], values: Sequence[Any]) -> list[list[Any]]:
    """Nothing where there are no values: the task failed."""
    return [[name, value] for name, value in zip(names, values, strict=True)] if values else []


def _kept(values: Sequence[Any]) -> list[Any]:
    return [v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else None for v in values]


def names_of(plan: Plan, program: RankProgram) -> dict[str, str]:
    """The user's name of registers with a parameter, buffer or input, also gathered or cast."""
    names = {reg: plan.args[p].name for reg, p in (*program.state, *program.data)}
    coming: dict[str, tuple[str, ...]] = {}
    for instr in program.instrs:
        if instr.op is Op.ALL_GATHER:
            coming[instr.outputs[0]] = instr.inputs
        elif instr.op is Op.WAIT and instr.inputs[0] in coming:
            for made, source in zip(instr.outputs, coming[instr.inputs[0]], strict=True):
                names[made] = names.get(source, source)
        elif instr.op in (Op.SLICE, Op.CAST):
            names[instr.outputs[0]] = names.get(instr.inputs[0], instr.inputs[0])
    return names


def _write(folder: Path, rank: int, content: dict[str, Any]) -> None:
    try:
        with written_whole(folder / f"rank-{rank}.pt") as begun:
            torch.save(content, begun)
    except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
        raise PiperError(
            format_error(
                "the dump cannot be written",
                {"folder": folder, "why": error},
                hint="name a folder that you may write to, on a disk with room",
            )
        ) from error


def read_dump(folder: str | Path) -> list[Record]:
    """The records of all ranks, in order of execution.

    Raises:
        PiperError: There is no dump, it is not whole, or not of one step.
    """
    parts = [_read(path) for path in sorted(Path(folder).glob("rank-*.pt"))]
    if not parts:
        raise PiperError(
            format_error(
                f"there is no dump in {folder}",
                hint="write one: piper.debug.dump(step, {}, folder), then run a step",
            )
        )
    plans, sizes = {one["plan"] for one in parts}, {one["world_size"] for one in parts}
    if len(plans) > 1:
        raise PiperError(
            format_error(
                f"{folder} holds dumps of several plans",
                {"ranks": ", ".join(f"{one['rank']}: {one['plan']}" for one in parts)},
                hint="dump each run into a folder of its own",
            )
        )
    missing = sorted(set(range(max(sizes))) - {one["rank"] for one in parts})
    if missing:
        raise PiperError(
            format_error(
                f"the dump in {folder} is not whole",
                {"missing": f"ranks {', '.join(map(str, missing))} of {max(sizes)}"},
                hint="call piper.debug.dump on every rank",
            )
        )
    found = [
        Record(
            rank=one["rank"],
            **{k: v for k, v in row.items() if k not in ("inputs", "outputs")},
            inputs=[(name, value) for name, value in row["inputs"]],
            outputs=[(name, value) for name, value in row["outputs"]],
        )
        for one in parts
        for row in one["records"]
    ]
    return sorted(found, key=lambda one: (one.start, one.rank))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True)
        is_ours = isinstance(content, dict) and content.get("piper_dump") == FORMAT
    except Exception as error:  # torch's reader raises whatever the bytes lead it to
        raise PiperError(format_error(f"{path} cannot be read", {"why": error})) from error
    if not is_ours:
        raise PiperError(f"{path} is no dump of this version of Piper")
    found: dict[str, Any] = content
    for row in found["records"]:
        TaskName.parse(row["task"])
    return found
