"""`piper.doctor` and `piper check --model`: each kind of finding, its line and its remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.examination import Finding, Report, Severity
from tests.models import (
    BakedIn,
    Branching,
    Dropped,
    Hidden,
    NormNet,
    Odd,
    Paths,
    Printing,
    Stack4,
    TiedLM,
    rows,
)

BATCH = rows(8)


class Mutating(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x[0] += 1  # the change
        return F.mse_loss(x @ self.w, y)


class Waiting(nn.Module):
    """Brings a value to the host without a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = (x @ self.w).cpu()  # the copy
        return F.mse_loss(h, y)


class Breaking(nn.Module):
    """Two graph breaks, of which one is no wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        torch._dynamo.graph_break()  # the break
        if h.sum() > 1:  # the wait
            h = h * 2
        return F.mse_loss(h, y)


def found(report: Report, severity: Severity, *words: str) -> Finding:
    """The finding of that severity with these words."""
    alike = [one for one in report.of(severity) if all(w in str(one) for w in words)]
    assert len(alike) == 1, f"{words} in\n{report}"
    return alike[0]


def line(text: str) -> str:
    """`file:line` of this file where a comment is."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"test_doctor.py:{1 + next(k for k, row in enumerate(source) if row.endswith(text))}"


def test_a_model_without_faults() -> None:
    report = piper.doctor(Stack4(), BATCH)
    assert report.is_fine, str(report)
    assert (report.graphs, len(report.of(Severity.WARNING))) == (1, 0)
    assert str(report).startswith("the model works under a strategy: 1 graph, ")


def test_graph_breaks_and_waits_are_told_apart() -> None:
    report = piper.doctor(Breaking(), BATCH)
    assert not report.is_fine
    wait = found(report, Severity.FAULT, "the host waits", line("# the wait"), "torch.where")
    other = found(report, Severity.FAULT, "graph break\n", line("# the break"))
    assert not set(wait.where) & set(other.where)
    assert report.graphs > 1
    assert str(report).startswith("the model works on one device alone")


@pytest.mark.parametrize("build", [Branching, Printing])
def test_branches_on_values_are_waits(build: Callable[[], nn.Module]) -> None:
    report = piper.doctor(build(), BATCH)
    found(report, Severity.FAULT, "the host waits", "models.py:")


def test_a_changed_input() -> None:
    report = piper.doctor(Mutating(), BATCH)
    found(report, Severity.FAULT, "changes its input 'x' in place", line("# the change"), "clone")


def test_a_wait_that_is_no_break() -> None:
    report = piper.doctor(Waiting(), BATCH)
    assert report.is_fine
    found(report, Severity.WARNING, "brought to the host", line("# the copy"))


def test_a_baked_in_batch_size() -> None:
    report = piper.doctor(BakedIn(), BATCH)
    found(report, Severity.FAULT, "batch size", "models.py:", "inputs={name: ")


def test_no_loss() -> None:
    report = piper.doctor(Hidden(), BATCH[:1])
    assert report.is_fine  # forwards and backwards are two programs
    two = piper.strategies.pipeline(ranks=2, num_microbatches=2)
    report = piper.doctor(Hidden(), BATCH[:1], strategy=two)
    assert not report.is_fine


def test_state() -> None:
    report = piper.doctor(Odd(), TiedLM.batch())
    assert found(report, Severity.WARNING, "does not use").where == (
        "unused.weight",
        "unused.bias",
    )
    found(report, Severity.NOTE, "frozen", "frozen")
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    tied[1].weight = tied[0].weight
    report = piper.doctor(tied, BATCH[:1])
    found(report, Severity.NOTE, "shared parameters", "0.weight = 1.weight")


def test_buffers_and_random_numbers() -> None:
    model = NormNet()
    before = {name: value.clone() for name, value in model.named_buffers()}
    state = torch.get_rng_state()
    report = piper.doctor(model, BATCH)
    found(report, Severity.NOTE, "buffers that every microbatch changes", "norm.running_mean")
    found(piper.doctor(Dropped(), BATCH), Severity.NOTE, "random numbers", "models.py:")
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_untagged_code() -> None:
    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=Paths.REGIONS)
    report = piper.doctor(Paths(), BATCH, strategy=strategy)
    found(report, Severity.WARNING, "without a tag", "models.py:")
    assert not piper.doctor(Paths(), BATCH).of(Severity.WARNING)


def test_models_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert piper.doctor(model, (torch.randn(8, 4),)).is_fine
    assert all(p.is_meta for p in model.parameters())


TARGET = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        {change}
        return h.square().mean()


def model():
    return Model()


def inputs():
    return (torch.randn(8, 4),)
"""


@pytest.mark.parametrize(
    ("change", "code"), [("h = h + 1", 0), ("h = h if h.sum() > 0 else -h", 1)]
)
def test_on_the_command_line(change: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TARGET.format(change=change), encoding="utf-8")
    done = CliRunner().invoke(main, ["check", "--model", str(path), "--json"])
    assert done.exit_code == code, done.output
    last: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    assert last["ok"] == (code == 0)
    assert bool(last["findings"]) == (code == 1)
    if code:
        assert f"{path}:13" in done.output


def test_one_target_is_asked_for(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["check", "a.py", "--model", "b.py"])
    assert done.exit_code == 2
    assert "give one" in done.output
