"""docs/benchmarks.md, from the files of results that `piper bench` has left."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = """\
# Benchmarks

<!-- Written by `make docs` from benchmarks/results/: change benchmarks/page.py, not this file. -->

`make bench`, or `piper bench` in a checkout, measures Piper beside its peers: the same model, data,
dtype, optimizer, threads and accounting of memory, each peer set up as its own documentation
recommends. Names choose suites, and `--only` sections of them: `piper bench pipeline --only real`.

Machines drift by ten per cent and more, so times are never compared across runs. Both sides are
measured in turn, A B B A A B B A, {pairs} pairs unless a suite says otherwise; each pair gives a
ratio, ours over theirs, whose median is shown with its bootstrap 95 % interval. Below 1 is faster,
or smaller. A bar counts as held when the interval's far end is within 3 % of it. *Emulated* devices
wait for modelled times and compute nothing; what they send is sent. *Predicted* is what the
simulator says, and nothing ran.

What was tried to hold the bars, and why some are not held, is in `benchmarks/notes.md`. The counts
of what steps do, which no noise changes, are compared by the tests: `make bench-counts`.

{contents}
"""
NOT_YET = "No results yet: `piper bench {name}` on an idle machine."


def text(folder: Path = RESULTS) -> str:
    """The whole page."""
    from benchmarks.paired import PAIRS
    from benchmarks.suites import SUITES

    parts = []
    for name, suite in SUITES.items():
        path = folder / f"{name}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        body = NOT_YET.format(name=name) if found is None else section(found)
        parts.append(f"## {name}\n\n{suite.about}\n\n{body}\n")
    return PAGE.format(pairs=PAIRS, contents="\n".join(parts).rstrip())


def section(results: Mapping[str, Any]) -> str:
    """A suite's table, below where and how it was measured."""
    rows = ["| | ours | theirs | ratio | bar | |", "| --- |" + " --- |" * 5]
    for row in results["rows"]:
        unit = row["unit"]
        name = f"{row['section']}: {row['name']}"
        if row["ours"] is None:
            name = f"{name}: {row['figures']}"
        cells = [name, _shown(row["ours"], unit), _shown(row["theirs"], unit), _ratio(row)]
        verdict = {None: "", True: "held", False: "**not held**"}[row["held"]]
        rows.append("| " + " | ".join([*cells, row["bar"], verdict]).replace("<", "&lt;") + " |")
    told = f"`{results['command']}`, {results['date']}; {results['machine']}."
    picture = f"![{results['suite']}](../benchmarks/results/{results['suite']}.png)"
    return "\n\n".join([told, picture, "\n".join(rows)])


def _ratio(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    within = "" if row["low"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
    return f"{row['ratio']:.3f}{within}"


def _shown(value: float | None, unit: str) -> str:
    """A figure with a unit that reads well."""
    if value is None:
        return ""
    if unit == "s":
        for scale, name in ((1.0, "s"), (1e-3, "ms")):
            if value >= scale:
                return f"{value / scale:.4g} {name}"
        return f"{value * 1e6:.3g} µs"
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value:.0f} bytes"
    if unit == "hidden":
        return f"{value:.0%} hidden"
    return f"{value:.4g} {unit}"
