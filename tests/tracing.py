"""The stages of a plan one by one, for tests that look between them.

`capture` stops after AOTAutograd, `regions` after the cut, `partitioned` after the partitioner,
`dag` after the build. Nothing is shared with the plans of other tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piper_dynamo import capture as capturing
from piper_dynamo.ir.graph import Dag
from piper_dynamo.ir.joint import Arg, ArgKind, Capture
from piper_dynamo.ir.task import RegionId
from piper_dynamo.passes.build import build
from piper_dynamo.passes.capacity import Bound, set_capacities
from piper_dynamo.passes.cut import RegionGraph, cut
from piper_dynamo.passes.partition import Partition, Partitioner
from piper_dynamo.passes.regions import Regions, find_regions


@dataclass(slots=True)
class Stages:
    """A captured microbatch, and what each stage of cutting makes of it."""

    capture: Capture
    dims: dict[int, int]
    regions: Regions = field(init=False)
    graphs: dict[RegionId, RegionGraph] = field(init=False)
    partitions: dict[RegionId, Partition] = field(init=False)
    dag: Dag = field(init=False)

    def cut(self, bounds: Sequence[Bound] = ()) -> "Stages":
        """Up to the cut: regions, and a joint graph of each."""
        self.regions = find_regions(self.capture)
        set_capacities(self.capture, self.regions, bounds)
        self.graphs = cut(self.capture, self.regions)
        return self

    def build(self, bounds: Sequence[Bound] = (), *, budget: float | None = None) -> "Stages":
        """Up to the DAG of one microbatch; every region keeps as much as `budget` says."""
        self.cut(bounds)
        kept = {self.capture.placeholders[a.position] for a in self.capture.args}
        partitioner = Partitioner(self.capture.mode)
        self.partitions = {
            region: partitioner(graph, tuple(name in kept for name in graph.primals), budget)
            for region, graph in self.graphs.items()
        }
        self.dag = self.rebuilt()
        return self

    def rebuilt(self) -> Dag:
        """The DAG once more, for passes that change it."""
        return build(self.capture, self.regions, self.graphs, self.partitions)

    def region(self, text: str) -> RegionId:
        """The region with this text form."""
        (found,) = [r for r in self.regions.order if str(r) == text]
        return found


def capture(
    model: nn.Module, example: Sequence[Any], microbatches: int = 1, *, training: bool = True
) -> Stages:
    """The joint graph of one microbatch; every data tensor is sliced along dim 0.

    The batch is not symbolic here, so a model that reads its size needs `microbatches=1`.
    """
    found: list[Stages] = []

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        args = capturing.read_args(gm, examples)
        numbers = {a.position: e for a, e in zip(args, examples, strict=True) if a.spec is None}
        dims = {a.position: 0 for a in args if _sliced(a)}
        traced = capturing.trace(
            gm, args, numbers, dims, microbatches, loss=None, training=training
        )
        found.append(Stages(traced, dims))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*example)
    return found[-1]


def _sliced(arg: Arg) -> bool:
    return arg.kind is ArgKind.DATA and arg.spec is not None and bool(arg.spec.shape)


def run(dag: Dag, model: nn.Module, batch: Sequence[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of a DAG without devices, run as one module.

    A gradient that is still several parts, before Split, is their sum.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    data = iter(batch)
    values: list[Any] = []
    for node in dag.graph.find_nodes(op="placeholder"):
        position = node.meta.get("arg")
        if position is None:
            values.append(torch.tensor(1 / dag.num_microbatches, dtype=node.meta["spec"].dtype))
        elif dag.args[position].name in state:
            values.append(state[dag.args[position].name].detach().clone())
        else:
            values.append(next(data))
    with torch.no_grad():
        results = dag.module()(*values)
    grads = {
        dag.args[int(key)].name: sum(grad) if isinstance(grad, list | tuple) else grad
        for key, grad in results["grads"].items()
    }
    return results["loss"], grads


def same_as_eager(dag: Dag, model: nn.Module, batch: Sequence[Any]) -> None:
    """The DAG's loss and gradients are the model's; every parameter that has one is there."""
    loss, grads = run(dag, model, batch)
    model.zero_grad()
    want = model(*batch)
    want.backward()
    torch.testing.assert_close(loss, want.detach(), rtol=0, atol=1e-14)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(grads) == set(expected)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-14)
