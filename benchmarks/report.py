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
from benchmarks.paired import Comparison

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
            where it is compared, "theirs"; "unit" of both; "ratio" with its "interval", where pairs
            were measured; "limit", the most that ours may be of theirs.
    """

    section: str
    what: str
    figures: str
    bar: str = ""
    held: bool | None = None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        verdict = {None: "", True: "held", False: "NOT HELD"}[self.held]
        return (self.section, self.what, self.figures, self.bar, verdict)

    def record(self, suite: str) -> dict[str, Any]:
        """What the row comes to, as numbers; None where there is none.

        Args:
            suite: What it is a part of.
        """
        ours, theirs = self.data.get("ours"), self.data.get("theirs")
        ratio = ours / theirs if ours is not None and theirs else None
        low, high = self.data.get("interval", (None, None))
        return {
            "suite": suite,
            "section": self.section,
            "name": self.what,
            "ours": ours,
            "theirs": theirs,
            "unit": self.data.get("unit", ""),
            "ratio": self.data.get("ratio", ratio),
            "low": low,
            "high": high,
            "limit": self.data.get("limit"),
            "bar": self.bar,
            "held": self.held,
            "figures": self.figures,
        }


def ratio_row(section: str, what: str, found: Comparison, bar: float, of: str) -> Row:
    """A row of a paired comparison of times."""
    return Row(
        section=section,
        what=what,
        figures=found.text(),
        bar=f"<= {bar:.2f} x {of}",
        held=found.holds(bar),
        data=found.figures(limit=bar),
    )


def growth_row(section: str, unit: str, found: Sequence[tuple[int, float]], bar: float) -> Row:
    """A row of the exponent by which time grows with size, between the first and the last.

    Args:
        section: The benchmark.
        unit: What sizes count.
        found: (size, seconds), growing.
        bar: Above it the bar is not held.
    """
    (few, first), (many, last) = found[0], found[-1]
    exponent = math.log(last / first) / math.log(many / few)
    return Row(
        section=section,
        what=f"exponent, {few} to {many} {unit}",
        figures=f"{exponent:.2f}",
        bar=f"<= {bar}",
        held=exponent <= bar,
        data={"ours": exponent, "unit": "exponent"},
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
