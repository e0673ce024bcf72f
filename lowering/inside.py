"""What a chunk needs while it runs, beside what it is given and what it leaves.

Terms: a *block* is one allocation; it dies after the last operator that reads it or a view of it. A
chunk empties its bundle, so what nobody else holds of that dies inside the chunk, too.

Operators are taken to allocate their results and nothing else. That is so in torch but for small
buffers per thread; products in bfloat16, whose operands some kernels reorder, are the exception.
What Inductor fuses needs no more than this.

Signature: chunk -> the most bytes that are its own at once.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Node

from piper_dynamo.ir.alias import viewed
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.aten import runnable_graph

Given = tuple[int, int]  # a block's number, and its bytes
SOMEBODYS = -1  # the number of a block that a chunk does not free
_known: dict[tuple[Any, ...], int] = {}


def most_inside(
    chunk: Chunk, adds: tuple[int, ...], first: int, bundle: Sequence[Given] = ()
) -> int:
    """The most bytes at once of blocks that a chunk makes, and that it was given to free.

    Args:
        chunk: Which.
        adds: Outputs that it adds into sums.
        first: How many inputs come before those of its bundle.
        bundle: The blocks of these, by numbers that equal ones share.
    """
    key = (chunk.key, chunk.num_results, adds, first, *bundle)
    if key not in _known:
        _known[key] = _most(runnable_graph(chunk, adds), first, bundle)
    return _known[key]


def _most(graph: fx.Graph, first: int, bundle: Sequence[Given]) -> int:
    sizes: dict[Any, int] = {}  # bytes of each block
    blocks: dict[Node, tuple[Any, ...]] = {}  # what a node's value lies in, tensor by tensor
    last: dict[Any, int] = {}  # where a block is read last
    made: list[list[Any]] = []  # by position
    for here, node in enumerate(graph.nodes):
        new: list[Any] = []
        if node.op == "placeholder":
            number, nbytes = bundle[here - first] if 0 <= here - first < len(bundle) else (-1, 0)
            blocks[node] = (number,)
            if number != SOMEBODYS and number not in sizes:
                sizes[number] = nbytes
                new = [number]
        else:
            blocks[node] = _blocks_of(node, blocks)
            for block in blocks[node]:
                if block not in sizes and block != SOMEBODYS:
                    sizes[block] = _bytes_of(node, block)
                    new.append(block)
        made.append(new)
        for source in (node, *node.all_input_nodes):
            last |= dict.fromkeys(blocks[source], here)
    dying: list[list[Any]] = [[] for _ in made]
    for block, here in last.items():
        dying[here].append(block)
    sizes[SOMEBODYS] = 0
    now = most = 0
    for new, old in zip(made, dying, strict=True):
        now += sum(sizes[block] for block in new)
        most = max(most, now)
        now -= sum(sizes[block] for block in old)
    return most


def _blocks_of(node: Node, blocks: dict[Node, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Where a node's value lies: in another's block, or in new ones of its own."""
    base = _written(node) or viewed(node)
    if base is not None:
        return blocks[base]
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        source, index = node.args
        assert isinstance(source, Node)
        return (blocks[source][index],)  # type: ignore[index]
    value = node.meta.get("val")
    count = len(value) if isinstance(value, tuple | list) else 1
    return tuple((node, index) for index in range(count))


def _bytes_of(node: Node, block: Any) -> int:
    value = node.meta.get("val")
    if isinstance(value, tuple | list):
        value = value[block[1]]
    return TensorSpec.of(value).nbytes if isinstance(value, Tensor) else 0


def _written(node: Node) -> Node | None:
    """What an operator writes its result into."""
    if not isinstance(node.target, OpOverload):
        return None
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = node.kwargs.get(argument.name)
            if found is None and place < len(node.args):
                found = node.args[place]
            return found if isinstance(found, Node) else None
    return None
