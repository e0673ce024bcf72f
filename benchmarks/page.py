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
measured in turn, A B B A A B B A, {pairs} pairs unless its row says otherwise; each pair gives a
ratio, ours over theirs, whose median is shown with its bootstrap 95 % interval. Below 1 is faster,
or smaller. The bar of a row in pairs counts as held when the interval's far end is within 3 % of
it; with fewer pairs than that row takes, nothing is decided. Fewer pairs have rows of which every
measurement is a job of its own processes, or as long as one, such as peaks of memory: the interval
of three pairs is their range, so that each of them has to hold the bar, and `--pairs` asks for
more. Other rows say how often and how they were measured, and are held to their bar itself.
*Emulated* devices wait for modelled times and compute nothing; what they send is sent. *Predicted*
is what the simulator says, and nothing ran.

Sections can be measured one by one: each suite's list says when, at which commit and on what each
of its sections was. What was tried so far, and what it changed, is in `benchmarks/notes.md`. The
counts of what steps do, which no noise changes, are compared by the tests: `make bench-counts`.

{contents}
"""
NOT_YET = "No results yet: `piper bench {name}` on an idle machine."


def read(path: Path) -> dict[str, Any] | None:
    """A suite's results; None where there are none."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def text(folder: Path = RESULTS) -> str:
    """The whole page."""
    from benchmarks.paired import PAIRS
    from benchmarks.suites import SUITES

    parts = []
    for name, suite in SUITES.items():
        found = read(folder / f"{name}.json")
        body = NOT_YET.format(name=name) if found is None else suite_text(found)
        parts.append(f"## {name}\n\n{suite.about}\n\n{body}\n")
    return PAGE.format(pairs=PAIRS, contents="\n".join(parts).rstrip())


def suite_text(results: Mapping[str, Any]) -> str:
    """A suite's table, below when, where and how its sections were measured."""
    told = [
        f"- {name}: `{one['command']}`, {one['date']}, commit {one['commit']}; {one['machine']}"
        for name, one in results["sections"].items()
    ]
    picture = f"![{results['suite']}](../benchmarks/results/{results['suite']}.png)"
    rows = [row for one in results["sections"].values() for row in one["rows"]]
    table = ["| | ours against theirs | bar | measured | |", "| --- |" + " --- |" * 4]
    table += ["| " + " | ".join(_cells(row)).replace("<", "&lt;") + " |" for row in rows]
    return "\n\n".join(["\n".join(told), picture, "\n".join(table)])


def _cells(row: Mapping[str, Any]) -> list[str]:
    verdict = {None: "", True: "held", False: "**not held**"}[row["held"]]
    if not row["decides"]:
        verdict = f"({row['measured']}: decides nothing)"
    return [
        f"{row['section']}: {row['name']}",
        row["figures"],
        row["bar"],
        row["measured"],
        verdict,
    ]


def strays(folder: Path = RESULTS) -> list[str]:
    """Files of results without a suite or picture, pictures without results, unknown sections."""
    from benchmarks.suites import SUITES

    numbers = {path.stem for path in folder.glob("*.json")}
    pictures = {path.stem for path in folder.glob("*.png")}
    found = [f"{name}.json is of no suite" for name in sorted(numbers - SUITES.keys())]
    found += [f"{name}.json has no picture" for name in sorted(numbers - pictures)]
    found += [f"{name}.png has no results" for name in sorted(pictures - numbers)]
    for name in sorted(numbers & SUITES.keys()):
        results = read(folder / f"{name}.json")
        assert results is not None  # the file is there
        unknown = results["sections"].keys() - SUITES[name].sections.keys()
        found += [f"{name}.json: no section {section}" for section in sorted(unknown)]
    return found
