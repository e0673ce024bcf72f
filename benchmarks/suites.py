"""All benchmarks in one run: each suite gives a table, a file of results and a picture.

make bench
make bench ARGS="pipeline zero --pairs 5"
piper bench plan --only proof

Without names every suite is run, which takes hours on an idle machine. A section that is run takes
the place of the same section in the suite's file, and the others stay, so that they can be measured
one by one. docs/benchmarks.md is made from the files: `make docs`.
"""

import json
import logging
import subprocess
import traceback
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
    page,
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
    steady,
    zero,
    zero_counts,
    zero_deepspeed,
    zero_hidden,
    zero_memory,
    zero_real,
)
from benchmarks.pictures import draw
from benchmarks.report import NOT_RUN, Row
from benchmarks.sides import TORCH, built

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


def _without_pairs(section: Callable[[], Iterator[Row]]) -> Section:
    """A section that measures no pairs, or its own number of them."""
    return lambda pairs: section()


def _of_sets(section: Callable[[str, int], Iterator[Row]]) -> Section:
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
            "sent": _without_pairs(sent.run),
            "host": _without_pairs(host.run),
            "real": lambda pairs: real.eager(pipeline.JOB, pairs, list(TORCH)),
            "compiled": lambda pairs: real.compiled(pipeline.JOB, pairs, list(TORCH)),
            "bound": lambda pairs: real.bound(pipeline.JOB, pairs, built(TORCH)),
            "emulated": lambda pairs: emulated.run(pairs, list(TORCH)),
            "emulated-8": lambda pairs: emulated.run(pairs, list(TORCH), emulated.EIGHT),
        },
    ),
    "zero": Suite(
        about="Replicas beside torch's DDP and FSDP2, alone and with torch's pipelining; and "
        "beside DeepSpeed, an optional peer: where it is not installed, its row says so.",
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
            "memory": _without_pairs(experts.memory),
            "overhead": experts.overhead,
            "exposed": _of_sets(lambda name, pairs: experts.exposed(name, pairs, None)),
            "time": _of_sets(experts.times),
        },
    ),
    "plan": Suite(
        about="How long planning, proving and simulating take, and what a plan weighs.",
        sections={
            "proof": _without_pairs(plan.proof),
            "planning": _without_pairs(planning.run),
            "weight": _without_pairs(planning.weight),
            "ranks": _without_pairs(many_ranks.run),
        },
    ),
    "compile": Suite(
        about="Compiling: equal layers are compiled once, so that time follows distinct layers.",
        sections={
            "inductor": command.Fewer(compiling.PAIRS, compiling.run),
            "depth": command.Fewer(compiling.PAIRS, compiling.depth),
        },
    ),
    "memory": Suite(
        about="Peak memory beside torch's, beside what plans say, and of building models.",
        sections={
            "pipeline": command.Fewer(
                memory.PAIRS, lambda pairs: memory.run(pipeline.JOB, pairs, built(TORCH))
            ),
            "steady": _without_pairs(lambda: steady.run(built(TORCH))),
            "zero": command.Fewer(
                zero_memory.PAIRS, lambda pairs: zero_memory.levels(zero.JOB, pairs, LEVELS)
            ),
            "activations": _without_pairs(kept.activations),
            "deferred": _without_pairs(init.layouts),
        },
    ),
    "single-device": Suite(
        about="One device, without a strategy and with one of a single rank, beside inductor's own "
        "training step of `torch.compile`.",
        sections={
            "time": single.run_times,
            "memory": command.Fewer(memory.PAIRS, single.run_memory),
        },
    ),
    "launch": Suite(
        about="Starting ranks by each engine, steps under each, saving beside steps.",
        sections={
            "start": _without_pairs(launch.start),
            "step": command.Fewer(launch.PAIRS, launch.step),
            "flat": _without_pairs(launch.flat),
            "saving": _without_pairs(saving.saving),
            "beside": command.Fewer(saving.PAIRS, saving.beside),
        },
    ),
    "predict": Suite(
        about="Predicted step times beside measured ones, and the search's choice.",
        sections={"steps": _without_pairs(predict.steps), "winner": _without_pairs(predict.winner)},
    ),
    "scaling": Suite(
        about="More ranks: real processes on emulated devices beside torch's runtime, and beyond "
        "this machine what the simulator predicts at the published rates of GPUs.",
        sections={"emulated": scaling.run, "predicted": _without_pairs(predicted.run)},
    ),
    "ablations": Suite(
        about="What each part brings: the same job with it and without it.",
        sections=ablations.SECTIONS,
    ),
}


ROOT = Path(__file__).resolve().parents[1]
FAILED = "failed"


def commit() -> str:
    """What is measured: the checkout's commit, and whether files but the results are others."""

    def git(*words: str) -> str:
        asked = ["git", *words]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    but_results = (".", ":!benchmarks/results", ":!docs/benchmarks.md")
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *but_results)
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        return "unknown"


def section_results(
    suite: str, section: str, rows: Sequence[Row], *, on: str, at: str, how: str, pairs: int
) -> dict[str, Any]:
    """What is written about a section that was run."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": how,
        "commit": at,
        "machine": on,
        "pairs": pairs,
        "rows": [row.record(suite, section) for row in rows],
        "data": [row.data for row in rows],
    }


def with_section(
    results: Mapping[str, Any], section: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """A suite's results with those of a section that was run instead of what was there of it.

    One that this machine cannot run leaves what was measured; sections that the suite no longer has
    are left out.
    """
    known: dict[str, Any] = dict(results["sections"])
    has_run = any(row["name"] != NOT_RUN for row in found["rows"])
    if has_run or section not in known:
        known[section] = found
    order = [name for name in SUITES[results["suite"]].sections if name in known]
    return {"suite": results["suite"], "sections": {name: known[name] for name in order}}


def attempted(name: str, section: Section, pairs: int) -> Iterator[Row]:
    """The rows of a section; where it cannot be run here, or fails, a last one that says why."""
    try:
        yield from section(pairs)
    except click.ClickException as error:
        yield Row(section=name, what=NOT_RUN, figures=error.message)
    except Exception as error:
        click.echo(traceback.format_exc(), err=True)
        *_, last = "".join(traceback.format_exception_only(error)).strip().splitlines()
        yield Row(section=name, what=FAILED, figures=last.strip(), held=False)


def _names(_: click.Context, __: click.Parameter, value: tuple[str, ...]) -> list[str]:
    return command.in_order(value, list(SUITES)) if value else list(SUITES)


def _sections(suites: Sequence[str], only: str | None) -> dict[str, dict[str, Section]]:
    """The sections that are run, by suite; suites without any are left out."""
    chosen = None if only is None else command.by_comma(only)
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
    default=page.RESULTS,
    show_default="benchmarks/results",
    help="Where the files of results and the pictures go.",
)
@click.pass_context
def main(
    ctx: click.Context, suites: list[str], only: str | None, pairs: int | None, out: Path
) -> None:
    """Measure suites beside their peers; of each a table, a file of results and a picture.

    SUITES are names; without any, all are run. Sections that are not run keep their results. A
    section that fails is told in them, and makes the exit code 1.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    out.mkdir(parents=True, exist_ok=True)
    failed, at = [], commit()
    for name, sections in _sections(suites, only).items():
        click.echo(f"== {name}")
        path = out / f"{name}.json"
        results = page.read(path) or {"suite": name, "sections": {}}
        on, all_rows = command.begin(), []
        for section, run in sections.items():
            many = command.pairs_of(run, pairs)
            rows = list(command.shown(section, attempted(section, run, many)))
            how = f"piper bench {name} --only {section}"
            how += "" if pairs is None else f" --pairs {pairs}"
            found = section_results(name, section, rows, on=on, at=at, how=how, pairs=many)
            results = with_section(results, section, found)
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            draw(results, path.with_suffix(".png"))
            all_rows += rows
            failed += [f"{name} {section}: {row.figures}" for row in rows if row.what == FAILED]
        command.end(all_rows, on)
        click.echo(f"{path}, {path.with_suffix('.png')}")
    for told in failed:
        click.echo(f"failed: {told}")
    ctx.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
