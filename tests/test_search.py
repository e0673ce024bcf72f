"""The search: what it finds is what planning everything finds; bounds, memory, refusals."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.errors import PiperError, PiperStrategyError
from piper_dynamo.look.compare import compare
from piper_dynamo.look.prediction import bytes_of
from piper_dynamo.look.target import Target
from piper_dynamo.predict.nominal import CPU, GPU, nominal
from piper_dynamo.predict.search import memory_by_rank
from piper_dynamo.predict.space import Choice, Space
from tests import experts
from tests.models import Stack4, rows


class Net(nn.Module):
    """Layers of unlike widths, without annotations."""

    def __init__(self, widths: tuple[int, ...] = (8, 32, 8, 16, 8)) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=torch.float64) for a, b in pairs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 8, dtype=torch.float64), torch.randn(count, 8, dtype=torch.float64)


def roofline(chunks) -> piper.Costs:
    return piper.Costs.roofline(
        chunks, flops=1e9, memory_bandwidth=1e9, alpha=1e-6, bandwidth=1e8, skew=1e-6
    )


# Not all there is, so that planning everything is quick.
SPACE = {
    "schedules": ("one_f_one_b", "interleaved_1f1b", "zb_h1", "zbv"),
    "microbatches": (1, 2, 4, 8),
    "zero": (0, 3),
}


def looked(**options) -> object:
    return piper.search(Net(), batch(), 4, **{"costs": roofline, **SPACE, **options})


@pytest.fixture(scope="module")
def everything():
    return looked(exhaustive=True, top=10**6)


# The search


def test_bounds_leave_out_nothing_that_is_among_the_best(everything) -> None:
    found = looked(exhaustive=False, top=5)
    assert found.best == everything.best[:5]
    pruned = [d for d in found.dropped if "takes at least" in d.detail]
    assert pruned, "nothing was left out by its bound: the test shows nothing"


def test_no_bound_exceeds_what_it_bounds(everything) -> None:
    assert len(everything.best) > 20
    for one in everything.best:
        assert one.bound <= one.seconds * (1 + 1e-9), one.choice


def test_bounds_of_1f1b_without_messages_are_what_it_takes() -> None:
    found = piper.search(
        Net(), batch(8), 4, costs=piper.Costs(), pp=(2, 4), zero=(0,), schedules=("one_f_one_b",)
    )
    assert len(found.best) == 7
    for one in found.best:
        assert one.bound == one.seconds


times = st.floats(0.1, 2.0)


@pytest.mark.slow
@given(times, times, times, st.floats(0.0, 0.5), st.sampled_from([1, 2]))
@settings(max_examples=5, deadline=None, derandomize=True)
def test_no_bound_exceeds_any_cost(f: float, bi: float, bw: float, comm: float, top: int) -> None:
    costs = piper.Costs(F=f, BI=bi, BW=bw, comm=comm, call=comm)
    found = piper.search(Net(), batch(8), 2, costs=costs, exhaustive=True, top=10**6, zero=(0,))
    for one in found.best:
        assert one.bound <= one.seconds * (1 + 1e-9), one.choice
    fewer = piper.search(Net(), batch(8), 2, costs=costs, exhaustive=False, top=top, zero=(0,))
    assert fewer.best == found.best[:top]


@pytest.mark.slow
def test_the_same_search_finds_the_same(everything) -> None:
    again = looked(exhaustive=True, top=10**6)
    assert again == everything
    assert [f.strategy.to_json() for f in again.best] == [
        f.strategy.to_json() for f in everything.best
    ]


@pytest.mark.slow
def test_a_search_without_costs_says_what_it_counts_by() -> None:
    """As the simplest call is written; what it finds is that of the roofline that it names."""
    model, inputs, devices = Net(), batch(), 2
    found = piper.search(model, inputs, devices, memory=2**20)
    assert found.best
    assert "costs: none were given, so those of a CPU core a rank: 4e+10 FLOP/s" in str(found)
    assert found.to_dict()["costs"] == str(CPU)
    assert found.best == piper.search(model, inputs, devices, memory=2**20, costs=CPU).best
    assert nominal(["cpu", "meta"]) is CPU
    assert nominal(["cpu", "cuda:0"]) is GPU
    gpu = piper.search(model, inputs, devices, costs=GPU, microbatches=(1,))
    assert gpu.best[0].seconds < found.best[0].seconds
    assert looked(top=1, pp=(4,), microbatches=(1,)).costs == "as given"


def test_memory_is_a_limit(everything) -> None:
    most = sorted(one.memory for one in everything.best)[len(everything.best) // 2]
    found = looked(exhaustive=True, top=10**6, memory=most, recompute=(1.0,))
    assert found.best == tuple(one for one in everything.best if one.memory <= most)
    tight = [d for d in found.dropped if d.why == "does not fit"]
    assert len(tight) == len(everything.best) - len(found.best)
    assert "bytes on a rank, of" in tight[0].detail
    assert "does not fit: " in str(found)
    none = looked(memory=1, pp=(4,), microbatches=(1,))
    assert none.best == ()
    assert "none can be run" in str(none)


def test_what_is_refused_says_why() -> None:
    found = looked(schedules=("dualpipev", "one_f_one_b"), pp=(2, 3, 4), top=3)
    refused = [d for d in found.dropped if d.why == "refused"]
    assert any("num_microbatches" in d.detail for d in refused)
    assert "refused: " in str(found)
    assert found.left_out == ("pp 3: does not divide 4 devices",)
    assert {d.why for d in found.dropped} <= {"refused", "slower"}
    json.dumps(found.to_dict(), allow_nan=False)


def test_where_a_choice_does_not_fit_less_is_kept() -> None:
    one = {"pp": (2,), "microbatches": (4,), "schedules": ("gpipe",), "zero": (0,)}
    (whole,) = looked(**one).best
    found = looked(**one, memory=whole.memory - 1)
    assert found.best[0].choice.recompute < whole.choice.recompute == 1
    assert found.best[0].memory < whole.memory
    assert found.best[0].seconds > whole.seconds
    assert any(d.why == "does not fit" and d.choice == whole.choice for d in found.dropped)
    assert "Recompute" in repr(found.best[0].strategy)
    assert not looked(**one, memory=whole.memory - 1, recompute=(1.0,)).best


def test_memory_counts_state_and_step() -> None:
    strategy = piper.strategies.pipeline("gpipe", ranks=2, num_microbatches=2)
    model = Stack4(2)
    model.w[0].requires_grad_(False)
    plan = piper.plan(model, strategy, rows(4))
    found, without = memory_by_rank(plan), memory_by_rank(plan, optimizer=0)
    own = 2 * 16 * 8  # two matrices of 16 numbers in float64
    assert [found[r] - without[r] for r in range(2)] == [own, 2 * own]  # one is frozen
    assert list(without.values()) == [one.total for one in plan.memory()]
    assert all(without[r] - own >= plan.programs[r].peak_bytes for r in range(2))


def test_a_model_with_its_own_stages_keeps_them() -> None:
    found = piper.search(Stack4(2), rows(8), 2, costs=piper.Costs(), zero=(0,), top=100)
    assert {one.choice.stages for one in found.best} == {2}
    assert any("own annotations name 2 stages" in d.detail for d in found.dropped)
    assert found.best[0].strategy.regions is None


def test_experts_are_shared_among_replicas() -> None:
    model = experts.Mixture(1)
    found = piper.search(
        model, rows(16), 2, costs=roofline, pp=(1,), microbatches=(1, 2), zero=(0,), exhaustive=True
    )
    assert {one.choice.ep for one in found.best} == {1, 2}, str(found)
    for one in found.best:
        assert one.bound <= one.seconds


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top": 0}, "top is 0"),
        ({"schedules": ("zb",)}, "schedule='zb': did you mean 'zbv'"),
        ({"pp": (0,)}, "pp has 0"),
        ({"pp": (3,)}, "nothing to choose from"),
        ({"zero": (4,)}, "zero has 4"),
        ({"microbatches": (1.5,)}, "microbatches has 1.5"),
        ({"recompute": (0.5, 1.0)}, "falling numbers"),
        ({"recompute": (2.0,)}, "falling numbers"),
    ],
)
def test_no_search_is_refused(options: dict, text: str) -> None:
    with pytest.raises(PiperStrategyError, match=text):
        looked(**options)


def test_one_call_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from piper_dynamo import planning
    from piper_dynamo.predict import search

    traced, looks = [], []
    trace, look = planning.capturing.trace, search.look
    monkeypatch.setattr(planning, "_templates", {})
    monkeypatch.setattr(
        planning.capturing, "trace", lambda *a, **k: traced.append(a) or trace(*a, **k)
    )
    monkeypatch.setattr(search, "look", lambda *a, **k: looks.append(a) or look(*a, **k))
    found = looked(exhaustive=True, top=10**6, schedules=("gpipe", "one_f_one_b"))
    assert len(looks) == 1
    # One trace per number of stages, replicas and microbatches; not per schedule and level.
    sizes = {(c.stages, c.dp, c.microbatches) for c in (f.choice for f in found.best)}
    assert len(traced) == len(sizes) < len(found.best)


def of_winner(model) -> Target:
    found = piper.search(Net(), batch(), 4, costs=roofline, pp=(2,), zero=(3,), top=1)

    def batches(step: int, replica: int, replicas: int) -> tuple[Tensor, ...]:
        return tuple(value.add(step).chunk(replicas)[replica] for value in batch())

    return Target(
        name="the winner",
        strategy=found.best[0].strategy,
        model=model,
        inputs=lambda: batches(0, 0, 2),
        batches=batches,
        is_meta=False,
    )


def test_a_winner_trains_like_one_process() -> None:
    """Two stages, two replicas with ZeRO-3: three steps in float64, with clipping."""
    torch._dynamo.reset()
    assert compare(of_winner(Net)).is_equal


def test_a_winner_of_another_model_does_not() -> None:
    torch._dynamo.reset()
    scales = itertools.count(1)

    def other() -> nn.Module:
        model, scale = Net(), next(scales)
        for parameter in model.parameters():
            parameter.data *= scale if scale > 5 else 1  # ranks have equal ones, the reference not
        return model

    assert not compare(of_winner(other)).is_equal


def test_pictures(tmp_path, everything) -> None:
    everything.plot(tmp_path / "search.svg")
    assert "predicted time" in (tmp_path / "search.svg").read_text()
    with pytest.raises(PiperError, match=r"give a \.png or \.svg"):
        everything.plot(tmp_path / "search.pdf")


def test_choices_are_each_once() -> None:
    space = Space(devices=8, rows=16, has_experts=True)
    found = list(space.choices())
    assert len(found) == len(set(found))
    assert all(c.pp * c.dp == 8 and 16 % (c.dp * c.microbatches) == 0 for c in found)
    assert all(isinstance(c, Choice) and math.gcd(c.dp, c.ep) == c.ep for c in found)


# The command


FILE = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def model():
    return Model()


def inputs():
    return (torch.randn(8, 8),)
"""
RATES = ("--flops", "1e9", "--memory-bandwidth", "1e9")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(FILE)
    return path


def piper_(*arguments: object) -> Result:
    torch._dynamo.reset()
    found = CliRunner().invoke(main, [str(a) for a in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_the_command_finds_draws_and_writes(file: Path, tmp_path: Path) -> None:
    where = tmp_path / "best.json"
    found = piper_(
        *("search", file, "--devices", 2, *RATES, "--top", 2, "--json", "--strategy-to", where),
        *("-o", tmp_path / "search.png"),
    )
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout.splitlines()[-1])
    assert (said["command"], said["ok"], len(said["best"])) == ("search", True, 2)
    assert said["best"][0]["seconds"] <= said["best"][1]["seconds"]
    assert {one["why"] for one in said["dropped"]} <= {"refused", "slower"}
    assert piper.Strategy.from_json(where.read_text()).directives
    assert (tmp_path / "search.png").stat().st_size > 1000


def test_the_command_without_costs_takes_usual_hardware(file: Path) -> None:
    found = piper_("search", file, "--devices", 1, "--json")
    assert found.exit_code == 0, found.output
    assert "costs: none were given" in found.stdout
    assert "a CPU core" in json.loads(found.stdout.splitlines()[-1])["costs"]


def test_nothing_that_fits_is_exit_code_1(file: Path) -> None:
    found = piper_("search", file, "--devices", 1, *RATES, "--memory", "1KiB")
    assert found.exit_code == 1
    assert "does not fit: " in found.stdout


def test_options_narrow_the_search_of_a_built_in_model() -> None:
    sizes = ("--dim", 16, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--seq", 8, "--batch", 4)
    narrowed = ("--pp", 2, "--schedule", "1f1b", "--microbatches", 2)
    found = piper_("search", "--devices", 2, *sizes, *narrowed, *RATES, "--json")
    assert found.exit_code == 0, found.output
    (best,) = json.loads(found.stdout.splitlines()[-1])["best"]
    assert (best["pp"], best["schedule"], best["microbatches"]) == (2, "one_f_one_b", 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--flops", 1e9), "needs both"),
        ((*RATES, "--profile", "x"), "say once what things take"),
        ((*RATES, "--ranks", 2), "uses --devices"),
        ((*RATES, "--memory", "much"), "write it as 4GiB"),
        ((*RATES, "--keep", "step"), "--keep: a search does not take this"),
        ((*RATES, "--precision", "bf16"), "--precision: a search does not take this"),
        ((*RATES, "--dp", 3), "--dp 3 does not divide --devices 2"),
        ((*RATES, "--dp", 2, "--pp", 2), "do not come to --devices 2"),
    ],
)
def test_a_search_asked_wrongly_is_exit_code_2(arguments: tuple, text: str) -> None:
    found = piper_("search", "--devices", 2, *arguments)
    assert found.exit_code == 2
    assert text in found.stderr


def test_a_strategy_is_no_target_of_a_search(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=1).to_json())
    found = piper_("search", path, "--devices", 2, *RATES)
    assert found.exit_code == 2
    assert "says a strategy, which is looked for here" in found.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4GiB", 2**32), ("1.5 KiB", 1536), ("100", 100), ("7B", 7)]
)
def test_bytes_on_the_command_line(text: str, nbytes: int) -> None:
    assert bytes_of(text) == nbytes
