"""Filters: which tasks a directive speaks of.

Terms: a *tag* is a region's annotation (`PP`), the dim a batch is split along (`MB`) or `PASS`; a
*filter* asks for values of some tags, and a task matches if it has every one with such a value.

    {"PP": 0}                          every task of region PP=0
    {"PP": [0, 3], "MB": range(4)}     of regions 0 and 3, for the first four microbatches
    {"EP": "*"}                        of every region with the tag EP
    {"PASS": "B"}                      whole backwards; the halves BI and BW have names of their own
    {}                                 everything
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.ir.task import Pass, is_tag_name
from piper_dynamo.values import Faults, code, is_whole, shown

ANY = "*"
_MOST_DIGITS = 18  # of an index that is told again
PASSES = tuple(which.value for which in Pass)

TagValue = int | str | tuple[int, ...] | tuple[str, ...]
"""As stored: an index, a pass, "*", or several of either, sorted, each once."""

FilterLike = Mapping[str, int | str | Sequence[int] | Sequence[str]]

# Filters are compared by value, so their tags have one order; it is also how they read best.
_RANK = {"PP": 0, "MB": 2, "PASS": 3}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Filter:
    """A filter as stored: hashable, compared by what it asks for, printed as the dict that it is.

    Attributes:
        items: (tag, value) pairs in a fixed order: `PP`, other annotations by name, `MB`, `PASS`.
    """

    items: tuple[tuple[str, TagValue], ...]

    def __init__(self, tags: "FilterLike | Filter") -> None:
        """Check and normalise `tags`.

        Raises:
            PiperStrategyError: Lists every fault.
        """
        items, wrong = _parse(tags)
        if wrong:
            raise PiperStrategyError(f"not a filter: {shown(tags)}\n  " + "\n  ".join(wrong))
        object.__setattr__(self, "items", items)

    @classmethod
    def checked(cls, tags: "FilterLike | Filter", argument: str, faults: Faults) -> "Filter":
        """The filter; what is wrong with it is added to `faults`, as of `argument`, not raised."""
        items, wrong = _parse(tags)
        for fault in wrong:
            faults.say(f"{argument}: {fault}")
        made = object.__new__(cls)
        object.__setattr__(made, "items", items)
        return made

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{code(tag)}: {_value(v)}" for tag, v in self.items) + "}"

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def tags(self) -> dict[str, TagValue]:
        """The filter as a dict of its own."""
        return dict(self.items)

    def matches(self, tags: Mapping[str, int | str]) -> bool:
        """Whether a task with these tags is meant; a tag that the task lacks does not match."""
        for tag, wanted in self.items:
            value = tags.get(tag)
            if value is None or not _allows(wanted, value):
                return False
        return True

    def allows(self, tag: str, value: int | str) -> bool:
        """Whether this filter lets a task have this value of this tag."""
        return all(_allows(wanted, value) for name, wanted in self.items if name == tag)


def _allows(wanted: TagValue, value: int | str) -> bool:
    if isinstance(wanted, tuple):
        return value in wanted
    return wanted in (ANY, value)


def _value(value: TagValue) -> str:
    """The Python code of a tag's value; a run of indices as a range."""
    if not isinstance(value, tuple):
        return code(value)
    first, last = value[0], value[-1]
    if isinstance(first, int) and isinstance(last, int) and len(value) > 2:
        run = range(first, last + 1)
        if len(run) == len(value):
            return f"range({last + 1})" if first == 0 else repr(run)
    return code(list(value))


def _parse(tags: object) -> tuple[tuple[tuple[str, TagValue], ...], list[str]]:
    """The items of a filter, and everything that is wrong with it."""
    if isinstance(tags, Filter):
        return tags.items, []
    if not isinstance(tags, Mapping):
        kind = type(tags).__name__
        return (), [f"a filter is a dict such as {{'PP': 0}}, not a {kind}; {{}} is everything"]
    items: list[tuple[str, TagValue]] = []
    faults: list[str] = []
    for tag, given in tags.items():
        if tag == "PASS":
            value, fault = _parse_pass(given)
        elif not isinstance(tag, str) or not (tag == "MB" or is_tag_name(tag)):
            value, fault = 0, "a tag is a name that ends in a letter or '_', such as 'PP' or 'MB'"
        else:
            value, fault = _parse_index(given)
        if fault:
            faults.append(f"{tag!r}: {shown(given)}: {fault}")
        items.append((tag, value))
    if not faults:
        items.sort(key=lambda item: (_RANK.get(item[0], 1), item[0]))
    return tuple(items), faults


def _parse_index(given: object) -> tuple[TagValue, str]:
    """An index or several, or why it is none."""
    if is_whole(given) and given >= 0:
        return given, ""
    if isinstance(given, str):
        if given == ANY:
            return ANY, ""
        is_number = given.isdecimal() and len(given) <= _MOST_DIGITS
        return 0, f"write {int(given)}" if is_number else 'an index is a whole number; "*" is any'
    if _is_several(given) and all(is_whole(one) and one >= 0 for one in given):
        several = tuple(sorted(set(given)))
        return (several[0] if len(several) == 1 else several), ""
    return 0, 'must be a whole number of at least 0, a list or range of them (not empty), or "*"'


def _parse_pass(given: object) -> tuple[TagValue, str]:
    if isinstance(given, str):
        if given in PASSES or given == ANY:
            return str(given), ""
    elif _is_several(given) and all(one in PASSES for one in given):
        several = tuple(which for which in PASSES if which in given)
        return (several[0] if len(several) == 1 else several), ""
    return 0, 'PASS must be one of "F", "B", "BI", "BW", a list of them, or "*"'


def _is_several(given: object) -> TypeGuard[Collection[Any]]:
    """Whether `given` is a list, range or set that is not empty (nothing would match)."""
    return isinstance(given, list | tuple | range | set | frozenset) and len(given) > 0
