"""Each pass: its rewrite as text, and what it refuses.

The texts are of one model of two regions with two microbatches, pass after pass. A line with `-` is
in the DAG before the pass, one with `+` after it.
"""

# ruff: noqa: E501  (the texts are as they are printed)

import difflib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.filters import Filter
from piper_dynamo.ir.graph import Dag, print_dag, task_of
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import TensorSpec, contiguous_stride
from piper_dynamo.ir.task import TaskName
from piper_dynamo.passes.order import Order, named_halves
from piper_dynamo.passes.pipeline import GraphPass
from piper_dynamo.passes.place import Place, Placement
from piper_dynamo.passes.split import Split, batch_dims
from piper_dynamo.passes.split_backward import SplitBackward
from piper_dynamo.passes.tie import Tie
from piper_dynamo.passes.transfer import Transfer
from tests.models import fill, xin
from tests.tracing import Stages, capture


class Two(nn.Module):
    """Two regions, each with a weight; `tied` has one weight for both."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(fill([2, 2], 0))
        self.v = self.w if tied else nn.Parameter(fill([2, 2], 1))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            return (h @ self.v).square().mean()


def traced(tied: bool = False) -> Stages:
    return capture(Two(tied), (xin([4, 2], 0),), 2).build()


def split(stages: Stages) -> Split:
    return Split(2, stages.dims, weight_per_microbatch=False)


def place(filters: dict[tuple[int, ...], dict], world: int = 2, shared: bool = False) -> Place:
    """A Place of each filter on its ranks, each with a label."""
    placements = [
        Placement(filter=Filter(tags), devices=devices, label=f"Place({Filter(tags)})")
        for devices, tags in filters.items()
    ]
    everywhere = Placement(filter=Filter({}), devices=(), label="Replicate({})")
    return Place(placements, world, sharers=[everywhere] if shared else [])


LINE2 = {(0,): {"PP": 0}, (1,): {"PP": 1}}


def task(which: str, stage: int, mb: int) -> dict:
    return {"PP": stage, "MB": mb, "PASS": which}


def rewrite(dag: Dag, one: GraphPass) -> str:
    """What a pass changes, as text."""
    before = print_dag(dag).splitlines()
    one(dag)
    dag.graph.lint()
    changed = difflib.ndiff(before, print_dag(dag).splitlines())
    return "\n".join(line.rstrip() for line in changed if line[0] in "+-")


def apply(dag: Dag, *passes: GraphPass) -> Dag:
    for one in passes:
        one(dag)
    return dag


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(PiperPlanError) as caught:
        call()
    return re.sub(r"/\S*/(test_passes\.py):\d+", r"\1", str(caught.value))


def test_split():
    assert_expected_inline(
        print_dag((stages := traced()).dag),
        """\
w = input    # float64[2, 2]
x = input    # float64[2, 2]
v = input    # float64[2, 2]
weight = input    # float64[]
F_PP0 = F_PP0(x, w)
tanh = F_PP0[0]    # float64[2, 2]
bundle_PP0 = F_PP0[1]
F_PP1 = F_PP1(tanh, v)
mean = F_PP1[0]    # float64[]
bundle_PP1 = F_PP1[1]
B_PP1 = B_PP1(v, bundle_PP1, weight)
mm_3 = B_PP1[0]    # float64[2, 2]
d_v = B_PP1[1]    # float64[2, 2]
B_PP0 = B_PP0(x, bundle_PP0, mm_3)
d_w = B_PP0[0]    # float64[2, 2]
return {loss: mean, outputs: [None], grads: {0: [d_w], 2: [d_v]}, buffers: {}}""",
    )
    split(stages)(stages.dag)
    stages.dag.graph.lint()
    assert_expected_inline(
        print_dag(stages.dag),
        """\
w = input    # float64[2, 2]
x = input    # float64[4, 2]
v = input    # float64[2, 2]
weight = input    # float64[]
x_MB0 = slice_batch(x, 0, 0, 2)    # float64[2, 2]
F_PP0_MB0 = F_PP0(x_MB0, w)
tanh_MB0 = F_PP0_MB0[0]    # float64[2, 2]
bundle_PP0_MB0 = F_PP0_MB0[1]
F_PP1_MB0 = F_PP1(tanh_MB0, v)
mean_MB0 = F_PP1_MB0[0]    # float64[]
bundle_PP1_MB0 = F_PP1_MB0[1]
B_PP1_MB0 = B_PP1(v, bundle_PP1_MB0, weight)
mm_3_MB0 = B_PP1_MB0[0]    # float64[2, 2]
d_v_MB0 = B_PP1_MB0[1]    # float64[2, 2]
B_PP0_MB0 = B_PP0(x_MB0, bundle_PP0_MB0, mm_3_MB0)
d_w_MB0 = B_PP0_MB0[0]    # float64[2, 2]
x_MB1 = slice_batch(x, 0, 1, 2)    # float64[2, 2]
F_PP0_MB1 = F_PP0(x_MB1, w)
tanh_MB1 = F_PP0_MB1[0]    # float64[2, 2]
bundle_PP0_MB1 = F_PP0_MB1[1]
F_PP1_MB1 = F_PP1(tanh_MB1, v)
mean_MB1 = F_PP1_MB1[0]    # float64[]
bundle_PP1_MB1 = F_PP1_MB1[1]
B_PP1_MB1 = B_PP1(v, bundle_PP1_MB1, weight)
mm_3_MB1 = B_PP1_MB1[0]    # float64[2, 2]
d_v_MB1 = B_PP1_MB1[1]    # float64[2, 2]
B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1)
d_w_MB1 = B_PP0_MB1[0]    # float64[2, 2]
loss = weighted_loss([mean_MB0, mean_MB1], [weight, weight])    # float64[]
grad_w = accumulate(d_w_MB0, d_w_MB1)    # float64[2, 2]
grad_v = accumulate(d_v_MB0, d_v_MB1)    # float64[2, 2]
return {loss: loss, outputs: [None], grads: {0: grad_w, 2: grad_v}, buffers: {}}""",
    )


def test_split_backward():
    stages = traced()
    split(stages)(stages.dag)
    halves = SplitBackward({TaskName.parse("B.PP0.MB1"), TaskName.parse("B.PP1.MB1")})
    assert_expected_inline(
        rewrite(stages.dag, halves),
        """\
- B_PP1_MB1 = B_PP1(v, bundle_PP1_MB1, weight)
+ BI_PP1_MB1 = BI_PP1(v, bundle_PP1_MB1, weight)
- mm_3_MB1 = B_PP1_MB1[0]    # float64[2, 2]
+ mm_3_MB1_1 = BI_PP1_MB1[0]    # float64[2, 2]
+ bundle_BI_PP1_MB1 = BI_PP1_MB1[1]
+ BW_PP1_MB1 = BW_PP1(bundle_BI_PP1_MB1)
- d_v_MB1 = B_PP1_MB1[1]    # float64[2, 2]
+ d_v_MB1_1 = BW_PP1_MB1[0]    # float64[2, 2]
+ BI_PP0_MB1 = nothing()
- B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1)
+ BW_PP0_MB1 = BW_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1_1)
- d_w_MB1 = B_PP0_MB1[0]    # float64[2, 2]
+ d_w_MB1_1 = BW_PP0_MB1[0]    # float64[2, 2]
- grad_w = accumulate(d_w_MB0, d_w_MB1)    # float64[2, 2]
+ grad_w = accumulate(d_w_MB0, d_w_MB1_1)    # float64[2, 2]
- grad_v = accumulate(d_v_MB0, d_v_MB1)    # float64[2, 2]
+ grad_v = accumulate(d_v_MB0, d_v_MB1_1)    # float64[2, 2]""",
    )


def test_place():
    stages = traced()
    split(stages)(stages.dag)
    assert_expected_inline(
        rewrite(stages.dag, place(LINE2)),
        """\
- F_PP0_MB0 = F_PP0(x_MB0, w)
+ F_PP0_MB0 = F_PP0(x_MB0, w)    # on 0
- F_PP1_MB0 = F_PP1(tanh_MB0, v)
+ F_PP1_MB0 = F_PP1(tanh_MB0, v)    # on 1
- B_PP1_MB0 = B_PP1(v, bundle_PP1_MB0, weight)
+ B_PP1_MB0 = B_PP1(v, bundle_PP1_MB0, weight)    # on 1
- B_PP0_MB0 = B_PP0(x_MB0, bundle_PP0_MB0, mm_3_MB0)
+ B_PP0_MB0 = B_PP0(x_MB0, bundle_PP0_MB0, mm_3_MB0)    # on 0
- F_PP0_MB1 = F_PP0(x_MB1, w)
+ F_PP0_MB1 = F_PP0(x_MB1, w)    # on 0
- F_PP1_MB1 = F_PP1(tanh_MB1, v)
+ F_PP1_MB1 = F_PP1(tanh_MB1, v)    # on 1
- B_PP1_MB1 = B_PP1(v, bundle_PP1_MB1, weight)
+ B_PP1_MB1 = B_PP1(v, bundle_PP1_MB1, weight)    # on 1
- B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1)
+ B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1)    # on 0
- loss = weighted_loss([mean_MB0, mean_MB1], [weight, weight])    # float64[]
+ loss = weighted_loss([mean_MB0, mean_MB1], [weight, weight])    # float64[]; on 1""",
    )


def test_tie():
    stages = traced(tied=True)
    apply(stages.dag, split(stages), place(LINE2))
    assert_expected_inline(
        rewrite(stages.dag, Tie()),
        """\
+ grad_w_on_0 = accumulate(d_w_MB0, d_w_MB1)    # float64[2, 2]; on 0
- grad_w = accumulate(d_w_MB0, d_w_1_MB0, d_w_MB1, d_w_1_MB1)    # float64[2, 2]
+ grad_w_on_1 = accumulate(d_w_1_MB0, d_w_1_MB1)    # float64[2, 2]; on 1
+ grad_w_total_0 = add(grad_w_on_0, grad_w_on_1)    # float64[2, 2]; on 0
+ grad_w_total_1 = add(grad_w_on_0, grad_w_on_1)    # float64[2, 2]; on 1
- return {loss: loss, outputs: [None], grads: {0: grad_w}, buffers: {}}
+ return {loss: loss, outputs: [None], grads: {0: [grad_w_total_0, grad_w_total_1]}, buffers: {}}""",
    )


def test_transfer():
    stages = traced()
    apply(stages.dag, split(stages), place(LINE2), Tie())
    assert_expected_inline(
        rewrite(stages.dag, Transfer()),
        """\
- x_MB0 = slice_batch(x, 0, 0, 2)    # float64[2, 2]
+ x_MB0 = slice_batch(x, 0, 0, 2)    # float64[2, 2]; on 0
+ send_tanh_MB0_to_1 = send(tanh_MB0, source=[0], target=[1])    # float64[2, 2]; on 0; stream send
+ tanh_MB0_on_1 = recv(send_tanh_MB0_to_1)    # float64[2, 2]; on 1; stream recv
- F_PP1_MB0 = F_PP1(tanh_MB0, v)    # on 1
+ F_PP1_MB0 = F_PP1(tanh_MB0_on_1, v)    # on 1
+ send_mm_3_MB0_to_0 = send(mm_3_MB0, source=[1], target=[0])    # float64[2, 2]; on 1; stream send
+ mm_3_MB0_on_0 = recv(send_mm_3_MB0_to_0)    # float64[2, 2]; on 0; stream recv
- B_PP0_MB0 = B_PP0(x_MB0, bundle_PP0_MB0, mm_3_MB0)    # on 0
+ B_PP0_MB0 = B_PP0(x_MB0, bundle_PP0_MB0, mm_3_MB0_on_0)    # on 0
- x_MB1 = slice_batch(x, 0, 1, 2)    # float64[2, 2]
+ x_MB1 = slice_batch(x, 0, 1, 2)    # float64[2, 2]; on 0
+ send_tanh_MB1_to_1 = send(tanh_MB1, source=[0], target=[1])    # float64[2, 2]; on 0; stream send
+ tanh_MB1_on_1 = recv(send_tanh_MB1_to_1)    # float64[2, 2]; on 1; stream recv
- F_PP1_MB1 = F_PP1(tanh_MB1, v)    # on 1
+ F_PP1_MB1 = F_PP1(tanh_MB1_on_1, v)    # on 1
+ send_mm_3_MB1_to_0 = send(mm_3_MB1, source=[1], target=[0])    # float64[2, 2]; on 1; stream send
+ mm_3_MB1_on_0 = recv(send_mm_3_MB1_to_0)    # float64[2, 2]; on 0; stream recv
- B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1)    # on 0
+ B_PP0_MB1 = B_PP0(x_MB1, bundle_PP0_MB1, mm_3_MB1_on_0)    # on 0
+ send_loss_to_0 = send(loss, source=[1], target=[0])    # float64[]; on 1; stream send
+ loss_on_0 = recv(send_loss_to_0)    # float64[]; on 0; stream recv
- return {loss: loss, outputs: [None], grads: {0: [grad_w], 2: [grad_v]}, buffers: {}}
+ return {loss: [loss_on_0, loss], outputs: [None], grads: {0: [grad_w], 2: [grad_v]}, buffers: {}}""",
    )


def test_transfer_after_tie():
    stages = traced(tied=True)
    apply(stages.dag, split(stages), place(LINE2), Tie())
    sums = [line for line in rewrite(stages.dag, Transfer()).splitlines() if "grad" in line]
    assert_expected_inline(
        "\n".join(sums),
        """\
+ send_grad_w_on_0_to_1 = send(grad_w_on_0, source=[0], target=[1])    # float64[2, 2]; on 0; stream send
+ grad_w_on_0_on_1 = recv(send_grad_w_on_0_to_1)    # float64[2, 2]; on 1; stream recv
+ send_grad_w_on_1_to_0 = send(grad_w_on_1, source=[1], target=[0])    # float64[2, 2]; on 1; stream send
+ grad_w_on_1_on_0 = recv(send_grad_w_on_1_to_0)    # float64[2, 2]; on 0; stream recv
- grad_w_total_0 = add(grad_w_on_0, grad_w_on_1)    # float64[2, 2]; on 0
+ grad_w_total_0 = add(grad_w_on_0, grad_w_on_1_on_0)    # float64[2, 2]; on 0
- grad_w_total_1 = add(grad_w_on_0, grad_w_on_1)    # float64[2, 2]; on 1
+ grad_w_total_1 = add(grad_w_on_0_on_1, grad_w_on_1)    # float64[2, 2]; on 1
- return {loss: loss, outputs: [None], grads: {0: [grad_w_total_0, grad_w_total_1]}, buffers: {}}
+ return {loss: [loss_on_0, loss], outputs: [None], grads: {0: [grad_w_total_0, grad_w_total_1]}, buffers: {}}""",
    )


def test_order():
    stages = traced()
    apply(stages.dag, split(stages), place(LINE2), Tie(), Transfer())
    orders = [
        piper.Order([task("F", 0, 0), task("F", 0, 1)]),
        piper.Order([[task("F", 1, 1), task("B", 1, 1)], [{"PP": 1, "MB": 0}]]),
    ]
    assert_expected_inline(
        rewrite(stages.dag, Order(orders)),
        """\
- F_PP1_MB0 = F_PP1(tanh_MB0_on_1, v)    # on 1
+ F_PP1_MB0 = F_PP1(tanh_MB0_on_1, v)    # on 1; after F_PP1_MB1, B_PP1_MB1
- B_PP1_MB0 = B_PP1(v, bundle_PP1_MB0, weight)    # on 1
+ B_PP1_MB0 = B_PP1(v, bundle_PP1_MB0, weight)    # on 1; after F_PP1_MB1, B_PP1_MB1
- F_PP0_MB1 = F_PP0(x_MB1, w)    # on 0
+ F_PP0_MB1 = F_PP0(x_MB1, w)    # on 0; after F_PP0_MB0""",
    )


def test_order_puts_a_task_into_its_group_once():
    """Two filters of one group may match the same task; it is no less in that group."""
    stages = traced()
    apply(stages.dag, split(stages), place(LINE2), Tie(), Transfer())
    group = [{"PP": 1, "PASS": "F"}, task("F", 1, 0), {"PP": 1, "PASS": "B"}]
    apply(stages.dag, Order([piper.Order([group])]))
    found = {str(task_of(n).name): n.meta.get("group") for n in stages.dag.tasks()}
    assert found == {
        **dict.fromkeys(("F.PP0.MB0", "F.PP0.MB1", "B.PP0.MB0", "B.PP0.MB1")),
        **dict.fromkeys(("F.PP1.MB0", "F.PP1.MB1", "B.PP1.MB0", "B.PP1.MB1"), (0, 1)),
    }


def test_nothing_to_do_changes_nothing():
    stages = traced()
    apply(stages.dag, split(stages))
    assert rewrite(stages.dag, SplitBackward(set())) == ""
    apply(stages.dag, place({(0,): {}}, world=1), Tie())
    onto_devices = rewrite(stages.dag, Transfer())
    assert "send" not in onto_devices
    assert "recv" not in onto_devices
    assert rewrite(stages.dag, Order([])) == ""


def data(name: str, *shape: int, position: int) -> Arg:
    spec = TensorSpec(shape=shape, dtype=torch.float32, stride=contiguous_stride(shape))
    return Arg(kind=ArgKind.DATA, name=name, position=position, spec=spec)


def test_batch_dims():
    args = (
        Arg(kind=ArgKind.PARAMETER, name="w", position=0, spec=data("", 3, position=0).spec),
        data("x", 4, 3, position=1),
        data("scale", position=2),
        data("batch['mask']", 1, 4, position=3),
        data("table", 5, position=4),
        Arg(kind=ArgKind.NUMBER, name="n", position=5),
    )
    assert batch_dims(args, 2, {"batch": 1, "table": "replicate"}, "") == {1: 0, 3: 1}
    assert batch_dims(args, 2, {"batch['mask']": -1, "table": "replicate"}, "") == {1: 0, 3: 1}
    assert_expected_inline(
        refused(lambda: batch_dims(args, 3, {"mask": 1, "w": 0, "batch": 2}, "train.py:7")),
        """\
the batch cannot be split
  asked  train.py:7
  why    Split(inputs=...) names 'mask', which is no tensor argument of the model (there are: batch, batch['mask'], scale, table, x)
         Split(inputs=...) names 'w', which is no tensor argument of the model (there are: batch, batch['mask'], scale, table, x)
         argument "batch['mask']" of shape (1, 4) has no dim 2
         the arguments' batch sizes disagree: x has 4, table has 5; say which are not sliced, Split(..., inputs={name: "replicate"}), or which dim is
         argument 'x' has batch 4, which 3 microbatches do not divide; numbers that do: [1, 2, 4]
         argument 'table' has batch 5, which 3 microbatches do not divide; numbers that do: [1, 5]
  hint   change the batch, num_microbatches or inputs= of piper.Split""",
    )


def test_batch_of_nothing_is_refused():
    assert_expected_inline(
        refused(lambda: batch_dims((data("x", 0, 3, position=0),), 1, None, "train.py:7")),
        """\
the batch cannot be split
  asked  train.py:7
  why    argument 'x' has batch 0, which 1 microbatches do not divide; numbers that do: none
  hint   change the batch, num_microbatches or inputs= of piper.Split""",
    )


def placed(filters: dict[tuple[int, ...], dict], world: int = 2, shared: bool = False) -> None:
    stages = traced()
    apply(stages.dag, split(stages), place(filters, world, shared))


def test_place_refuses_all_at_once():
    filters = {(0,): {"PP": 0}, (5,): {"PP": 0, "MB": 1}, (1,): {"EP": 0}, (6, 7): {"PP": 3}}
    stages = traced()
    split(stages)(stages.dag)
    for node in stages.dag.tasks():
        node.meta["task"] = replace(task_of(node), where="model.py:8")
    assert_expected_inline(
        refused(lambda: place(filters)(stages.dag)),
        """\
the placement is not possible
  PP0 is placed twice for microbatch 1 (model.py:8): Place({"PP": 0}) and Place({"PP": 0, "MB": 1})
    hint  leave one of them out, or let each name other microbatches (MB)
  Place({"PP": 0, "MB": 1}) names ranks [5], but the world has ranks 0-1
    hint  number the ranks that are used from 0 to 4
  Place({"PP": 3}) names ranks [6, 7], but the world has ranks 0-1
    hint  number the ranks that are used from 0 to 4
  Place({"EP": 0}) matches nothing: no task has the tag 'EP' (there are: MB, PASS, PP)
  Place({"PP": 3}) matches nothing: no task has PP=3; there are: 0, 1
  PP1 is placed nowhere (model.py:8)
    hint  add piper.Place({'PP': 1}, devices=[...])""",
    )


def test_place_refuses_nothing_placed():
    assert_expected_inline(
        refused(lambda: placed({})),
        """\
the placement is not possible
  nothing is placed, but the world has 2 ranks
    hint  add piper.Place({...}, devices=[...]) for every region""",
    )


def test_place_refuses_idle_ranks():
    assert_expected_inline(
        refused(lambda: placed({(0,): {"PP": 0}, (3,): {"PP": 1}}, world=5)),
        """\
the placement is not possible
  nothing is placed on ranks 1, 2, 4 of 5; Place({"PP": 0}), Place({"PP": 1}) use ranks 0, 3
    hint  number the ranks that are used from 0 to 1""",
    )


def test_place_refuses_groups_of_unlike_size():
    assert_expected_inline(
        refused(lambda: placed({(0,): {"PP": 0}, (1, 2): {"PP": 1}}, world=3, shared=True)),
        """\
the placement is not possible
  the device groups differ in size: PP0 on (0,), PP1 on (1, 2), by Place({"PP": 0}), Place({"PP": 1})
    hint  regions of one step need the same number of replicas""",
    )


def test_place_refuses_several_ranks_that_share_nothing():
    assert_expected_inline(
        refused(lambda: placed({(0, 1): {"PP": 0}, (2, 3): {"PP": 1}}, world=4)),
        """\
the placement is not possible
  PP0 (test_passes.py) is placed on 2 ranks (0, 1) by Place({"PP": 0}), and no directive says how they share it
    hint  add piper.Replicate(...) or piper.Shard(...), or place it on one rank
  PP1 (test_passes.py) is placed on 2 ranks (2, 3) by Place({"PP": 1}), and no directive says how they share it
    hint  add piper.Replicate(...) or piper.Shard(...), or place it on one rank""",
    )


def test_place_takes_several_ranks_that_share():
    placed({(0, 1): {"PP": 0}, (2, 3): {"PP": 1}}, world=4, shared=True)


def test_transfer_refuses_to_send_a_bundle():
    stages = traced()
    apply(stages.dag, split(stages), place(LINE2))
    for node in stages.dag.tasks():
        if str(task_of(node)) == "B.PP0.MB1":
            node.meta["task"] = replace(task_of(node), devices=(1,))
    apply(stages.dag, Tie())
    assert_expected_inline(
        refused(lambda: Transfer()(stages.dag)),
        """\
a bundle would have to be sent
  of    F.PP0.MB1
  at    test_passes.py
  from  (0,)
  to    (1,)
  hint  place the forward and the backward of a microbatch on the same ranks""",
    )


def order_at(line: int, *groups: object) -> piper.Order:
    order = piper.Order(list(groups))
    object.__setattr__(order, "where", f"train.py:{line}")
    return order


def halves(*orders: piper.Order) -> set[str]:
    stages = traced()
    split(stages)(stages.dag)
    found = named_halves(orders, stages.dag)
    if found.refused is not None:
        raise found.refused
    return {str(name) for name in found.split}


def test_named_halves():
    assert halves() == set()
    assert halves(piper.Order([task("B", 0, 0), task("F", 0, 1)])) == set()
    assert halves(piper.Order([task("BI", 0, 1)])) == {"B.PP0.MB1"}
    assert halves(piper.Order([{"PP": 1, "PASS": ["BI", "BW"]}])) == {"B.PP1.MB0", "B.PP1.MB1"}
    assert halves(piper.Order([{"PP": 1, "MB": 0, "PASS": "*"}])) == set()


def test_what_all_microbatches_share_is_told_once():
    """Of a stage, not of each of its tasks: in two Places, whole and split, and named twice."""
    text = refused(lambda: placed({(0,): {"PP": 0}, (1,): {"PP": [0, 1]}}))
    assert text.count("placed twice") == 1
    assert "microbatch" not in text.splitlines()[1]
    whole, split_up = order_at(3, {"PP": 1, "PASS": "B"}), order_at(4, {"PP": 1, "PASS": "BI"})
    text = refused(lambda: halves(whole, split_up))
    assert text.count("as BI or BW") == 1
    assert "B.PP1 of microbatches 0, 1: as B at train.py:3, as BI or BW at train.py:4" in text
    forwards = {"PP": 0, "PASS": "F"}
    text = refused(lambda: ordered(order_at(5, forwards, forwards)))
    assert text.count("comes twice") == 2
    assert "F.PP0.MB0 comes twice, in groups[0] and groups[1]; so do 1 more of its tasks" in text


def test_a_backward_both_whole_and_split_is_refused():
    orders = (
        order_at(3, {"PP": 1, "PASS": "B"}),
        order_at(4, {"PP": 0, "PASS": "B"}, task("BW", 1, 1)),
    )
    assert_expected_inline(
        refused(lambda: halves(*orders)),
        """\
a backward is ordered both whole and split
  B.PP1.MB1: as B at train.py:3, as BI or BW at train.py:4
  hint  use PASS "B", or the pair "BI" and "BW", for one region and microbatch""",
    )


def ordered(*orders: piper.Order) -> None:
    stages = traced()
    split(stages)(stages.dag)
    for node in stages.dag.tasks():
        node.meta["task"] = replace(task_of(node), where="model.py:8")
    apply(stages.dag, place(LINE2), Tie(), Transfer(), Order(orders))


def test_order_refuses_all_at_once():
    orders = (
        order_at(3, {"PP": 2}, {"EP": 0, "MB": 0}, task("BI", 0, 0)),
        order_at(4, task("F", 0, 0), task("F", 1, 0)),
        order_at(5, task("F", 0, 0), {"PP": 0, "PASS": "F"}),
    )
    assert_expected_inline(
        refused(lambda: ordered(*orders)),
        """\
an order cannot be kept
  train.py:3: the filter {"PP": 2} matches nothing: no task has PP=2; there are: 0, 1
  train.py:3: the filter {"EP": 0, "MB": 0} matches nothing: no task has the tag 'EP' (there are: MB, PASS, PP)
  train.py:3: the filter {"PP": 0, "MB": 0, "PASS": "BI"} matches nothing: no task has PASS='BI'; there are: B, F
  train.py:4: one order names tasks of several device groups: F.PP0.MB0 on rank 0, F.PP1.MB0 on rank 1
    hint  write one piper.Order for each rank, or for each group of replicas
  train.py:4: leaves out F.PP0.MB1, though it names the same pass of other microbatches
    hint  the batch is split into 2; is the schedule made for as many? Name a pass for all microbatches, or for none
  train.py:5: F.PP0.MB0 comes twice, in groups[0] and groups[1]
    hint  a task runs once: name it in one group""",
    )


def test_order_refuses_a_filter_that_is_close():
    assert_expected_inline(
        refused(lambda: ordered(order_at(3, {"PP": 0, "MB": 5}))),
        """\
an order cannot be kept
  train.py:3: the filter {"PP": 0, "MB": 5} matches nothing: no task has MB=5; there are: 0, 1
    hint  the batch is split into 2; is the schedule made for as many?""",
    )


def test_order_against_the_dataflow_is_refused():
    assert_expected_inline(
        refused(lambda: ordered(order_at(3, {"PP": 0, "PASS": "B"}, {"PP": 0, "PASS": "F"}))),
        """\
an order contradicts the dataflow or another order
  asked  the Order at train.py:3: B.PP0.MB0 before F.PP0.MB0, on rank 0
  cycle  rank 0 B.PP0.MB0 [model.py:8]  waits for  F.PP0.MB0  (uses bundle_PP0_MB0)
         rank 0 F.PP0.MB0 [model.py:8]  waits for  B.PP0.MB0  (ordered at train.py:3)
  hint   change the order of one of these tasks""",
    )


def test_orders_against_one_another_are_refused():
    both = task("F", 0, 0), task("F", 0, 1)
    assert_expected_inline(
        refused(lambda: ordered(order_at(3, *both), order_at(4, *both[::-1]))),
        """\
an order contradicts the dataflow or another order
  contradict  the Order at train.py:3: F.PP0.MB0 before F.PP0.MB1, on rank 0
              the Order at train.py:4: F.PP0.MB1 before F.PP0.MB0, on rank 0
  cycle       rank 0 F.PP0.MB1 [model.py:8]  waits for  F.PP0.MB0  (ordered at train.py:3)
              rank 0 F.PP0.MB0 [model.py:8]  waits for  F.PP0.MB1  (ordered at train.py:4)
  hint        change the order of one of these tasks""",
    )


def test_orders_that_deadlock_are_refused():
    first = order_at(3, task("F", 0, 0), task("B", 0, 0), task("F", 0, 1), task("B", 0, 1))
    second = order_at(4, task("F", 1, 1), task("F", 1, 0))
    assert_expected_inline(
        refused(lambda: ordered(first, second)),
        """\
the orders deadlock: tasks wait for one another across ranks
  contradict  the Order at train.py:3: B.PP0.MB0 before F.PP0.MB1, on rank 0
              the Order at train.py:4: F.PP1.MB1 before F.PP1.MB0, on rank 1
  cycle       rank 1 B.PP1.MB0 [model.py:8]  waits for  F.PP1.MB0  (uses bundle_PP1_MB0)
              rank 0 B.PP0.MB0 [model.py:8]  waits for  B.PP1.MB0  (uses mm_3_MB0, from rank 1)
              rank 0 F.PP0.MB1 [model.py:8]  waits for  B.PP0.MB0  (ordered at train.py:3)
              rank 1 F.PP1.MB1 [model.py:8]  waits for  F.PP0.MB1  (uses tanh_MB1, from rank 0)
              rank 1 F.PP1.MB0 [model.py:8]  waits for  F.PP1.MB1  (ordered at train.py:4)
  hint        change the order of one of these tasks""",
    )
