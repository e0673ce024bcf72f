"""What every picture of a timeline shares: colours, order of streams, units, shades.

Terms: a *lane* is a thin row under a rank's row of tasks, one per further stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from piper_dynamo.timeline import CATEGORIES, COMPUTE, Event, Held, Message, Timeline

# Colours that stay apart in print and for colour-blind readers (Okabe-Ito, lightened), and what
# the legend calls them; kinds of one name share an entry.
LOOKS: Mapping[str, tuple[str, str]] = {
    "F": ("#7fb3d9", "forward"),
    "B": ("#e9a86b", "backward"),
    "BI": ("#f2c14e", "input gradient"),
    "BW": ("#8fc79a", "weight gradient"),
    "send": ("#8b76b8", "send"),
    "recv": ("#b9abd6", "receive"),
    "wait": ("#e4e4e4", "wait"),
    "reduce": ("#c4668f", "reduce"),
    "gather": ("#dca3be", "gather"),
    "exchange": ("#7d5ba6", "exchange of rows"),
    "other": ("#a8a8a8", "other work"),
}
EDGE = "#4d4d4d"
MESSAGE, MESSAGE_LABEL = "#5b3f8c", "message"
LOSS = ("loss", "loss_sum")  # what messages that carry it are called
# What ranks hold, by category, from the bottom up; colours as of the tasks that make it.
MEMORY: Mapping[str, str] = dict(
    zip(
        CATEGORIES,
        ("#c9ced4", "#e3e6ea", "#a9b0b8", "#8fc79a", "#7fb3d9", "#dca3be", "#b9abd6"),
        strict=True,
    )
)
MEMORY_LABEL = "memory"


def kind_of(event: Event) -> str:
    """The kind that an event is drawn as."""
    return event.kind if event.kind in LOOKS else "other"


def streams_of(timeline: Timeline) -> list[str]:
    """All streams, compute first."""
    return sorted({e.stream for e in timeline.events}, key=lambda s: (s != "compute", s))


def shown_messages(timeline: Timeline) -> list[tuple[Message, tuple[float, float]]]:
    """The messages that become arrows, with both their times.

    Not the loss: every rank takes it at the step's end, and the arrows would cross all others.
    """
    return [(m, m.ends) for m in timeline.messages if m.ends is not None and m.name not in LOSS]


def peak_of(curve: Sequence[tuple[float, Held]]) -> int:
    """The most bytes of a memory curve."""
    return max((sum(held) for _, held in curve), default=0)


def held_categories(timeline: Timeline) -> list[int]:
    """The categories of which some rank holds something, by their place in CATEGORIES."""
    curves = timeline.memory.values()
    return [at for at in range(len(CATEGORIES)) if any(held[at] for c in curves for _, held in c)]


def scale_of(span: float, unit: str) -> tuple[float, str]:
    """What to multiply times with, and the unit they then have."""
    if unit != "s" or span >= 2:
        return 1.0, unit
    return (1e3, "ms") if span >= 2e-3 else (1e6, "µs")


def darker(color: str, depth: float) -> str:
    """A colour, up to 40 % darker."""
    keep = 1 - 0.4 * depth
    parts = (round(int(color[i : i + 2], 16) * keep) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)


@dataclass(slots=True)
class Shades:
    """How dark each event is: the later its stage among those of its rank, the darker."""

    stages: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> "Shades":
        """Those of a timeline's ranks."""
        found: dict[int, set[int]] = {}
        for event in timeline.events:
            if event.kind in COMPUTE:
                found.setdefault(event.rank, set()).add(event.tags.get("PP", 0))
        return cls({rank: sorted(stages) for rank, stages in found.items()})

    def depth(self, event: Event) -> float:
        """0 for the first of a rank's stages, 1 for the last."""
        stages = self.stages.get(event.rank, [0])
        if event.kind not in COMPUTE or len(stages) < 2:
            return 0.0
        return stages.index(event.tags.get("PP", 0)) / (len(stages) - 1)

    def told(self) -> str:
        """What the boxes' numbers and shades say."""
        has_shades = any(len(stages) > 1 for stages in self.stages.values())
        return "numbers: microbatches" + (" · darker: a rank's later stages" if has_shades else "")

    def color(self, event: Event) -> str:
        """The fill of an event's box."""
        return darker(LOOKS[kind_of(event)][0], self.depth(event))
