"""What a search comes to: the best choices, the dropped ones, as a table, JSON or a picture."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.predict.space import Choice
from piper_dynamo.strategy import Strategy
from piper_dynamo.tables import table

WHYS = ("refused", "does not fit", "slower")
_LISTED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A choice that was planned.

    Attributes:
        choice: In numbers.
        strategy: What it stands for, to be compiled.
        seconds: The predicted time of a step, in the costs' unit.
        bound: What it was known to take at least before it was planned.
        memory: Bytes of the rank that holds most.
    """

    choice: Choice
    strategy: Strategy
    seconds: float
    bound: float
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A choice that is not among the best.

    Attributes:
        choice: In numbers.
        why: "refused", "does not fit" or "slower".
        detail: The refusal's text, or by how much.
    """

    choice: Choice
    why: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        best: Fastest first; of equally fast ones those that need least memory.
        dropped: All others of the space.
        left_out: What was asked for that is no choice, and why.
        devices: Ranks of the job.
        memory: Bytes that a rank may hold; None: any number.
        costs: What times were predicted by.
    """

    best: tuple[Found, ...]
    dropped: tuple[Dropped, ...]
    left_out: tuple[str, ...]
    devices: int
    memory: float | None
    costs: str

    def __str__(self) -> str:
        """The best as a table, and how many others were dropped for what."""
        count = len(self.best) + len(self.dropped)
        lines = [f"search of {count} strategies for {self.devices} ranks", f"costs: {self.costs}"]
        heads = ["time", "memory", *Choice.__annotations__]
        rows = [
            [f"{f.seconds:.4g}", show_bytes(f.memory), *map(str, asdict(f.choice).values())]
            for f in self.best
        ]
        lines += table(heads, rows, left=("schedule",)) if rows else ["none can be run"]
        for why in WHYS:
            mine = [one for one in self.dropped if one.why == why]
            if mine:
                lines.append(f"{why}: {len(mine)}")
            details: dict[str, list[Choice]] = {}
            for one in mine if why != "slower" else ():
                details.setdefault(_short(one), []).append(one.choice)
            for text, choices in list(details.items())[:_LISTED]:
                more = f" and {len(choices) - 1} more" if len(choices) > 1 else ""
                lines.append(f"  {choices[0]}{more}: {text}")
        return "\n".join([*lines, *(f"left out: {text}" for text in self.left_out)])

    def to_dict(self) -> Mapping[str, Any]:
        """Everything but the strategies' directives, for JSON."""
        return {
            "devices": self.devices,
            "memory": self.memory,
            "costs": self.costs,
            "best": [
                {"seconds": f.seconds, "bound": f.bound, "memory": f.memory, **asdict(f.choice)}
                for f in self.best
            ],
            "dropped": [
                {"why": d.why, "detail": d.detail, **asdict(d.choice)} for d in self.dropped
            ],
            "left_out": list(self.left_out),
        }

    def plot(self, path: str | Path) -> None:
        """Draw the best: predicted time beside memory, fastest on top.

        Args:
            path: .png or .svg.

        Raises:
            PiperError: The suffix is another, there is nothing to draw, or the file cannot be
                written.
        """
        from matplotlib.figure import Figure

        if Path(path).suffix not in (".png", ".svg") or not self.best:
            why = "it found nothing" if not self.best else "give a .png or .svg"
            raise PiperError(f"a search cannot be drawn to {path}: {why}")
        figure = Figure(figsize=(9, 1 + 0.4 * len(self.best)), layout="constrained")
        times, memories = figure.subplots(1, 2, sharey=True)
        names = [
            f"{f.choice.schedule} {f.choice.pp}x{f.choice.dp}, {f.choice.microbatches} mb, "
            f"zero {f.choice.zero}" + (f", ep {f.choice.ep}" if f.choice.ep > 1 else "")
            for f in self.best
        ]
        places = list(range(len(names)))
        times.barh(places, [f.seconds for f in self.best], color="#4477aa")
        times.set(xlabel="predicted time of a step", yticks=places, yticklabels=names)
        memories.barh(places, [f.memory / 2**20 for f in self.best], color="#ccbb44")
        memories.set_xlabel("memory of the fullest rank, MiB")
        if self.memory is not None:
            memories.axvline(self.memory / 2**20, color="#ee6677")
        times.invert_yaxis()
        try:
            figure.savefig(path)
        except OSError as error:
            raise PiperError(f"a search cannot be drawn to {path}: {error}") from error


def _short(dropped: Dropped) -> str:
    """The line that says it; a refusal's title may be followed by details."""
    first, *rest = dropped.detail.splitlines()
    return f"{first}: {rest[0].strip()}" if rest else first
