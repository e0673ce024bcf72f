"""Chunks compiled: operator by operator ("aten", see aten.py), or fused by inductor.

"max-autotune" is inductor with kernels chosen by measuring. A compiled chunk takes one list, which
it empties, and returns its outputs in order. Equal chunks are compiled once per process;
inductor's results are kept on disk under `PIPER_CACHE_DIR` (or inductor's own folder) by graph,
shapes, settings and version of torch, and shared by all processes, of which one compiles a chunk
at a time.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from piper_dynamo import _torch_inductor as inductor
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.generated import named
from piper_dynamo.ir.chunk import Chunk, copied, function_of, runnable
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.lowering.aten import drop_stand_ins, runnable_graph
from piper_dynamo.lowering.draws import hide_draws
from piper_dynamo.options import FUSED, TUNED

log = logging.getLogger("piper.chunks")
ChunkFn = Callable[[list[Any]], Sequence[Any]]

_Places = tuple[int, ...]
_compiled: dict[tuple[str, str, _Places, _Places], ChunkFn] = {}


def compile_chunks(
    chunks: Mapping[str, Chunk],
    mode: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    adds: Mapping[str, _Places] | None = None,
    passing: Mapping[str, _Places] | None = None,
) -> dict[str, ChunkFn]:
    """A callable per chunk name; chunks with one key share it, over all models of this process.

    Args:
        chunks: What to compile.
        mode: "aten", "inductor" or "max-autotune".
        progress: Called with the number compiled and the number to compile.
        adds: By chunk name, the outputs that are added into sums; "aten" only.
        passing: By chunk name, the outputs that are gone before the step ends.
    """
    forms: dict[str, tuple[str, str, _Places, _Places]] = {}
    for name, chunk in chunks.items():
        if mode in FUSED and not chunk.is_ragged:  # a ragged one may look like one that is not
            forms[name] = mode, chunk.key, (), ()
        else:
            places = (adds or {}).get(name, ()), (passing or {}).get(name, ())
            forms[name] = "aten", chunk.key, *places
    missing = {form: chunks[name] for name, form in forms.items() if form not in _compiled}
    for count, (form, chunk) in enumerate(missing.items()):
        if progress is not None:
            progress(count, len(missing))
        start = time.perf_counter()
        if form[0] in FUSED:
            _compiled[form] = _inductor(chunk, tuned=form[0] == TUNED)
        else:
            file = functools.partial(named, kind="chunk", label=chunk.key)
            _compiled[form] = function_of(runnable_graph(chunk, *form[2:]), file)
        log.info(
            "chunk %s compiled (%s) in %.2f s", chunk.key, form[0], time.perf_counter() - start
        )
    if progress is not None and missing:
        progress(len(missing), len(missing))
    return {name: _compiled[form] for name, form in forms.items()}


def _inductor(chunk: Chunk, *, tuned: bool) -> ChunkFn:
    """Decomposed, fused, compiled; outputs keep the layout that the next chunk was traced with."""
    folder = os.environ.get("PIPER_CACHE_DIR")
    if folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "inductor"))
    graph = copied(chunk.graph)
    drop_stand_ins(graph)
    hide_draws(graph)
    with one_at_a_time(Path(inductor.inductor_folder()), chunk.key):
        run = inductor.compile_with_inductor(runnable(graph), chunk.inputs, tuned=tuned)
    expected = [
        (spec.shape, spec.stride, spec.dtype) if spec is not None else None for spec in chunk.inputs
    ]

    def checked(args: list[Any]) -> Sequence[Any]:
        # Compiled kernels do not check: an empty tensor in place of a full one would read wild
        # memory.
        for i, (arg, want) in enumerate(zip(args, expected, strict=True)):
            if want is not None and (
                arg.shape != want[0] or arg.dtype != want[2] or not _same_stride(arg, want)
            ):
                raise PiperRuntimeError(_mismatch(i, arg, chunk.inputs[i]))
        results: Sequence[Any] = run(args)
        return results

    return checked


@contextmanager
def one_at_a_time(folder: Path, key: str) -> Iterator[None]:
    """Ranks start together: one of a host compiles an equal chunk, the others find its result."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"piper-{key}.lock"):
        yield


def _same_stride(arg: Any, want: tuple[Any, ...]) -> bool:
    shape, stride, _ = want
    return arg.stride() == stride or all(
        have == need or size <= 1
        for have, need, size in zip(arg.stride(), stride, shape, strict=True)
    )


def _mismatch(index: int, arg: Any, spec: TensorSpec | None) -> str:
    have = TensorSpec.of(arg)
    strides = spec.stride if spec is not None else ()
    return (
        f"input {index} of a compiled chunk is {have} with strides {have.stride}, "
        f"but it was compiled for {spec} with {strides}"
    )
