"""`piper.debug`: where tasks come from, what they computed, where two runs part, breakpoints."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import piper_dynamo as piper
from piper_dynamo import debug
from piper_dynamo.cli import main
from piper_dynamo.debug.dump import read_dump
from piper_dynamo.ir.program import Op
from tests import jobs
from tests.jobs import LINE2
from tests.models import BareLoss, Stack4, rows
from tests.pool import Pool
from tests.replicas import local
from tests.source_tree import ROOT

HERE = Path(__file__).name


class Blocks(nn.Module):
    """Two equal blocks, whose chunks share their code, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = self.blocks[0](x).tanh()
        with piper.annotate("PP", 1):
            h = self.blocks[1](h).tanh()
        with piper.annotate("PP", 2):
            return nn.functional.mse_loss(h, y)


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_VERIFY", "1")


LINES = Path(__file__).read_text().splitlines()


def line_of(text: str) -> str:
    return f"{HERE}:{1 + next(i for i, line in enumerate(LINES) if text in line)}"


def test_a_task_is_found_in_the_model():
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=2), *jobs.places({0: [0], 1: [1], 2: [1]})
    )
    plan = piper.plan(Blocks(), strategy, rows(8))
    found = debug.find(plan, "F.PP1.MB1")
    assert found.ranks == (1,)
    assert [one.module for one in found.sources] == ["blocks.1", ""]
    assert all(one.line.endswith(line_of("self.blocks[1](h)")) for one in found.sources)
    assert debug.find(plan, "B.PP0.MB0").sources[0].module == "blocks.0"
    assert str(found).startswith("F.PP1.MB1 on rank 1\n  blocks.1  ")
    assert "modules     blocks.1" in explained(plan, "F.PP1.MB1")
    with pytest.raises(piper.PiperError, match=r"no task 'F.PP1.MB7'(?s:.*)near.*F.PP1.MB1"):
        debug.find(plan, "F.PP1.MB7")


def explained(plan: piper.Plan, subject: str) -> str:
    from piper_dynamo.look.explain import explain

    return explain(plan, subject)


# ---- dumps --------------------------------------------------------------------------------------

STRATEGIES: dict[str, Callable[[], piper.Strategy]] = {
    "line": lambda: jobs.strategy(LINE2, 2, "one_f_one_b"),
    "gpipe": lambda: jobs.strategy(LINE2, 2, "gpipe"),
    "zero 0": lambda: piper.strategies.pipeline(ranks=2, num_microbatches=2, replicas=2),
    "zero 3": lambda: piper.strategies.pipeline(
        ranks=2, num_microbatches=2, replicas=2, zero=3, bucket_mb=0.0001
    ),
    "zero 3 whole": lambda: piper.strategies.pipeline(
        ranks=2, num_microbatches=2, replicas=2, zero=3
    ),
}


def dumped(name: str, folder: Path, *, perturb: str = "", tasks: Any = None) -> None:
    """A second step, dumped; with one number changed at one task's input, where that is asked."""
    strategy = STRATEGIES[name]()

    def job() -> None:
        model = Stack4(2)
        step = piper.compile(model, strategy, example_inputs=rows(8))
        batch = rows(8, piper.data_rank(step))
        optimizer = torch.optim.SGD(piper.parameters(step), lr=0.1)
        step(*batch).backward()
        optimizer.step()
        if perturb:
            for param_name, param in piper.named_parameters(step):
                if param_name == perturb:
                    with torch.no_grad():
                        local(param).view(-1)[:1] += 1e-6
        debug.dump(step, {} if tasks is None else tasks, folder)
        step(*batch)
        step(*batch)  # only one step is dumped

    jobs.run_ranks(job, 2 if "zero" not in name else 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Dumps of all tasks, each made once."""

    @cache
    def of(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("run")
        dumped(name, folder)
        return folder

    return of


def copied(source: Path, to: Path) -> Path:
    return Path((shutil.copytree if source.is_dir() else shutil.copy)(source, to))


def test_a_dump_holds_what_tasks_saw(tmp_path: Path):
    dumped("line", tmp_path, tasks={"PP": 1, "MB": 0})
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["rank-0.pt", "rank-1.pt"]
    content = torch.load(tmp_path / "rank-1.pt", weights_only=True)
    assert [row["task"] for row in content["records"]] == ["F.PP1.MB0", "B.PP1.MB0"]
    forward, backward = read_dump(tmp_path)
    inputs = dict(forward.inputs)
    hidden = next(value for name, value in forward.inputs if name not in ("w.2", "w.3", "y"))
    x, y = (part.chunk(2)[0] for part in rows(8))
    assert {"w.2", "w.3", "y"} <= set(inputs)
    assert hidden is not None
    assert torch.equal(inputs["y"], y)
    w = [inputs["w.2"], inputs["w.3"]]
    loss = nn.functional.mse_loss(torch.tanh(torch.tanh(hidden @ w[0].T) @ w[1].T), y)
    assert torch.allclose(forward.outputs[0][1], loss)
    assert [name for name, _ in backward.outputs]
    assert forward.where.startswith(str(ROOT / "tests"))
    assert x.shape == hidden.shape


def test_a_dump_without_a_folder_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As the simplest call is written; the folder is that of the call, wherever the step runs."""
    monkeypatch.chdir(tmp_path)
    where: list[Path] = []

    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        where.append(piper.debug.dump(step, {"PP": 1, "MB": 0}))
        step(*rows(8))

    jobs.run_ranks(job, 2)
    assert where == [tmp_path / "piper-dump"] * 2
    assert [one.task for one in read_dump("piper-dump")] == ["F.PP1.MB0", "B.PP1.MB0"]
    told = {one.getMessage() for one in caplog.records if one.name == "piper.dump"}
    assert told == {
        f"rank 0 dumped 0 tasks to {where[0]}",
        f"rank 1 dumped 2 tasks to {where[0]}",
    }
    caplog.clear()
    dumped("line", tmp_path / "named")
    assert not [one for one in caplog.records if one.name == "piper.dump"]


def test_equal_runs_do_not_part(runs: Callable[[str], Path], tmp_path: Path):
    dumped("line", tmp_path)
    found = debug.diff(runs("line"), tmp_path)
    assert (found.is_equal, found.common, found.alone) == (True, 8, ((), ()))
    assert "no value differs" in str(found)


@pytest.mark.parametrize(
    ("name", "weight", "first"),
    [
        ("line", "w.0", "F.PP0.MB0"),
        ("line", "w.3", "F.PP1.MB0"),
        ("zero 3", "w.1", "F.PP0.MB0.v1"),
        ("zero 3", "w.2", "F.PP1.MB0"),
    ],
)
def test_a_perturbed_run_parts_where_it_was_perturbed(
    name: str, weight: str, first: str, runs: Callable[[str], Path], tmp_path: Path
):
    dumped(name, tmp_path, perturb=weight)
    found = debug.diff(runs(name), tmp_path)
    parting = found.partings[0]
    assert parting.task == first
    (given,) = [one for one in parting.values if one.is_input]
    assert (given.name, given.largest) == (weight, pytest.approx(1e-6, rel=1e-3))
    assert not parting.is_cause
    assert "models.py:" in parting.where
    assert debug.diff(runs(name), tmp_path, tolerance=1.0).is_equal


def test_a_task_that_computes_otherwise_is_the_cause(runs: Callable[[str], Path], tmp_path: Path):
    """One value of one rank's file is changed: what the task was given is the same."""
    path = copied(runs("line"), tmp_path / "b") / "rank-1.pt"
    content = torch.load(path, weights_only=True)
    (record,) = [row for row in content["records"] if row["task"] == "B.PP1.MB1"]
    record["outputs"][0][1].view(-1)[3] += 0.5
    torch.save(content, path)
    found = debug.diff(runs("line"), tmp_path / "b")
    (parting,) = found.partings
    assert (parting.task, parting.is_cause, parting.ranks) == ("B.PP1.MB1", True, (1, 1))
    assert parting.values[0].largest == pytest.approx(0.5)
    assert "was given the same and gives something else" in str(found)


def test_runs_under_other_schedules_and_levels_are_compared(runs: Callable[[str], Path]):
    assert debug.diff(runs("line"), runs("gpipe")).is_equal
    # With zero=3 each microbatch's gradient is reduced, so that chunks do not add to sums.
    found = debug.diff(runs("zero 0"), runs("zero 3 whole"), tolerance=1e-12)
    assert (found.is_equal, found.common, found.unlike) == (True, 16, 4)
    assert "4 add gradients to sums in one run only" in str(found)


def test_no_number_and_other_shapes_are_told(runs: Callable[[str], Path], tmp_path: Path):
    path = copied(runs("line"), tmp_path / "b") / "rank-0.pt"
    content = torch.load(path, weights_only=True)
    content["records"][0]["inputs"][0][1].view(-1)[0] = float("nan")
    content["records"][1]["outputs"][0][1] = torch.zeros(3)
    torch.save(content, path)
    first, second = debug.diff(runs("line"), tmp_path / "b").partings
    assert first.values[0].largest == float("inf")
    assert "float32[3] in the second" in str(second)


def test_a_failing_step_leaves_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from piper_dynamo.runtime.executor import Runtime

    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        debug.dump(step, {}, tmp_path)
        monkeypatch.setattr(Runtime, "loss", lambda *_: 1 / 0)
        step(*rows(8))

    with pytest.raises(piper.PiperRuntimeError):
        jobs.run_ranks(job, 2)
    seen = [one.task for one in read_dump(tmp_path) if one.rank == 1]
    assert seen[:2] == ["F.PP1.MB0", "F.PP1.MB1"]


def test_a_backward_that_comes_later_is_dumped(tmp_path: Path):
    def job() -> None:
        x, y = rows(8)
        step = piper.compile(BareLoss(), jobs.strategy({0: [0], 1: [0]}, 2), example_inputs=(x, y))
        debug.dump(step, {"MB": 1}, tmp_path)
        outputs = step(x, y)
        step(x, y)  # another step begins before its backward
        torch.utils._pytree.tree_leaves(outputs)[0].sum().backward()

    jobs.run_ranks(job, 1)
    passes = {one.task[0] for one in read_dump(tmp_path)}
    assert passes == {"F", "B"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def dump_one(folder: str, key: int) -> None:
    batch = rows(8)
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places({0: [0, 1], 1: [0, 1]}),
        piper.Replicate({"PP": "*"}, zero=2),
    )
    step = piper.compile(Stack4(2), strategy, example_inputs=batch)
    debug.dump(step, {"PP": 1}, folder)
    step(*rows(8, key + piper.rank()))


@pytest.mark.dist(2)
def test_processes_dump_too(pool: Pool, tmp_path: Path):
    for run, key in (("a", 0), ("b", 0), ("c", 5)):
        pool.values(dump_one, str(tmp_path / run), key)
    assert debug.diff(tmp_path / "a", tmp_path / "b").is_equal
    parting = debug.diff(tmp_path / "a", tmp_path / "c").partings[0]
    assert parting.task == "F.PP1.MB0"


def test_what_is_no_dump_is_refused(runs: Callable[[str], Path], tmp_path: Path):
    first, second = copied(runs("line"), tmp_path / "a"), tmp_path / "b"
    dumped("line", second, tasks={"PP": 1, "MB": 1})
    content = torch.load(first / "rank-1.pt", weights_only=True)
    torch.save({**content, "records": []}, first / "rank-1.pt")
    with pytest.raises(piper.PiperError, match="have no task in common"):
        debug.diff(first, second)
    with pytest.raises(piper.PiperError, match="there is no dump in"):
        debug.diff(first, tmp_path / "none")
    (second / "rank-1.pt").unlink()
    with pytest.raises(piper.PiperError, match=r"not whole(?s:.*)ranks 1 of 2"):
        debug.diff(first, second)
    copied(runs("gpipe") / "rank-1.pt", second / "rank-1.pt")
    with pytest.raises(piper.PiperError, match="dumps of several plans"):
        debug.diff(first, second)
    (second / "rank-1.pt").write_bytes(b"nothing")
    with pytest.raises(piper.PiperError, match="cannot be read"):
        debug.diff(first, second)
    torch.save({"other": 1}, second / "rank-1.pt")
    with pytest.raises(piper.PiperError, match="is no dump of this version"):
        debug.diff(first, second)


def test_what_cannot_be_dumped_is_refused(tmp_path: Path):
    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        with pytest.raises(piper.PiperError, match="no task matches"):
            debug.dump(step, {"PP": 7}, tmp_path)
        with pytest.raises(piper.PiperStrategyError, match="not a filter"):
            debug.dump(step, {"PP": -1}, tmp_path)
        (tmp_path / "file").write_text("")
        debug.dump(step, {}, tmp_path / "file")
        with pytest.raises(piper.PiperError, match="the dump cannot be written"):
            step(*rows(8))

    jobs.run_ranks(job, 2)


def test_the_command_names_the_task(runs: Callable[[str], Path], tmp_path: Path):
    dumped("line", tmp_path, perturb="w.2")

    def command(*words: str) -> Any:
        return CliRunner().invoke(main, ["debug", "diff", *words])

    a, b = str(runs("line")), str(tmp_path)
    done = command(a, b, "--json")
    assert done.exit_code == 1
    assert re.search(r"F\.PP1\.MB0 on rank 1 was given another\n  .*models\.py:\d+", done.output)
    assert '"task": "F.PP1.MB0"' in done.output.splitlines()[-1]
    assert command(a, a).exit_code == 0
    assert command(a, "none").exit_code == 1


# ---- breakpoints --------------------------------------------------------------------------------

SCRIPT = """\
import torch
import piper_dynamo as piper
from tests import jobs
from tests.models import Stack4, rows


def job():
    step = piper.compile(Stack4(2), jobs.strategy(jobs.LINE2, 2), example_inputs=rows(8))
    with piper.debug.stop_at(step, "F.PP1.MB1"):
        step(*rows(8))
    step(*rows(8))
    return "done"


print(piper.launch(job, 2, engine="inprocess"))
"""


def with_pdb(script: Path, commands: str, *, cache: Path | None) -> str:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PIPER_VERIFY": "1", "HOME": str(ROOT)}
    if cache is not None:
        environment["PIPER_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=commands,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_debugger_stops_and_lists(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    steps = "s\n" * 10  # into the call, its helpers, the chunk
    output = with_pdb(script, f"l\np rt is not None\n{steps}n\nl\nw\nc\n", cache=None)
    assert "breakpoint()  # before F.PP1.MB1" in output
    assert re.search(r"->.*= F_PP1\(", output)
    assert "# F  PP=1 MB=1" in output
    assert "(Pdb) True" in output
    assert "def forward(self, args_list)" in output
    assert re.search(r"# File: .*models\.py:\d+ in forward", output)
    assert "<piper step rank1 " in output
    assert "['done', 'done']" in output


@pytest.mark.slow
def test_a_line_of_a_chunk_takes_a_breakpoint(tmp_path: Path):
    script, cache = tmp_path / "job.py", tmp_path / "cache"
    script.write_text(SCRIPT)
    with_pdb(script, "c\n", cache=cache)
    files = sorted((cache / "generated").iterdir())
    assert {path.name.partition("-")[0] for path in files} == {"chunk", "step"}
    chunk, line = next(
        (path, number)
        for path in files
        for number, text in enumerate(path.read_text().splitlines(), 1)
        if "mse_loss.default" in text
    )
    output = with_pdb(script, f"b {chunk}:{line}\nc\nl\nc\nc\nc\nc\n", cache=cache)
    assert f"Breakpoint 1 at {chunk}:{line}" in output
    assert f"> {chunk}({line})forward()" in output


def test_programs_that_are_not_looked_into_are_the_same():
    plan = piper.plan(Stack4(2), jobs.strategy(LINE2, 2), rows(8))
    source = str(plan.program(0))
    assert "probe" not in source
    assert "breakpoint" not in source
    assert sum(i.op is Op.RUN for i in plan.programs[0].instrs) == 4


def test_a_step_is_dumped_and_stopped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Casts of parameters have their names, too."""
    stops: list[None] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(None))
    half = piper.Strategy(*STRATEGIES["line"]().directives, piper.Precision({}, param="bf16"))

    def job() -> None:
        step = piper.compile(Stack4(2), half, example_inputs=rows(8))
        debug.dump(step, {"MB": 1}, tmp_path)
        with debug.stop_at(step, "F.PP0.MB0"), debug.stop_at(step, "F.PP1.MB1"):
            step(*rows(8))
        step(*rows(8))

    jobs.run_ranks(job, 2)
    assert len(stops) == 2
    dumped = read_dump(tmp_path)
    assert {one.task for one in dumped} == {f"{w}.PP{s}.MB1" for w in "FB" for s in (0, 1)}
    forwards = [one for one in dumped if one.task.startswith("F")]
    names = {name for one in forwards for name, _ in one.inputs}
    assert names >= {"w.0", "w.1", "w.2", "w.3", "x", "y"}
