"""What users' models do beside computing: wrapped forwards, log messages, outputs of all pairs."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import example, jobs, zoo
from tests.models import fill, rows, xin

# Torch's own, while Dynamo traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
LOG = logging.getLogger(__name__)
REGIONS = {"first": {"PP": 0}, "second": {"PP": 1}}


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper as libraries have them: Dynamo sees its `*args` and `**kwargs`."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Layer(nn.Module):
    """A layer whose forward is wrapped."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(fill([4, 4], key))

    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.T)


class Wrapped(nn.Module):
    """Layers under wrapped forwards, found by `__getattr__`; it writes to the log."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"first": Layer(0), "second": Layer(1)})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    @decorated
    def forward(self, x: Tensor, table: Tensor, *, y: Tensor) -> Tensor:
        LOG.warning("a message for every call")
        return F.mse_loss(self.second(self.first(x)) * table.sum(), y)


def wrapped_batch() -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    x, y = rows(8)
    return (x, xin([3], 5)), {"y": y}


def wrapped_strategy(**options: Any) -> piper.Strategy:
    inner = {f"inner.{name}": tags for name, tags in REGIONS.items()}
    return piper.strategies.pipeline(
        ranks=2, num_microbatches=2, inputs={"table": "replicate"}, regions=inner, **options
    )


def test_names_are_those_of_the_model_and_not_of_wrappers() -> None:
    """Of parameters, of inputs in `Split`, of a weight's arguments, and of patterns."""

    def job() -> dict[str, Tensor]:
        (x, table), named = wrapped_batch()
        step = torch.compile(
            Wrapped(), backend="piper", options={"strategy": wrapped_strategy(combine=weigh)}
        )
        piper.prepare(step, x, table, **named)
        step(x, table, **named).backward()
        return jobs.grads(step)

    def weigh(y: Tensor, table: Tensor) -> Tensor:
        return table.abs().sum() * y.shape[0]

    want = Wrapped()
    (x, table), named = wrapped_batch()
    want(x, table, **named).backward()
    jobs.check_grads(jobs.run_ranks(job, 2), want)


class Pairs(nn.Module):
    """A contrastive loss, and the similarities of all pairs beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(0), Layer(1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        alike = self.first(x) @ self.second(y).T
        return {"loss": F.cross_entropy(alike, torch.arange(alike.shape[0])), "alike": alike}


def test_similarities_of_all_pairs_are_not_joined() -> None:
    """A batch's are not those of its microbatches; who touches them is told, others are not."""
    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=REGIONS, loss="loss")
    subject = zoo.Subject(
        build=Pairs,
        batch=lambda step, replica: dict(zip("xy", rows(8, 2 * step), strict=True)),
        loss_of=lambda output: output["loss"],
    )
    zoo.check(subject, strategy)

    def job() -> tuple[tuple[int, ...], str]:
        x, y = rows(8)
        output = piper.compile(Pairs(), strategy, (x, y))(x, y)
        return tuple(output["alike"].shape), jobs.refusal(
            lambda: output["alike"] + 1, piper.PiperAbsentError
        )

    for shape, text in jobs.run_ranks(job, 2):
        assert shape == (8, 8)
        jobs.mentions(text, "'alike'", "float64[8, 8]", "float64[4, 4]", "outside of the model")


def test_gradients_alone_cross_where_a_custom_function_is_at_a_border() -> None:
    """What its forward saved stays where it was made."""
    subject, regions = example.subject("autograd_function"), example.regions("autograd_function")
    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=regions)
    plan = piper.plan(subject.build(), strategy, subject.batch(0, 0))
    sent = [
        [instr.spec.dtype for instr in program.instrs if instr.op is Op.SEND and instr.spec]
        for program in plan.programs
    ]
    # A value for each microbatch, without what of it is passed on; gradients, and the loss.
    assert sent == [[torch.float64] * 2, [torch.float64] * 3]


def test_calls_of_one_nested_region_are_told_apart() -> None:
    """Each belongs to its own module: the plan is that of the model without the mark."""
    nested: Any = example.load("nested_region").Nested

    class Unmarked(nested):  # type: ignore[misc]
        def once(self, block: nn.Module, x: Tensor) -> Tensor:
            found: Tensor = block(x)
            return found

    regions = example.regions("nested_region")
    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=regions)
    batch = example.subject("nested_region").batch(0, 0)
    plans = [piper.plan(model().double(), strategy, batch) for model in (Unmarked, nested)]
    held = [
        [sorted(plan.args[p].name for _, p in program.state) for program in plan.programs]
        for plan in plans
    ]
    assert held[0] == held[1]
    assert plans[0].summary().splitlines()[0] == plans[1].summary().splitlines()[0]


class Annotated(nn.Module):
    """A nested region whose calls are tagged where they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    @torch.compiler.nested_compile_region
    def once(self, layer: nn.Module, h: Tensor) -> Tensor:
        found: Tensor = layer(h)
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for k, layer in enumerate(self.layers):
            with piper.annotate("PP", k // 2):
                h = self.once(layer, h)
        return F.mse_loss(h, y)


def test_tags_around_a_nested_region_are_those_of_each_call() -> None:
    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2)
    plan = piper.plan(Annotated(), strategy, rows(8))
    held = [[plan.args[p].name for _, p in program.state] for program in plan.programs]
    assert [sorted({name.rpartition(".")[0] for name in names}) for names in held] == [
        ["layers.0", "layers.1"],
        ["layers.2", "layers.3"],
    ]


@pytest.mark.parametrize(
    "kind",
    [nn.LSTM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.GRU, nn.RNN))],
)
def test_recurrent_layers_are_captured(kind: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = kind(4, 4, batch_first=True, dtype=torch.float64)
            self.second = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[0]).square().mean()

    strategy = piper.strategies.pipeline(ranks=2, num_microbatches=2, regions=REGIONS)
    subject = zoo.Subject(build=Model, batch=lambda step, replica: {"x": xin([4, 3, 4], step)})
    zoo.check(subject, strategy, steps=1)


class Listed(nn.Module):
    """Blocks that are registered by one name and called through a plain list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = []
        for k in range(4):
            self.add_module(f"block{k}", nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())
            self.blocks.append(getattr(self, f"block{k}"))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def test_modules_in_a_plain_list_have_their_own_names() -> None:
    batch = rows(8, 0)
    report = piper.doctor(Listed(), batch)
    assert not report.findings, str(report)
    regions = piper.auto_stages(Listed(), batch, 2)
    assert dict(regions) == {f"block{k}": {"PP": k // 2} for k in range(4)}
    by_pattern = {"block[01]": {"PP": 0}, "block[23]*": {"PP": 1}}
    wanted = piper.strategies.pipeline(
        ranks=2, num_microbatches=4, schedule="one_f_one_b", regions=by_pattern
    )
    plan = piper.plan(Listed(), wanted, batch)
    assert {arg.name for arg in plan.args} == {"x", "y", *dict(Listed().named_parameters())}

    def job() -> jobs.Trace:
        batches = [rows(8, k) for k in range(jobs.STEPS)]
        return jobs.train(piper.compile(Listed(), wanted, batches[0]), batches)

    want = jobs.reference(Listed(), [rows(8, k) for k in range(jobs.STEPS)], 4)
    jobs.compare(jobs.run_ranks(job, 2), want)
