"""How fast a strategy can be at best, known before it is planned.

Formal: of one microbatch, `before(t)` is the longest chain of tasks that task t waits for, and
`after(t)` the longest that waits for t. A rank runs all its tasks of all microbatches, the first of
them no sooner than before(t), and after the last of them at least after(t) follows. So
    makespan >= min before + work of the rank + min after,   and   >= the longest chain,
whatever the order and the messages, since these and sharing a machine only add time. Where a
backward may be split, its halves count where the whole would take longer.

Signature: captured microbatch, costs, where stages are -> seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx.node import Node

from piper_dynamo.costs import Costs, durations
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.graph import producer, task_of
from piper_dynamo.ir.task import Pass
from piper_dynamo.passes.partition import Partition
from piper_dynamo.planning import Template

STAGE, EXPERTS = "PP", "EP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The least that a task of one microbatch takes.

    Attributes:
        stage: Its stage.
        work: Of its rank.
        chain: Until what waits for it may start.
    """

    stage: int
    work: float
    chain: float


def chunks_of(template: Template) -> dict[str, Chunk]:
    """Every chunk that a plan of the template may run, but for those made for a rank's experts."""
    found = dict(template.dag.chunks)
    for node in template.dag.tasks():
        partition: Partition | None = node.meta.get("partition")
        halves = (partition.input_grad, partition.weight_grad) if partition is not None else ()
        for half in halves:
            if half is not None:
                found[half.chunk.key] = half.chunk
    return found


def lower_bound(
    template: Template,
    costs: Costs,
    ranks: Sequence[Sequence[int]],
    num_microbatches: int,
    *,
    splits: bool,
    shares_experts: bool,
) -> float:
    """What no step of a pipeline can take less than.

    Args:
        template: The captured microbatch.
        costs: What its chunks take.
        ranks: The stages of each pipeline rank.
        num_microbatches: That each rank runs of each of its stages.
        splits: Whether backwards may be split.
        shares_experts: Whether tasks of experts will run other chunks than the template's: they
            count as nothing.
    """
    nodes = [n for n in template.dag.graph.nodes if n.meta.get("task") is not None]
    least = _least(template, costs, splits=splits, shares_experts=shares_experts)
    before, after = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0.0)
    for node in nodes:
        sources = [producer(s) for s in node.all_input_nodes if producer(s) in before]
        before[node] = max((before[s] + _chain(least, s) for s in sources), default=0.0)
    for node in reversed(nodes):
        for source in {producer(s): None for s in node.all_input_nodes if producer(s) in after}:
            after[source] = max(after[source], after[node] + _chain(least, node))
    longest = max((before[n] + one.chain + after[n] for n, one in least.items()), default=0.0)
    busiest = 0.0
    for stages in ranks:
        mine = {n: one for n, one in least.items() if one.stage in stages}
        if not mine:
            continue
        work = num_microbatches * sum(one.work for one in mine.values())
        # The last one is a backward: each forward has one to follow it, on the same rank.
        last = [n for n in mine if _is_backward(n)] or list(mine)
        tail = 0.0 if splits else min(after[n] for n in last)
        busiest = max(busiest, min(before[n] for n in mine) + work + tail)
    return costs.call + max(longest, busiest)


def _chain(least: Mapping[Node, Least], node: Node) -> float:
    return least[node].chain if node in least else 0.0


def _is_backward(node: Node) -> bool:
    name = task_of(node).name
    return name is not None and name.which is not Pass.F


def _least(
    template: Template, costs: Costs, *, splits: bool, shares_experts: bool
) -> dict[Node, Least]:
    """Of every task that does something."""
    named = [
        (node, name, node.meta["phase"].chunk.key)
        for node in template.dag.tasks()
        if (name := task_of(node).name) is not None and node.meta.get("phase") is not None
    ]
    keys = {name: key for _, name, key in named}
    keys |= {name.with_pass(w): key for node, name, _ in named for w, key in _halves(node)}
    took = durations(keys, costs, template.halves)
    found = {}
    for node, name, _ in named:
        tags = dict(name.tags)
        whole = 0.0 if shares_experts and EXPERTS in tags else took[str(name)]
        work = chain = whole
        halves = {which: took[str(name.with_pass(which))] for which, _ in _halves(node)}
        if splits and halves and whole:
            work, chain = min(whole, sum(halves.values())), min(whole, halves.get(Pass.BI, 0.0))
        found[node] = Least(stage=int(tags.get(STAGE, 0)), work=work, chain=chain)
    return found


def _halves(node: Node) -> list[tuple[Pass, str]]:
    """The halves of a backward that do something, and their chunks' keys."""
    partition: Partition | None = node.meta.get("partition")
    if partition is None:
        return []
    both = ((Pass.BI, partition.input_grad), (Pass.BW, partition.weight_grad))
    return [(which, half.chunk.key) for which, half in both if half is not None]
