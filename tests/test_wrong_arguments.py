"""What is no model, no strategy or no input of the model is told before Dynamo or torch see it."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.models import rows

REGIONS = {"first": {"PP": 0}, "second": {"PP": 1}}
STRATEGY = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=REGIONS)


class Two(nn.Module):
    """Two stages, with something between."""

    kept: Tensor

    def __init__(self, between: Callable[[Any, Tensor], object] = lambda module, x: None) -> None:
        super().__init__()
        self.between = between
        self.first, self.second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.register_buffer("kept", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        self.between(self, x)
        return F.mse_loss(self.second(h) * self.kept, y)


MODEL, BATCH = Two(), rows(8)
LOOKS: dict[str, Callable[[Any, Any], object]] = {
    "plan": lambda model, inputs: piper.plan(model, STRATEGY, inputs),
    "compile": lambda model, inputs: piper.compile(model, STRATEGY, inputs),
    "doctor": piper.doctor,
    "auto_stages": lambda model, inputs: piper.auto_stages(model, inputs, 2),
    "search": lambda model, inputs: piper.search(model, inputs, 2),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("two", "model is a str; give an nn.Module"),
        (lambda x, y: x, "model is a function; give an nn.Module"),
        (Two, "model is the class Two; give an instance of it"),
        (
            torch.compile(Two(), backend="eager"),
            "model is compiled already; give the module itself, model._orig_mod",
        ),
        (object.__new__(Two), "model is a Two without super().__init__()"),
    ],
)
def test_what_is_no_model(look: str, model: Any, message: str) -> None:
    assert jobs.refusal(lambda: LOOKS[look](model, BATCH)) == message


@pytest.mark.parametrize("look", ["plan", "auto_stages"])
@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        (BATCH[:1], "missing a required argument: 'y'"),
        ((*BATCH, 1), "too many positional arguments"),
        ({"x": BATCH[0], "z": BATCH[1]}, "missing a required argument: 'y'"),
        ({"x": BATCH[0], "y": BATCH[1], "z": 1}, "got an unexpected keyword argument 'z'"),
    ],
)
def test_what_forward_does_not_take(look: str, inputs: Any, why: str) -> None:
    text = jobs.refusal(lambda: LOOKS[look](MODEL, inputs), piper.PiperCaptureError)
    jobs.mentions(text, "cannot be called with these inputs", "Two.forward(", why, "example_inputs")


def test_doctor_says_so_too() -> None:
    report = piper.doctor(MODEL, BATCH[:1])
    assert not report.is_fine
    jobs.mentions(str(report), "cannot be called with these inputs", "argument: 'y'")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: piper.plan(MODEL, None, BATCH), "strategy is a NoneType"),  # type: ignore[arg-type]
        (lambda: piper.doctor(MODEL, BATCH, strategy="1f1b"), "strategy is a str"),  # type: ignore[arg-type]
        (lambda: piper.auto_stages(MODEL, BATCH, 2, memory="1GB"), "memory is '1GB'"),  # type: ignore[arg-type]
        (lambda: piper.auto_stages(MODEL, BATCH, 2, memory=-1), "memory is -1"),
        (lambda: piper.auto_stages(MODEL, BATCH, 2, memory=float("nan")), "memory is nan"),
        (lambda: piper.auto_stages(MODEL, BATCH, 2, measure="yes"), "measure is 'yes'"),  # type: ignore[arg-type]
        (lambda: piper.search(MODEL, BATCH, 2, memory="1GB"), "memory is '1GB'"),  # type: ignore[arg-type]
        (lambda: piper.search(MODEL, BATCH, 2, top="3"), "top is '3'"),  # type: ignore[arg-type]
        (lambda: piper.search(MODEL, BATCH, 2, zero=3), "zero is 3"),  # type: ignore[arg-type]
        (lambda: piper.search(MODEL, BATCH, 2, schedules="gpipe"), "schedules is 'gpipe'"),
        (lambda: piper.plan(MODEL, STRATEGY, dict(enumerate(BATCH))), "a dict with 0"),  # type: ignore[arg-type]
    ],
)
def test_other_arguments(call: Callable[[], object], message: str) -> None:
    jobs.mentions(jobs.refusal(call), message, "give ")


def new_data(name: str) -> Callable[[Any, Tensor], None]:
    def change(module: Any, x: Tensor) -> None:
        tensor = x if name == "x" else module.get_parameter(name)
        tensor.data = tensor.detach() * 2

    return change


def new_buffer(module: Any, _x: Tensor) -> None:
    module.kept.data = module.kept * 2


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (new_data("second.weight"), ("changes its parameter 'second.weight'", "optimizer.step")),
        (new_data("x"), ("changes its input 'x'", "clone")),
        (new_buffer, ("its buffer 'kept' other memory", "copy_")),
    ],
)
def test_other_memory_for_an_argument(
    between: Callable[[Any, Tensor], None], words: tuple[str, ...]
) -> None:
    """`x.data = ...`, which AOTAutograd ends in an assertion for."""
    text = jobs.refusal(lambda: LOOKS["plan"](Two(between), BATCH), piper.PiperCaptureError)
    jobs.mentions(text, *words, "test_wrong_arguments.py:")


def test_a_logger_that_is_made_in_forward() -> None:
    """The user's line is told, not the one of Python's library in it."""

    def between(_module: Any, _x: Tensor) -> None:
        logging.getLogger("somewhere").warning("a message")

    text = jobs.refusal(lambda: LOOKS["plan"](Two(between), BATCH), piper.PiperCaptureError)
    jobs.mentions(text, "graph break", "test_wrong_arguments.py:", "loggers outside of forward")
    report = str(piper.doctor(Two(between), BATCH))
    jobs.mentions(report, "graph break", "test_wrong_arguments.py:", "loggers outside of forward")
