"""Values as JSON text, for what ranks tell each other: reading it makes data and runs nothing.

What JSON lacks is an object with the key `~` that names its kind: tuples, dicts with other keys
than text, tensors, dtypes, numbers that are not finite, and *records*: classes that a module of
Piper has listed by `records`. Any other kind is refused by both ends.

Signature: value <-> text of at most `MOST_BYTES`.
"""

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError, format_error

KIND = "~"
MOST_BYTES = 256 * 2**20  # of a text; the plan of a save of 100,000 tensors takes 30 MB

_records: dict[str, type] = {}


def records(*classes: type) -> None:
    """Let dataclasses, named tuples and enumerations be written, and made from what is read."""
    for one in classes:
        known = _records.setdefault(one.__name__, one)
        if known is not one:
            raise ValueError(f"two records are named {one.__name__}")


def dump(value: Any) -> str:
    """The text of a value.

    Raises:
        PiperError: It holds what no text is made of, or it is too large.
    """
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    check_size(len(text))
    return text


def load(text: str) -> Any:
    """The value of a text.

    Raises:
        PiperError: It is no such text, or too large.
    """
    check_size(len(text))
    try:
        return _rich(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise PiperError(
            format_error(
                "what another rank has sent cannot be read",
                {"why": f"{type(error).__name__}: {error}", "it begins": text[:80]},
                hint="run the same version of Piper on every rank, and let nobody else connect to "
                "the job's ports",
            )
        ) from error


def check_size(num_bytes: int) -> None:
    """Refuse a text that is too large.

    Raises:
        PiperError: It is.
    """
    if num_bytes > MOST_BYTES:
        raise PiperError(
            format_error(
                "what one rank tells the others is too large",
                {"bytes": f"{num_bytes:,}", "at most": f"{MOST_BYTES:,}"},
                hint="keep large values as tensors of the model or the optimizer: these go to the "
                "checkpoint directly",
            )
        )


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {KIND: "float", "value": repr(value)}
    if kind is list:
        return [_plain(one) for one in value]
    if kind is dict and KIND not in value and all(type(key) is str for key in value):
        return {key: _plain(one) for key, one in value.items()}
    if kind in (dict, OrderedDict):
        name = "dict" if kind is dict else "ordered"
        return {KIND: name, "value": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, Tensor):
        return _plain_tensor(value)
    for name, (cls, write, _) in _SIMPLE.items():
        if kind is cls:
            return {KIND: name, "value": write(value)}
    if _records.get(kind.__name__) is kind:
        return {KIND: kind.__name__, "value": _plain_record(value)}
    raise PiperError(
        format_error(
            f"a {kind.__name__} cannot be told to other ranks",
            {"value": repr(value)[:80]},
            hint="use numbers, text, tensors, and lists, tuples and dicts of them",
        )
    )


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(one) for one in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: _rich(one) for key, one in value.items()}
    name, held = value[KIND], value["value"]
    if name in ("dict", "ordered"):
        made = [(_rich(k), _rich(v)) for k, v in held]
        return dict(made) if name == "dict" else OrderedDict(made)
    if name == "tensor":
        return _rich_tensor(held)
    if name in _SIMPLE:
        return _SIMPLE[name][2](held)
    if name not in _records:
        raise ValueError(f"{name!r} is no kind of value")
    return _rich_record(_records[name], held)


def _plain_record(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.init}
    return [_plain(one) for one in value]  # a named tuple


def _rich_record(cls: type, held: Any) -> Any:
    if issubclass(cls, Enum):
        return cls[held]
    if is_dataclass(cls):
        return cls(**{name: _rich(one) for name, one in held.items()})
    return cls(*[_rich(one) for one in held])


def _plain_tensor(value: Tensor) -> Mapping[str, Any]:
    whole = value.detach().cpu().contiguous()
    data = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    held = [_name_of(whole.dtype), list(whole.shape), base64.b64encode(data).decode()]
    return {KIND: "tensor", "value": held}


def _rich_tensor(held: Any) -> Tensor:
    name, shape, text = held
    dtype, data = _torch_of(name, torch.dtype), bytearray(base64.b64decode(text))
    whole = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return whole.view(dtype).reshape(shape)  # so a shape takes no memory that no bytes are for


def _name_of(value: Any) -> str:
    """A dtype, layout or memory format of torch, by its name there."""
    return str(value).removeprefix("torch.")


def _torch_of(name: str, *kinds: type) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kinds):
        raise ValueError(f"torch.{name} is not what was expected")
    return found


def _of_torch(kind: type) -> tuple[type, Callable[[Any], Any], Callable[[Any], Any]]:
    return kind, _name_of, lambda name: _torch_of(name, kind)


# By kind: the class, what is written of a value, and what is made of that.
_SIMPLE: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),
    "complex": (complex, lambda v: [_plain(v.real), _plain(v.imag)], lambda v: complex(*_rich(v))),
    "tuple": (tuple, lambda v: [_plain(one) for one in v], lambda v: tuple(_rich(v))),
    "set": (set, lambda v: [_plain(one) for one in v], lambda v: set(_rich(v))),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v)),
    "size": (torch.Size, list, lambda v: torch.Size(v)),
    "dtype": _of_torch(torch.dtype),
    "layout": _of_torch(torch.layout),
    "memory": _of_torch(torch.memory_format),
    "device": (torch.device, str, lambda v: torch.device(v)),
}
