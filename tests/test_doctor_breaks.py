"""Graph breaks in `piper.doctor`: what to do about each, and that none spoils what comes later."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.backend import break_remedy, graph_break, is_wait
from piper_dynamo.examination import Severity
from tests.test_doctor import ALONE, BATCH, Clamped, found, line

# Torch's own, while Dynamo traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Counting(Clamped):
    """Assigns a buffer in what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        def product(value: Tensor) -> Tensor:
            self.count = self.count + 1  # the count
            return value @ self.w

        return F.mse_loss(checkpoint(product, x, use_reentrant=False), y)


class Looping(Clamped):
    """A break in a loop, where Dynamo cannot resume: it leaves forward to Python."""

    flag = True
    mark = "# the loop's break"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        for _ in range(2):
            h = h * 2
            if self.flag:
                torch._dynamo.graph_break()  # the loop's break
        return F.mse_loss(h, y)


class Skipped(Looping):
    """The same in code of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        for _ in range(2):
            if self.flag:
                torch._dynamo.graph_break()
        return F.mse_loss(h, y)


class Trying(Looping):
    """A break in a block that is tried: Dynamo cuts the graph before it."""

    mark = "# the try's break"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        h = h + 1
        try:
            h = h * 2
            torch._dynamo.graph_break()  # the try's break
        finally:
            h = h * 3
        return F.mse_loss(h, y)


def entries(model: nn.Module) -> list[int]:
    """What is compiled of a model's forward."""
    return [id(one) for one in eval_frame._debug_get_cache_entry_list(model.forward.__code__)]


@pytest.mark.parametrize(
    ("why", "waits", "hint"),
    [
        ("Data-dependent branching: attempted to jump", True, "torch.where"),
        ("generic_jump TensorVariable()", True, "torch.where"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", True, "keep .item()"),
        ("Tensor.tolist() with non-integer tensor", True, "keep .item()"),
        ("Tensor.numpy() with trace_numpy=False", True, "keep .item()"),
        ("Dynamic shape operator: aten.nonzero.default", True, "keep shapes fixed"),
        ("unsupported __getitem__ (sq_item)", False, "move the statement"),
        ("Missing tp_iteritem", False, "move the statement"),
        ("input iterator to itertools.cycle has too many items", False, "move the statement"),
        ("attempted to trace numpy function unsupported by PyTorch", False, "move the statement"),
        ("HOP: Unsafe side effect: Attempted to mutate", False, "self.count.add_(1)"),
    ],
)
def test_what_to_do_about_a_break_follows_from_its_reason(why: str, waits: bool, hint: str) -> None:
    assert is_wait(why) == waits
    assert hint in break_remedy(why)
    assert break_remedy(why) in graph_break("model.py:1", why)


def test_a_checkpoint_that_assigns_a_buffer() -> None:
    report = piper.doctor(Counting(), BATCH)
    found(
        report, Severity.FAULT, "graph break", line("# the count", __file__), "self.count.add_(1)"
    )
    assert "does not use" not in str(report)  # Dynamo leaves all of forward to Python


@pytest.mark.parametrize("model", [Looping(), Trying()], ids=["loop", "try"])
def test_a_break_that_cannot_be_resumed_after(model: Looping) -> None:
    for _ in range(2):  # a report is no reason for another one to see less
        report = piper.doctor(model, BATCH)
        fault = found(report, Severity.FAULT, "graph break", line(model.mark, __file__))
        assert len(fault.where) == 1, "an earlier statement is told of as well"
        found(
            report,
            Severity.WARNING,
            "could not be looked at",
            "other graph breaks",
            line(model.mark, __file__),
        )


def test_a_report_leaves_dynamo_as_it_was() -> None:
    model = Looping()
    compiled = torch.compile(model, backend="eager")  # somebody's, also of the same code
    model.flag = False
    compiled(*BATCH)
    model.flag = True
    before = entries(model)
    assert not piper.doctor(model, BATCH).is_fine
    model.flag = False
    assert set(before) <= set(entries(model))
    assert piper.plan(model, ALONE, BATCH).args
    assert piper.doctor(model, BATCH).is_fine


def test_a_skip_without_the_survey_spoils_later_calls() -> None:
    """What `skips_taken_back` is for; and it leaves alone what was skipped before."""
    model = Skipped()
    torch.compile(model, backend="eager")(*BATCH)
    model.flag = False
    with dynamo.skips_taken_back():
        torch.compile(model, backend="eager")(*BATCH)
    with pytest.raises(RuntimeError, match="no compiled frames"):
        torch.compile(model, backend="eager", fullgraph=True)(*BATCH)


class Misfit(Clamped):
    """A matrix product of matrices that do not fit."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x @ self.w
        return F.mse_loss(h @ torch.ones(5, 3, dtype=h.dtype), y)  # the misfit


def test_an_operator_that_fails_is_no_graph_break() -> None:
    with pytest.raises(piper.PiperCaptureError) as caught:
        piper.plan(Misfit(), ALONE, BATCH, 1)
    text = str(caught.value)
    assert text.startswith("an operator of the model fails")
    assert line("# the misfit", __file__) in text
    assert "[the batch size, 4] X [5, 3]" in text
    report = str(piper.doctor(Misfit(), BATCH))
    assert "an operator of the model fails" in report
    assert "graph break" not in report
