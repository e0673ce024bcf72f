"""Ranks on hosts: meshes with an order, pipelines that follow it, and what crosses hosts."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.topology import describe, traffic
from piper_dynamo.train import compare
from piper_dynamo.train.compare import one_process
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import balance
from tests import jobs
from tests.models import Stack4, rows
from tests.test_train_cli import RATE, train_rank
from tests.test_train_data import counting


def test_a_mesh_with_an_order() -> None:
    mesh = piper.Mesh((2, 2, 2), ("pp", "dp", "ep"), order=("dp", "pp", "ep"))
    assert mesh.ranks(dp=0) == [0, 1, 2, 3]
    assert mesh.ranks(pp=0) == [0, 1, 4, 5]
    assert mesh.ranks(ep=0) == [0, 2, 4, 6]
    assert repr(mesh) == ('piper.Mesh((2, 2, 2), ("pp", "dp", "ep"), order=("dp", "pp", "ep"))')
    assert eval(repr(mesh)) == mesh
    assert mesh != piper.Mesh((2, 2, 2), ("pp", "dp", "ep"))
    assert piper.Mesh((2,), ("dp",), order=["dp"]) == piper.Mesh((2,), ("dp",))
    strategy = piper.Strategy(piper.Place({"PP": 0}, devices=[0]), mesh=mesh)
    assert piper.Strategy.from_json(strategy.to_json()) == strategy


@given(st.permutations(["a", "b", "c"]), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_an_order_is_another_sequence_of_axes(order: list[str], shape: list[int]) -> None:
    mesh = piper.Mesh(shape, ("a", "b", "c"), order)
    plain = piper.Mesh([shape["abc".index(name)] for name in order], order)
    for name, size in zip("abc", shape, strict=True):
        for at in range(size):
            assert mesh.ranks(**{name: at}) == plain.ranks(**{name: at})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: piper.Mesh((2,), ("dp",), order="dp"), "order='dp': must be a tuple of names"),
        (
            lambda: piper.Mesh((2, 2), ("pp", "dp"), order=("dp",)),
            "order=('dp',): must have the axes pp, dp, each once",
        ),
        (
            lambda: piper.strategies.pipeline(
                ranks=2, num_microbatches=2, replicas=2, order=("dp", "ep")
            ),
            "order=('dp', 'ep'): must have the axes of several ranks: pp, dp",
        ),
        (
            lambda: piper.strategies.pipeline(ranks=2, num_microbatches=2, order=("pp", "tp")),
            "order=('pp', 'tp'): must have the axes of several ranks: pp",
        ),
    ],
)
def test_orders_that_are_none(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(piper.PiperStrategyError, match=re.escape(message)):
        make()


def devices(strategy: piper.Strategy) -> list[tuple[int, ...]]:
    return [place.devices for place in strategy.of(piper.Place)]


def test_a_pipeline_follows_the_order() -> None:
    def made(order: tuple[str, ...] | None, **more: int) -> piper.Strategy:
        return piper.strategies.pipeline(ranks=2, num_microbatches=2, order=order, **more)

    assert devices(made(None, replicas=2)) == [(0, 1), (2, 3)]
    assert made(("pp", "dp"), replicas=2) == made(None, replicas=2)
    assert devices(made(("dp", "pp"), replicas=2)) == [(0, 2), (1, 3)]
    shared = made(("dp", "pp", "ep"), replicas=4, expert_ranks=2)
    assert devices(shared) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert shared.mesh is not None
    assert shared.mesh.ranks(pp=1, dp=0) == [2, 3]
    copied = made(("copy", "pp", "dp"), replicas=4, zero=1, shard_ranks=2)
    assert devices(copied) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize(
    "options",
    [
        {"order": "dp,pp", "zero": 3},
        pytest.param({"order": "dp,pp", "schedule": "zbv"}, marks=pytest.mark.slow),
    ],
)
def test_an_order_changes_no_number(options: dict[str, Any]) -> None:
    config = Config(
        dim=16, layers=4, heads=2, kv_heads=1, seq=8, batch=8, microbatches=4, steps=2, pp=2, dp=2,
        dtype="float64", **options,
    )  # fmt: skip
    corpus = counting()
    want = one_process(config, corpus)
    found = jobs.run_ranks(lambda: place_rank(config, corpus), config.world)
    for losses, norms in found:
        assert want.max_relative_difference(losses, norms) < 1e-12


def place_rank(config: Config, corpus: Any) -> Any:
    """As `train_rank`, where the replica is what the plan says it is."""
    return train_rank(config, corpus, share=piper.rank() // config.pp)


@pytest.mark.slow
def test_experts_with_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        model="moe", dim=16, layers=2, heads=2, kv_heads=1, seq=8, batch=16, microbatches=2,
        steps=2, experts=4, dtype="float64", pp=2, ep=2, dp=2, order="dp,pp,ep",
    )  # fmt: skip
    monkeypatch.setattr(compare, "balance", functools.partial(balance, rate=RATE))
    corpus, posted = counting(), {}
    want = one_process(config, corpus)
    share = {rank: 2 * (rank // 4) + rank % 2 for rank in range(8)}
    found = jobs.run_ranks(
        lambda: train_rank(config, corpus, posted, share[piper.rank()]), config.world
    )
    for losses, norms in found:
        assert want.max_relative_difference(losses, norms) < 1e-12


# What crosses hosts


def plan(order: tuple[str, ...] | None, **more: Any) -> piper.Plan:
    strategy = piper.strategies.pipeline(
        ranks=2, num_microbatches=2, replicas=2, order=order, **more
    )
    return piper.plan(Stack4(2), strategy, rows(8))


def test_what_hosts_send_each_other() -> None:
    assert_expected_inline(
        plan(("dp", "pp")).topology(2),
        """\
topology: 2 hosts
host  ranks  regions
h0    0, 1   PP0, PP1
h1    2, 3   PP0, PP1
what ranks send each other in a step
            within hosts  between hosts
messages         1.0 KiB            0 B
reductions           0 B        1.0 KiB""",
    )
    assert_expected_inline(
        plan(None, zero=3).topology(["a", "a", "b", "b"]),
        """\
topology: 2 hosts
host  ranks  regions
a     0, 1   PP0
b     2, 3   PP1
what ranks send each other in a step
            within hosts  between hosts
messages             0 B        1.0 KiB
gathers          1.8 KiB            0 B
reductions       1.0 KiB            0 B""",
    )


def test_traffic_is_what_programs_send() -> None:
    """Each way of numbering the ranks keeps one kind within hosts, and the sums are the same."""
    names = ["a", "a", "b", "b"]
    stages, replicas = (
        traffic(plan(order, zero=1).programs, names) for order in (("dp", "pp"), ("pp", "dp"))
    )
    for kind in ("messages", "gathers", "reductions"):
        both = [within[kind] + between[kind] for within, between in (stages, replicas)]
        assert both[0] == both[1] > 0
    assert stages[1]["messages"] == 0 < stages[0]["messages"]
    assert replicas[0]["messages"] == 0 < replicas[1]["messages"]
    # 4 x 4 float64 each, 4 of them, two replicas: what gathers bring of the other's half.
    assert stages[1]["gathers"] == 4 * 4 * 4 * 8


def test_one_host_is_a_line() -> None:
    found = plan(None)
    assert found.topology(1) == "topology: 1 host; h0: ranks 0-3"
    assert describe(None, ["a", "a", "b"]) == "topology: 2 hosts; a: ranks 0, 1; b: ranks 2"
    text = jobs.refusal(lambda: found.topology(3))
    jobs.mentions(text, "4 ranks do not divide among 3 hosts")


def test_the_command() -> None:
    tiny = "--dim 16 --layers 2 --heads 2 --kv-heads 1 --seq 8 --batch 8 --microbatches 2 --dp 2"
    asked = ["plan", *tiny.split(), "--hosts", "2", "--order", "dp,pp"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    jobs.mentions(result.output, "topology: 2 hosts", "h1    2, 3   PP0, PP1", "between hosts")
    refused = CliRunner().invoke(main, ["train", *tiny.split(), "--order", "pp,ep"])
    assert refused.exit_code == 2
    jobs.mentions(refused.output, "--order is 'pp,ep'", "--pp, --dp")


def test_gradients_of_one_rank_stay() -> None:
    """Nothing is sent where there is nobody to send to."""
    strategy = piper.strategies.pipeline("gpipe", ranks=1, num_microbatches=2)
    found = piper.plan(Stack4(1), strategy, (torch.zeros(4, 4).double(),) * 2)
    within, between = traffic(found.programs, ["a"])
    assert sum(within.values()) == sum(between.values()) == 0
