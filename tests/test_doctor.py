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
from piper_dynamo.examination import MOST_PARTS, Finding, Report, Severity, _alone
from piper_dynamo.planning import split_of
from tests import example, zoo_models
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

# Torch's own, while Dynamo traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
BATCH = rows(8)
ALONE = piper.Strategy(piper.Split({}, num_microbatches=2), piper.Place({}, devices=[0]))
ON_TWO = piper.strategies.pipeline(ranks=2, num_microbatches=2)


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


class Clamped(nn.Module):
    """Changes a parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.w.clamp_(-1, 1)  # the clamp
        return F.mse_loss(x @ self.w, y)


class Teacher(nn.Module):
    """Changes a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        self.slow = nn.Parameter(torch.ones(4, 4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.slow.mul_(0.9).add_(self.w.detach(), alpha=0.1)  # the average
        return F.mse_loss(x @ self.w + x @ self.slow, y)


class Assigned(Clamped):
    """Changes the values behind a parameter."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.w.data.mul_(2)  # the product
        return F.mse_loss(x @ self.w, y)


class Averaged(nn.Module):
    """Changes a buffer to a value that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return F.mse_loss(h, y)


class Statistics(Clamped):
    """Changes inputs where their version does not show it, as running statistics."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, var = y[0], y[1]
        return F.batch_norm(x @ self.w, mean, var, training=True).square().mean()


class Mapped(Clamped):
    """Attention to each row by a transform of torch.func."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.func.vmap(lambda row, other: (row * other).sum(-1) @ row)(x @ self.w, y)
        return scores.square().mean()


class Failing(Clamped):
    """Is wrong on any device."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x @ self.w[:3], y)  # the mistake


class Idle(Clamped):
    """Reads a parameter for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _ = x @ self.idle
        return F.mse_loss(x @ self.w, y)


class Sloppy(nn.Module):
    """A break in a block that Dynamo leaves to Python as a whole: it changes what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout(x @ self.w)  # the draw
        torch._dynamo.graph_break()
        h.relu_()
        update(self, x)
        return F.mse_loss(h, y)


@torch._dynamo.disable
def update(model: Sloppy, x: Tensor) -> None:
    """Code that Dynamo does not look at."""
    with torch.no_grad():
        model.w.data.add_(1)
        model.count.add_(1)
        x.add_(1)


def found(report: Report, severity: Severity, *words: str) -> Finding:
    """The finding of that severity with these words."""
    alike = [one for one in report.of(severity) if all(w in str(one) for w in words)]
    assert len(alike) == 1, f"{words} in\n{report}"
    return alike[0]


def line(text: str, file: str = __file__) -> str:
    """`file:line` of a file, this one by default, where a comment is."""
    source = Path(file).read_text(encoding="utf-8").splitlines()
    return f"{Path(file).name}:{1 + next(k for k, row in enumerate(source) if row.endswith(text))}"


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


@pytest.mark.parametrize(
    ("build", "name", "at"),
    [
        (Clamped, "w", "# the clamp"),
        (Teacher, "slow", "# the average"),
        (Assigned, "w", "# the product"),
    ],
)
def test_a_changed_parameter(build: Callable[[], nn.Module], name: str, at: str) -> None:
    report = piper.doctor(build(), BATCH)
    assert str(report).startswith("the model works on one device alone")
    title = f"changes its parameter {name!r} in place"
    found(report, Severity.FAULT, title, line(at), "register_buffer")
    with pytest.raises(piper.PiperCaptureError, match=title):
        piper.plan(build(), ON_TWO, BATCH)


AGREED: list[tuple[Callable[[], nn.Module], Any]] = [
    *((build, BATCH) for build in (Stack4, Dropped, NormNet, Paths, Mapped, Idle, Waiting)),
    *((build, BATCH) for build in (Clamped, Teacher, Assigned, Averaged, Statistics, Mutating)),
    *((build, BATCH) for build in (Breaking, Branching, Printing, Failing, Sloppy, BakedIn)),
    (TiedLM, TiedLM.batch()),
    (Odd, TiedLM.batch()),
]


@pytest.mark.parametrize(("build", "batch"), AGREED, ids=[build.__name__ for build, _ in AGREED])
def test_what_is_fine_is_planned_and_nothing_else(
    build: Callable[[], nn.Module], batch: Any
) -> None:
    try:
        piper.plan(build(), ALONE, batch)
        refusal = ""
    except piper.PiperError as error:
        refusal = str(error)
    report = piper.doctor(build(), batch)
    assert report.is_fine == (not refusal), f"{report}\n{refusal}"
    assert report.is_fine == (not report.of(Severity.FAULT))


FINE = ("TextLSTM", "Nested")
FINE_SLOW = ("ResNet", "UNet", "Translator", "Rounded", "Checkpointed")


@pytest.mark.parametrize(
    "name", [*FINE, *(pytest.param(name, marks=pytest.mark.slow) for name in FINE_SLOW)]
)
def test_models_that_are_trained_are_fine(name: str) -> None:
    model = getattr(zoo_models, name)
    subject = zoo_models.subject(model)
    strategy = example.load(zoo_models.EXAMPLES[model]).strategy()
    report = piper.doctor(subject.build(), subject.batch(0, 0), strategy=strategy)
    assert report.is_fine, str(report)
    assert report.graphs == 1
    assert "could not be looked at" not in str(report)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Branching", ("the host waits", "torch.where")),
        pytest.param("Conditional", ("cond",), marks=pytest.mark.slow),
        ("Flex", ("FlexAttention", "write it as scaled_dot_product_attention")),
    ],
)
def test_models_that_are_refused_are_not(name: str, words: tuple[str, ...]) -> None:
    subject = zoo_models.subject(getattr(zoo_models, name))
    report = piper.doctor(subject.build(), subject.batch(0, 0))
    found(report, Severity.FAULT, *words, "zoo_models.py:")
    found(report, Severity.WARNING, "could not be looked at", "baked in")


def test_a_fault_hides_no_other_finding() -> None:
    class Both(Dropped):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x.view(8, 4), y)

    report = piper.doctor(Both(), BATCH)
    found(report, Severity.FAULT, "batch size")
    found(report, Severity.NOTE, "random numbers", "models.py:")
    found(
        report, Severity.WARNING, "could not be looked at", "batch sizes that are baked in, but for"
    )
    two = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions={"layer.*": {"PP": 1}})
    report = piper.doctor(Dropped(), BATCH, strategy=two)
    found(report, Severity.FAULT, "matches no module", "layer.*")
    assert str(report).startswith("this strategy is refused, the model works on one device alone: ")
    found(report, Severity.NOTE, "random numbers", "models.py:")
    found(report, Severity.WARNING, "could not be looked at", "stages and placement")
    three = piper.strategies.pipeline(ranks=3, num_microbatches=2)
    report = piper.doctor(Dropped(), BATCH, strategy=three)
    found(report, Severity.FAULT, "the placement is not possible")
    found(report, Severity.NOTE, "random numbers", "models.py:")
    assert "could not be looked at" not in str(report)  # captured as the strategy wants it


def test_what_code_around_breaks_does_is_seen_and_put_back() -> None:
    model, (x, y) = Sloppy(), rows(8)
    before = [value.detach().clone() for value in (*model.parameters(), *model.buffers(), x)]
    report = piper.doctor(model, (x, y))
    for old, new in zip(before, (*model.parameters(), *model.buffers(), x), strict=True):
        assert torch.equal(old, new)
    found(report, Severity.NOTE, "random numbers", line("# the draw"))
    found(report, Severity.WARNING, "could not be looked at", "baked in", "the loss", "not used")
    assert "does not use" not in str(report)  # which are read between graphs is not known
    # what an earlier graph has made is no input of the model
    assert "in place" not in str(report)


def test_a_refused_model_leaves_its_inputs_as_they_were() -> None:
    """Dynamo's marks on them would let the next model be refused, too."""
    x, y = rows(8)
    with pytest.raises(piper.PiperCaptureError, match="baked into the model"):
        piper.plan(BakedIn(), ALONE, (x, y))
    assert not [name for name in vars(x) if "dynamo" in name]


def test_a_buffer_that_changes_to_a_value_with_a_gradient() -> None:
    report = piper.doctor(Averaged(), BATCH)
    found(report, Severity.FAULT, "its buffer 'mean' to a value with a gradient", "detach")


def test_what_is_wrong_anyway_is_a_fault() -> None:
    report = piper.doctor(Failing(), BATCH)
    assert str(report).startswith("the model is refused under a strategy: ")
    found(report, Severity.FAULT, line("# the mistake"))


def test_what_a_call_reads_for_nothing() -> None:
    report = piper.doctor(Idle(), BATCH)
    assert found(report, Severity.WARNING, "does not use").where == ("idle",)


@pytest.mark.parametrize(
    ("moved", "waits"),
    [
        (lambda h, x: h.to("cpu"), True),
        (lambda h, x: h.to(device="cpu", dtype=torch.float64), True),
        (lambda h, x: h.to(x.device), False),
        (lambda h, x: h.to(torch.float64), False),
    ],
)
def test_values_that_are_moved(moved: Callable[[Tensor, Tensor], Tensor], waits: bool) -> None:
    class Moved(Clamped):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(moved(x @ self.w, x), y)

    report = piper.doctor(Moved(), BATCH)
    assert report.is_fine
    assert ("brought to the host" in str(report)) == waits


def test_a_wait_that_is_no_break() -> None:
    report = piper.doctor(Waiting(), BATCH)
    assert report.is_fine
    found(report, Severity.WARNING, "brought to the host", line("# the copy"))


def test_a_baked_in_batch_size() -> None:
    report = piper.doctor(BakedIn(), BATCH)
    found(report, Severity.FAULT, "batch size", "models.py:", "inputs={name: ")


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ((1, 8, 8), 2),  # the first, such as of positions, is the same for every row
        ((9, 9, 4), 3),
        ((61, 61), 61),
        ((127, 127), 1),
        ((254, 254), 2),
        ((67 * 71,), 1),
        ((1, 1), 1),
        ((), 1),
    ],
)
def test_how_a_batch_is_split_where_no_strategy_says_it(sizes: tuple[int, ...], parts: int) -> None:
    assert parts <= MOST_PARTS
    strategy = _alone([torch.zeros(size, 2) for size in sizes] + [torch.zeros(())], None)
    assert split_of(strategy).num_microbatches == parts


def test_a_batch_that_is_not_split_is_told() -> None:
    report = piper.doctor(Stack4(), rows(127))
    assert report.is_fine, str(report)
    found(report, Severity.NOTE, "the batch is not split", "an even number of rows")
    assert "not split" not in str(piper.doctor(Stack4(), BATCH))


def test_no_loss() -> None:
    report = piper.doctor(Hidden(), BATCH[:1])
    assert report.is_fine  # forwards and backwards are two programs
    found(report, Severity.WARNING, "no output of the model can be the loss", "loss=")
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
