"""`piper plan`, `check`, `plot`, `compare`, `explain`: targets, tables, exit codes, JSON."""

import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result
from torch import Tensor

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.look import compare as comparing
from piper_dynamo.look.explain import explain
from piper_dynamo.look.target import Target, load_target
from piper_dynamo.pictures import to_chrome_trace
from piper_dynamo.runtime.executor import Executor
from piper_dynamo.summary import COLUMNS, HELD_COLUMNS, _row, facts, legend
from piper_dynamo.timeline import INSIDE, STEP
from piper_dynamo.train import progress
from piper_dynamo.train.config import Config
from tests import jobs
from tests.jobs import LINE2
from tests.models import Stack4, rows

SIZES = {"dim": 16, "layers": 2, "heads": 2, "kv_heads": 1, "seq": 8, "batch": 4}
MODEL = [w for name, n in SIZES.items() for w in (f"--{name.replace('_', '-')}", str(n))]
TINY = [*MODEL, "--microbatches", "2"]

FILE = """\
import torch
from torch import nn

import piper_dynamo as piper


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x, y):
        with piper.annotate("PP", 0):
            hidden = self.first(x).relu()
        with piper.annotate("PP", 1):
            return nn.functional.mse_loss(self.second(hidden), y)


def model():
    return Model()


def inputs():
    return torch.randn(8, 4), torch.randn(8, 1)


def strategy():
    return piper.strategies.pipeline("one_f_one_b", ranks=2, num_microbatches=2)
"""


@pytest.fixture(autouse=True)
def cheap_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIPER_VERIFY", "1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(FILE)
    return path


def piper_(*arguments: Any) -> Result:
    """What `piper` does with these arguments, in this process."""
    torch._dynamo.reset()
    found = CliRunner().invoke(main, [str(a) for a in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def last_line(found: Result) -> dict[str, Any]:
    return dict(json.loads(found.stdout.splitlines()[-1]))


# Targets


def test_plan_of_a_file(file: Path):
    found = piper_("plan", file, "--json")
    assert found.exit_code == 0
    assert "   0  PP0           160 B    36 B" in found.stdout
    said = last_line(found)
    assert (said["command"], said["ok"], said["world_size"]) == ("plan", True, 2)
    assert [rank["parameters"] for rank in said["ranks"]] == [160, 36]
    assert said["messages"][0] == {
        "source": 0,
        "targets": [1],
        "after": "F.PP0",
        "each": 128,
        "messages": {"count": 2, "nbytes": 256},
    }


def test_plan_shows_the_graph_and_a_program(file: Path):
    found = piper_("plan", file, "--graph", "--rank", 1, "--tasks", "--meta")
    assert found.exit_code == 0
    assert "  rank 0: F.PP0.MB0 F.PP0.MB1 B.PP0.MB0 B.PP0.MB1" in found.stdout
    assert "F_PP0_MB0 = F_PP0(" in found.stdout
    assert "# rank 1 of 2 · PP=1" in found.stdout


def test_a_strategy_may_be_a_value(file: Path):
    file.write_text(FILE.replace("def strategy():\n    return", "strategy ="))
    assert piper_("check", file).exit_code == 0


def test_options_alone_are_a_job_of_piper_train():
    found = piper_("plan", *TINY, "--pp", 2, "--dp", 2, "--zero", 3, "--json")
    assert found.exit_code == 0
    assert (last_line(found)["world_size"], last_line(found)["replicas"]) == (4, 2)


def test_a_strategy_as_json_for_a_built_in_model(tmp_path: Path):
    path = tmp_path / "strategy.json"
    wanted = piper.strategies.pipeline("gpipe", ranks=2, num_microbatches=2)
    path.write_text(wanted.to_json())
    found = piper_("check", path, *MODEL)
    assert found.exit_code == 0
    assert f"{path} is safe on 2 ranks" in found.stdout
    refused = piper_("check", path, *MODEL, "--layers", 1)
    assert refused.exit_code == 2
    assert "--layers is 1, fewer than the 2 stages" in refused.stderr


@pytest.mark.slow
def test_experts_are_planned_on_meta():
    found = piper_("plan", *TINY, "--model", "moe", "--ep", 2, "--experts", 4, "--json")
    assert found.exit_code == 0
    assert last_line(found)["ranks"][0]["exchanges"]["count"] > 0


def run_folder(folder: Path) -> Path:
    """What a run leaves behind that is looked at, without the run."""
    config = Config(**SIZES, microbatches=2)
    (folder / "config.json").write_text(json.dumps({"options": config.as_dict()}))
    target = load_target(str(folder), {}, set(), is_meta=False)
    to_chrome_trace(target.plan().simulate(piper.Costs(F=0.01)).timeline, folder / "trace.json")
    return folder


def test_a_run_folder_is_planned_and_drawn(tmp_path: Path):
    folder = run_folder(tmp_path)
    found = piper_("plot", folder, "-o", tmp_path / "run.svg")
    assert found.exit_code == 0
    assert "<!-- measured · " in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["none.py"], "there is no such file or folder"),
        (["job.txt"], "this is no target"),
        (["job.py", "--pp", "2"], "--pp"),
        (["job.py", "--dim", "8", "--batch", "4"], "--batch, --dim"),
        (["strategy.json", "--schedule", "gpipe"], "--schedule"),
        (["strategy.json"], "this is no strategy"),
        (["."], "this folder is no run of piper train"),
        (["--schedule", "gpip"], "did you mean gpipe?"),
        (["--batch", "6"], "--batch 6 does not divide into --microbatches 4"),
        (["--ranks", "0"], "0 is not in the range"),
        (["--nope"], "No such option"),
    ],
)
def test_asked_wrongly(
    arguments: list[str], want: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("job.py", "job.txt", "strategy.json"):
        (tmp_path / name).write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    found = piper_("plan", *arguments)
    assert found.exit_code == 2
    assert want in found.stderr
    assert not found.stdout


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("def inputs", "def input", "missing  inputs()"),
        ("return Model()", "return 3", "model() returned a int; return a torch.nn.Module"),
        ("return torch.randn(8, 4), torch.randn(8, 1)", "return 1 / 0", "ZeroDivisionError"),
        ("import torch\n", "import torch, nonesuch\n", "No module named 'nonesuch'"),
        ("import torch\n", "import torch(\n", "SyntaxError"),
        ("def model():\n    return Model()", "model = 3", "model is a int; make it a function"),
    ],
)
def test_a_file_that_is_no_target(file: Path, old: str, new: str, want: str):
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    found = piper_("plan", file, "--json")
    assert found.exit_code == 2
    assert want in found.stderr
    assert last_line(found)["ok"] is False
    if "Error" in want:
        line = (
            FILE.replace(old, new)
            .splitlines()
            .index(new.strip() if "1 / 0" not in new else "    return 1 / 0")
            + 1
        )
        assert f"job.py:{line}" in found.stderr


# Refusals of the plan


@pytest.mark.parametrize(
    ("old", "new", "kind", "want"),
    [
        (
            "num_microbatches=2",
            "num_microbatches=3",
            "PiperPlanError",
            "microbatches do not divide",
        ),
        ('"one_f_one_b"', '"one_f"', "PiperStrategyError", "schedule"),
        ('annotate("PP", 1)', 'annotate("PP", 3)', "PiperPlanError", "PP"),
        ("self.first(x).relu()", "print(x) or self.first(x)", "PiperCaptureError", "graph break"),
    ],
)
def test_refused_plans_exit_with_1(file: Path, old: str, new: str, kind: str, want: str):
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    found = piper_("check", file, "--json")
    assert found.exit_code == 1, found.output
    assert want in found.stderr
    said = last_line(found)
    assert (said["command"], said["ok"], said["error"]) == ("check", False, kind)
    assert want in said["message"]


def test_check_lists_what_deadlocks(file: Path):
    """Stage 1 wants microbatch 1 first, stage 0 needs the gradient of 0 before it sends 1."""
    strategy = """\
    split = piper.Split({}, num_microbatches=2)
    places = [piper.Place({"PP": stage}, devices=[stage]) for stage in (0, 1)]
    tasks = ["F0 B0 F1 B1", "F1 B1 F0 B0"]
    orders = [
        piper.Order([{"PP": s, "MB": int(t[1]), "PASS": t[0]} for t in text.split()])
        for s, text in enumerate(tasks)
    ]
    return piper.Strategy(split, *places, *orders)
"""
    wanted = FILE[: FILE.index("    return piper.strategies")] + strategy
    file.write_text(wanted)
    found = piper_("check", file)
    assert found.exit_code == 1
    assert "rank 0" in found.stderr
    assert "rank 1" in found.stderr


# Pictures


@pytest.mark.parametrize("suffix", [".html", ".png", ".svg", ".json"])
def test_plot(file: Path, tmp_path: Path, suffix: str):
    out = tmp_path / f"timeline{suffix}"
    found = piper_("plot", file, "-o", out, "--costs", "F=1,BI=2,comm=0.5", "--json")
    assert found.exit_code == 0
    assert out.stat().st_size > 1000
    assert last_line(found) == {
        "command": "plot",
        "ok": True,
        "path": str(out),
        "makespan": pytest.approx(last_line(found)["makespan"]),
    }


def test_plot_of_the_graph(file: Path, tmp_path: Path):
    out = tmp_path / "graph.dot"
    assert piper_("plot", file, "--graph", "-o", out).exit_code == 0
    assert out.read_text().startswith("digraph plan {")


@pytest.mark.parametrize(
    ("options", "code", "want"),
    [
        (["--costs", "F"], 2, "'F' is not name=number"),
        (["--costs", "G=1"], 2, "there is no 'G'; known: F, BI"),
        (["--costs", "comm=-1"], 2, "comm is -1.0"),
        (["--graph", "--costs", "F=1"], 2, "about steps over time"),
        (["-o", "timeline.pdf"], 1, "suffix"),
        (["-o", "none/timeline.png"], 1, "cannot be written"),
        (["--run", "none"], 1, "not a trace of a step"),
    ],
)
def test_plot_refuses(
    file: Path, options: list[str], code: int, want: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(file.parent)
    found = piper_("plot", file, *options)
    assert found.exit_code == code
    assert want in found.stderr


# Comparison


def target(
    strategy: piper.Strategy, model: Callable[[], torch.nn.Module] = lambda: Stack4(2)
) -> Target:
    """A model in float64, replicas with batches of their own."""
    return Target(
        name="test",
        strategy=strategy,
        model=model,
        inputs=lambda: rows(8),
        batches=lambda step, replica, replicas: rows(8, 2 * step + replica),
        is_meta=False,
    )


def compared(strategy: piper.Strategy, **options: Any) -> comparing.Comparison:
    torch._dynamo.reset()
    return comparing.compare(target(strategy, **options), steps=2)


class Mean(Stack4):
    """A loss that is a mean, a sum, or a mean weighted by the targets' squares."""

    def __init__(self, reduction: str) -> None:
        super().__init__(2)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T) @ self.w[1].T
        with piper.annotate("PP", 1):
            error = (torch.tanh(h @ self.w[2].T) @ self.w[3].T - y).square()
            if self.reduction == "sum":
                return error.sum()
            weight = y.square() if self.reduction == "weights" else torch.ones_like(y)
            return (weight * error).sum() / weight.sum()


@pytest.mark.parametrize(
    ("name", "rule"), [("mean", "mean"), ("sum", "sum"), ("weights", lambda y: y.square().sum())]
)
def test_compare_with_replicas_and_shards(name: str, rule: Any):
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=2, zero=3, combine=rule
    )
    found = compared(strategy, model=lambda: Mean(name))
    worst = max(max(one.gradient, one.value) for one in found.differences)
    assert found.is_equal
    assert max(worst, found.loss, found.norm) < 1e-12
    assert {one.ranks for one in found.differences} == {(0, 1), (2, 3)}


def test_compare_notices_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch):
    """Control: every gradient is twice as large."""
    run = Executor.run

    def wrong(self: Executor, *args: Any, **kwargs: Any) -> Any:
        results = run(self, *args, **kwargs)
        for grad in results.grads:
            grad.mul_(2)
        return results

    monkeypatch.setattr(Executor, "run", wrong)
    found = compared(jobs.strategy(LINE2, 2))
    assert not found.is_equal
    assert [one.gradient for one in found.differences] == pytest.approx([1.0] * 4)
    assert found.loss < 1e-3 < found.norm


def test_missing_rows_are_infinitely_wrong():
    whole = {"w": (0, torch.ones(4, 2))}
    half = {"w": (0, torch.ones(2, 2))}
    assert comparing._of_rows("w", [half, {"w": (2, torch.ones(2, 2))}], whole) == 0
    assert comparing._of_rows("w", [half], whole) == math.inf
    assert comparing._of_rows("w", [{"w": (0, torch.full((4, 2), math.nan))}], whole) == math.inf
    assert comparing._of_rows("w", [{}], {}) == 0
    assert comparing._of_rows("w", [half], {}) == math.inf


def test_what_rounding_leaves_of_nothing_is_no_difference():
    """The bias of attention's keys adds one number to a row of scores, which softmax takes away."""

    def of(key: float, other: float) -> comparing._Trace:
        rows = {"key": (0, torch.full((2,), key)), "other": (0, torch.full((2,), other))}
        return comparing._Trace(grads=rows, params=rows)

    def differs(have: comparing._Trace) -> bool:
        found = (comparing._difference(n, [have], want, (1.0, 1.0)) for n in ("key", "other"))
        return not all(one.is_equal for one in found)

    want = of(1e-20, 1.0)
    assert not differs(of(-3e-20, 1.0))
    assert differs(of(1e-4, 1.0))
    assert differs(of(1e-20, 1.1))


def test_compare_shows_every_parameter(file: Path):
    found = piper_("compare", file, "--float64", "--steps", 1, "--json")
    assert found.exit_code == 0, found.output
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert [line.split()[0] for line in found.stdout.splitlines()[1:5]] == names
    said = last_line(found)
    assert list(said["parameters"]) == names
    assert max(one["gradient"] for one in said["parameters"].values()) < 1e-12
    assert "equal to one process" in found.stdout


@pytest.mark.slow
def test_compare_of_a_built_in_model():
    found = piper_("compare", *TINY, "--dtype", "float64", "--steps", 1, "--tied-head")
    assert found.exit_code == 0, found.output
    assert "embedding.weight" in found.stdout


def test_compare_says_what_differs(file: Path):
    """The mean over microbatches of a loss that is no mean is not the whole batch's."""
    file.write_text(
        FILE.replace(
            "mse_loss(self.second(hidden), y)", 'mse_loss(self.second(hidden), y, reduction="sum")'
        )
    )
    found = piper_("compare", file, "--steps", 1, "--json")
    assert found.exit_code == 1
    assert "DIFFERS from one process" in found.stdout
    assert found.stdout.count("DIFFERS, rounding explains 1e-04") == 4
    assert last_line(found)["ok"] is False


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        (".relu()", ".relu().dropout(0.5)", "random numbers"),
        ("nn.functional.mse_loss(self.second(hidden), y)", "self.second(hidden)", "loss"),
        (
            "num_microbatches=2)",
            "num_microbatches=2)\n\n\nplain = strategy\n\n\ndef strategy():\n    "
            'return piper.Strategy(*plain().directives, piper.Precision({}, param="bf16"))',
            "Precision rounds",
        ),
    ],
)
def test_compare_refuses_what_must_differ(file: Path, old: str, new: str, want: str):
    new = new.replace(
        ".relu().dropout(0.5)", ".relu(); hidden = nn.functional.dropout(hidden, 0.5)"
    )
    file.write_text(FILE.replace(old, new))
    found = piper_("compare", file)
    assert found.exit_code == 1
    assert want in found.stderr


# Explanations


def test_explain_tells_of_casts() -> None:
    rule = piper.Precision({}, param="bf16")
    wanted = piper.Strategy(*jobs.strategy(jobs.LINE2, 2).directives, rule)
    found = piper.plan(Stack4(2), wanted, rows(4))
    jobs.mentions(explain(found, "w.0"), "float64[4, 4]", "cast to bfloat16 once a step", "F.PP0")


@pytest.fixture(scope="module")
def sharded() -> piper.Plan:
    torch._dynamo.reset()
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=2, zero=3
    )
    return piper.plan(Stack4(2), strategy, rows(4))


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("F.PP1.MB0", ["forward of region PP1", "models.py:", "ranks 2, 3", "by message, 64 B"]),
        ("B.PP0.MB1", ["backward", "4 of 4 on rank 0: after B.PP0.MB0, last", "bundle"]),
        ("F.PP0", ["F.PP0.MB0: forward", "first", "for ranks 2, 3 by message"]),
        ("w.0", ["float64[4, 4], 128 B", "block 2 of 2, float64[2, 4], 64 B", "for F.PP0"]),
        ("w.3", ["rank 2", "sum of ranks 2, 3", "gathered 4 times a step, for F.PP1, B.PP1"]),
        ("0", ["rank 0 of 4", "sends to rank 2", "waits for rank 2", "all gather over ranks 0, 1"]),
    ],
)
def test_explain(sharded: piper.Plan, subject: str, words: list[str]):
    jobs.mentions(explain(sharded, subject), *words)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("F.PP0.MB9", ["no 'F.PP0.MB9'", "near", "F.PP0.MB0"]),
        ("w.9", ["no 'w.9'", "w.0"]),
        ("4", ["no '4'", "ranks", "0 to 3"]),
    ],
)
def test_explain_refuses(sharded: piper.Plan, subject: str, words: list[str]):
    jobs.mentions(jobs.refusal(lambda: explain(sharded, subject)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("explain F.PP1.MB0", ("piper explain example.py F.PP1.MB0", "piper explain - F.PP1.MB0")),
        ("explain", ("needs a target and a subject", "piper explain - F.PP0.MB0")),
        (
            "search --devices 2 --flops 1e9 --profile profile.json",
            ("say once what things take: --profile, or --flops and --memory-bandwidth",),
        ),
        ("plot --costs-from no.json", ("piper profile, or piper.profile, measures",)),
        ("plot --costs F=1,X=2", ("there is no 'X'; known: F, BI, BW",)),
        ("plott", ("Did you mean 'plot'?",)),
        ("plot --unt s", ("'--unit'",)),
    ],
)
def test_what_is_asked_wrongly_is_told_with_what_is_right(arguments: str, words: tuple[str, ...]):
    found = piper_(*arguments.split())
    assert found.exit_code != 0
    jobs.mentions(found.output, *words)


def test_a_summary_says_what_its_columns_mean(file: Path, sharded: piper.Plan):
    shown = " ".join(piper_("plan", file).stdout.split())
    assert "sends messages to other ranks, and the bytes of all" in shown
    assert "activations what forwards leave for backwards" in shown
    assert "gathers sharded" not in shown  # there are none
    told = " ".join(legend(sharded.summary()).split())
    assert "gathers sharded parameters made whole" in told
    assert "gathered parameters sharded ones while they are whole" in told
    columns = _row(facts(sharded.programs[0], sharded.args))
    assert set(COLUMNS) == set(columns) - {"rank"}
    assert set(HELD_COLUMNS) == {*STEP, "optimizer state", INSIDE}


def test_explain_commands(file: Path):
    found = piper_("explain", file, "F.PP1.MB1", "--json")
    assert found.exit_code == 0
    assert last_line(found)["text"] == found.stdout.splitlines()[:-1]
    assert piper_("explain", file, "F.PP9").exit_code == 1
    assert piper_("explain", "-", "F.PP0", *TINY).exit_code == 0


# Completion


@pytest.mark.parametrize(
    ("words", "begun", "want"),
    [
        (["piper"], "pl", {"plan", "plot"}),
        (["piper", "plan", "--schedule"], "z", {"zb_h1", "zbv"}),
        (["piper", "train", "--dtype"], "", {"float32", "float64"}),
        (["piper", "check"], "--mo", {"--model"}),
    ],
)
def test_shells_complete(words: list[str], begun: str, want: set[str]):
    complete = BashComplete(main, {}, "piper", "_PIPER_COMPLETE")
    assert {one.value for one in complete.get_completions(words[1:], begun)} == want


def test_in_a_terminal_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with mock.patch("sys.stderr", terminal), mock.patch.object(progress, "TICK_S", 0.01):
        with progress.waiting_for("planning"):
            while "planning: 0 s" not in terminal.getvalue():
                time.sleep(0.01)
        assert terminal.getvalue().endswith(progress.CLEAR)
    with progress.waiting_for("planning"):  # to a file
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_subject_that_is_forgotten_is_asked_for_with_the_target(file: Path):
    found = piper_("explain", file)
    assert found.exit_code == 2
    assert f"piper explain {file} F.PP0.MB0" in " ".join(found.output.split()).replace("│", "")
