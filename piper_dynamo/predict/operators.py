"""What the operators of a captured call compute, and what each reads.

Terms: *work* is the FLOPs of an operator's forward, or the seconds that it takes. An operator is
*free* if it is computed from parameters, constants and buffers that do not change: it is in no
stage, and each stage that uses it computes it again (`passes/regions.py`). Operators are numbered
in order.

Signature: Dynamo's graph of a call -> its operators, in order.
"""

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo.capture import fake_args
from piper_dynamo.captured import Call
from piper_dynamo.changes import memory_of, version_of
from piper_dynamo.ir.alias import call_draws
from piper_dynamo.ir.flops import flops_of_call
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import module_paths

_RUNS = 3  # of which the fastest counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of a graph.

    Attributes:
        paths: The modules that it is in, outermost first.
        work: FLOPs, or seconds.
        params: Bytes of the parameters that it reads itself, by name.
        reads: Numbers of the operators whose results it reads.
        is_free: Whether each stage that uses it computes it again.
    """

    paths: tuple[str, ...]
    work: float
    params: Mapping[str, int]
    reads: tuple[int, ...] = ()
    is_free: bool = False


def operators_of(graph: fx.GraphModule, call: Call, *, measure: bool = False) -> list[Operator]:
    """The operators of a graph that its outputs or buffers need, in order.

    Args:
        graph: Dynamo's graph of the call.
        call: What it is called with.
        measure: Work is the fastest of several runs, in seconds, on random values as large as the
            call's.
    """
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        values = fake_args(mode, call.args, call.numbers, {}, 1)
        found = _walked(graph, call.args, values, _count)
    runs = [[one.work for one in found.operators]]
    if measure:
        runs = [_measured(graph, call.args, values) for _ in range(_RUNS)]
    return found.needed([min(works) for works in zip(*runs, strict=True)])


def _measured(graph: fx.GraphModule, args: Sequence[Arg], fakes: Sequence[Any]) -> list[float]:
    with torch.no_grad(), torch.random.fork_rng():
        found = _walked(graph, args, [_value_like(fake) for fake in fakes], _clock)
    return [one.work for one in found.operators]


def _value_like(fake: Any) -> Any:
    """Small numbers of the shape of a fake tensor; zeros, which every table of embeddings has."""
    if not isinstance(fake, Tensor):
        return fake
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return made.normal_(std=0.02) if fake.is_floating_point() else made.zero_()


_Weigh: TypeAlias = Callable[[Callable[[], Any]], tuple[Any, float, bool]]


def _count(run: Callable[[], Any]) -> tuple[Any, float, bool]:
    """The result, its FLOPs, and whether random numbers were drawn."""
    flops, draws = 0, False

    def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal flops, draws
        if isinstance(func, torch._ops.OpOverload):
            draws |= call_draws(func, args, kwargs)
            if torch.is_inference_mode_enabled():  # operators made of others come here whole
                with mode:
                    made = func.decompose(*args, **kwargs)
                if made is not NotImplemented:
                    return made
        result = func(*args, **kwargs)
        flops += flops_of_call(func, args, kwargs, result)
        return result

    mode = compat.DispatchMode(take, higher_order=True)
    with mode:
        result = run()
    return result, float(flops), draws


def _clock(run: Callable[[], Any]) -> tuple[Any, float, bool]:
    """The result, and the seconds that it took."""
    start = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start, False


@dataclass(frozen=True, slots=True, kw_only=True)
class _From:
    """What a value is made from: numbers of operators, and positions of the call's arguments."""

    operators: frozenset[int] = frozenset()
    args: frozenset[int] = frozenset()

    def __or__(self, other: "_From") -> "_From":
        return _From(operators=self.operators | other.operators, args=self.args | other.args)


@dataclass(slots=True, kw_only=True)
class _Seen:
    """An operator as it was run."""

    paths: tuple[str, ...]
    work: float
    draws: bool
    reads: _From
    changes_argument: bool = False


@dataclass(slots=True)
class _Found:
    """What the operators of a graph, and of those nested in it, were seen to do.

    Attributes:
        args: The call's arguments.
        held: Which argument a memory is, by what its tensors have in common.
        operators: In order.
        changed: Positions of the arguments that operators change.
        changer: The last operator that changed a memory.
        outputs: What the graph's outputs are made from.
    """

    args: Sequence[Arg]
    held: dict[int, int]
    operators: list[_Seen] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    changer: dict[int, int] = field(default_factory=dict)
    outputs: _From = field(default_factory=_From)

    def add(self, seen: _Seen, changed: Sequence[int]) -> _From:
        """An operator, and the memories that it changes; what its result is made from."""
        number = len(self.operators)
        self.operators.append(seen)
        for memory in changed:
            self.changer[memory] = number
            if memory in self.held:
                self.changed.add(self.held[memory])
                seen.changes_argument = True
        return _From(operators=frozenset((number,)))

    def needed(self, works: Sequence[float]) -> list[Operator]:
        """The operators, with their work, without those whose results nobody needs."""
        assert len(works) == len(self.operators), "they are others on real values"
        live: set[int] = set()
        for number in reversed(range(len(self.operators))):
            seen = self.operators[number]
            if number in live or number in self.outputs.operators or seen.changes_argument:
                live |= {number, *seen.reads.operators}
        numbers = {old: new for new, old in enumerate(sorted(live))}
        found: list[Operator] = []
        for old in numbers:
            seen = self.operators[old]
            reads = tuple(sorted(numbers[r] for r in seen.reads.operators))
            found.append(
                Operator(
                    paths=seen.paths,
                    work=works[old],
                    params=self._params(seen.reads.args),
                    reads=reads,
                    is_free=not seen.draws
                    and old not in self.outputs.operators
                    and all(map(self._is_constant, seen.reads.args))
                    and all(found[r].is_free for r in reads),
                )
            )
        return found

    def _is_constant(self, position: int) -> bool:
        return self.args[position].kind is not ArgKind.DATA and position not in self.changed

    def _params(self, positions: frozenset[int]) -> dict[str, int]:
        params = [self.args[p] for p in sorted(positions)]
        return {
            arg.name: arg.spec.nbytes
            for arg in params
            if arg.kind is ArgKind.PARAMETER and arg.spec is not None
        }


def _walked(
    graph: fx.GraphModule, args: Sequence[Arg], values: Sequence[Any], weigh: _Weigh
) -> _Found:
    """Run a graph on values, real or fake."""
    places = {
        memory: position
        for position, value in enumerate(values)
        for one in _tensors(value)
        if (memory := memory_of(one)) is not None
    }
    found = _Found(args, places)
    walk = _Walk(graph, [_From(args=frozenset((k,))) for k in range(len(args))], weigh, found)
    walk.run(*values)
    found.outputs = _union(walk.results)
    return found


class _Walk(fx.Interpreter):
    """Says of each node of a graph, in order, what running it came to.

    Attributes:
        results: What each output of the graph is made from.
    """

    def __init__(
        self, graph: fx.GraphModule, given: Sequence[_From], weigh: _Weigh, found: _Found
    ) -> None:
        """`given` says what the graph's arguments are made from."""
        super().__init__(graph)
        self.results: list[_From] = []
        self._weigh = weigh
        self._found = found
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._of: dict[Node, _From] = dict(zip(placeholders, given, strict=True))
        self._parts: dict[Node, list[_From]] = {}  # of the results of a nested graph

    def run_node(self, n: Node) -> Any:
        """See `fx.Interpreter`."""
        match n.op:
            case "placeholder":
                return super().run_node(n)
            case "get_attr":
                self._of[n] = _From()
                return super().run_node(n)
            case "output":
                ends = n.args[0] if isinstance(n.args[0], tuple | list) else [n.args[0]]
                self.results = [self._made_from(tree_leaves(end)) for end in ends]
                return super().run_node(n)
            case _:
                return self._run_call(n)

    def _run_call(self, n: Node) -> Any:
        given = [one for i in n.all_input_nodes for one in _tensors(self.env[i])]
        before = [version_of(one) for one in given]
        reads = self._made_from(n.all_input_nodes)
        result, work, draws = self._weigh(lambda: super(_Walk, self).run_node(n))
        if self._is_nested(n):
            return result
        changed = {
            memory: None
            for one, version in zip(given, before, strict=True)
            if version_of(one) != version and (memory := memory_of(one)) is not None
        }
        made = _tensors(result)
        source = n.args[0] if n.args and isinstance(n.args[0], Node) else None
        if n.target is operator.getitem and source in self._parts:
            self._of[n] = self._parts[source][n.args[1]]  # type: ignore[index]
        elif not made and not changed:
            self._of[n] = _From()  # a size, or a switch: what is made from it reads no values
        elif not changed and source is not None and result is self.env[source]:
            self._of[n] = self._of[source]  # nothing was done: a cast to its own dtype
        else:
            seen = _Seen(paths=tuple(module_paths(n)), work=work, draws=draws, reads=reads)
            self._of[n] = self._found.add(seen, list(changed))
        return result

    def _made_from(self, values: Sequence[Any]) -> _From:
        """What nodes are made from, as they are now: their memory may have been changed since."""
        found = []
        for i in values:
            if not isinstance(i, Node):
                continue
            made = self._of[i]
            found.append(made)
            for one in _tensors(self.env[i]):
                memory = memory_of(one)
                last = self._found.changer.get(memory, -1) if memory is not None else -1
                # An earlier change was of what had this memory before.
                if last > max(made.operators, default=-1):
                    found.append(_From(operators=frozenset((last,))))
        return _union(found)

    def _is_nested(self, n: Node) -> bool:
        """Whether a node calls one graph, as checkpoints do; if so, its operators are found.

        Each has its own modules. A node that calls several graphs counts as one operator.
        """
        bodies = [i for i in n.all_input_nodes if isinstance(self.env.get(i), fx.GraphModule)]
        if len(bodies) != 1 or n.args[0] is not bodies[0]:
            return False
        body: fx.GraphModule = self.env[bodies[0]]
        count = len(body.graph.find_nodes(op="placeholder"))
        given = n.args[len(n.args) - count :]
        if len(given) != count or bodies[0] in given:
            return False
        walk = _Walk(body, [self._made_from([i]) for i in given], self._weigh, self._found)
        values: Any = self.map_nodes_to_values(given, n)
        walk.run(*values)
        self._parts[n] = walk.results
        self._of[n] = _union(walk.results)
        return True


def _union(found: Sequence[_From]) -> _From:
    made = _From()
    for one in found:
        made |= one
    return made


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
