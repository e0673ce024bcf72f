"""Shape, dtype and size of a value, and where in the user's source and model a node is from."""

import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx.node import Node

_LIBRARY = re.compile(r"[/\\](piper_dynamo[/\\]moe|(site|dist)-packages[/\\]torch)[/\\]")
_PYTHON = sysconfig.get_path("stdlib")
# How Dynamo says that a module was found by its parent's `__getattr__`, as peft's are.
_BY_DICT = re.compile(r"(?:\.__dict__)?(?:\._modules|\['_modules'\])\['([^']*)'\]")
ROOT = "L['self']"  # how Dynamo calls the model
_ROOT = re.compile(r"^[A-Za-z_]+(\[[^\]]*\])+")  # L['self'], L['args'][0]
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$')


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of a tensor, real or fake."""
        return cls(
            shape=tuple(int(s) for s in tensor.shape),
            dtype=tensor.dtype,
            stride=tuple(int(s) for s in tensor.stride()),
            device=str(tensor.device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, laid out densely."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        want = contiguous_stride(self.shape)
        return prod(self.shape) == 0 or all(
            size == 1 or have == need
            for size, have, need in zip(self.shape, self.stride, want, strict=True)
        )

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their memory, in any order of the dims."""
        want = 1
        dims = [d for d in zip(self.stride, self.shape, strict=True) if d[1] != 1]
        for stride, size in sorted(dims):
            if stride != want:
                return False
            want *= size
        return True

    def contiguous(self) -> "TensorSpec":
        """The same tensor laid out in row-major order."""
        return replace(self, stride=contiguous_stride(self.shape))

    def divided(self, dim: int, parts: int) -> "TensorSpec":
        """One of `parts` equal slices along `dim`, contiguous."""
        size, rest = divmod(self.shape[dim], parts)
        assert rest == 0
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return replace(self, shape=shape, stride=contiguous_stride(shape))

    def __str__(self) -> str:
        return f"{short(self.dtype)}[{', '.join(map(str, self.shape))}]"


def short(dtype: torch.dtype) -> str:
    """A dtype's name without what all have: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def show_bytes(nbytes: float) -> str:
    """Bytes with a unit that reads well."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def source_meta(node: Node) -> dict[str, Any]:
    """What a node made in another's place keeps of its `meta`: its tags and the user's line."""
    return {k: v for k, v in node.meta.items() if k in ("custom", "stack_trace")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an operator comes from: the module that was called, and the user's `file:line`."""

    module: str
    line: str

    def __str__(self) -> str:
        return f"{self.module or 'the model itself'}  {self.line or 'no source line'}"


def is_library(frame: str) -> bool:
    """Whether a stack's line is of torch, of Python's library, or of the vocabulary for experts."""
    is_python = _PYTHON in frame and "-packages" not in frame
    return is_python or _LIBRARY.search(frame) is not None


def user_line(node: Node | None) -> str:
    """`file:line` of the user's code that made a node, or an empty text."""
    trace = node.meta.get("stack_trace") if node is not None else None
    if not trace:
        return ""
    frames = [m for line in str(trace).splitlines() if (m := _FRAME.match(line))]
    # What torch.nn and the vocabulary for experts do inside says nothing to who calls them.
    frames = [m for m in frames if not is_library(m[1])] or frames
    return f"{frames[-1][1]}:{frames[-1][2]}" if frames else ""


def shown_line(node: object) -> str:
    """A node's `user_line` as errors show it."""
    return (user_line(node) if isinstance(node, Node) else "") or "no source line"


def module_paths(node: Node) -> list[str]:
    """Paths of the modules a node was traced in, outermost first, without the name of the root.

    The first is the root itself, "": Dynamo leaves it out where a decorator wraps its forward.
    """
    found = paths_in(node.meta.get("nn_module_stack") or {})
    return found if found and found[0] == "" else ["", *found]


def paths_in(stack: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Paths of the modules in a `nn_module_stack`."""
    return [_BY_DICT.sub(r".\1", _ROOT.sub("", path)).lstrip(".") for path, _ in stack.values()]
