"""One picture per suite, from its results: ratios with their intervals beside what they may be.

Rows that were compared are drawn as ours over theirs; the others as figures of their own, by unit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {True: "#2f7d4f", False: "#b3402e", None: "#5a6672"}
NAMES = {True: "bar held", False: "bar not held", None: "no bar, or too few pairs"}
ROW_IN, WIDTH_IN = 0.26, 9.0


def panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each panel by what its axis shows; rows without a number are in none."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["ratio"] is not None:
            found.setdefault("ours / theirs", []).append(row)
        elif row["ours"] is not None:
            found.setdefault(row["unit"], []).append(row)
    return found


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a suite's results; one without any number gets a picture that says so."""
    found = panels([row for one in results["sections"].values() for row in one["rows"]])
    heights = [len(rows) + 1.6 for rows in found.values()] or [2.0]
    figure = Figure(figsize=(WIDTH_IN, ROW_IN * sum(heights) + 0.9), layout="constrained")
    dates = sorted({one["date"] for one in results["sections"].values()})
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    figure.suptitle(f"{results['suite']}, {when}" if when else results["suite"], fontsize=11)
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (label, rows) in zip(axes, found.items(), strict=False):
        _panel(axis, label, rows)
    if not found:
        axes[0].text(0.5, 0.5, "no figures", ha="center", va="center")
        axes[0].set_axis_off()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _panel(axis: Axes, label: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A row's point each, from the top down."""
    is_ratio = label == "ours / theirs"
    seen: set[bool | None] = set()
    for place, row in enumerate(rows):
        value = row["ratio"] if is_ratio else row["ours"]
        held = row["held"]
        told = None if held in seen else NAMES[held]
        seen.add(held)
        axis.plot([value], [place], "o", color=COLOURS[held], markersize=5, label=told)
        if is_ratio and row["low"] is not None:
            axis.plot([row["low"], row["high"]], [place, place], color=COLOURS[held], linewidth=1.6)
        if is_ratio and row["limit"] is not None:
            axis.plot([row["limit"]], [place], "|", color="black", markersize=11)
    if is_ratio:
        axis.axvline(1.0, color="#c4c9ce", linewidth=0.8, zorder=0)
    elif all(row["ours"] > 0 for row in rows):
        axis.set_xscale("log")
    names = [f"{row['section']}: {row['name']}" for row in rows]
    axis.set_yticks(range(len(rows)), labels=names, fontsize=7)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel(f"{label}; | is the bar" if is_ratio else label, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", color="#eceff1", linewidth=0.6)
    axis.legend(fontsize=7, loc="best", frameon=False)
