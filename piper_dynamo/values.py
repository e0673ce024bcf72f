"""What records compared by value share.

Printing as code, frozen mappings, lists of faults, and where the user wrote the record.
"""

import json
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeGuard, TypeVar

from piper_dynamo.errors import PiperStrategyError

_K = TypeVar("_K")
_V = TypeVar("_V")

# Frames that make a record for somebody else: our own, and the standard library's ways to copy one.
_INNER = ("piper_dynamo", "dataclasses", "copy")
# Of these the functions that make records for the user, which is told of what was called.
_MAKERS = {f"piper_dynamo.{name}": f"piper.{name}" for name in ("strategies", "schedules")}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, of which true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """`value` for a message: its repr, cut where it is long."""
    return _short.repr(value)


def user_line() -> str:
    """`file:line` of the nearest caller outside the package, or nothing if all are inside.

    Walks frame objects only: an order is made thousands of times faster than a traceback.
    """
    _, frame = _border(sys._getframe())
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def maker() -> str:
    """The function of `piper.strategies` or `piper.schedules` that the user called, or nothing."""
    inner, _ = _border(sys._getframe())
    module = _MAKERS.get(inner.f_globals.get("__name__", ""))
    return f"{module}.{inner.f_code.co_name}" if module is not None else ""


def _border(inner: FrameType) -> tuple[FrameType, FrameType | None]:
    """The outermost frame of those inside that lead here, and the user's that called it."""
    outer = inner.f_back
    while outer is not None:
        if outer.f_globals.get("__name__", "").partition(".")[0] not in _INNER:
            break
        inner, outer = outer, outer.f_back
    return inner, outer


def code(value: object) -> str:
    """Python code that builds `value`: mappings as dicts, functions by their name.

    Functions that no name leads to, such as lambdas, have no code: they print in angle brackets.
    """
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            return "{" + ", ".join(f"{code(k)}: {code(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(code, value)) + "]"
        case tuple():
            return "(" + ", ".join(map(code, value)) + ("," if len(value) == 1 else "") + ")"
        case _ if callable(value):
            return _function(value)
        case _:
            return repr(value)


def _function(value: object) -> str:
    """By name and without its address: ranks compare strategies by their text."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: object = sys.modules.get(str(module))
    for part in str(name).split("."):  # of what is local it leads nowhere
        found = getattr(found, part, None)
    if found == value:
        return str(name) if module == "__main__" else f"{module}.{name}"
    if name is not None:
        return f"<{name} of {module}, which has no name to import it by>"
    return f"<an object of {code(type(value))}, which has no code>"


class FrozenMap(Mapping[_K, _V]):
    """A dict that is hashable and cannot be changed; equal to any mapping with the same items."""

    __slots__ = ("_items",)
    _items: dict[_K, _V]

    def __init__(self, items: Mapping[_K, _V] | Iterable[tuple[_K, _V]] = ()) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name!r}: this mapping is frozen")

    def __getitem__(self, key: _K) -> _V:
        return self._items[key]

    def __iter__(self) -> Iterator[_K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return code(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMap, (self._items,))


class Faults:
    """Everything that is wrong with the arguments of one record; raised together."""

    def __init__(self, owner: str, where: str) -> None:
        """`owner` is the class as the user writes it, `where` the user's line."""
        self._owner = owner
        self._where = where
        self._found: list[str] = []

    def add(self, argument: str, value: object, must: str) -> None:
        """Note that `argument` has a `value` that it must not have."""
        self._found.append(f"{argument}={shown(value)}: {must}")

    def say(self, text: str) -> None:
        """Note a fault that is not one argument's value."""
        self._found.append(text)

    def whole(self, argument: str, value: object, least: int, hint: str = "") -> None:
        """Require a whole number of at least `least`."""
        if not is_whole(value) or value < least:
            tail = f"; {hint}" if hint else ""
            self.add(argument, value, f"must be a whole number of at least {least}{tail}")

    def name(self, argument: str, value: object, hint: str = "") -> None:
        """Require a string that is not empty."""
        if not isinstance(value, str) or not value:
            tail = f"; {hint}" if hint else ""
            self.add(argument, value, f"must be a name (a string that is not empty){tail}")

    def names(self, argument: str, value: object) -> bool:
        """Require one or more different names in a tuple or list; says whether they are."""
        before = len(self._found)
        if isinstance(value, str):
            self.add(argument, value, f"must be a tuple of names; write {argument}=({value!r},)")
        elif not isinstance(value, Sequence) or not value:
            self.add(argument, value, "must be a tuple of one or more names")
        elif not all(isinstance(one, str) and one for one in value):
            self.add(argument, value, "each must be a name (a string that is not empty)")
        elif len(set(value)) < len(value):
            self.add(argument, value, "names one twice; name each once")
        return len(self._found) == before

    def __bool__(self) -> bool:
        return bool(self._found)

    def check(self) -> None:
        """Raise if anything was noted.

        Raises:
            PiperStrategyError: Lists every fault.
        """
        if self._found:
            caller = maker()
            by = f", called by {caller}," if caller not in ("", self._owner) else ""
            at = f"{by} at {self._where}" if self._where else ""
            lines = "".join(f"\n  {line}" for line in self._found)
            raise PiperStrategyError(f"{self._owner}{at} is refused{lines}")
