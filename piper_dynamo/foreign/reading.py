"""What other systems' parallelism arguments mean here.

Terms: an argument has a *counterpart* if a Strategy says the same: then it is read. Some only say
how the other system overlaps or chooses kernels, and change neither values nor what a rank holds:
they are taken and have no effect, since Piper overlaps what it can. All others are refused, unless
they have the value by which the other system leaves them out.

Sources: torchtitan's `Parallelism` configuration, Megatron-LM's `arguments.py`, DeepSpeed's
configuration JSON, by their own names.

Signature: the arguments of one of them -> the arguments of `piper.strategies.pipeline`, and a
Precision.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from typing import Any, TypeGuard

from piper_dynamo.directives import Precision
from piper_dynamo.values import Faults, is_number, is_whole

Arguments = Mapping[str, Any]
MIB = 2**20
NO_TENSOR = "Piper has no tensor parallelism yet; use more pipeline ranks or replicas"
NO_CONTEXT = "Piper has no context parallelism yet; a sequence stays on one rank"
OWN_LAYERS = (
    "Piper counts no layers; say the stages by regions=, by hand or by piper.auto_stages(...)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the arguments of another system come to.

    Attributes:
        pipeline: Arguments of `piper.strategies.pipeline`.
        precision: What is computed in another dtype than it is held in.
    """

    pipeline: dict[str, Any]
    precision: Precision | None = None


class Reader:
    """Reads each argument once; what is left in the end is refused."""

    def __init__(self, given: object, faults: Faults, prefix: str = "") -> None:
        self._faults = faults
        self._prefix = prefix
        self._known: list[str] = []
        if not isinstance(given, Mapping):
            faults.add(
                prefix.rstrip(".") or "arguments", given, "must be a dict of arguments by name"
            )
            given = {}
        # As on a command line: "--micro-batch-size".
        self._left: dict[Any, Any] = {}
        for name, value in given.items():
            if (plain := _plain(name)) in self._left:
                faults.add(f"{prefix}{name}", value, "is given twice, under two spellings")
            self._left[plain] = value

    def take(self, name: str, default: Any) -> Any:
        """The argument's value, as it is."""
        self._known.append(name)
        return self._left.pop(name, default)

    def size(self, name: str, default: int = 1) -> int:
        """A number of ranks or of the like."""
        value = self.take(name, default)
        if not is_whole(value) or value < 1:
            must = "must be a whole number of at least 1"
            if isinstance(value, str) and value.isdecimal():
                must += ", not a text"
            self._faults.add(self._prefix + name, value, must)
            return 1
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            self._faults.add(self._prefix + name, value, "must be true or false")
            return default
        return value

    def choice(self, name: str, default: str | None, meanings: Mapping[str, Any], why: str) -> Any:
        """What one of some values means; None, where that is the default, means nothing."""
        value = self.take(name, default)
        if value is None and default is None:
            return None
        if not isinstance(value, str) or value not in meanings:  # a list has no hash
            known = ", ".join(map(repr, meanings))
            self._faults.add(
                self._prefix + name, value, f"{why}; there are counterparts of {known}"
            )
            return None if default is None else meanings[default]
        return meanings[value]

    def part(self, name: str) -> "Reader":
        """A table inside of the table."""
        return Reader(self.take(name, {}), self._faults, f"{self._prefix}{name}.")

    def refuse(self, why: str, **absent: Any) -> None:
        """Arguments without a counterpart, by the value that leaves each out."""
        for name, without in absent.items():
            value = self.take(name, without)
            if value != without:
                self._faults.add(self._prefix + name, value, why)

    def refuse_unless_off(self, why: str, *names: str, switch: str = "enabled") -> None:
        """Tables without a counterpart, which are absent, empty, or switched off."""
        for name in names:
            value = self.take(name, None)
            off = value.get(switch, False) in (False, "none", None) if is_table(value) else False
            if value and not off:
                self._faults.add(self._prefix + name, value, why)

    def without_effect(self, *names: str) -> None:
        """Arguments that change neither values nor what ranks hold."""
        for name in names:
            self.take(name, None)

    def drop(self) -> None:
        """The rest is of something that is switched off."""
        self._left.clear()

    def finish(self) -> None:
        """Refuse what was not read."""
        for name, value in self._left.items():
            near = get_close_matches(str(name), self._known, n=1, cutoff=0.8)
            hint = f"did you mean {near[0]!r}?" if near else _OTHER_KIND
            self._faults.add(
                f"{self._prefix}{name}", value, f"is no argument of parallelism known here; {hint}"
            )


_OTHER_KIND = "leave it out if it is of another kind: of the model, the data or the training loop"


def _plain(name: Any) -> Any:
    return name.removeprefix("--").replace("-", "_") if isinstance(name, str) else name


def is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is a dict or the like."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether it is a list or the like."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def bucket_size(elements: object, name: str, precision: Precision | None, faults: Faults) -> float:
    """MiB of a bucket of so many gradients, as they are reduced."""
    if not is_number(elements) or not 1 <= elements < inf:
        faults.add(name, elements, "must be a number of elements")
        return 1.0
    sums = None if precision is None else precision.reduce or precision.grad
    return elements * (2 if sums in ("bf16", "fp16") else 4) / MIB
