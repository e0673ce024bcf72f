"""One table for all benchmarks: what was measured, the figures, and whether the bar is held."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import piper_dynamo as piper
from benchmarks.paired import PAIRS, Comparison

NOT_RUN = "not run"  # what a row is of that says why a section could not be
HEAD = ("section", "what", "figures", "bar", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        section: The benchmark, as `--only` names it.
        what: What was measured.
        figures: The outcome, to be read.
        bar: What is to be held; empty where a row only informs.
        held: Whether it is; None where there is no bar.
        data: The measurements, for a file of results. What they come to has these names: "ours";
            "theirs", where it is compared and less is better, or "other", what stands beside it;
            "unit" of all; "ratio" with its "interval", where pairs were measured; "limit", the most
            that ours may be of theirs; "measured", how often and how, where it was not in pairs;
            "runs" and "needed", how many were measured, and with how many fewer nothing is decided.
    """

    section: str
    what: str
    figures: str
    bar: str = ""
    held: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """How often, and how."""
        pairs = len(self.data.get("first", ()))
        told: str = self.data.get("measured", f"{pairs} pairs" if pairs else "")
        return told

    @property
    def verdict(self) -> bool | None:
        """Whether the bar is held; None also where too little was measured to say so."""
        runs = self.data.get("runs", len(self.data.get("first", ())))
        needed = self.data.get("needed", PAIRS if "first" in self.data else 0)
        return self.held if runs >= needed else None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        told = {None: "", True: "held", False: "NOT HELD"}[self.verdict]
        if self.held is not None and self.verdict is None:
            told = f"({self.measured}: decides nothing)"
        return (self.section, self.what, self.figures, self.bar, told)

    def record(self, suite: str, section: str) -> dict[str, Any]:
        """What the row comes to, as numbers; None where there is none.

        Args:
            suite: What it is a part of.
            section: What of the suite.
        """
        ours, theirs = self.data.get("ours"), self.data.get("theirs")
        ratio = ours / theirs if ours is not None and theirs else None
        low, high = self.data.get("interval", (None, None))
        return {
            "suite": suite,
            "section": section,
            "name": self.what,
            "ours": ours,
            "theirs": self.data.get("other", theirs),
            "unit": self.data.get("unit", ""),
            "ratio": self.data.get("ratio", ratio),
            "low": low,
            "high": high,
            "limit": self.data.get("limit"),
            "bar": self.bar,
            "held": self.verdict,
            "decides": self.held is None or self.verdict is not None,
            "measured": self.measured,
            "figures": " ".join(self.figures.split()),
        }


def ratio_row(
    section: str, what: str, found: Comparison, bar: float, of: str, *, needed: int = PAIRS
) -> Row:
    """A row of a paired comparison of times; fewer pairs than needed decide nothing."""
    return Row(
        section=section,
        what=what,
        figures=found.text(),
        bar=f"<= {bar:.2f} x {of}",
        held=found.holds(bar),
        data=found.figures(limit=bar) | {"needed": needed},
    )


def gain_row(
    section: str, what: str, found: Comparison, gain: float, of: str, note: str = ""
) -> Row:
    """A row of a paired comparison of times whose bar is how many times as fast ours is."""
    return Row(
        section=section,
        what=what,
        figures=f"{found.text()}   {1 / found.ratio:.2f} x as fast{note}",
        bar=f">= {gain:.2f} x {of}",
        held=found.holds(1 / gain),
        data=found.figures(limit=1 / gain),
    )


def growth_row(
    section: str, unit: str, found: Sequence[tuple[int, float]], bar: float, measured: str
) -> Row:
    """A row of the exponent by which time grows with size, between the first and the last.

    Args:
        section: The benchmark.
        unit: What sizes count.
        found: (size, seconds), growing.
        bar: Above it the bar is not held.
        measured: How the seconds were.
    """
    (few, first), (many, last) = found[0], found[-1]
    exponent = math.log(last / first) / math.log(many / few)
    return Row(
        section=section,
        what=f"exponent, {few} to {many} {unit}",
        figures=f"{exponent:.2f}",
        bar=f"<= {bar}",
        held=exponent <= bar,
        data={"ours": exponent, "unit": "exponent", "measured": measured},
    )


def table(rows: Sequence[Row]) -> str:
    """All rows with aligned columns."""
    cells = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"piper {piper.__version__}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} x {model}, "
        f"{torch.get_num_threads()} thread(s) per rank{load}"
    )


def write(path: str, rows: Sequence[Row], on: str) -> None:
    """All rows and what they were measured on, as JSON."""
    found = {"machine": on, "rows": [asdict(row) for row in rows]}
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
