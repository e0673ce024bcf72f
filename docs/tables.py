"""Pages that are written from tests and results: faults, what works with what, benchmarks."""

from pathlib import Path

from benchmarks import page
from tests.faults import combinations, kinds

FOLDER = Path(__file__).parent
WRITTEN = "<!-- Written by `make docs` from {source}: change that, not this file. -->\n"

FAULTS = """\
# Known faults of such systems

{written}
Users of other systems that train over many devices have reported these faults, most often those
at the top. Each report is a test here, as a tiny input with the value that should come out, in
float64; where a report gives the value that the fault would give, a test makes the fault on
purpose and sees that value, so that the test is known to notice; what Piper has no way to do, such
as microbatches of unequal size, is computed in eager mode instead. `tests/faults/` has them, by the
kind of thing that goes wrong; a test's docstring begins with the number of its case.

What ranks send each other is compared first with `PIPER_DEBUG=comm`
([debugging.md](debugging.md)), since gloo is silent about much of it;
`tests/faults/test_headers.py` makes each such fault.

"""

COMBINATIONS = """\
# What works with what

{written}
*Yes* means that a test trains the pair for two clipped steps and compares losses, gradient norms
and the whole state with one process, within {exact:g} in float64; where Piper draws masks or
rounds, with the same model on one rank. Pairs with *Precision* are compared within {rounded:g},
where an update is about 0.01, and a run that does not round is off by 5e-05. *No* means that the
pair is refused when it is compiled, for the reason below; that is tried, too. What is empty
excludes itself. A pair without a schedule runs on two stages of 1F1B.

Rows are what is tried with everything; more works, and has tests of its own: the other schedules
([schedules.md](schedules.md)), meshes and `Place` by microbatch, chunks compiled by Inductor,
autocast. What is not built is refused by name: tensor parallelism, several `Split`s,
`Order(stream=)`.

"""


def faults() -> str:
    """The page of known faults."""
    return FAULTS.format(written=WRITTEN.format(source="tests/faults/")) + kinds.text()


def pairs() -> str:
    """The page of combinations."""
    source = "tests/faults/combinations.py"
    written, found = WRITTEN.format(source=source), combinations
    head = COMBINATIONS.format(written=written, exact=found.EXACT, rounded=found.ROUNDED)
    return head + found.text()


PAGES = {"faults.md": faults, "what-works-with-what.md": pairs, "benchmarks.md": page.text}


def write() -> None:
    """Write all of them."""
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")
