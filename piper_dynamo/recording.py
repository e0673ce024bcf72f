"""Operations that make a model's initial values, kept to be run later for the values wanted.

Terms: a *memory* stands for the storage of a tensor that has none: the tensor itself is on the meta
device, and its storage carries the memory as an attribute, which views share. An *operation* is one
call of an operator. It knows which earlier operation wrote last to each memory that it reads, so
what one tensor's values need is found by going back from the last operation on its memory.

Random operators keep the generator's state from which they drew, so any tensor can be made alone,
any number of times, in any order: its values are those that the model's own code would have made.
"""

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from piper_dynamo import _torch_compat as compat
from piper_dynamo.errors import PiperError, PiperRuntimeError, format_error
from piper_dynamo.garbage import freed
from piper_dynamo.ir.spec import TensorSpec

_COPIED_BYTES = 2**20  # a constant of up to so many bytes is copied, a larger one referred to
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Memory:
    """The storage of a tensor without values.

    Attributes:
        device: Where it would be.
        last: What wrote to it last.
    """

    device: torch.device
    last: "Operation | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor on a memory.

    Attributes:
        memory: On which.
        nbytes: The memory's size.
        dtype: Of the tensor, as all that follows.
        offset: In elements.
    """

    memory: Memory
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """Of a deferred tensor."""
        memory = memory_of(tensor)
        assert memory is not None
        return cls(
            memory=memory,
            nbytes=tensor.untyped_storage().nbytes(),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor on a real storage."""
        found = torch.empty(0, dtype=self.dtype, device=self.memory.device)
        found.set_(storage, self.offset, self.shape, self.stride)
        return compat.with_bits(found, is_conj=self.is_conj, is_neg=self.is_neg)

    def scratch(self) -> Tensor:
        """A tensor of this layout with any values."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.memory.device
        )

    @property
    def spec(self) -> TensorSpec:
        """Shape and layout."""
        return TensorSpec(
            shape=self.shape,
            dtype=self.dtype,
            stride=self.stride,
            device=str(self.memory.device),
        )

    @property
    def is_all(self) -> bool:
        """Whether it is the whole memory, each byte once."""
        spec = self.spec
        return spec.nbytes == self.nbytes and spec.is_dense


@dataclass(slots=True, eq=False)
class Constant:
    """A tensor that has values: small ones are copied, others must not change."""

    value: Tensor
    version: int | None = None

    @classmethod
    def of(cls, value: Tensor) -> "Constant":
        """A constant of a tensor's values now."""
        if value.is_inference() or value.nbytes <= _COPIED_BYTES:
            return cls(value.detach().clone())
        return cls(value, value._version)  # itself: its detached twin would have another version

    def get(self, where: str) -> Tensor:
        """Its values.

        Raises:
            PiperRuntimeError: They have changed in place since.
        """
        if self.version is not None and self.value._version != self.version:
            raise PiperRuntimeError(
                format_error(
                    "a tensor that initial values are made from was changed in place since",
                    {"used at": where, "tensor": TensorSpec.of(self.value)},
                    hint="change it before it is used, or give the model a copy: tensor.clone()",
                )
            )
        return self.value.detach()


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """One call of an operator.

    Attributes:
        func: The operator; None makes a memory of the constant that is the only argument.
        args: Its arguments, with views and constants in place of tensors.
        kwargs: Likewise.
        outputs: Where each output tensor goes that has a memory of its own, by its index among the
            tensors that the operator returns.
        before: The operations that must have run: the last writers of what it reads.
        memories: All that it reads or writes.
        state: The state of the generator from which it draws.
        where: `file:line` of the caller.
        number: Operations ran in this order.
    """

    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: dict[int, View]
    before: tuple["Operation", ...]
    memories: tuple[Memory, ...]
    state: Tensor | None
    where: str
    number: int = field(default_factory=lambda: next(_numbers))

    def run(self, buffers: dict[Memory, torch.UntypedStorage]) -> None:
        """Run it on real memory.

        Raises:
            PiperRuntimeError: The operator fails.
        """

        def tensor(view: View) -> Tensor:
            if view.memory not in buffers:  # wholly overwritten: nobody made it before
                device = view.memory.device
                buffers[view.memory] = compat.new_storage(view.nbytes, device)
            return view.on(buffers[view.memory])

        try:
            given = tree_map_only(View, tensor, (self.args, self.kwargs))
            given = tree_map_only(Constant, lambda constant: constant.get(self.where), given)
            results = self._call(*given)
        except PiperError:
            raise
        except Exception as error:
            raise PiperRuntimeError(
                format_error(
                    "an operation recorded by piper.deferred_init fails when it is run",
                    {"operation": self.func, "at": self.where, "why": error},
                )
            ) from error
        for index, view in self.outputs.items():
            buffers[view.memory] = _as_recorded(results[index], view)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        if self.func is None:
            return [args[0].clone()]
        if self.state is not None:
            given = [g for g in tree_leaves((args, kwargs)) if isinstance(g, torch.Generator)]
            if given:
                own = torch.Generator(given[0].device).set_state(self.state)
                args, kwargs = tree_map_only(torch.Generator, lambda _: own, (args, kwargs))
            else:
                compat.generator_of(drawn_on(args, kwargs)).set_state(self.state)
        return [r for r in tree_leaves(self.func(*args, **kwargs)) if isinstance(r, Tensor)]


def _as_recorded(result: Tensor, view: View) -> torch.UntypedStorage:
    """The result's storage, laid out as the operator without values said it would be."""
    layout = (tuple(result.shape), tuple(result.stride()), result.storage_offset(), result.dtype)
    storage = result.untyped_storage()
    wanted = (view.shape, view.stride, view.offset, view.dtype)
    if layout == wanted and storage.nbytes() == view.nbytes and not result.is_conj():
        return storage
    if layout[0] != view.shape or result.dtype != view.dtype:
        raise PiperRuntimeError(
            f"the operator gives {TensorSpec.of(result)} where it said it would give {view.spec}"
        )
    storage = compat.new_storage(view.nbytes, view.memory.device)
    view.on(storage).copy_(result)
    return storage


def memory_of(tensor: Tensor) -> Memory | None:
    """The memory of a deferred tensor, else None."""
    if tensor.layout != torch.strided or not compat.is_on_meta(tensor):
        return None
    found: Memory | None = getattr(tensor.untyped_storage(), "_piper_memory", None)
    return found


def give_memory(tensor: Tensor, device: torch.device) -> View:
    """Make a deferred tensor of a fresh one on the meta device."""
    storage: Any = tensor.untyped_storage()
    storage._piper_memory = Memory(device)
    return View.of(tensor)


def drawn_on(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """The device on which a random operator with these arguments draws."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            return leaf.device
    return torch.device(kwargs.get("device") or "cpu")


def values(view: View) -> Tensor:
    """Make a tensor's values now, in memory of its own; the random state stays as it is."""
    with compat.no_modes():
        return view.on(_run_for(view.memory))


def _run_for(memory: Memory) -> torch.UntypedStorage:
    """Run what the values of a memory need; all else that it takes is freed at its last use."""
    needed = _needed(memory)
    last_use = {m: op for op in needed for m in op.memories}
    buffers: dict[Memory, torch.UntypedStorage] = {}
    drawing = any(op.state is not None for op in needed)
    with torch.no_grad(), _kept_random_state(needed if drawing else ()):
        for op in needed:
            op.run(buffers)
            for used in op.memories:
                if last_use[used] is op and used is not memory and used in buffers:
                    freed(buffers.pop(used).nbytes())
    return buffers[memory]


def _needed(memory: Memory) -> list[Operation]:
    """The operations that the values of a memory come from, in order."""
    found: set[Operation] = set()
    waiting = [memory.last] if memory.last is not None else []
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += op.before
    return sorted(found, key=lambda op: op.number)


@contextmanager
def _kept_random_state(operations: Sequence[Operation]) -> Iterator[None]:
    """What is drawn inside does not change what is drawn later."""
    devices = {m.device for op in operations if op.state is not None for m in op.memories}
    kept = {
        compat.generator_of(d): compat.generator_of(d).get_state() for d in sorted(devices, key=str)
    }
    try:
        yield
    finally:
        for generator, state in kept.items():
            generator.set_state(state)


def recipe(view: View) -> str:
    """A short text per tensor, equal where its values are made in the same way from the same."""
    hashed = hashlib.sha1(usedforsecurity=False)
    places: dict[Memory, int] = {}

    def text(leaf: Any) -> str:
        if isinstance(leaf, View):
            place = places.setdefault(leaf.memory, len(places))
            return f"{place} {leaf.spec} {leaf.stride} {leaf.offset} {leaf.is_conj} {leaf.is_neg}"
        if isinstance(leaf, Constant):
            raw = leaf.value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
            return hashlib.sha1(raw.numpy().data, usedforsecurity=False).hexdigest()
        return "generator" if isinstance(leaf, torch.Generator) else repr(leaf)

    for op in _needed(view.memory):
        leaves = [text(leaf) for leaf in tree_leaves((op.args, op.kwargs))]
        outputs = [f"{index} {text(made)}" for index, made in op.outputs.items()]
        hashed.update(repr((str(op.func), leaves, outputs)).encode())
        if op.state is not None:
            hashed.update(op.state.numpy().data)
    hashed.update(text(view).encode())
    return hashed.hexdigest()[:12]


def caller() -> str:
    """`file:line` of the nearest caller that is neither torch's code nor Piper's."""
    frame = sys._getframe(1)
    nearest: Any = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _OWN):
            return f"{name}:{frame.f_lineno}"
        nearest, frame = frame, frame.f_back  # type: ignore[assignment]
    return f"{nearest.f_code.co_filename}:{nearest.f_lineno}"


_OWN = (f"{torch.__path__[0]}/", __file__.rpartition("/")[0] + "/", "<")
