"""Write `docs/schedules.md`, its like, and pictures: `python -m docs.build`, or `make docs`.

The numbers come from plans (`figures.py`), the rules from the schedules' own docstrings.
"""

import inspect
import re
from pathlib import Path
from textwrap import fill

from PIL import Image

from docs import tables
from docs.figures import (
    LAYERS,
    MICROBATCHES,
    RANKS,
    ROWS,
    SHARE_BYTES,
    TIMES,
    WIDTH,
    WORK,
    allowed,
    figures,
    plan_of,
    sharded_plan,
    uniform,
)
from docs.programs import cuda_program
from piper_dynamo.costs import Costs
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.schedules import SCHEDULES, Shape

FOLDER = Path(__file__).parent
SHAPES = {Shape.LINE: "a line", Shape.LOOP: "a loop", Shape.VEE: "a V"}
SHAPES |= {Shape.TWO_WAY: "a line, both ways", None: "any; here a line"}

PURPOSES = {
    "gpipe": "The simplest order, and the one that fits any placement. It keeps every microbatch "
    "alive until the backwards begin, so it is for few microbatches, for checks, and for stages "
    "that no other schedule can take.",
    "one_f_one_b": "The usual choice. It idles as long as gpipe, but a rank holds no more "
    "microbatches than there are ranks from it to the end, so more microbatches cost no memory "
    "and make the idle share small.",
    "interleaved_1f1b": "Each rank has several smaller stages, which divide the time to fill and "
    "drain the pipeline. It pays with memory and with messages, as many times more as a rank has "
    "stages. For fast links, or few microbatches.",
    "zb_h1": "1F1B whose weight gradients, for which nobody waits, fill the gaps of the drain. "
    "Every rank holds as many microbatches as the first rank of 1F1B. For models whose weight "
    "gradients cost about as much as their input gradients.",
    "zbv": "A V of two stages a rank: the first rank also ends the model, so its first backward "
    "starts without a way back through the pipeline. All that is left of the idle time is the "
    "fill, and every rank holds the same.",
    "dualpipev": "A V whose forwards and backwards come in pairs, made for experts over ranks: one "
    "of a pair computes while the other communicates. These figures are of a model without "
    "experts, where a pair's tasks run one after the other, and the backward first where both can "
    "start: without what pairing hides.",
    "dualpipe": "Half of the microbatches goes through the ranks from the first to the last, half "
    "from the last to the first; forwards and backwards come in pairs, as in dualpipev. It idles a "
    "little less than a V and needs half its stages, but every stage is on two ranks: parameters, "
    "gradients and optimizer state take twice the memory, and gradients are summed over the two "
    "once per step. For models that cannot be cut into as many stages as a V wants. A buffer that "
    "every microbatch changes, such as a running mean, would tie the two directions together: it "
    "is refused.",
}
HEAD = """\
# Schedules

<!-- Written by `make docs` from plans and docstrings: change docs/build.py, not this file. -->
"""
INTRODUCTION = (
    f"What each order of `piper.schedules` is for, and what it costs at {RANKS} ranks and "
    f"{MICROBATCHES} microbatches. A rank's whole share of one microbatch takes {TIMES} units of "
    "time for forward, input gradient and weight gradient (F, I, W), a stage its part of that, a "
    "message none. Below, p is the number of ranks, which can be any (in dualpipe, any even "
    "number), r one of them, m the number of microbatches, v the number of stages on a rank.",
    "",
    f"- *Idle*: the length of the simulated step less a rank's own {WORK:g}, and the closed form.",
    "- *Live forwards*: the most microbatches whose forward a rank has run and whose backward it "
    f"has not finished, for ranks 0 to {RANKS - 1}, in units of a rank's whole share of the "
    "activations.",
    "- *Peak*: the most bytes that a rank's step holds at once beside parameters, and beside what "
    "a task needs only while it runs, as the plan predicts "
    "(`plan.simulate().peak_bytes(rank)`); in the table, on the rank that holds most. The "
    f"model is {LAYERS} linear layers of width {WIDTH} with tanh, at {ROWS} rows per microbatch: "
    f"{show_bytes(SHARE_BYTES)} per live forward. Its input needs no gradient; for the times, "
    "and in the pictures, it does, so that the first stage has as much to do as the others.",
)
OWN = (
    "An `Order` says what one rank runs, group after group. A group is a filter, or a list of "
    "filters whose tasks may interleave, as those of a pair in dualpipev do: then the scheduler "
    'decides. `PASS` is `"F"`, `"B"`, or a backward\'s halves `"BI"` (input gradient) and `"BW"` '
    "(weight gradient); naming these splits it. What no Order names runs when it can. "
    "`piper.strategies.from_orders` adds the `Split` and the `Place`s."
)
OWN_CODE = """\
```python
import torch
from torch import nn

import piper_dynamo as piper


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            with piper.annotate("PP", k):
                x = torch.tanh(layer(x))
        with piper.annotate("PP", 1):
            return x.square().mean()


def late_weights(ranks, num_microbatches):
    \"""All forwards, then all input gradients, then all weight gradients.\"""
    return [
        piper.Order(
            [
                {"PP": rank, "MB": mb, "PASS": half}
                for half in ("F", "BI", "BW")
                for mb in range(num_microbatches)
            ]
        )
        for rank in range(ranks)
    ]


strategy = piper.strategies.from_orders(late_weights(2, 4))
plan = piper.plan(Model(), strategy, (torch.randn(8, 16),), world_size=2)
print(plan.simulate().makespan)  # 13 where F, BI and BW take 1 each; gpipe takes 14
plan.plot("late_weights.png")
```
"""


def facts(name: str) -> dict[str, str]:
    """The docstring's lines by their heads: Idle, Memory, Least number of microbatches, Source."""
    text = inspect.getdoc(SCHEDULES[name][0]) or ""
    paragraph = " ".join(text.partition("\n\nArgs:")[0].split())
    heads = "Idle|Memory|Least number of microbatches|Source"
    _, *found = re.split(rf"(?:^|(?<=\. ))({heads}): ", paragraph)
    return dict(zip(found[::2], map(str.strip, found[1::2]), strict=True))


def text() -> str:
    """The whole page."""
    parts = [
        HEAD,
        *map(_wrapped, INTRODUCTION),
        "",
        _table(),
        *(_section(name) for name in SCHEDULES),
        "## A schedule of your own\n",
        _wrapped(OWN),
        "",
        OWN_CODE,
    ]
    return "\n".join(parts)


def _table() -> str:
    rows = ["| schedule | placement | idle | closed form | idle share | live forwards | peak |"]
    rows.append("|" + " --- |" * 7)
    for name, (_, shape) in SCHEDULES.items():
        found = figures(name)
        cells = [f"[{name}](#{name})", SHAPES[shape], f"{found.idle:g}", f"{found.closed_form:g}"]
        cells += [f"{found.idle / found.makespan:.0%}", _listed(found.live)]
        cells += [f"{max(found.peak_bytes) / 1024:.0f} KiB"]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _section(name: str) -> str:
    found, fact = figures(name), facts(name)
    peaks = ", ".join(f"{b / 1024:.0f}" for b in found.peak_bytes)
    items = {
        "Source": fact["Source"],
        "Rule": f"least number of microbatches: {fact['Least number of microbatches']} "
        f"{RANKS} ranks take, up to {4 * RANKS}: {allowed(name)}.",
        "Idle": f"{fact['Idle']} Here: simulated {found.idle:g} of a step of {found.makespan:g}; "
        f"closed form {found.closed_form:g}.",
        "Memory": f"{fact['Memory']} Here: live forwards {_listed(found.live)}; peaks {peaks} KiB.",
    }
    bullets = (_wrapped(f"- *{k}*: {v}") for k, v in items.items())
    picture = f"![{name}: who computes what when](schedules/{name}.png)"
    return "\n".join([f"## {name}\n", _wrapped(PURPOSES[name]), "", picture, "", *bullets, ""])


def _wrapped(paragraph: str) -> str:
    return fill(paragraph, 110, subsequent_indent="  " if paragraph.startswith("- ") else "")


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def main() -> None:
    """Write the pages and their pictures."""
    tables.write()
    (FOLDER / "cuda-program.txt").write_text(cuda_program(), encoding="utf-8")
    (FOLDER / "schedules.md").write_text(text(), encoding="utf-8")
    (FOLDER / "schedules").mkdir(exist_ok=True)
    for name in SCHEDULES:
        picture = FOLDER / "schedules" / f"{name}.png"
        plan_of(name, input_gradient=True).plot(picture, uniform(name))
        _with_palette(picture)
    (FOLDER / "pictures").mkdir(exist_ok=True)
    picture = FOLDER / "pictures" / "timeline.png"
    sharded_plan().plot(picture, Costs(comm=0.2))
    _with_palette(picture)


def _with_palette(picture: Path) -> None:
    """A palette takes a third of the bytes."""
    with Image.open(picture) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    main()
