"""The examples: they train as one process does, run as they are, and compile without a strategy.

Those of transformers and peft need the extra `models` (`make test-models`); without it they are
skipped, and pytest says so.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import example, jobs, observed, zoo
from tests.source_tree import ROOT

pytestmark = [
    # torch's own, while Dynamo traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*deprecated and will be removed:FutureWarning"),  # in peft
]


@pytest.mark.parametrize("name", [example.param(name) for name in example.NAMES])
def test_trains_as_one_process(name: str) -> None:
    wanted = example.load(name).strategy()
    assert max(len(place.devices) for place in wanted.of(piper.Place)) > 1, "no replicas"
    assert len({place.devices for place in wanted.of(piper.Place)}) > 1, "one pipeline rank"
    zoo.check(
        example.subject(name),
        wanted,
        tolerance=example.tolerance(name),
        optimizers=zoo.OPTIMIZERS if example.libraries(name) else zoo.OPTIMIZERS[1:],
    )


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "name", [example.param(n, *[pytest.mark.slow] * (n != "nested_region")) for n in example.NAMES]
)
def test_does_what_eager_does_without_a_strategy(name: str, training: bool) -> None:
    """Outputs, gradients and buffers of a whole model, in training and in evaluation."""
    subject = example.subject(name)
    with torch.set_grad_enabled(training):
        observed.check(lambda: subject.calls(training=training), example.tolerance(name))


CUT = [example.param(n, *[pytest.mark.slow] * (n != "unet")) for n in example.NAMES]


@pytest.mark.parametrize("name", CUT)
def test_auto_stages_cuts_it(name: str) -> None:
    """Into two stages, under which it trains as one process does."""
    subject, wanted = example.subject(name), example.load(name).strategy()
    (split,) = wanted.of(piper.Split)
    regions = piper.auto_stages(subject.build(), subject.batch(0, 0), 2)
    assert {tags["PP"] for tags in regions.values()} == {0, 1}
    strategy = piper.strategies.pipeline(
        "one_f_one_b",
        ranks=2,
        num_microbatches=2,
        regions=regions,
        inputs=split.inputs,
        loss=wanted.loss,
    )
    zoo.check(subject, strategy, tolerance=example.tolerance(name), optimizers=zoo.OPTIMIZERS[1:])


@pytest.mark.parametrize("name", CUT)
def test_doctor_finds_no_fault(name: str) -> None:
    """Under its own strategy; and without one, where the batch alone says how it is split."""
    subject, wanted = example.subject(name), example.load(name).strategy()
    report = piper.doctor(subject.build(), subject.batch(0, 0), strategy=wanted)
    assert report.is_fine, str(report)
    assert report.graphs == 1
    used = {arg.name for arg in piper.plan(subject.build(), wanted, subject.batch(0, 0)).args}
    unused = [one for one in report.findings if "does not use" in one.title]
    assert not [name for one in unused for name in one.where if name in used], str(report)


def fewer(inputs: Any, rows: int) -> Any:
    """A batch of fewer rows."""
    size = max(v.shape[0] for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim())
    return {
        name: v[:rows] if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == size else v
        for name, v in inputs.items()
    }


@pytest.mark.parametrize("name", CUT)
def test_sizes_may_change_without_a_strategy(name: str) -> None:
    """One program for batches of any size, by Dynamo's symbols."""
    subject = example.subject(name)
    model = subject.build()
    step = torch.compile(model, backend="piper", dynamic=True)
    for rows in (8, 5, 3, 6):
        inputs = subject.batch(0, 0)
        given = fewer(inputs, rows) if isinstance(inputs, dict) else [v[:rows] for v in inputs]
        found, want = (
            example.loss_of(one(**given) if isinstance(given, dict) else one(*given))
            for one in (step, model)
        )
        jobs.close(found.detach(), want.detach(), f"loss of {rows} rows", example.tolerance(name))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.dist(4)
@pytest.mark.parametrize("name", [example.param(name) for name in example.NAMES])
def test_runs_as_it_is(name: str) -> None:
    """As a user starts it: four processes, float32, dropout where the model has it."""
    env = {name: value for name, value in os.environ.items() if name != "PIPER_VERIFY"}
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.fullmatch(r"loss (\S+) -> (\S+)", done.stdout.strip().splitlines()[-1])
    assert losses is not None, done.stdout
    first, last = map(float, losses.groups())
    assert last < 0.98 * first, done.stdout


def outcome(name: str, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients of one process with the library's experts, or with others."""
    subject = example.subject(name)
    model: Any = subject.build()
    model.set_experts_implementation(implementation)
    output = model(**subject.batch(0, 0))
    output.loss.backward()
    return output.logits.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", [example.param("qwen3_moe")])
def test_registered_experts_compute_what_the_librarys_do(name: str) -> None:
    module = example.load(name)
    logits, grads = outcome(name, "eager")
    found, ours = outcome(name, "piper")
    jobs.close(found, logits, "logits", 1e-9)
    assert set(ours) == set(grads)
    for param, grad in grads.items():
        jobs.close(ours[param], grad, param, 1e-9)

    def swapped(self: nn.Module, hidden: Any, index: Any, weights: Any) -> Any:
        return module.experts(self, hidden, index, weights.flip(-1))

    module.ALL_EXPERTS_FUNCTIONS.register("swapped", swapped)
    wrong, _ = outcome(name, "swapped")
    with pytest.raises(AssertionError, match="off by"):
        jobs.close(wrong, logits, "logits", 1e-9)


def last_forward(program: Any) -> int:
    """Where a rank's last forward runs."""
    return max(
        at
        for at, instr in enumerate(program.instrs)
        if instr.op is Op.RUN and instr.task.startswith("F.")
    )


def first_run(program: Any, task: str) -> int:
    """Where a rank first runs a chunk of a task."""
    return next(
        at for at, instr in enumerate(program.instrs) if instr.op is Op.RUN and instr.task == task
    )


def first_received(program: Any) -> int:
    """Where a rank first waits for a message of another."""
    posted = {i.outputs[0] for i in program.instrs if i.op is Op.POST}
    return min(
        at
        for at, instr in enumerate(program.instrs)
        if instr.op is Op.WAIT and set(instr.inputs) & posted
    )


@pytest.mark.parametrize("name", [example.param("clip")])
def test_neither_tower_waits_for_the_other(name: str) -> None:
    """What crosses are embeddings of the images, later their gradients, and the loss."""
    module = example.load(name)
    plan = piper.plan(module.model(), module.strategy(), module.inputs())
    vision, text = plan.programs[0], plan.programs[2]
    assert first_received(vision) > last_forward(vision)
    assert first_run(text, "F.PP1.MB0") < first_received(text) < first_run(text, "F.PP2.MB0")

    def sent(program: Any) -> list[tuple[int, ...]]:
        return [i.spec.shape for i in program.instrs if i.op is Op.SEND and i.spec]

    embeddings = [(4, 16)] * 2  # of each microbatch
    assert sent(vision) == embeddings
    assert sent(text) == [*embeddings, ()]


def torchvision() -> Any:
    """The library, or nothing where it cannot be imported."""
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # it was built for another torch
        return None


def test_the_resnet_is_torchvisions() -> None:
    """The same parameters and buffers, and what it computes from them."""
    library = torchvision()
    if library is None:
        pytest.skip("needs a torchvision that was built for this torch")
    block, widths = library.models.resnet.BasicBlock, (64, 128, 256, 512)
    theirs = library.models.ResNet(block, [1, 1, 1, 1], num_classes=5)
    ours = example.load("resnet").ResNet(widths, 5)
    ours.load_state_dict(theirs.state_dict())
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(5, (4,))
    want = nn.functional.cross_entropy(theirs(images), labels)
    jobs.close(ours(images, labels).detach(), want.detach(), "loss", 1e-6)
    for (name, buffer), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        jobs.close(buffer, other, name, 1e-6)


MISSING = importlib.util.find_spec("transformers") is None


@pytest.mark.skipif(not MISSING, reason="needs an environment without transformers")
def test_an_environment_without_the_libraries_is_refused() -> None:
    """`make test-models` with a PYTHON that would skip the models is no success.

    If it were, it would collect this file, and not run it again.
    """
    done = subprocess.run(
        ["make", "test-models", f"PYTHON={sys.executable}", "ARGS=--collect-only"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    jobs.mentions(done.stdout + done.stderr, "transformers", "hint")
