"""Random trainings: `make fuzz-train`, or `python -m tests.fuzz_train --help`.

A small random model under a random legal strategy is trained for two updates with clipping, on
ranks that are threads of this process, and must end where one process ends; or it is refused by a
rule that docs/errors.md has. The first failure is made as small as it can be and written as a
script that runs alone.
"""

import gc
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner
from tqdm import tqdm

import piper_dynamo as piper
from tests import trial
from tests.drawing import drawn_trainings
from tests.drawn import Job
from tests.raised import UNKNOWN, title_of
from tests.source_tree import ROOT

PIECE = 100  # trainings of one seed
SLOW_S = 60.0  # of CPU: whoever stops the process for a while makes no training slow
MOST_REFUSED = 0.15  # of all; above, what is drawn means little
RULES = ("Strategies and options", "Capturing the model", "Planning", "Experts")
FAULTS = (  # in these sections, but nobody's rule: they say that Piper is wrong
    "the plan is unsafe",
    "the plan deadlocks: … wait for one another",
    "replicas of the plan are not alike",
    "the captured graph has an input of an unknown kind: …",
    "the captured graph has an output of an unknown kind: …",
    "output … of the model is not in the captured graph",
    "the captured graph's regions wait for one another",
)


@dataclass(slots=True)
class Tally:
    """What has been tried, and what a failing script is made of."""

    started: int = 0
    trained: int = 0
    failed: int = 0
    slow: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    last: str = ""

    @property
    def tried(self) -> int:
        return self.trained + self.refused.total()

    def __str__(self) -> str:
        refused = self.refused.total()
        share = refused / max(self.tried, 1)
        slow = f"; {self.slow} slow" if self.slow else ""
        return f"{self.trained} trainings as in one process; {refused} refused ({share:.1%}){slow}"

    def table(self) -> str:
        """How often each rule refused one, and of how many trainings each thing was a part."""
        lines = [f"  {count:>5}  refused: {title}" for title, count in self.refused.most_common()]
        shown = [f"{name} {count}" for name, count in sorted(self.features.items())]
        return "\n".join([*lines, *_wrapped(shown)])


def _wrapped(words: list[str], width: int = 110) -> Iterator[str]:
    line = ""
    for word in words:
        if len(line) + len(word) > width:
            yield line
            line = ""
        line += f"  {word}"
    yield line


def features(job: Job) -> Iterator[str]:
    """What a job has, for a table of what was tried."""
    yield from sorted({layer.kind for layer in job.layers})
    yield job.schedule or "own order"
    yield f"{job.world} ranks"
    yield from sorted({f"zero {z}" for z in job.zero} if job.replicas > 1 else ())
    yield f"loss {job.combine}"
    yield job.style
    has = {
        "skip": any(layer.skip is not None for layer in job.layers),
        "regions in stages": any(layer.tag is not None for layer in job.layers),
        "mesh": job.mesh,
        "sharded experts": bool(job.experts),
        "capacity": job.capacity,
        "precision": bool(job.precision),
        "recompute": bool(job.recompute),
        "placed by microbatch": bool(job.moved),
        "split backward": bool(job.split),
        "outputs": bool(job.outputs),
        "inductor": job.compile == "inductor",
        "no_sync": job.calls > 1,
        "deferred": job.deferred,
        "evaluated": job.evaluates,
        "other sizes": job.later != job.rows,
    }
    yield from (name for name, is_there in has.items() if is_there)


def rules() -> list[str]:
    """The titles of refusals that are rules, from docs/errors.md."""
    found = []
    for section in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("\n## "):
        heading, _, body = section.partition("\n")
        if heading in RULES:
            found += re.findall(r"^\| `([^`]+)` \|", body, flags=re.MULTILINE)
    return [title for title in found if title not in FAULTS]


def rule_of(error: piper.PiperError, known: list[str]) -> str | None:
    """Which documented rule refused a job; None: that was no rule."""
    title = title_of(str(error))
    for rule in known:
        parts = (re.escape(part) for part in rule.split(UNKNOWN))
        if re.fullmatch(".*".join(parts), title):
            return rule
    return None


def check_training(job: Job, tally: Tally, known: list[str]) -> None:
    """The job's ranks end where one process does, or a rule refuses it."""
    tally.last = job.training_script()
    try:
        trial.check(job.trial())
    except piper.PiperError as error:
        rule = rule_of(error, known)
        if rule is None:
            raise
        tally.refused[rule] += 1
        return
    tally.trained += 1
    tally.features.update(features(job))


@contextmanager
def watched(tell: Callable[[], object]) -> Iterator[None]:
    """Call `tell` once if what is inside takes over SLOW_S of CPU, while it still runs."""
    began, is_done = time.process_time(), threading.Event()

    def look() -> None:
        while not is_done.wait(min(SLOW_S, 1.0)):
            if time.process_time() - began > SLOW_S:
                tell()
                return

    watcher = threading.Thread(target=look, name="slow trainings", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()


def fuzz(
    trainings: int,
    start: int,
    tally: Tally,
    *,
    jobs: st.SearchStrategy[Job] | None = None,
    is_over: Callable[[], bool] = lambda: False,
    progress: Callable[[], object] = lambda: None,
    failed: Callable[[Exception], bool] = lambda error: True,
    slow: Callable[[str], object] = lambda text: None,
) -> None:
    """Try so many trainings, by the hundred with one seed.

    `failed` is told of each failure, and says whether to look for a smaller one and stop; `slow` of
    each training that takes long, by its number and its job.

    Raises:
        Exception: That of the smallest failing training found; `tally.last` is its script.
    """
    known = rules()
    for number, done in enumerate(range(0, trainings, PIECE)):

        @seed(start + number)
        @settings(
            max_examples=min(PIECE, trainings - done),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        )
        @given(jobs if jobs is not None else drawn_trainings())
        def one(job: Job) -> None:
            if is_over():
                return
            tally.started += 1
            which = f"training {tally.started}, of seed {start + number}"  # noqa: B023, run at once

            def tell() -> None:
                tally.slow += 1
                slow(f"{which}, takes over {SLOW_S:g} s of CPU: {job!r}")

            try:
                with watched(tell):
                    check_training(job, tally, known)
            except Exception as error:
                if failed(error):
                    raise
            progress()

        # Hypothesis follows each example by five that are nearly it: seconds that try little else.
        with mock.patch.object(ConjectureRunner, "generate_mutations_from"):
            one()
        if is_over():
            break


@click.command()
@click.option("--trainings", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", "start", type=int, default=0, help=f"Of the first {PIECE}; then the next.")
@click.option("--minutes", type=float, default=None, help="Stop after so long.")
@click.option("--out", type=Path, default=Path("fuzz-failure.py"), help="Where a script goes.")
@click.option("--all", "everything", is_flag=True, help="Go on after a failure; make none small.")
def main(trainings: int, start: int, minutes: float | None, out: Path, everything: bool) -> None:
    """Try random trainings; exit 1 at the first failure, made small, or at too many refusals."""
    torch.set_num_threads(1)
    os.environ.setdefault("PIPER_VERIFY", "1")
    tally, began = Tally(), time.perf_counter()
    failure: Exception | None = None
    with tqdm(total=trainings, unit="training", mininterval=1.0) as bar:

        def is_over() -> bool:
            spent = time.perf_counter() - began
            is_searching = failure is not None and not everything
            return not is_searching and minutes is not None and spent > 60 * minutes

        def failed(error: Exception) -> bool:
            """Written at once: whoever stops the search for a smaller one has this one."""
            nonlocal failure
            failure = error
            if not everything:
                out.write_text(tally.last, encoding="utf-8")
                bar.set_description(f"{type(error).__name__}; making it small")
                return True
            tally.failed += 1
            path = out.with_stem(f"{out.stem}-{tally.failed}")
            path.write_text(tally.last, encoding="utf-8")
            bar.write(f"{path}: {type(error).__name__}: {error}\n")
            return False

        def progress() -> None:
            bar.update()
            if tally.tried == 1:
                # Piper collects garbage after each capture: what has been imported by now is none.
                gc.collect()
                gc.freeze()

        try:
            fuzz(
                trainings,
                start,
                tally,
                is_over=is_over,
                progress=progress,
                failed=failed,
                slow=bar.write,
            )
        except Exception as error:  # whatever it is, it is what was looked for
            failure = error
            out.write_text(tally.last, encoding="utf-8")
    click.echo(f"seed {start}: {tally}; {time.perf_counter() - began:.0f} s")
    click.echo(tally.table())
    if failure is not None and everything:
        click.echo(f"{tally.failed} failed: {out.with_stem(out.stem + '-*')}", err=True)
        sys.exit(1)
    if failure is not None:
        click.echo(f"\n{type(failure).__name__}: {failure}\n\nscript: {out}", err=True)
        sys.exit(1)
    if tally.refused.total() > MOST_REFUSED * tally.tried:
        click.echo("too many are refused for the others to mean much", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
