"""Chunks compiled: operator by operator ("aten").

A compiled chunk takes one list, which it empties, and returns its outputs in order. Equal chunks are compiled once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.chunk import Chunk

ChunkFn = Callable[[list[Any]], Sequence[Any]]

_compiled: dict[tuple[str, str], ChunkFn] = {}


def compile_chunks(chunks: Mapping[str, Chunk], mode: str) -> dict[str, ChunkFn]:
    """A callable per chunk name; chunks with one key share it, over all models and steps of this process."""
    for chunk in chunks.values():
        if (mode, chunk.key) not in _compiled:
            _compiled[mode, chunk.key] = _aten(chunk)
    return {name: _compiled[mode, chunk.key] for name, chunk in chunks.items()}


def _aten(chunk: Chunk) -> ChunkFn:
    """Python code that calls the operators one after another and drops each value after its last use."""
    graph = fx.Graph()
    output = graph.graph_copy(chunk.graph, {})
    graph.output(output)
    graph.set_codegen(compat.boxed_codegen())
    module = fx.GraphModule(torch.nn.Module(), graph)
    return module.forward  # type: ignore[no-any-return]
