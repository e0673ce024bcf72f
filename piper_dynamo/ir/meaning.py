"""What a step has to compute, whoever computes it: the reference of the proof.

Terms: a *value* says how something is made of the call's arguments, in the words of one process
that runs all microbatches: result 0 of F.PP0.MB1, microbatch 1 of x, a sum of such. Ranks,
messages, replicas and buckets do not occur in it.

Signature: DAG over the whole batch, before it is placed -> its meaning, which `evaluate.py`
compares with what the programs of all ranks do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch.fx.node import Node

from piper_dynamo.ir.graph import Dag, border_of, is_pick, producer, results_of, task_of
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import short
from piper_dynamo.ir.task import Kind

# ("arg", position)                    an argument of the call, whole
# ("cast", value, dtype)               a parameter as chunks compute with it
# ("weight", name), ("tangent", k)     what scales a loss; what the caller gives for output k
# ("slice", value, dim, k, count)      a microbatch of it
# ("task", name, k), ("bundle", name)  what a task makes
# ("sum", values), ("loss", values), ("concat", dim, values)
Value: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMeaning:
    """What one task reads and is.

    Attributes:
        inputs: Primals, then tangents.
        num_primals: How many of them are primals.
        bundle: What an earlier phase left for it; None where it takes nothing.
        target: The chunk that it runs.
        seed: Microbatch and number of the first draw, where it draws random numbers.
    """

    inputs: tuple[Value, ...]
    num_primals: int
    bundle: Value | None
    target: str
    seed: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a step has to compute.

    Attributes:
        tasks: By name; empty phases are left out.
        loss: The loss of one replica.
        outputs: By index, those that there are.
        grads: By argument position, the parts whose sum the gradient is; of an input that is
            sliced, its gradient alone.
        buffers: By argument position, the new value.
        routing: Of values that experts get or give: the counts by which rows travel, and of which
            microbatch.
        parameters: Which arguments are parameters: their gradients are summed over replicas.
        kept: Parameters whose gradients this step does not reduce.
        names: What the user calls each argument.
    """

    tasks: Mapping[str, TaskMeaning]
    loss: Value | None
    outputs: Mapping[int, Value]
    grads: Mapping[int, tuple[Value, ...]]
    buffers: Mapping[int, Value]
    routing: Mapping[Value, tuple[str, int | None]]
    parameters: frozenset[int]
    names: Mapping[int, str]
    kept: frozenset[int] = field(default_factory=frozenset)


def meaning_of(dag: Dag) -> Meaning:
    """The meaning of a DAG that is not placed yet, every backward split as it will run."""
    reader = _Reader(dag)
    results = results_of(dag.graph)
    grads = {int(key): reader.value(node) for key, node in results["grads"].items()}
    return Meaning(
        tasks=reader.tasks(),
        loss=None if results["loss"] is None else reader.value(results["loss"]),
        outputs={
            index: reader.value(node)
            for index, node in enumerate(results["outputs"])
            if node is not None
        },
        grads={p: value[1] if value[0] == "sum" else (value,) for p, value in grads.items()},
        buffers={int(key): reader.value(node) for key, node in results["buffers"].items()},
        routing=reader.routing(),
        parameters=frozenset(a.position for a in dag.args if a.kind is ArgKind.PARAMETER),
        names={arg.position: arg.name for arg in dag.args},
    )


def as_placed(meaning: Meaning, dag: Dag) -> Meaning:
    """The same meaning, with what placing decides: each task's chunk, and what is not reduced."""
    targets = {str(task_of(node).name): str(node.target) for node in dag.tasks()}
    return replace(
        meaning,
        tasks={name: replace(t, target=targets[name]) for name, t in meaning.tasks.items()},
        kept=frozenset(p for (p, _), layout in dag.layouts.items() if not layout.reduced),
    )


class _Reader:
    """Nodes read as values, each once."""

    def __init__(self, dag: Dag) -> None:
        self._dag = dag
        self._known: dict[Node, Value] = {}

    def value(self, node: Node) -> Value:
        if node not in self._known:
            self._known[node] = self._read(node)
        return self._known[node]

    def _read(self, node: Node) -> Value:
        if node.op == "placeholder":
            if "arg" in node.meta:
                position = node.meta["arg"]
                dtype = self._dag.computed.get(position)
                whole: Value = ("arg", position)
                return whole if dtype is None else ("cast", whole, short(dtype))
            if "tangent" in node.meta:
                return ("tangent", node.meta["tangent"])
            return ("weight", node.name)
        if is_pick(node):
            made, slot = producer(node), node.args[1]
            name = str(task_of(made).name)
            is_bundle = slot == len(made.meta["phase"].results)
            return ("bundle", name) if is_bundle else ("task", name, slot)
        match task_of(node).kind:
            case Kind.SLICE:
                source, *rest = node.args
                return ("slice", self._of(source), *rest)
            case Kind.LOSS:
                losses, weights = node.args
                assert isinstance(losses, list | tuple)
                assert isinstance(weights, list | tuple)
                pairs = zip(losses, weights, strict=True)
                return ("loss", tuple(self._of(one) for pair in pairs for one in pair))
            case Kind.CONCAT:
                parts, dim = node.args
                assert isinstance(parts, list | tuple)
                return ("concat", dim, tuple(self._of(part) for part in parts))
            case Kind.ACCUMULATE | Kind.SUM:
                return ("sum", tuple(self._of(part) for part in node.args))
            case kind:
                raise AssertionError(f"{node} is a {kind}, which comes with placement")

    def _of(self, node: Any) -> Value:
        assert isinstance(node, Node)
        return self.value(node)

    def tasks(self) -> dict[str, TaskMeaning]:
        found = {}
        for node in self._dag.tasks():
            phase, name = node.meta.get("phase"), task_of(node).name
            if phase is None or name is None:
                continue
            values = [self._of(source) for source in node.args]
            bundle = values.pop(len(phase.primals)) if phase.takes_bundle else None
            found[str(name)] = TaskMeaning(
                inputs=tuple(values),
                num_primals=len(phase.primals),
                bundle=bundle,
                target=str(node.target),
                seed=self._dag.seed(name) if phase.chunk.is_random else None,
            )
        return found

    def routing(self) -> dict[Value, tuple[str, int | None]]:
        found = {}
        for node in self._dag.graph.nodes:
            if "border" in node.meta:
                kind = node.meta["border"].kind
                border, name = border_of(node, kind), task_of(producer(node)).name
                assert border is not None
                assert name is not None
                found[self.value(node)] = (border.routing, name.mb)
        return found


def shown(value: Any, names: Mapping[int, str]) -> str:  # noqa: PLR0911
    """A value in the user's words."""
    match value:
        case ("arg", position):
            return repr(names.get(position, f"argument {position}"))
        case ("own", position, index, count):
            return f"part {index} of {count} of the experts {names.get(position, position)!r}"
        case ("block", of, index, count):
            return f"block {index} of {count} of {shown(of, names)}"
        case ("cast", of, dtype):
            return f"{shown(of, names)} as {dtype}"
        case ("slice", of, _, index, count):
            return f"microbatch {index} of {count} of {shown(of, names)}"
        case ("task", name, slot):
            return f"result {slot} of {name}"
        case ("bundle", name):
            return f"what {name} keeps"
        case ("tangent", index):
            return f"the gradient of output {index}"
        case ("weight", name):
            return f"the loss weight {name!r}"
        case ("splits", name, mb):
            return f"the counts {name!r} of microbatch {mb}"
        case ("loss", parts):
            return f"the loss of {', '.join(shown(one, names) for one in parts[::2])}"
        case ("concat", _, parts):
            return f"[{', '.join(shown(one, names) for one in parts)}]"
        case _:
            return str(value)
