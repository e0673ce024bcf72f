"""Two rewrites stated by hand, before the passes that will make them exist.

ZeRO-3: a bucket gathered before each use and its gradient scattered. Experts: two experts on two
ranks, tokens exchanged. The IR must not need to change for them: both are nodes of the same DAG,
printed by the same printer, lowered, verified and run by the same runtime.
"""

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import piper_dynamo as piper
from piper_dynamo.binding import bind, executor_of
from piper_dynamo.errors import PiperPlanError
from piper_dynamo.ir import ops
from piper_dynamo.ir.graph import Dag, Layout, is_pick, print_dag, producer, results_of, task_of
from piper_dynamo.ir.graph import collective as collect
from piper_dynamo.ir.task import Kind, Task
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.chunks import compile_chunks
from piper_dynamo.lowering.emit import emit
from piper_dynamo.programs import lower_all
from piper_dynamo.runtime.local import LocalWorld, current

GROUP = (0, 1)


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=generator))

    def forward(self, x):
        with piper.annotate("PP", 0):
            return (torch.tanh(x @ self.w.T) @ self.w.T).square().mean()


class Expert(nn.Module):
    """One rank's view: tokens, a local expert, and what comes back."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.float64, generator=generator))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = x * 2
            with piper.annotate("EP", 0):
                y = torch.tanh(h @ self.w)
            return (y * h).mean()


def template(model: nn.Module, x: torch.Tensor) -> Dag:
    """The model's DAG of one microbatch, every task on both ranks."""
    dag = piper.plan(model, piper.Strategy(piper.Split({}, num_microbatches=1)), (x,)).dag
    for node in dag.graph.nodes:
        if "task" in node.meta:
            node.meta["task"] = replace(task_of(node), devices=GROUP)
    dag.makers = dict.fromkeys(dag.makers, (GROUP,))
    return dag


def collective(dag: Dag, kind: Kind, value, after, name: str, stream: str):
    have = value.meta["spec"]
    rows = {Kind.ALL_GATHER: 2, Kind.REDUCE_SCATTER: 0.5, Kind.ALL_TO_ALL: 1}[kind]
    spec = replace(have, shape=(int(have.shape[0] * rows), *have.shape[1:])).contiguous()
    task = Task(kind=kind, label=name, devices=GROUP, stream=stream)
    function = getattr(ops, str(kind))
    with dag.graph.inserting_after(after):
        (made,) = collect(
            dag.graph,
            task,
            function,
            [value],
            (GROUP,),
            name=f"{kind}_{name}",
            results=[(name, spec)],
        )
    return made


def shard_bucket(dag: Dag) -> None:
    """ZeRO-3 of the one parameter: gather before each task that uses it, scatter its gradient."""
    (weight,) = [n for n in dag.graph.find_nodes(op="placeholder") if n.name == "w"]
    whole = weight.meta["spec"]
    weight.meta["spec"] = replace(whole, shape=(2, 4)).contiguous()
    for user in list(weight.users):
        gathered = collective(
            dag, Kind.ALL_GATHER, weight, user.prev, f"w_for_{user.name}", "gather"
        )
        user.replace_input_with(weight, gathered)
    results = results_of(dag.graph)
    ((key, found),) = results["grads"].items()
    shard = collective(dag, Kind.REDUCE_SCATTER, found[0], found[0], "w_grad_shard", "reduce")
    dag.graph.find_nodes(op="output")[0].args = ({**results, "grads": {key: [shard]}},)


def exchange_tokens(dag: Dag) -> None:
    """Every value that enters or leaves the expert's region changes ranks."""
    for node in list(dag.graph.nodes):
        if not is_pick(node) or "spec" not in node.meta or not node.users:
            continue
        if all(task_of(u).kind is not Kind.COMPUTE for u in node.users if "task" in u.meta):
            continue
        home = task_of(producer(node)).name.region
        away = [u for u in node.users if "task" in u.meta and _expert(_region(u)) != _expert(home)]
        if away:
            last = node
            while is_pick(last.next):
                last = last.next
            moved = collective(dag, Kind.ALL_TO_ALL, node, last, f"{node.name}_exchanged", "ep")
            for user in away:
                user.replace_input_with(node, moved)


def _region(node):
    name = task_of(node).name
    return name.region if name is not None else None


def _expert(region):
    return region is not None and "EP" in dict(region.tags)


def run_by_hand(dag: Dag, weights, batches):
    """Both ranks' programs on the in-process runtime: (loss, gradient) per rank."""
    programs = lower_all(dag, 2)
    verify(programs)
    functions = compile_chunks(dag.chunks, "aten")

    def body():
        comm = current()
        program = programs[comm.rank]
        executor = executor_of(program, bind(program, dag.chunks, functions), comm)
        half = torch.tensor(0.5, dtype=torch.float64)
        state = [weights[comm.rank] for _ in program.state]
        data = [batches[comm.rank] for _ in program.data]
        results = executor.run(state, data, [half for _ in program.weights])
        return results.loss, results.grads[0]

    return LocalWorld(2).run(body), programs


def test_zero3_around_one_bucket():
    model = OneLayer()
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dag = template(model, x[:3])
    shard_bucket(dag)
    assert_expected_inline(
        print_dag(dag),
        """\
w = input    # float64[2, 4]
x = input    # float64[3, 4]
weight = input    # float64[]
all_gather_w_for_F_PP0_MB0 = all_gather([w], groups=[[0, 1]])    # on 0,1; stream gather
w_for_F_PP0_MB0 = all_gather_w_for_F_PP0_MB0[0]    # float64[4, 4]
F_PP0_MB0 = F_PP0(x, w_for_F_PP0_MB0)    # on 0,1
mean_MB0 = F_PP0_MB0[0]    # float64[]
bundle_PP0_MB0 = F_PP0_MB0[1]
all_gather_w_for_B_PP0_MB0 = all_gather([w], groups=[[0, 1]])    # on 0,1; stream gather
w_for_B_PP0_MB0 = all_gather_w_for_B_PP0_MB0[0]    # float64[4, 4]
B_PP0_MB0 = B_PP0(x, w_for_B_PP0_MB0, bundle_PP0_MB0, weight)    # on 0,1
d_w_MB0 = B_PP0_MB0[0]    # float64[4, 4]
loss = weighted_loss([mean_MB0], [weight])    # float64[]; on 0,1
grad_w = accumulate(d_w_MB0)    # float64[4, 4]; on 0,1
reduce_scatter_w_grad_shard = reduce_scatter([grad_w], groups=[[0, 1]])    # on 0,1; stream reduce
w_grad_shard = reduce_scatter_w_grad_shard[0]    # float64[2, 4]
return {loss: [loss], outputs: [None], grads: {0: [w_grad_shard]}, buffers: {}}""",
    )
    (first, second), programs = run_by_hand(dag, model.w.detach().chunk(2), x.chunk(2))
    model(x).backward()
    torch.testing.assert_close(torch.cat([first[1], second[1]]), model.w.grad, rtol=0, atol=1e-15)
    assert str(emit(programs[0]).source).count("rt.all_gather(") == 2


def test_two_experts_exchange_tokens():
    model = Expert()
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dag = template(model, x[:2])
    exchange_tokens(dag)
    (position,) = (arg.position for arg in dag.args if arg.name == "w")
    # Each rank has an expert of its own: nobody sums their gradients.
    dag.layouts[position, GROUP] = Layout(
        bucket="w", shard_groups=(), stream="", prefetch=0, keep="step", reduced=False, where=""
    )
    assert_expected_inline(
        print_dag(dag),
        """\
x = input    # float64[2, 3]
w = input    # float64[3, 3]
weight = input    # float64[]
F_PP0_MB0 = F_PP0(x)    # on 0,1
mul_MB0 = F_PP0_MB0[0]    # float64[2, 3]
all_to_all_mul_MB0_exchanged = all_to_all([mul_MB0], groups=[[0, 1]])    # on 0,1; stream ep
mul_MB0_exchanged = all_to_all_mul_MB0_exchanged[0]    # float64[2, 3]
F_PP0_EP0_MB0 = F_PP0_EP0(mul_MB0_exchanged, w)    # on 0,1
tanh_MB0 = F_PP0_EP0_MB0[0]    # float64[2, 3]
bundle_PP0_EP0_MB0 = F_PP0_EP0_MB0[1]
all_to_all_tanh_MB0_exchanged = all_to_all([tanh_MB0], groups=[[0, 1]])    # on 0,1; stream ep
tanh_MB0_exchanged = all_to_all_tanh_MB0_exchanged[0]    # float64[2, 3]
F_PP0_MB0_v1 = F_PP0_v1(tanh_MB0_exchanged, mul_MB0)    # on 0,1
mean_MB0 = F_PP0_MB0_v1[0]    # float64[]
bundle_PP0_v1_MB0 = F_PP0_MB0_v1[1]
B_PP0_MB0_v1 = B_PP0_v1(bundle_PP0_v1_MB0, weight)    # on 0,1
mul_2_MB0 = B_PP0_MB0_v1[0]    # float64[2, 3]
all_to_all_mul_2_MB0_exchanged = all_to_all([mul_2_MB0], groups=[[0, 1]])    # on 0,1; stream ep
mul_2_MB0_exchanged = all_to_all_mul_2_MB0_exchanged[0]    # float64[2, 3]
B_PP0_EP0_MB0 = B_PP0_EP0(bundle_PP0_EP0_MB0, mul_2_MB0_exchanged)    # on 0,1
d_w_MB0 = B_PP0_EP0_MB0[0]    # float64[3, 3]
B_PP0_MB0 = nothing()    # on 0,1
loss = weighted_loss([mean_MB0], [weight])    # float64[]; on 0,1
grad_w = accumulate(d_w_MB0)    # float64[3, 3]; on 0,1
return {loss: [loss], outputs: [None], grads: {2: [grad_w]}, buffers: {}}""",
    )
    experts = torch.randn(2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (first, second), _ = run_by_hand(dag, list(experts), x.chunk(2))

    # One process: each rank's first token goes to expert 0, its second to expert 1.
    reference = experts.clone().requires_grad_()
    h = x * 2
    y = torch.stack([torch.tanh(h[i] @ reference[i % 2]) for i in range(4)])
    (y * h).mean().backward()
    torch.testing.assert_close(first[1], reference.grad[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(second[1], reference.grad[1], rtol=0, atol=1e-15)


def test_swapped_collectives_are_refused():
    dag = template(OneLayer(), torch.zeros(3, 4, dtype=torch.float64))
    shard_bucket(dag)
    first, second = lower_all(dag, 2)
    gathers = [i for i, instr in enumerate(second.instrs) if instr.group]
    instrs = list(second.instrs)
    a, b = gathers[0], gathers[-1]
    instrs[a], instrs[b] = (
        replace(instrs[a], op=instrs[b].op, task=instrs[b].task),
        replace(instrs[b], op=instrs[a].op, task=instrs[a].task),
    )
    with pytest.raises(PiperPlanError, match="collective 0 differs between rank 0"):
        verify((first, replace(second, instrs=tuple(instrs))))
