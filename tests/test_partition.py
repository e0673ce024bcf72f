"""Partitioning: nothing is computed twice, nothing is kept that is there anyway.

Work is counted in *products*: matrix products, convolutions and attention, forward or backward.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import piper_dynamo as piper
from piper_dynamo.ir.chunk import Chunk, make_chunk, spec_of
from piper_dynamo.passes.partition import Partition
from tests.models import fill, xin
from tests.tracing import Stages, capture, same_as_eager

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
DIM, HEADS, KV_HEADS, TOKENS = 16, 4, 2, 8


def parameter(*shape: int, key: int = 0) -> nn.Parameter:
    return nn.Parameter(fill(shape, key) / 4)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary grouped-query attention, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        kv = DIM * KV_HEADS // HEADS
        self.q, self.k = parameter(DIM, DIM), parameter(kv, DIM, key=1)
        self.v, self.o = parameter(kv, DIM, key=2), parameter(DIM, DIM, key=3)
        self.gate, self.up = parameter(24, DIM, key=4), parameter(24, DIM, key=5)
        self.down = parameter(DIM, 24, key=6)
        self.first = nn.RMSNorm(DIM, dtype=torch.float64)
        self.second = nn.RMSNorm(DIM, dtype=torch.float64)
        angle = torch.outer(torch.arange(TOKENS), 10.0 ** -torch.arange(DIM // HEADS // 2))
        self.register_buffer("cos", angle.cos().double())
        self.register_buffer("sin", angle.sin().double())

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        q, k, v = (self.heads(h, w) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + F.linear(y.transpose(1, 2).flatten(2), self.o)
        h = self.second(x)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Conv(nn.Module):
    """Two convolutions, which give the gradients of input and weight in one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(TOKENS, TOKENS, 3, padding=1, dtype=torch.float64)
        self.b = nn.Conv1d(TOKENS, TOKENS, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.a(x))))


class Norm(nn.Module):
    """LayerNorm gives three gradients in one operator; a linear layer before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = parameter(DIM, DIM), parameter(DIM, DIM, key=1)
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x @ self.w) @ self.v)


class Squares(torch.autograd.Function):
    """x w, squared; with a backward of its own that runs two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        ctx.save_for_backward(x, w, y)
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w, y = ctx.saved_tensors
        inner = 2 * y * grad
        return inner @ w.t(), x.flatten(0, 1).t() @ inner.flatten(0, 1)


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Squares.apply(x, self.w))


BODIES: dict[str, Callable[[], nn.Module]] = {
    "llama": LlamaBlock,
    "convolution": Conv,
    "layernorm": Norm,
    "function": Function,
}


class Layers(nn.Module):
    """A first stage, `count` equal bodies each a stage of its own, and the loss."""

    def __init__(self, body: str, count: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = parameter(DIM, DIM)
        self.layers = nn.ModuleList(BODIES[body]() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP", i + 1):
                h = layer(h)
        with piper.annotate("PP", len(self.layers) + 1):
            return h.square().mean()


BATCH = (xin([2, TOKENS, DIM], 0),)


@cache
def built(name: str, count: int = 1) -> tuple[Layers, Stages]:
    model = Layers(name, count)
    return model, capture(model, BATCH).build()


@pytest.fixture(params=BODIES)
def layers(request: pytest.FixtureRequest) -> tuple[Layers, Stages]:
    return built(request.param)


def products(graph: fx.Graph) -> Counter[str]:
    names = Counter[str]()
    for node in graph.nodes:
        name = str(getattr(node.target, "overloadpacket", ""))
        if any(part in name for part in ("mm", "mv", "convolution", "dot_product")):
            names[name] += 1
    return names


def together(*phases: Any) -> Counter[str]:
    total = Counter[str]()
    for phase in phases:
        total += products(phase.chunk.graph) if phase is not None else Counter()
    return total


def body(stages: Stages) -> Partition:
    return stages.partitions[stages.region("PP1")]


def test_forward_and_backward_do_the_joint_graphs_products(layers: tuple[Layers, Stages]):
    _, stages = layers
    for region, partition in stages.partitions.items():
        joint = products(stages.graphs[region].graph)
        assert together(partition.forward, partition.backward) == joint
    assert sum(together(body(stages).forward).values()) > 0


def test_the_halves_do_the_whole_backwards_products(layers: tuple[Layers, Stages]):
    _, stages = layers
    for partition in stages.partitions.values():
        assert together(partition.input_grad, partition.weight_grad) == together(partition.backward)
    halves = body(stages)
    assert halves.input_grad is not None
    assert halves.input_grad is not halves.backward or halves.weight_grad is None
    whole = set(halves.backward.results)
    late = halves.weight_grad.results if halves.weight_grad is not None else ()
    assert sorted((*halves.input_grad.results, *late)) == sorted(whole)


def test_weight_gradients_wait(layers: tuple[Layers, Stages]):
    """BW runs a product per weight whose gradient is an operator of its own."""
    model, stages = layers
    weight_grad = body(stages).weight_grad
    expected = {LlamaBlock: 7, Conv: 0, Norm: 2, Function: 1}[type(model.layers[0])]
    assert sum(together(weight_grad).values()) == expected


def test_values_are_the_models(layers: tuple[Layers, Stages]):
    model, stages = layers
    same_as_eager(stages.dag, model, BATCH)


def test_matmuls_are_counted():
    _, stages = built("layernorm")
    halves = body(stages)
    counts = [
        p.chunk.matmuls
        for p in (halves.forward, halves.backward, halves.input_grad, halves.weight_grad)
    ]
    assert counts == [2, 4, 2, 2]


def test_empty_halves_are_none():
    """The first stage's input is data, so nobody waits for it; the last has no parameters."""
    _, stages = built("layernorm")
    first = stages.partitions[stages.region("PP0")]
    assert (first.input_grad, first.weight_grad) == (None, first.backward)
    last = stages.partitions[stages.region("PP2")]
    assert (last.input_grad, last.weight_grad) == (last.backward, None)


def bundle(chunk: Chunk) -> list[fx.Node]:
    (output,) = chunk.graph.find_nodes(op="output")
    return list(output.args[0][chunk.num_results :])


def test_bundles_hold_no_parameters_buffers_or_data(layers: tuple[Layers, Stages]):
    _, stages = layers
    held = {stages.capture.placeholders[a.position] for a in stages.capture.args}
    for region, partition in stages.partitions.items():
        names = stages.graphs[region].primals
        for phase in (partition.forward, partition.input_grad):
            if phase is None or not phase.gives_bundle:
                continue
            inputs = list(phase.chunk.graph.find_nodes(op="placeholder"))
            own = dict(zip(inputs, (names[i] for i in phase.primals), strict=False))
            assert not {own.get(node) for node in bundle(phase.chunk)} & held
    # They are read again instead.
    assert body(stages).backward.primals


def test_bundles_hold_other_regions_values():
    """A value that was received is gone from the rank after the forward, so it is kept."""
    _, stages = built("layernorm")
    forward = body(stages).forward
    (received,) = [
        node
        for node, i in zip(
            forward.chunk.graph.find_nodes(op="placeholder"), forward.primals, strict=True
        )
        if stages.graphs[stages.region("PP1")].primals[i] == "tanh"
    ]
    assert received in bundle(forward.chunk)


def test_bundles_hold_nothing_twice(layers: tuple[Layers, Stages]):
    _, stages = layers
    for partition in stages.partitions.values():
        kept = bundle(partition.forward.chunk)
        assert len(set(kept)) == len(kept)


def kept_bytes(chunk: Chunk) -> int:
    """Of the bundle's own memory."""
    outputs = enumerate(zip(chunk.shares, chunk.outputs, strict=True))
    return sum(
        spec.nbytes
        for i, (share, spec) in outputs
        if i >= chunk.num_results and share == -1 - i and spec is not None
    )


def test_a_llama_block_keeps_only_what_a_product_makes():
    """And what it was given: all else is one cheap operator away."""
    chunk = body(built("llama")[1]).forward.chunk
    keys = DIM * KV_HEADS // HEADS
    products = DIM + 2 * keys + DIM + DIM + 24 + 24  # q, k, v, attention, out, gate, up
    statistics = 2 + HEADS  # of both norms, and of the attention
    assert kept_bytes(chunk) == 2 * TOKENS * (products + statistics) * 8


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.w = parameter(6, DIM), parameter(DIM, DIM, key=1)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(tokens, self.table) @ self.w)
        with piper.annotate("PP", 1):
            return h.square().mean()


def test_a_lookup_is_made_again():
    model, batch = Lookup(), (torch.arange(6).view(2, 3),)
    stages = capture(model, batch).build()
    partition = stages.partitions[stages.region("PP0")]
    assert [str(n.target) for n in bundle(partition.forward.chunk)] == ["aten.tanh.default"]
    again = [n.target for n in partition.backward.chunk.graph.nodes]
    assert torch.ops.aten.embedding.default in again
    same_as_eager(stages.dag, model, batch)


def test_chunks_say_of_their_nodes_what_is_asked(layers: tuple[Layers, Stages]):
    _, stages = layers
    for partition in stages.partitions.values():
        for phase in (partition.forward, partition.backward):
            values: dict[Any, Tensor] = {}
            for node in phase.chunk.graph.nodes if phase is not None else ():
                assert set(node.meta) <= {"val", "stack_trace", "constant"}
                spec = spec_of(node)
                if spec is not None:  # a fake tensor for each form, not for each node
                    assert values.setdefault(spec, node.meta["val"]) is node.meta["val"]


def test_equal_layers_are_one_chunk():
    _, stages = built("layernorm", 4)
    partitions = [stages.partitions[stages.region(f"PP{i}")] for i in range(1, 5)]
    assert all(p is partitions[0] for p in partitions)


@pytest.mark.parametrize(("name", "count"), [("layernorm", 4), ("llama", 2)])
def test_equal_layers_of_two_models_are_equal_chunks(name: str, count: int):
    one, other = body(built(name)[1]), body(built(name, count)[1])
    assert one is not other
    for phase in ("forward", "backward", "input_grad", "weight_grad"):
        assert getattr(one, phase).chunk.key == getattr(other, phase).chunk.key


def test_unlike_layers_are_unlike_chunks():
    keys = {body(built(n)[1]).forward.chunk.key for n in BODIES}
    assert len(keys) == len(BODIES)
    wider = body(capture(Layers("layernorm"), (xin([3, TOKENS, DIM], 0),)).build())
    keys.add(wider.forward.chunk.key)
    keys.add(wider.backward.chunk.key)
    assert len(keys) == len(BODIES) + 2


def test_keys_tell_operators_arguments_and_inputs_apart():
    def chunk(call: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node], dtype=torch.float32) -> Chunk:
        graph = fx.Graph()
        inputs = [graph.placeholder(f"primals_{i}") for i in (1, 2)]
        for node in inputs:
            node.meta["val"] = torch.empty(2, 3, dtype=dtype)
        made = call(graph, *inputs)
        made.meta["val"] = torch.empty(2, 3, dtype=dtype)
        graph.output((made,))
        return make_chunk(graph, 1)

    aten = torch.ops.aten
    same = lambda g, a, b: g.call_function(aten.sub.Tensor, (a, b))  # noqa: E731
    keys = [
        chunk(same).key,
        chunk(lambda g, a, b: g.call_function(aten.sub.Tensor, (b, a))).key,
        chunk(lambda g, a, b: g.call_function(aten.add.Tensor, (a, b))).key,
        chunk(lambda g, a, b: g.call_function(aten.sub.Tensor, (a, b), {"alpha": 2})).key,
        chunk(same, torch.float64).key,
    ]
    assert len(set(keys)) == len(keys)
    assert chunk(same).key == keys[0]


class Aliases(nn.Module):
    """Gradients that are another output, an input, expanded, or each other."""

    def __init__(self) -> None:
        super().__init__()
        self.w = parameter(4, 4)
        self.inside, self.twin = parameter(2, 4, key=1), parameter(2, 4, key=2)
        self.border, self.expanded = parameter(2, 4, key=3), parameter(2, 4, key=4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w) + self.inside + self.twin
        with piper.annotate("PP", 1):
            h = torch.sin(h + self.border)
        with piper.annotate("PP", 2):
            return h.square().sum() + (x + self.expanded).sum()


def test_every_gradient_has_memory_of_its_own():
    model = Aliases()
    batch = (xin([2, 4], 0),)
    stages = capture(model, batch).build()
    args = {a.name: a.position for a in stages.capture.args}
    checked = set()
    for name, position in args.items():
        for region, node in stages.regions.partials.get(position, {}).items():
            backward = stages.partitions[region].backward
            names = stages.graphs[region].backward
            slot = [i for i, r in enumerate(backward.results) if names[r] == node.name]
            for at in slot[-1:]:
                spec = backward.chunk.outputs[at]
                assert spec.shape == tuple(model.get_parameter(name).shape)
                assert spec.is_contiguous, f"{name} is {spec} with strides {spec.stride}"
                checked.add(name)
    assert checked == {n for n, _ in model.named_parameters()}
    same_as_eager(stages.dag, model, batch)


def test_no_gradient_shares_memory_when_it_runs():
    """On real tensors: adding into one gradient leaves inputs and all other results as they are."""
    model = Aliases()
    stages = capture(model, (xin([2, 4], 0),)).build()
    for region, partition in stages.partitions.items():
        chunk = partition.backward.chunk
        inputs = [torch.ones(s.shape, dtype=s.dtype) for s in chunk.inputs]
        results = fx.GraphModule(nn.Module(), chunk.graph)(*inputs)
        early = stages.graphs[region].needed_early
        for slot, result in enumerate(partition.backward.results):
            if early[result]:
                continue
            others = [*inputs, *results[:slot], *results[slot + 1 :]]
            before = [t.clone() for t in others]
            results[slot].add_(1)
            assert all(torch.equal(a, b) for a, b in zip(others, before, strict=True))


class Penalised(nn.Module):
    """Terms of the loss that come from parameters alone: a penalty, and a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = parameter(4, 4), parameter(4, 4, key=1)
        self.b = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w)
        with piper.annotate("PP", 1):
            return (h @ self.v).square().mean() + self.v.square().sum() + self.w.sum() + self.b


def test_a_penalty_on_parameters_has_its_gradient():
    model = Penalised()
    batch = (xin([2, 4], 0),)
    same_as_eager(capture(model, batch).build().dag, model, batch)
