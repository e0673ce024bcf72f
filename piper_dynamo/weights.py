"""Loading plain state dicts: each rank reads what it holds, one tensor at a time.

piper.load_state_dict(step, "weights.pt")            written by torch.save(model.state_dict(), ...)
piper.load_state_dict(step, "model.safetensors")     or "model.safetensors.index.json"
piper.load_state_dict(step, other_model.state_dict())
"""

import difflib
import importlib
import json
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo import wire
from piper_dynamo.access import module_of
from piper_dynamo.checkpoint.job import free_communicator
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import read_text
from piper_dynamo.meeting import Meeting
from piper_dynamo.pending import fill, source_of
from piper_dynamo.state import record_of


class Loaded(NamedTuple):
    """What did not meet, where `strict=False` lets it be."""

    missing: list[str]
    unexpected: list[str]


wire.records(Loaded)


class Tensors(Protocol):
    """Tensors by name, read in parts."""

    def names(self) -> list[str]:
        """All names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Some rows, along dim 0."""
        ...

    def whole(self, name: str) -> Tensor:
        """All of it."""
        ...


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A dict of tensors, in memory or mapped from a file."""

    tensors: Mapping[str, Tensor]

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def rows(self, name: str, start: int, count: int) -> Tensor:
        return self.tensors[name].detach().narrow(0, start, count)

    def whole(self, name: str) -> Tensor:
        return self.tensors[name].detach()


@dataclass(frozen=True, slots=True)
class _Safe:
    """Open safetensors files, by the names of what they hold."""

    files: Mapping[str, Any]

    def names(self) -> list[str]:
        return list(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, count: int) -> Tensor:
        found: Tensor = self.files[name].get_slice(name)[start : start + count]
        return found

    def whole(self, name: str) -> Tensor:
        found: Tensor = self.files[name].get_tensor(name)
        return found


def load_state_dict(
    step: Any, source: str | os.PathLike[str] | Mapping[str, Tensor], *, strict: bool = True
) -> Loaded:
    """Give the model's parameters and buffers the values of a plain state dict.

    Every rank calls it, and reads only what it holds: whole parameters or its rows of them.

    Args:
        step: A compiled step, or a plain module.
        source: A state dict by the model's own names, or a file of one: written by torch.save, or
            a safetensors file, or the index of several.
        strict: Whether names must be the same on both sides. Of several names of one parameter,
            one is enough.

    Returns:
        The names without values, and the values without a parameter; none where `strict`.

    Raises:
        PiperError: Names or shapes do not fit, all are listed; the file cannot be read; or not all
            ranks call this.
    """
    module = module_of(step)
    meeting = Meeting(free_communicator(step), "load_state_dict()")
    with ExitStack() as stack:
        opened: list[Tensors] = []

        def look() -> Loaded:
            opened.append(_open(source, stack))
            return _compared(module, opened[0], source, strict=strict)

        def take() -> None:
            named, have = dict(_state(module)), set(opened[0].names())
            for name, tensor in named.items():
                if name in have:
                    _give(tensor, name, opened[0])

        found = meeting.together(look, lambda parts: parts[0])
        meeting.together(take, lambda parts: None)
    return found


def _compared(module: nn.Module, tensors: Tensors, source: Any, *, strict: bool) -> Loaded:
    """What does not meet.

    Raises:
        PiperError: Shapes do not fit, or names where `strict`.
    """
    wanted = _names(module)
    have = set(tensors.names())
    missing = [n for n, aliases in wanted.items() if not have.intersection(aliases)]
    unexpected = [name for name in tensors.names() if name not in wanted]
    faults = [f"no value for {n}{_near(n, unexpected)}" for n in missing] if strict else []
    faults += [f"nothing is named {name}" for name in unexpected] if strict else []
    named = dict(_state(module))
    for name in wanted:
        if name in have and tensors.shape(name) != tuple(named[name].shape):
            faults.append(
                f"{name} is {tuple(named[name].shape)} and {tensors.shape(name)} in the source"
            )
    if faults:
        raise _do_not_fit(source, faults)
    return Loaded(missing, unexpected)


def _do_not_fit(source: Any, faults: Sequence[str]) -> PiperError:
    more = [f"and {len(faults) - 12} more"] if len(faults) > 12 else []
    what = "a dict" if isinstance(source, Mapping) else os.fspath(source)
    return PiperError(
        format_error(
            "this state dict does not fit the model",
            {"source": what, "faults": "\n".join([*faults[:12], *more])},
            hint="names must be those of model.state_dict(); strict=False loads what fits by name",
        )
    )


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (there is {near[0]})" if near else ""


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a state dict holds, by all names."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def _names(module: nn.Module) -> dict[str, list[str]]:
    """By each name, all names of the same tensor."""
    same: dict[int, list[str]] = {}
    for name, tensor in _state(module):
        same.setdefault(id(tensor), []).append(name)
    return {name: same[id(tensor)] for name, tensor in _state(module)}


def _give(tensor: Tensor, name: str, tensors: Tensors) -> None:
    """Copy what this rank holds of a tensor."""
    record = record_of(tensor)
    if record is not None and not record.held:
        return
    if source_of(tensor) is not None:  # of no program yet, which may change
        fill(tensor)
    with torch.no_grad():
        block = record.block if record is not None else None
        if block is None:
            tensor.copy_(tensors.whole(name))
        elif block.home is None:
            compat.local_tensor(block.param).copy_(tensors.whole(name))
        elif block.rows:
            compat.local_tensor(block.param).copy_(tensors.rows(name, block.start, block.rows))


def _open(source: Any, stack: ExitStack) -> Tensors:
    if isinstance(source, Mapping):
        return _Mapped(_only_tensors(source, "a dict"))
    if not isinstance(source, str | os.PathLike):
        raise PiperError(
            f"a state dict is a dict of tensors or the path of a file, not a "
            f"{type(source).__name__}"
        )
    path = Path(source)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "missing"
        raise PiperError(
            format_error(
                f"there is no state dict in {str(path)!r}: it is {kind}",
                hint="name a file written by torch.save, a .safetensors file or its .index.json",
            )
        )
    if path.name.endswith(".index.json"):
        return _indexed(path, stack)
    if path.suffix == ".safetensors":
        opened = _open_safe(path, stack)
        return _Safe({name: opened for name in opened.keys()})  # noqa: SIM118 (not a dict)
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise PiperError(
            format_error(
                f"{str(path)!r} cannot be read as a state dict",
                {"why": str(error).partition("\n")[0]},
                hint="write it with torch.save(model.state_dict(), path): only tensors are read, "
                "and nothing in the file is run",
            )
        ) from error
    return _Mapped(_only_tensors(found, repr(str(path))))


def _only_tensors(found: Any, what: str) -> Mapping[str, Tensor]:
    if not isinstance(found, Mapping):
        raise PiperError(f"{what} holds a {type(found).__name__} where a state dict is expected")
    others = [str(name) for name, value in found.items() if not isinstance(value, Tensor)]
    if others:
        raise PiperError(
            format_error(
                f"{what} holds more than tensors",
                {"others": ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")},
                hint="give the dict of tensors in it, e.g. "
                'piper.load_state_dict(step, torch.load(path, mmap=True)["model"])',
            )
        )
    return found


def _open_safe(path: Path, stack: ExitStack) -> Any:
    try:
        library = importlib.import_module("safetensors")
    except ImportError as error:
        raise PiperError(
            f"{str(path)!r} needs the library safetensors: pip install 'piper-dynamo[safetensors]'"
        ) from error
    try:
        return stack.enter_context(library.safe_open(path, framework="pt", device="cpu"))
    except (library.SafetensorError, OSError) as error:
        raise PiperError(f"{str(path)!r} cannot be read: {error}") from error


def _indexed(path: Path, stack: ExitStack) -> Tensors:
    """Several safetensors files with an index of which holds what."""
    try:
        where: dict[str, str] = dict(json.loads(read_text(path))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise PiperError(
            f"{str(path)!r} is no index of safetensors files: it has no weight_map"
        ) from error
    files = {name: _open_safe(path.parent / name, stack) for name in sorted(set(where.values()))}
    wrong = [n for n, file in where.items() if n not in set(files[file].keys())]
    if wrong:
        raise PiperError(f"{str(path)!r} names tensors that its files lack: {', '.join(wrong[:8])}")
    return _Safe({name: files[file] for name, file in where.items()})
