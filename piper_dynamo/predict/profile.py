"""A machine's profile: what chunks, messages and the host take on it, as it was measured.

Terms: the *features* of a chunk are its work, summed by what limits it; the *rates* are seconds per
unit of each, fitted to the measured chunks, by which chunks that were not measured are predicted.

Signature: measurements <-> JSON; chunks -> costs in seconds.
"""

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import read_text
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.work import work_by_operator

VERSION = 3
_features: dict[str, tuple[float, ...]] = {}  # by chunk key: equal chunks do the same
FEATURES = ("product_flops", "product_bytes", "attention_flops", "other_bytes", "operators")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """One measured chunk.

    Attributes:
        key: Its structural key.
        seconds: The median of its runs, alone on the machine.
        features: Its work, in the order of `FEATURES`.
    """

    key: str
    seconds: float
    features: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured on one machine; times in seconds, rates per second.

    Attributes:
        machine: What it was measured on and with: processor, versions of torch, Python and Piper.
        compile: How chunks ran.
        chunks: Each distinct chunk.
        alpha: Of a message between two processes, whatever its size.
        bandwidth: Bytes per second of a message or collective.
        skew: What a collective takes beside that.
        per_value: What each of its values takes beside its bytes.
        host: What issuing an instruction takes, by what it does.
        host_value: What each value of a collective takes beside that, by what it does.
        host_byte: The same of each byte that it makes, sends, takes or adds.
        call: What a step takes beside its program.
        call_shard: The same of each gradient that a rank with shards hands over.
        slowdown: How much longer chunks take while 1, 2, ... ranks compute.
    """

    machine: Mapping[str, str]
    compile: str
    chunks: tuple[ChunkTime, ...]
    alpha: float = 0.0
    bandwidth: float | None = None
    skew: float = 0.0
    per_value: float = 0.0
    host: Mapping[str, float] = field(default_factory=dict)
    host_value: Mapping[str, float] = field(default_factory=dict)
    host_byte: Mapping[str, float] = field(default_factory=dict)
    call: float = 0.0
    call_shard: float = 0.0
    slowdown: tuple[float, ...] = ()

    def rates(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, none below 0, that fit the measured chunks best."""
        return fitted(tuple(c.features for c in self.chunks), tuple(c.seconds for c in self.chunks))

    def costs(self, chunks: Mapping[str, Chunk]) -> Costs:
        """The costs of a plan on this machine, in seconds.

        Args:
            chunks: The plan's, `plan.chunks`. Those that were measured take what they took, others
                what their work and the rates say.
        """
        measured = {c.key: c.seconds for c in self.chunks}
        rates = self.rates()
        took: dict[str, float] = {}
        for chunk in chunks.values():
            if chunk.key not in took:
                known = measured.get(chunk.key)
                took[chunk.key] = predicted(features_of(chunk), rates) if known is None else known
        return Costs(
            chunks=took,
            comm=self.alpha,
            bandwidth=self.bandwidth,
            skew=self.skew,
            per_value=self.per_value,
            host=_by_op(self.host),
            host_value=_by_op(self.host_value),
            host_byte=_by_op(self.host_byte),
            call=self.call,
            call_shard=self.call_shard,
            slowdown=self.slowdown,
        )

    def to_json(self) -> str:
        """The profile as text; `from_json` reads it."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """The profile that a text holds.

        Raises:
            PiperError: It is not exactly a profile of this version.
        """
        try:
            return _read(json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise PiperError(
                format_error(
                    "this is no profile",
                    {"why": f"{error}"},
                    hint=f"make one, of version {VERSION}, with piper profile or piper.profile",
                )
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Raises:
            PiperError: It cannot be written.
        """
        try:
            Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            raise PiperError(f"the profile cannot be written: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """The profile in a file.

        Raises:
            PiperError: There is none.
        """
        try:
            return cls.from_json(read_text(Path(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise PiperError(
                format_error(
                    f"no profile can be read: {error}",
                    hint="piper profile, or piper.profile, measures a machine and writes one",
                )
            ) from error

    def __str__(self) -> str:
        """What was measured, as a few lines."""
        took = sorted(c.seconds for c in self.chunks)
        carried = "any number" if self.bandwidth is None else f"{self.bandwidth / 1e6:.0f}"
        lines = [
            ", ".join(f"{name} {value}" for name, value in self.machine.items()),
            f"{len(took)} chunks ({self.compile})"
            + (f", {took[0] * 1e3:.3g} to {took[-1] * 1e3:.3g} ms" if took else ""),
            f"messages: {self.alpha * 1e6:.0f} us and {carried} MB/s; "
            f"collectives {self.skew * 1e6:.0f} us more, and {self.per_value * 1e6:.0f} us a value",
            f"a step beside its program: {self.call * 1e6:.0f} us, "
            f"and {self.call_shard * 1e6:.0f} us a gradient that is a shard",
        ]
        if self.slowdown:
            factors = ", ".join(f"{factor:.2f}" for factor in self.slowdown)
            lines.append(f"chunks while 1, 2, ... ranks compute: x {factors}")
        return "\n".join(lines)


def _read(found: Any) -> Profile:
    """A profile of what JSON gave, checked field by field."""
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise ValueError(f"it has no version {VERSION}")
    known = {one.name for one in fields(Profile)}
    if set(found) != known:
        odd = ", ".join(sorted(set(found) ^ known))
        raise ValueError(f"missing or unknown: {odd}")
    chunks = []
    for one in found["chunks"]:
        chunk = ChunkTime(**{**one, "features": tuple(map(_number, one["features"]))})
        if not isinstance(chunk.key, str) or len(chunk.features) != len(FEATURES):
            raise ValueError(f"{one!r} is no chunk's time")
        _number(chunk.seconds)
        chunks.append(chunk)
    texts = {**found["machine"], "compile": found["compile"]}
    if not all(isinstance(text, str) for text in (*texts, *texts.values())):
        raise TypeError("machine and compile are texts")
    bandwidth = found["bandwidth"]
    return Profile(
        machine=found["machine"],
        compile=found["compile"],
        chunks=tuple(chunks),
        alpha=_number(found["alpha"]),
        bandwidth=None if bandwidth is None else _number(bandwidth),
        skew=_number(found["skew"]),
        per_value=_number(found["per_value"]),
        **{
            name: {str(Op(op)): _number(seconds) for op, seconds in found[name].items()}
            for name in ("host", "host_value", "host_byte")
        },
        call=_number(found["call"]),
        call_shard=_number(found["call_shard"]),
        slowdown=tuple(map(_number, found["slowdown"])),
    )


def _by_op(times: Mapping[str, float]) -> dict[Op, float]:
    return {Op(name): seconds for name, seconds in times.items()}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is no number of at least 0")
    return float(value)


def features_of(chunk: Chunk) -> tuple[float, ...]:
    """A chunk's work, in the order of `FEATURES`."""
    if chunk.key in _features:
        return _features[chunk.key]
    product_flops = product_bytes = attention_flops = other_bytes = operators = 0
    for work in work_by_operator(chunk.graph):
        operators += 1
        if "scaled_dot_product" in work.name:
            attention_flops += work.flops
        elif work.flops:
            product_flops += work.flops
            product_bytes += work.nbytes
        else:
            other_bytes += work.nbytes
    found = (product_flops, product_bytes, attention_flops, other_bytes, operators)
    return _features.setdefault(chunk.key, found)


def predicted(features: Sequence[float], rates: Sequence[float]) -> float:
    """The seconds that work takes at these rates."""
    return sum(amount * rate for amount, rate in zip(features, rates, strict=True))


@functools.lru_cache(maxsize=8)  # a search asks for the same ones with every plan
def fitted(
    features: tuple[tuple[float, ...], ...], seconds: tuple[float, ...]
) -> tuple[float, ...]:
    """Rates of at least 0 with the least squares of relative errors.

    Args:
        features: Of each measurement.
        seconds: What each took.

    Returns:
        A rate per feature: the best of all solutions in which some are 0, of which there are few.
    """
    took = np.array(seconds, dtype=float)
    used = took > 0
    table = np.array(features, dtype=float).reshape(len(took), len(FEATURES))
    rows = table[used] / took[used, None]
    best, least = np.zeros(len(FEATURES)), math.inf
    for count in range(1, len(FEATURES) + 1):
        for chosen in itertools.combinations(range(len(FEATURES)), count):
            found, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)
            error = float(np.sum((rows[:, chosen] @ found - 1) ** 2))
            if (found >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(len(FEATURES)), error
                best[list(chosen)] = found
    return tuple(best.tolist())
