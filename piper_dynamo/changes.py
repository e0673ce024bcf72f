"""Changes in place: which values of Dynamo's graph share memory, and which calls change it.

Dynamo's graph is as the user wrote it: `h.relu_()` is a call whose result nobody uses, after which
`h` stands for something else. What is put into such a graph has to be put after the last change.

Signature: graph, fake arguments -> the memory of each value, and who changes it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Node


def memory_of(value: Tensor) -> int | None:
    """What tensors in the same memory have in common.

    None where a tensor has none that can be told: sparse, or inside a transform of torch.func.
    """
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def version_of(value: Tensor) -> int:
    """A number that grows when a tensor is changed in place; not where torch keeps none."""
    return 0 if value.is_inference() else value._version


class Changes(fx.Interpreter):
    """Runs a graph once and sees what its calls do to their arguments.

    Attributes:
        maker: For each value that is a tensor, the first one in the same memory.
    """

    def __init__(self, gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> None:
        """`fakes` are the graph's arguments, in the fake mode `mode`."""
        # Every value stays alive, so that no two memories have one address.
        super().__init__(gm, garbage_collect_values=False)
        self.maker: dict[Node, Node] = {}
        self._first: dict[int, Node] = {}
        self._calls: dict[Node, list[Node]] = {}  # that change a memory, by its first value
        self._changed: dict[Node, list[Node]] = {}  # the same by call
        self._place = {node: place for place, node in enumerate(gm.graph.nodes)}
        with mode, torch.no_grad():
            self.run(*fakes)
        self.env = {}

    def run_node(self, n: Node) -> Any:
        """See `fx.Interpreter`."""
        given = {i: value for i in n.all_input_nodes if isinstance(value := self.env[i], Tensor)}
        before = {i: version_of(value) for i, value in given.items()}
        result = super().run_node(n)
        for source, value in given.items():
            if version_of(value) != before[source]:
                self._calls.setdefault(self.maker[source], []).append(n)
                self._changed.setdefault(n, []).append(self.maker[source])
        if isinstance(result, Tensor):
            memory = memory_of(result)
            self.maker[n] = n if memory is None else self._first.setdefault(memory, n)
        return result

    def changed_by(self, call: Node) -> list[Node]:
        """The first values in each memory that a call changes."""
        return self._changed.get(call, [])

    def is_stale(self, value: Node, user: Node) -> bool:
        """Whether a copy that was taken with a value is not any more what `user` is to see."""
        last = self.last_before(value, user)
        return last is not None and self._place[last] > self._place[value]

    def last_before(self, value: Node, user: Node) -> Node | None:
        """The last call before `user` that changes the memory of a value."""
        calls = self._calls.get(self.maker.get(value, value), ())
        earlier = [c for c in calls if self._place[c] < self._place[user]]
        return earlier[-1] if earlier else None
