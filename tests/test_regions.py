"""Regions and cuts: which part of the model each node of the captured graph belongs to.

Most models are run as a DAG on one process too, and equal the eager model: whatever the regions,
no number may change.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper
from piper_dynamo.errors import PiperCaptureError
from piper_dynamo.ir.graph import is_pick, task_of
from piper_dynamo.ir.task import Kind
from piper_dynamo.passes.split import Split
from tests import jobs
from tests.models import Checkpointed, Custom, NormNet, Paths, TiedLM, Tripled, fill, rows, xin
from tests.tracing import Stages, capture, same_as_eager

BATCH = (xin([4, 4], 0),)


class Weights(nn.Module):
    """Square weights `w`, `v` for the models below."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(fill([4, 4], 0)), nn.Parameter(fill([4, 4], 1))


def regions(stages: Stages, target: Any = None) -> list[str]:
    """The regions of the nodes that call `target`, in graph order; of all, each once, without."""
    found = stages.regions.of
    if target is None:
        return [str(r) for r in stages.regions.order]
    nodes = [n for n in stages.capture.graph.nodes if n.target is target]
    return [str(found[n]) if n in found else "free" for n in nodes]


def partials(stages: Stages) -> dict[str, list[str]]:
    """The regions that have a partial gradient of each argument."""
    args = stages.capture.args
    return {args[p].name: [str(r) for r in f] for p, f in stages.regions.partials.items()}


aten = torch.ops.aten


class Fan(Weights):
    """One value used in two later regions: its gradient is summed."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            a = torch.sin(h)
        with piper.annotate("PP", 2):
            return (a + torch.cos(h) + h).square().mean()


def test_gradients_are_summed_where_all_parts_are_or_where_the_value_was_made():
    model = Fan()
    stages = capture(model, BATCH).build()
    sums = [n for n in stages.capture.graph.nodes if n.meta.get("is_gradient_acc")]
    assert [str(stages.regions.of[n]) for n in sums] == ["PP2", "PP0"]
    assert all(n in stages.regions.is_backward for n in sums)
    # PP2 sends one sum of its two uses and PP1 its own part; PP0 adds them.
    assert stages.graphs[stages.region("PP0")].tangents == (sums[0].name, sums[1].args[1].name)
    same_as_eager(stages.dag, model, BATCH)


class Through(Weights):
    """What passes the second region, and has something added there, is used in two later ones."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            h = h + self.v[0]
        with piper.annotate("PP", 2):
            a = torch.sin(h)
        with piper.annotate("PP", 3):
            return (a + torch.cos(h)).square().mean()


def test_gradients_are_summed_where_something_was_added_to_what_passes():
    model = Through()
    stages = capture(model, BATCH).build()
    sums = [n for n in stages.capture.graph.nodes if n.meta.get("is_gradient_acc")]
    assert [str(stages.regions.of[n]) for n in sums] == ["PP1"]
    same_as_eager(stages.dag, model, BATCH)


class Merged(Weights):
    """Uses of one weight, and of values computed from weights alone, in two regions."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            scaled = self.w.t() * 2
            h = torch.tanh(x @ scaled)
        with piper.annotate("PP", 1):
            return ((h @ scaled).sin() @ self.v + h @ self.w).square().mean()


def test_one_partial_gradient_per_region_that_uses_a_parameter():
    stages = capture(TiedLM(), TiedLM.batch()).cut()
    assert partials(stages) == {"e": ["PP0", "PP1"], "a": ["PP0"]}


def test_values_of_parameters_alone_are_free_and_their_gradients_split():
    model = Merged()
    stages = capture(model, BATCH).build()
    forward = [
        n
        for n in stages.capture.graph.nodes
        if n.op == "call_function" and n not in stages.regions.is_backward
    ]
    free = [n for n in forward if n not in stages.regions.of]
    assert {aten.t.default, aten.mul.Tensor} <= {n.target for n in free}
    assert partials(stages) == {"w": ["PP0", "PP1"], "v": ["PP1"]}
    # Recomputed by both, kept and sent by neither.
    for region in ("PP0", "PP1"):
        graph = stages.graphs[stages.region(region)]
        copies = [n for n in graph.graph.nodes if n.meta.get("piper_free")]
        assert any(n.target is aten.mul.Tensor for n in copies)
        assert not {n.name for n in free} & {*graph.primals, *graph.forward}
    for partition in stages.partitions.values():
        products = [n.target for n in partition.backward.chunk.graph.nodes]
        assert aten.t.default in products
    same_as_eager(stages.dag, model, BATCH)


def test_free_values_are_not_kept():
    """The bundle of a linear layer holds no transposed or cast weight, only activations."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(fill([64, 4], 0))

        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = torch.tanh(x.float() @ self.w.float().t())
            with piper.annotate("PP", 1):
                return h.square().mean()

    stages = capture(Cast(), (xin([5, 4], 0),)).build()
    chunk = stages.partitions[stages.region("PP0")].forward.chunk
    kept = [spec.shape for spec in chunk.outputs[chunk.num_results :]]
    assert (64, 4) not in kept
    assert (4, 64) not in kept


class Returns(Weights):
    """PP 0 -> 1 -> 0: the second visit to PP 0 cannot be one region with the first."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            h = torch.sin(h)
        with piper.annotate("PP", 0):
            return (h @ self.v).square().mean()


def test_visits_are_split():
    model = Returns()
    stages = capture(model, BATCH).cut()
    assert regions(stages) == ["PP0", "PP1", "PP0.v1"]
    assert regions(stages, aten.tanh.default) == ["PP0"]
    assert regions(stages, aten.tanh_backward.default) == ["PP0"]
    assert partials(stages) == {"w": ["PP0"], "v": ["PP0.v1"]}
    # What the backward of the first visit needs is not made in the second.
    assert not set(stages.graphs[stages.region("PP0")].primals) & {
        n.name for n, r in stages.regions.of.items() if str(r) != "PP0"
    }
    same_as_eager(stages.build().dag, model, BATCH)


class Sideways(Weights):
    """PP 0, 1, 0 with nothing flowing from 1 back to 0: one region each."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            a = torch.sin(h)
        with piper.annotate("PP", 0):
            b = torch.cos(h) @ self.v
        with piper.annotate("PP", 1):
            return (a + b).square().mean()


def test_stretches_without_a_way_back_are_one_region():
    model = Sideways()
    stages = capture(model, BATCH).build()
    assert regions(stages) == ["PP0", "PP1"]
    same_as_eager(stages.dag, model, BATCH)


class Unnumbered(Weights):
    """Blocks without an index, the inner ones nested in numbered ones."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for stage in range(2):
            with piper.annotate("PP", stage):
                for _ in range(2):
                    with piper.annotate("block"):
                        h = torch.tanh(h @ self.w)
        return h.square().mean()


def test_annotations_without_an_index_are_numbered_in_order_of_entry():
    model = Unnumbered()
    stages = capture(model, BATCH).build()
    # The loss is in no block; it joins the region that it follows.
    assert regions(stages) == ["PP0.block0", "PP0.block1", "PP1.block2", "PP1.block3"]
    assert [r for r in regions(stages, aten.tanh.default)] == regions(stages)
    assert partials(stages)["w"] == regions(stages)
    same_as_eager(stages.dag, model, BATCH)


class Mixed(Weights):
    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP"):
            return h.square().mean()


def test_a_tag_with_and_without_an_index_is_refused():
    stages = capture(Mixed(), BATCH)
    with pytest.raises(PiperCaptureError, match="both with and without an index") as caught:
        stages.cut()
    assert "PP" in str(caught.value)
    assert "give every piper.annotate of one name an index, or none" in str(caught.value)


class Untagged(Weights):
    """Before, between and after the tagged blocks; and an output that no block has to do with."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2  # inputs only: joins its consumer
        with piper.annotate("PP", 0):
            h = torch.tanh(h @ self.w)
        h = h + 1  # joins its producer
        with piper.annotate("PP", 1):
            h = torch.sin(h @ self.v)
        return h.square().mean(), y.exp()


def test_untagged_nodes_are_adopted():
    stages = capture(Untagged(), rows(4)).build()
    assert regions(stages) == ["PP0", "PP1"]
    assert regions(stages, aten.mul.Tensor)[0] == "PP0"
    assert regions(stages, aten.add.Tensor)[0] == "PP0"
    assert regions(stages, aten.mean.default) == ["PP1"]
    assert regions(stages, aten.exp.default) == ["PP0"]
    first = Untagged.forward.__code__.co_firstlineno
    found = {(int(w.rsplit(":", 1)[-1]) - first, str(r)) for w, r in stages.regions.untagged}
    # The backward's own reads of these nodes (2 * h of the square) have their lines too.
    assert found == {(1, "PP0"), (4, "PP0"), (7, "PP1"), (7, "PP0")}


def test_a_model_without_tags_is_one_region():
    class Plain(Weights):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.w).square().mean()

    model = Plain()
    stages = capture(model, BATCH).build()
    assert regions(stages) == ["all"]
    assert stages.regions.untagged == ()
    same_as_eager(stages.dag, model, BATCH)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_backward_of_a_custom_function_is_in_its_region():
    model = Custom()
    stages = capture(model, rows(4)).build()
    # Three times: the constant of the custom backward, in one backward node per region.
    tripled = [n for n in stages.capture.graph.nodes if 3 in n.args]
    assert [str(stages.regions.of[n]) for n in tripled] == ["PP1", "PP0"]
    assert all(n in stages.regions.is_backward for n in tripled)
    assert partials(stages) == {"w.0": ["PP0"], "w.1": ["PP1"]}
    same_as_eager(stages.dag, model, rows(4))


class Around(Weights):
    """A custom function in the first visit of a region, whose backward comes last."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = Tripled.apply(x @ self.w)
        with piper.annotate("PP", 1):
            h = torch.tanh(h @ self.v)
        with piper.annotate("PP", 0):
            return Tripled.apply(h).square().mean()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_backward_of_a_custom_function_is_in_its_visit():
    model = Around()
    stages = capture(model, BATCH).build()
    assert regions(stages) == ["PP0", "PP1", "PP0.v1"]
    tripled = [n for n in stages.capture.graph.nodes if 3 in n.args]
    assert [str(stages.regions.of[n]) for n in tripled] == ["PP0.v1", "PP0"]
    assert partials(stages) == {"w": ["PP0"], "v": ["PP1"]}
    same_as_eager(stages.dag, model, BATCH)


def test_a_checkpointed_region_recomputes_in_its_own_backward():
    model = Checkpointed()
    stages = capture(model, rows(4)).build()
    assert regions(stages) == ["PP0", "PP1"]
    for region in ("PP0", "PP1"):
        partition = stages.partitions[stages.region(region)]
        again = [n.target for n in partition.backward.chunk.graph.nodes]
        assert aten.tanh.default in again
        assert aten.mm.default in again
    # The first stage keeps nothing: its input is data.
    first = stages.partitions[stages.region("PP0")].forward.chunk
    assert len(first.outputs) == first.num_results == 1
    same_as_eager(stages.dag, model, rows(4))


def test_a_recomputed_region_between_others():
    class Middle(Weights):
        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = torch.tanh(x @ self.w)
            with piper.annotate("PP", 1):
                h = checkpoint(lambda h: torch.sin(h @ self.v).exp(), h, use_reentrant=False)
            with piper.annotate("PP", 2):
                return h.square().mean()

    model = Middle()
    stages = capture(model, BATCH).build()
    assert regions(stages) == ["PP0", "PP1", "PP2"]
    same_as_eager(stages.dag, model, BATCH)


def test_changed_buffers_are_results():
    model = NormNet()
    batch = rows(4)
    stages = capture(model, batch, 2).build()
    changed = {stages.capture.args[p].name for p in stages.capture.buffers}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    Split(2, stages.dims, weight_per_microbatch=False)(stages.dag)
    # The second microbatch starts from what the first leaves; the first from the state.
    first, second = (n for n in stages.dag.tasks() if str(task_of(n)).startswith("F.PP0"))
    (running,) = [n for n in stages.dag.graph.nodes if n.name.endswith("running_mean")]
    assert running in first.args
    assert running not in second.args
    assert any(is_pick(a) and a.args[0] is first for a in second.args)


class Transposed(Weights):
    """A transposed value and a transposed gradient cross the border."""

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w).t()
        with piper.annotate("PP", 1):
            return (h @ x).square().mean()


def test_what_crosses_a_border_is_contiguous():
    model = Transposed()
    stages = capture(model, BATCH).build()
    copies = [n for n in stages.capture.graph.nodes if n.target is aten.clone.default]
    assert [str(stages.regions.of[n]) for n in copies] == ["PP0", "PP1"]
    for node in stages.dag.graph.nodes:
        if is_pick(node) and "spec" in node.meta and any("task" in u.meta for u in node.users):
            assert node.meta["spec"].is_contiguous
    same_as_eager(stages.dag, model, BATCH)


def test_the_other_region_sees_the_contiguous_value():
    """Strides that the next region was traced with are those it will be given."""

    class Shown(Weights):
        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = torch.tanh(x @ self.w).t()
            with piper.annotate("PP", 1):
                return h.flatten().sin().view(4, 4).mean(0).square().sum()

    model = Shown()
    stages = capture(model, BATCH).build()
    second = stages.graphs[stages.region("PP1")].graph
    (given,) = [n for n in second.find_nodes(op="placeholder") if str(n.target) == "primals_1"]
    assert given.meta["val"].stride() == (4, 1)
    same_as_eager(stages.dag, model, BATCH)


def test_views_of_values_laid_out_like_a_border_value():
    """A view that the traced layout allows is a copy where the border value is contiguous."""

    class Kept(Weights):
        def forward(self, x: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = torch.tanh(x @ self.w).view(4, 2, 2).transpose(0, 1)
            with piper.annotate("PP", 1):
                return (torch.sin(h).transpose(0, 1).flatten(1) @ self.v).square().mean()

    model = Kept()
    same_as_eager(capture(model, BATCH).build().dag, model, BATCH)


def test_skips_go_straight_to_where_they_are_used():
    class Skip(Weights):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with piper.annotate("PP", 0):
                h = first = torch.tanh(x @ self.w)
            with piper.annotate("PP", 1):
                h = torch.sin(h)
            with piper.annotate("PP", 2):
                return F.mse_loss((h + first) @ self.v, y)

    model = Skip()
    stages = capture(model, rows(4)).build()
    middle = stages.graphs[stages.region("PP1")]
    last = stages.graphs[stages.region("PP2")]
    made = stages.graphs[stages.region("PP0")].forward
    assert len(made) == 1
    assert made[0] in last.primals
    assert made[0] not in middle.forward
    same_as_eager(stages.dag, model, rows(4))


def test_only_forward_without_gradients():
    stages = capture(Fan(), BATCH, training=False).build()
    assert not stages.capture.tangents
    assert not stages.regions.is_backward
    assert stages.regions.partials == {}
    assert {str(task_of(n)) for n in stages.dag.tasks()} == {"F.PP0", "F.PP1", "F.PP2"}
    assert not any(task_of(n).kind is not Kind.COMPUTE for n in stages.dag.tasks())
    assert all(p.backward is None for p in stages.partitions.values())


class Alike(nn.Module):
    """The names of two regions differ in a dot and an underscore alone."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(fill([4, 4], k) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("A", 1):
            x = torch.tanh(x @ self.w[0])
            with piper.annotate("B", 2):
                x = torch.sin(x @ self.w[1])
        with piper.annotate("A1_B", 2):
            return torch.cos(x @ self.w[2]).square().mean()


def test_chunks_have_names_of_their_own_whatever_the_tags():
    def job() -> tuple[float, dict[str, Tensor]]:
        place = piper.Strategy(piper.Split({}, num_microbatches=2), piper.Place({}, devices=[0]))
        step = piper.compile(Alike(), place, example_inputs=BATCH)
        loss = step(*BATCH)
        loss.backward()
        return loss.item(), jobs.grads(step)

    want = Alike()
    loss = want(*BATCH)
    loss.backward()
    ((found, grads),) = jobs.run_ranks(job, 1)
    jobs.close(found, loss.item(), "loss")
    jobs.check_grads([grads], want)


def test_a_schedule_over_stages_that_run_backwards() -> None:
    """The order is none of the user's: it is the stages that are to be looked at."""
    backwards = {"layers.[01]": {"PP": 1}, "layers.[23]": {"PP": 0}}
    strategy = piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, regions=backwards
    )
    text = jobs.refusal(lambda: piper.plan(Paths(), strategy, rows(8), world_size=2))
    jobs.mentions(text, "regions=", "number the stages as forward runs them")
