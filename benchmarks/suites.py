"""All benchmarks in one run: each suite gives a table, a file of results and a picture.

make bench
make bench ARGS="pipeline zero --pairs 5"
piper bench plan --only proof

Without names every suite is run, which takes hours on an idle machine. docs/benchmarks.md is made
from the files: `make docs`.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks import (
    ablations,
    command,
    compiling,
    counts,
    emulated,
    experts,
    host,
    init,
    kept,
    launch,
    many_ranks,
    memory,
    pipeline,
    plan,
    planning,
    predict,
    predicted,
    real,
    saving,
    scaling,
    sent,
    single,
    zero,
    zero_counts,
    zero_deepspeed,
    zero_hidden,
    zero_memory,
    zero_real,
)
from benchmarks.paired import PAIRS
from benchmarks.pictures import draw
from benchmarks.report import Row
from benchmarks.sides import TORCH, built

RESULTS = Path(__file__).parent / "results"
Section = Callable[[int], Iterator[Row]]  # from a number of pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is run together.

    Attributes:
        about: What it is about, for its page.
        sections: By name, from what is quick to what takes long.
    """

    about: str
    sections: Mapping[str, Section]


def _alone(section: Callable[[], Iterator[Row]]) -> Section:
    """Of a section without pairs."""
    return lambda pairs: section()


def _experts(section: Callable[[str, int], Iterator[Row]]) -> Section:
    """Of both set-ups of experts."""
    return lambda pairs: (row for name in experts.SETS for row in section(name, pairs))


LEVELS = (0, 1, 2, 3)
SUITES: Mapping[str, Suite] = {
    "pipeline": Suite(
        about="Pipelines beside `torch.distributed.pipelining`: the same model, data, optimizer "
        "and threads, in the same processes; then on emulated devices, where both wait for the "
        "same times.",
        sections={
            "counts": lambda pairs: counts.run(pipeline.JOB, built(TORCH)),
            "sent": _alone(sent.run),
            "host": _alone(host.run),
            "real": lambda pairs: real.eager(pipeline.JOB, pairs, built(TORCH)),
            "compiled": lambda pairs: real.compiled(pipeline.JOB, pairs),
            "emulated": lambda pairs: emulated.run(pairs, list(TORCH)),
            "emulated-8": lambda pairs: emulated.run(pairs, list(TORCH), emulated.EIGHT),
        },
    ),
    "zero": Suite(
        about="Replicas beside torch's DDP and FSDP2, alone and with torch's pipelining; and "
        "beside DeepSpeed where it is installed.",
        sections={
            "counts": lambda pairs: zero_counts.run(zero.JOB, LEVELS),
            "ddp": lambda pairs: zero_real.ddp(zero.JOB, pairs),
            "fsdp": lambda pairs: zero_real.fsdp(zero.JOB, pairs),
            "deepspeed": lambda pairs: zero_deepspeed.run(zero.JOB, pairs, LEVELS),
            "time": lambda pairs: zero_real.levels(zero.JOB, pairs, LEVELS),
            "hidden": lambda pairs: zero_hidden.hidden(zero.JOB, pairs, LEVELS),
            "largest": lambda pairs: zero_memory.fitting(zero.JOB, (2, 3)),
        },
    ),
    "experts": Suite(
        about="Experts over ranks that slow links join: how much of the exchanges is hidden, and "
        "DualPipeV beside other schedules and torch's.",
        sections={
            "memory": _alone(experts.memory),
            "overhead": experts.overhead,
            "exposed": _experts(lambda name, pairs: experts.exposed(name, pairs, None)),
            "time": _experts(experts.times),
        },
    ),
    "plan": Suite(
        about="How long planning, proving and simulating take, and what a plan weighs.",
        sections={
            "proof": _alone(plan.proof),
            "planning": _alone(planning.run),
            "weight": _alone(planning.weight),
            "ranks": _alone(many_ranks.run),
        },
    ),
    "compile": Suite(
        about="Compiling: equal layers are compiled once, so that time follows distinct layers.",
        sections={
            "inductor": _alone(compiling.run),
            "depth": _alone(compiling.depth),
        },
    ),
    "memory": Suite(
        about="Peak memory beside torch's, beside what plans say, and of building models.",
        sections={
            "pipeline": lambda pairs: memory.run(pipeline.JOB, pairs, built(TORCH)),
            "zero": lambda pairs: zero_memory.levels(zero.JOB, pairs, LEVELS),
            "activations": _alone(kept.activations),
            "deferred": _alone(init.layouts),
        },
    ),
    "single-device": Suite(
        about="One device, without a strategy and with one of a single rank, beside inductor's own "
        "training step of `torch.compile`.",
        sections={"time": single.run_times, "memory": single.run_memory},
    ),
    "launch": Suite(
        about="Starting ranks by each engine, steps under each, saving beside steps.",
        sections={
            "start": _alone(launch.start),
            "step": _alone(launch.step),
            "flat": _alone(launch.flat),
            "saving": _alone(saving.saving),
            "beside": _alone(saving.beside),
        },
    ),
    "predict": Suite(
        about="Predicted step times beside measured ones, and the search's choice.",
        sections={"steps": _alone(predict.steps), "winner": _alone(predict.winner)},
    ),
    "scaling": Suite(
        about="More ranks: real processes on emulated devices beside torch's runtime, and beyond "
        "this machine what the simulator predicts at the published rates of GPUs.",
        sections={"emulated": scaling.run, "predicted": _alone(predicted.run)},
    ),
    "ablations": Suite(
        about="What each part brings: the same job with it and without it.",
        sections=ablations.SECTIONS,
    ),
}


def results_of(name: str, rows: Sequence[Row], *, on: str, how: str, pairs: int) -> dict[str, Any]:
    """What is written about a run of a suite."""
    return {
        "suite": name,
        "date": datetime.now(UTC).date().isoformat(),
        "command": how,
        "machine": on,
        "pairs": pairs,
        "rows": [row.record(name) for row in rows],
        "data": [row.data for row in rows],
    }


def _told(name: str, section: Section, pairs: int) -> Iterator[Row]:
    """The rows of a section, or why this machine cannot run it."""
    try:
        yield from section(pairs)
    except click.ClickException as error:
        yield Row(section=name, what="not run", figures=error.message)


def _names(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> list[str]:
    unknown = [name for name in value if name not in SUITES]
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise click.BadParameter(f"{wrong}; choose from {', '.join(SUITES)}")
    return [name for name in SUITES if name in value or not value]


def _sections(suites: Sequence[str], only: str | None) -> dict[str, dict[str, Section]]:
    """The sections that are run, by suite; suites without any are left out."""
    chosen = None if only is None else [name.strip() for name in only.split(",")]
    known = {name for suite in suites for name in SUITES[suite].sections}
    unknown = [name for name in chosen or () if name not in known]
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise click.UsageError(f"--only {wrong}: choose from {', '.join(sorted(known))}")
    found = {
        suite: {
            name: section
            for name, section in SUITES[suite].sections.items()
            if chosen is None or name in chosen
        }
        for suite in suites
    }
    return {suite: sections for suite, sections in found.items() if sections}


@click.command()
@click.argument("suites", nargs=-1, callback=_names)
@click.option("--only", help="Sections, by comma.  [default: all of the suites]")
@command.pairs()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="benchmarks/results",
    help="Where the files of results and the pictures go.",
)
def main(suites: list[str], only: str | None, pairs: int, out: Path) -> None:
    """Measure suites beside their peers; of each a table, a file of results and a picture.

    SUITES are names; without any, all are run.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    out.mkdir(parents=True, exist_ok=True)
    for name, sections in _sections(suites, only).items():
        asked = [] if only is None else ["--only", ",".join(sections)]
        counted = [] if pairs == PAIRS else ["--pairs", str(pairs)]
        how = " ".join(["piper bench", name, *asked, *counted])
        click.echo(f"== {name}")
        ready = {n: functools.partial(_told, n, section, pairs) for n, section in sections.items()}
        on, rows = command.measure(ready, pairs, None)
        found = results_of(name, rows, on=on, how=how, pairs=pairs)
        path = out / f"{name}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw(found, path.with_suffix(".png"))
        click.echo(f"{path}, {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
