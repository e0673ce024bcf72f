"""The passes that know of experts: their rewrites as text, and that they cost no more than they must.

A line with `-` is there before the pass, one with `+` after it.
"""

# ruff: noqa: E501  (the texts are as they are printed)

import difflib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

import piper_dynamo as piper
from piper_dynamo.filters import Filter
from piper_dynamo.ir.alias import operator_name
from piper_dynamo.ir.graph import print_dag, task_of
from piper_dynamo.ir.joint import Capture
from piper_dynamo.ir.task import RegionId
from piper_dynamo.moe.capacity import Capacity
from piper_dynamo.passes import localize
from piper_dynamo.passes.capacity import Bound, set_capacities
from piper_dynamo.passes.localize import Localizer
from piper_dynamo.passes.place import Place, Placement
from piper_dynamo.passes.regions import find_regions
from piper_dynamo.passes.shard import Shard, Sharding
from piper_dynamo.passes.split import Split
from piper_dynamo.passes.tie import Tie
from tests.experts import EXPERTS, Mixture
from tests.models import fill, rows
from tests.tracing import Stages, capture

EP = Filter({"EP": "*"})


class One(nn.Module):
    """Four experts of a matrix each, whose results are divided by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(fill([4, 2, 2], 0))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            sent, routing = piper.moe.dispatch(x, index, 4)
            with piper.annotate("EP"):
                y = piper.moe.grouped_mm(sent, self.w, routing)
                y = y / y.norm(dim=-1, keepdim=True)
            return piper.moe.combine(y, routing).square().mean()


EP0 = RegionId(tags=(("PP", 0), ("EP", 0)))


def region_of(node: fx.Node) -> RegionId:
    name = task_of(node).name
    assert name is not None
    return name.region


def traced() -> Stages:
    return capture(One(), (fill([4, 2], 1).detach(), torch.tensor([[0], [3], [1], [2]])))


def placed(*bounds: Bound) -> Stages:
    stages = traced().build(bounds)
    both = Placement(filter=Filter({}), devices=(0, 1), label="Place")
    for one in (
        Split(1, stages.dims, weight_per_microbatch=False),
        Place([both], 2, sharers=[Sharding(filter=Filter({}), label="Shard")]),
        Tie(),
    ):
        one(stages.dag)
    return stages


def printed(graph: fx.Graph) -> str:
    """A graph's operators, one per line."""
    lines = []
    for node in graph.nodes:
        if node.op != "output":
            args = ", ".join(map(str, node.args))
            shape = getattr(node.meta.get("val"), "shape", None)
            note = f"  # {list(shape)}" if shape is not None else ""
            lines.append(f"{node.name} = {operator_name(node) or 'input'}({args}){note}")
    return "\n".join(lines)


def difference(before: str, after: str) -> str:
    changed = difflib.ndiff(before.splitlines(), after.splitlines())
    return "\n".join(line.rstrip() for line in changed if line[0] in "+-")


def test_shard():
    dag = placed().dag
    before = print_dag(dag)
    Shard([Sharding(filter=EP, label="Shard")])(dag)
    dag.graph.lint()
    assert_expected_inline(
        difference(before, print_dag(dag)),
        """\
+ exchange_counts_exchange_counts_MB0_F_PP0_MB0_on_0 = exchange_counts([exchange_counts_MB0], groups=[[0, 1]])    # on 0,1; stream ep
+ exchange_counts_MB0_here = exchange_counts_exchange_counts_MB0_F_PP0_MB0_on_0[0]    # int64[2]
+ exchange_counts_MB0_splits = exchange_counts_exchange_counts_MB0_F_PP0_MB0_on_0[1]    # int64[2, 4]
+ exchange_exchange_MB0_F_PP0_MB0_on_0 = exchange([exchange_MB0, exchange_counts_MB0_splits], groups=[[0, 1]])    # on 0,1; stream ep
+ exchange_MB0_here = exchange_exchange_MB0_F_PP0_MB0_on_0[0]    # float64[4, 2]
- F_PP0_EP0_MB0 = F_PP0_EP0(exchange_MB0, w, exchange_counts_MB0)    # on 0,1
+ F_PP0_EP0_MB0 = F_PP0_EP0_of_2(exchange_MB0_here, w, exchange_counts_MB0_here)    # on 0,1
+ unexchange_div_MB0_F_PP0_EP0_MB0_on_0 = unexchange([div_MB0, exchange_counts_MB0_splits], groups=[[0, 1]])    # on 0,1; stream ep
+ div_MB0_back = unexchange_div_MB0_F_PP0_EP0_MB0_on_0[0]    # float64[4, 2]
- F_PP0_MB0_v1 = F_PP0_v1(div_MB0, exchange_counts_MB0, getitem_MB0)    # on 0,1
+ F_PP0_MB0_v1 = F_PP0_v1(div_MB0_back, exchange_counts_MB0, getitem_MB0)    # on 0,1
+ exchange_exchange_1_MB0_B_PP0_MB0_v1_on_0 = exchange([exchange_1_MB0, exchange_counts_MB0_splits], groups=[[0, 1]])    # on 0,1; stream ep
+ exchange_1_MB0_here = exchange_exchange_1_MB0_B_PP0_MB0_v1_on_0[0]    # float64[4, 2]
- B_PP0_EP0_MB0 = B_PP0_EP0(bundle_PP0_EP0_MB0, exchange_1_MB0)    # on 0,1
+ B_PP0_EP0_MB0 = B_PP0_EP0_of_2(bundle_PP0_EP0_MB0, exchange_1_MB0_here)    # on 0,1
- d_w_MB0 = B_PP0_EP0_MB0[0]    # float64[4, 2, 2]
+ d_w_MB0 = B_PP0_EP0_MB0[0]    # float64[2, 2, 2]
- grad_w = accumulate(d_w_MB0)    # float64[4, 2, 2]; on 0,1
+ grad_w = accumulate(d_w_MB0)    # float64[2, 2, 2]; on 0,1""",
    )


def bounded(given: int | float = 2) -> tuple[Bound, ...]:
    return (Bound(filter=EP, capacity=Capacity.of(given), label="Shard"),)


def localized(*bounds: Bound) -> str:
    """What changes in the chunks of one of two ranks."""
    dag = placed(*bounds).dag
    local, texts = Localizer(dag), []
    for node in dag.tasks():
        if region_of(node) == EP0:
            before = printed(node.meta["phase"].chunk.graph)
            local(node, 2, "EP0", is_static=bool(bounds))
            after = printed(node.meta["phase"].chunk.graph)
            texts += [f"{node.target}:", difference(before, after)]
    assert not local.faults
    return "\n".join(texts)


def test_localize():
    """A rank's experts are two of four, and so are their gradients and counts."""
    assert_expected_inline(
        localized(),
        """\
F_PP0_EP0_of_2:
- primals_2 = input()  # [4, 2, 2]
+ primals_2 = input()  # [2, 2, 2]
- primals_3 = input()  # [4]
+ primals_3 = input()  # [2]
B_PP0_EP0_of_2:
- saved_2 = input()  # [4]
+ saved_2 = input()  # [2]
- grouped_outer = grouped_outer(saved_1, add, saved_2)  # [4, 2, 2]
+ grouped_outer = grouped_outer(saved_1, add, saved_2)  # [2, 2, 2]""",
    )


def test_localize_static():
    """With a capacity rows come by rank and are sorted by expert, and products are one."""
    assert_expected_inline(
        localized(*bounded()),
        """\
F_PP0_EP0_of_2:
- primals_2 = input()  # [4, 2, 2]
+ primals_2 = input()  # [2, 2, 2]
- grouped_mm = even_mm(primals_1, primals_2, 4)  # [8, 2]
+ view_default_2 = view(primals_1, [2, 2, 2, 2])  # [2, 2, 2, 2]
+ transpose_int = transpose(view_default_2, 0, 1)  # [2, 2, 2, 2]
+ clone_default = clone(transpose_int)  # [2, 2, 2, 2]
+ view_default_3 = view(clone_default, [8, 2])  # [8, 2]
+ view_default = view(view_default_3, [2, 4, 2])  # [2, 4, 2]
+ bmm_default = bmm(view_default, primals_2)  # [2, 4, 2]
+ view_default_1 = view(bmm_default, [8, 2])  # [8, 2]
- linalg_vector_norm = linalg_vector_norm(grouped_mm, 2, [-1], True)  # [8, 1]
+ linalg_vector_norm = linalg_vector_norm(view_default_1, 2, [-1], True)  # [8, 1]
- div = div(grouped_mm, linalg_vector_norm)  # [8, 2]
+ div = div(view_default_1, linalg_vector_norm)  # [8, 2]
+ view_default_4 = view(div, [2, 2, 2, 2])  # [2, 2, 2, 2]
+ transpose_int_1 = transpose(view_default_4, 0, 1)  # [2, 2, 2, 2]
+ clone_default_1 = clone(transpose_int_1)  # [2, 2, 2, 2]
+ view_default_5 = view(clone_default_1, [8, 2])  # [8, 2]
B_PP0_EP0_of_2:
- neg = neg(tangents_1)  # [8, 2]
+ view_default_2 = view(tangents_1, [2, 2, 2, 2])  # [2, 2, 2, 2]
+ transpose_int_1 = transpose(view_default_2, 0, 1)  # [2, 2, 2, 2]
+ clone_default = clone(transpose_int_1)  # [2, 2, 2, 2]
+ view_default_3 = view(clone_default, [8, 2])  # [8, 2]
+ neg = neg(view_default_3)  # [8, 2]
- div_4 = div(tangents_1, saved_3)  # [8, 2]
+ div_4 = div(view_default_3, saved_3)  # [8, 2]
- abs_default = abs(tangents_1)  # [8, 2]
+ abs_default = abs(view_default_3)  # [8, 2]
- grouped_outer = even_outer(saved_1, masked_fill_scalar, 4)  # [4, 2, 2]
+ view_default = view(saved_1, [2, 4, 2])  # [2, 4, 2]
+ view_default_1 = view(masked_fill_scalar, [2, 4, 2])  # [2, 4, 2]
+ transpose_int = transpose(view_default, 1, 2)  # [2, 2, 4]
+ bmm_default = bmm(transpose_int, view_default_1)  # [2, 2, 2]""",
    )


def test_capacity():
    stages = traced()
    regions = find_regions(stages.capture)
    before = printed(stages.capture.graph)
    set_capacities(stages.capture, regions, bounded())
    stages.capture.graph.lint()
    assert_expected_inline(
        difference(before, printed(stages.capture.graph)),
        """\
- exchange_counts = exchange_counts(getitem_1)  # [4]
- exchange = exchange(permute, exchange_counts)  # [4, 2]
+ exchange = pad(permute, getitem_1, 2)  # [8, 2]
- grouped_mm = grouped_mm(exchange, primals_3, exchange_counts)  # [4, 2]
+ grouped_mm = even_mm(exchange, primals_3, 4)  # [8, 2]
- linalg_vector_norm = linalg_vector_norm(grouped_mm, 2, [-1], True)  # [4, 1]
+ linalg_vector_norm = linalg_vector_norm(grouped_mm, 2, [-1], True)  # [8, 1]
- div = div(grouped_mm, linalg_vector_norm)  # [4, 2]
+ div = div(grouped_mm, linalg_vector_norm)  # [8, 2]
- unexchange = unexchange(div, exchange_counts)  # [4, 2]
+ unexchange = unpad(div, getitem_1, 4)  # [4, 2]
- exchange_1 = exchange(permute_1, exchange_counts)  # [4, 2]
+ exchange_1 = pad(permute_1, getitem_1, 2)  # [8, 2]
- div_2 = div(grouped_mm, linalg_vector_norm)  # [4, 2]
+ div_2 = div(grouped_mm, linalg_vector_norm)  # [8, 2]
- div_3 = div(div_2, linalg_vector_norm)  # [4, 2]
+ div_3 = div(div_2, linalg_vector_norm)  # [8, 2]
- neg = neg(exchange_1)  # [4, 2]
+ neg = neg(exchange_1)  # [8, 2]
- mul_2 = mul(neg, div_3)  # [4, 2]
+ mul_2 = mul(neg, div_3)  # [8, 2]
- div_4 = div(exchange_1, linalg_vector_norm)  # [4, 2]
+ div_4 = div(exchange_1, linalg_vector_norm)  # [8, 2]
- sum_1 = sum(mul_2, [1], True)  # [4, 1]
+ sum_1 = sum(mul_2, [1], True)  # [8, 1]
- div_5 = div(grouped_mm, linalg_vector_norm)  # [4, 2]
+ div_5 = div(grouped_mm, linalg_vector_norm)  # [8, 2]
- eq = eq(linalg_vector_norm, 0)  # [4, 1]
+ eq = eq(linalg_vector_norm, 0)  # [8, 1]
- masked_fill = masked_fill(div_5, eq, 0)  # [4, 2]
+ masked_fill = masked_fill(div_5, eq, 0)  # [8, 2]
- mul_3 = mul(sum_1, masked_fill)  # [4, 2]
+ mul_3 = mul(sum_1, masked_fill)  # [8, 2]
- add = add(div_4, mul_3)  # [4, 2]
+ add = add(div_4, mul_3)  # [8, 2]
- grouped_outer = grouped_outer(exchange, add, exchange_counts)  # [4, 2, 2]
+ abs_default = abs(exchange_1)  # [8, 2]
+ amax_default = amax(abs_default, [1], True)  # [8, 1]
+ eq_scalar = eq(amax_default, 0)  # [8, 1]
+ masked_fill_scalar = masked_fill(add, eq_scalar, 0)  # [8, 2]
+ grouped_outer = even_outer(exchange, masked_fill_scalar, 4)  # [4, 2, 2]""",
    )


class Asked(dict[Any, Any]):
    """Counts how often it is asked, and for how many it is walked."""

    asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked += 1
        return super().get(key, default)


class Deep(Mixture):
    """As many layers as one likes, of the same experts."""

    layers = 4

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            for _ in range(self.layers):
                x = torch.tanh(x + self.mix(x, 0))
            return (x - y).square().mean()


def asked(layers: int) -> tuple[int, int]:
    """How often a node's region is looked up, and how many nodes there are."""
    model = Deep(1)
    model.layers = layers
    stages = capture(model, rows(12, 0))
    regions = find_regions(stages.capture)
    regions.of = Asked(regions.of)
    set_capacities(stages.capture, regions, bounded())
    return regions.of.asked, len(stages.capture.graph.nodes)


def test_capacities_take_time_by_the_nodes_not_by_nodes_times_layers():
    few, many = asked(2), asked(8)
    assert many[1] > 3 * few[1]
    assert many[0] / many[1] < 1.2 * few[0] / few[1]


class Late(nn.Module):
    """A row that is there among all rows, and not among few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(fill([EXPERTS, 4, 4], 0))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            sent, routing = piper.moe.dispatch(x, index, EXPERTS)
            with piper.annotate("EP"):
                y = piper.moe.grouped_mm(sent, self.w, routing) + sent[20]
            return piper.moe.combine(y, routing).square().mean()


def late() -> tuple[Capture, Any]:
    index = torch.arange(24).unsqueeze(1) % EXPERTS
    stages = capture(Late(), (fill([24, 4], 1).detach(), index))
    return stages.capture, find_regions(stages.capture)


def test_what_an_operator_refuses_is_the_users():
    with pytest.raises(piper.PiperPlanError, match=r"test_passes_experts.py:\d+ select: .*20 out"):
        set_capacities(*late(), bounded())


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError])
def test_our_own_mistakes_are_not_the_users(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not said to be operators that mix rows."""

    def broken(*args: Any, **named: Any) -> Any:
        raise error("ours")

    stages, dag = traced(), placed().dag
    regions = find_regions(stages.capture)
    (mm,) = [n for n in stages.capture.graph.nodes if operator_name(n) == "linalg_vector_norm"]
    mm.target = broken
    with pytest.raises(error, match="ours"):
        set_capacities(stages.capture, regions, bounded())
    monkeypatch.setattr(localize.FakeTensorProp, "run_node", broken)
    node = next(n for n in dag.tasks() if region_of(n) == EP0)
    with pytest.raises(error, match="ours"):
        Localizer(dag)(node, 2, "EP0")
