"""Rewrites of chunks run operator by operator change no value, no input, no output's memory."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import piper_dynamo as piper
from piper_dynamo.ir.alias import exchange_of
from piper_dynamo.ir.chunk import Chunk, copied, make_chunk, runnable
from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering import aten
from tests import jobs
from tests.models import Stack4, rows

aten_ops = torch.ops.aten


def traced(fn: Callable[..., Any], *args: Tensor) -> Chunk:
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    outputs = graph.output_node().args[0]
    if isinstance(outputs, fx.Node):
        graph.output_node().args = ((outputs,),)
    return make_chunk(graph, len(graph.output_node().args[0]))


def run(graph: fx.Graph, args: list[Any]) -> list[Tensor]:
    return list(runnable(graph).forward(list(args)))


def plain(chunk: Chunk) -> Callable[..., Any]:
    return runnable(copied(chunk.graph)).forward


def in_place(graph: fx.Graph) -> list[str]:
    return [
        str(n.target)
        for n in graph.nodes
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
    ]


UNARY = (torch.tanh, torch.neg, torch.sigmoid, lambda a: a * 2.0, lambda a: a + 1.0)
BINARY = (torch.add, torch.mul, torch.sub, lambda a, b: torch.add(a, b, alpha=2))
VIEWS = (
    lambda a: a.t().contiguous().t(),
    lambda a: a.reshape(-1).view(a.shape),
    lambda a: a.permute(1, 0).transpose(0, 1),
    lambda a: a[:, :1].expand(a.shape),
    lambda a: a.t().t(),
    lambda a: a.pow(1.0),
)


def composed(seed: int) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    """A random function of two square matrices with several outputs, views among them."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(seed)
        values = [x, y, x @ y]
        for _ in range(14):
            kind = draw.random()
            a, b = draw.choice(values[-5:]), draw.choice(values[-5:])
            if kind < 0.35:
                values.append(draw.choice(UNARY)(a))
            elif kind < 0.75:
                values.append(draw.choice(BINARY)(a, b))
            else:
                values.append(draw.choice(VIEWS)(a))
        return values[-1], values[-4], draw.choice(values[3:])

    return fn


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_give_the_same_bits(seed: int) -> None:
    args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    chunk = traced(composed(seed), *args)
    before = [a.clone() for a in args]
    want = [v.clone() for v in plain(chunk)(*args)]
    got = run(aten.runnable_graph(chunk), args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True)), "an input changed"
    mine = {i: a.untyped_storage().data_ptr() for i, a in enumerate(args)}
    for i, (value, share) in enumerate(zip(got, chunk.shares, strict=True)):
        address = value.untyped_storage().data_ptr()
        owner = mine[share] if share >= 0 else got[-1 - share].untyped_storage().data_ptr()
        assert address == owner, f"output {i} has not the memory that the chunk says"


def test_something_is_written_over() -> None:
    found = [
        in_place(aten.runnable_graph(traced(composed(s), *[torch.randn(4, 4)] * 2)))
        for s in range(10)
    ]
    assert sum(map(len, found)) > 20


def test_control_what_is_read_later_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    real = aten._Memory.last
    monkeypatch.setattr(
        aten._Memory, "last", lambda self, node: min(real(self, node), _first(node))
    )
    args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    wrong = 0
    for seed in range(20):
        chunk = traced(composed(seed), *args)
        want = plain(chunk)(*args)
        got = run(aten.runnable_graph(chunk), args)
        wrong += not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert wrong > 0


def _first(node: fx.Node) -> int:
    """Where a node is read first: too early to take its memory."""
    place = {n: i for i, n in enumerate(node.graph.nodes)}
    return min(place[user] for user in node.users)


@pytest.mark.parametrize(
    "parts",
    [
        lambda g: torch.unsafe_chunk(g, 2, 0),
        lambda g: torch.unsafe_split(g, 2, 0),
        lambda g: torch.ops.aten.unsafe_split_with_sizes(g, [2, 2], 0),
        lambda g: torch.split(g, 2, 0),
        lambda g: g.unbind(0),
    ],
)
def test_parts_are_not_written_over_while_the_whole_lives(parts: Callable[..., Any]) -> None:
    """Some operators give views and do not say so."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        whole = x @ y
        first, *_ = parts(whole)
        return (first * 2).sum() + whole

    args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    want = fn(*args)
    assert torch.equal(run(aten.runnable_graph(traced(fn, *args)), args)[0], want)


def test_an_operator_that_is_told_where_to_write() -> None:
    def fn(g: Tensor, x: Tensor) -> Tensor:
        return aten_ops.silu_backward(g * 2, x)

    args = [torch.randn(4, 4) for _ in range(2)]
    chunk = traced(fn, *args)
    graph = aten.runnable_graph(chunk)
    assert "aten.silu_backward.grad_input" in in_place(graph)
    assert torch.equal(run(graph, args)[0], fn(*args))


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x, y: (x * 2) + y.double(), 1),  # only the operand of the result's dtype
        (lambda x, y: (x * 2) > y, 0),
        (lambda x, y: (x * 2)[:, :1] + y, 0),  # another shape
        (lambda x, y: (x * 2).expand(2, 4, 4) * y, 0),
        (lambda x, y: (z := x * 2, z.t() + z)[1], 0),  # another view of the same memory
        (lambda x, y: (z := x * 2, z * z)[1], 1),  # the very same view
        (lambda x, y: y * (x * 2), 1),  # the second operand
        (lambda x, y: y - (x * 2), 0),  # which does not commute
    ],
)
def test_what_is_written_over(fn: Callable[[Tensor, Tensor], Tensor], count: int) -> None:
    args = [torch.randn(4, 4), torch.randn(4, 4)]
    chunk = traced(fn, *args)
    graph = aten.runnable_graph(chunk)
    assert len(in_place(graph)) == count
    assert torch.equal(run(graph, args)[0], fn(*args))


# Sums.


def test_products_are_added_into_sums() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shared = x @ x
        return (x.t() @ y).t(), x @ y, shared, shared.tanh(), (x @ y) + 1

    args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    chunk = traced(fn, *args)
    assert aten.addable(chunk) == (0, 1)
    sums = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    sums[0] = sums[0].t().contiguous().t()  # laid out as the gradient before it was
    want = [a + b for a, b in zip(fn(*args), sums, strict=False)]
    got = run(aten.runnable_graph(chunk, (0, 1)), [*args, *sums])
    for i, total in enumerate(sums):
        assert got[i] is total
        torch.testing.assert_close(total, want[i], rtol=0, atol=1e-14)
    assert all(torch.equal(a, b) for a, b in zip(got[2:], fn(*args)[2:], strict=True))


def test_some_products_only() -> None:
    args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    chunk = traced(lambda x, y: (x @ y, y @ x), *args)
    assert aten.addable(chunk) == (0, 1)
    total = torch.randn(4, 4, dtype=torch.float64)
    want = total + args[1] @ args[0]
    got = run(aten.runnable_graph(chunk, (1,)), [*args, total])
    assert torch.equal(got[0], args[0] @ args[1])
    torch.testing.assert_close(got[1], want, rtol=0, atol=1e-14)


def plan(compile_mode: str = "aten") -> piper.Plan:
    wanted = piper.Strategy(piper.Split({}, num_microbatches=4), *jobs.places({0: [0], 1: [1]}))
    return piper.plan(Stack4(2), wanted, rows(8), 2, compile=compile_mode)


def test_programs_add_in_chunks() -> None:
    """The first microbatch makes the sums; the others add to them, and nothing else adds."""
    for program in plan().programs:
        runs = [i for i in program.instrs if i.op is Op.RUN and i.adds]
        assert len(runs) == 3
        adding = [i for i in program.instrs if i.op is Op.ACCUMULATE]
        assert all(len(i.inputs) == 1 for i in adding)
        text = str(plan().program(program.rank))
        assert text.count("rt.accumulate(") == 0


def test_fused_chunks_add_afterwards() -> None:
    """Inductor's products write memory of their own, so programs add what they give."""
    for program in plan("inductor").programs:
        assert not any(i.adds for i in program.instrs)
        assert any(len(i.inputs) == 2 for i in program.instrs if i.op is Op.ACCUMULATE)


# Unsafe sums.


def refused(change: Callable[[list[Instr]], None]) -> str:
    """What the proof says of a plan whose first rank's instructions are changed."""
    first, *others = plan().programs
    instrs = list(first.instrs)
    change(instrs)
    with pytest.raises(piper.PiperPlanError) as caught:
        verify([replace(first, instrs=tuple(instrs)), *others])
    return str(caught.value)


def test_a_microbatch_left_out_of_a_sum():
    """A chunk that adds to a sum gives a part of its own instead, which nobody uses."""

    def change(instrs: list[Instr]) -> None:
        at = next(k for k, i in enumerate(instrs) if i.adds)
        instrs[at] = replace(instrs[at], adds=(), outputs=("other", *instrs[at].outputs[1:]))

    assert "'other' is made and never used" in refused(change)


def test_a_sum_written_over():
    """A chunk that does not add overwrites what the microbatches before have added."""

    def change(instrs: list[Instr]) -> None:
        at = next(k for k, i in enumerate(instrs) if i.adds)
        instrs[at] = replace(instrs[at], adds=())

    assert "is written twice" in refused(change)


exchange = torch.ops.piper.exchange


def stand_ins(graph: fx.Graph) -> int:
    return sum(exchange_of(node) is not None for node in graph.nodes)


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (lambda x, n: exchange(x.sin(), n), 0),  # an output in memory that the chunk makes
        (lambda x, n: exchange(exchange(x.sin(), n), n), 0),
        (lambda x, n: exchange(x, n).sin(), 0),  # no output
        (lambda x, n: exchange(x.sin().t(), n).sin(), 1),  # laid out otherwise
        (lambda x, n: exchange(x, n), 1),  # an input's memory
        (lambda x, n: exchange(x.view(-1, 4), n).t(), 1),  # so is a view of it
        (lambda x, n: exchange(x.sin()[1:], n), 1),  # a part, which would keep the rest alive
        (lambda x, n: (y := x.sin(), exchange(y, n)), 1),  # two outputs
        (lambda x, n: (exchange(y := x.sin(), n), exchange(y, n)), 1),
        (lambda x, n: (exchange(y := x.sin(), n).t(), exchange(y, n).cos()), 0),
    ],
)
def test_what_stands_for_exchanges_is_no_copy(fn: Callable[..., Any], left: int) -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    chunk = traced(fn, x, torch.tensor([2, 1, 1]))
    graph = aten.runnable_graph(chunk)
    assert stand_ins(chunk.graph) > 0
    assert stand_ins(graph) == left
    want, got = plain(chunk)(x.clone(), None), run(graph, [x.clone(), None])
    for a, b, spec in zip(want, got, chunk.outputs, strict=True):
        assert torch.equal(a, b)
        assert spec is not None
        assert b.stride() == spec.stride
        assert b.untyped_storage().nbytes() == spec.nbytes
    owners = {b.untyped_storage().data_ptr() for b in got}
    assert len(owners) == len(set(chunk.shares))
