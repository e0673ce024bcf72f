"""Failures of every kind, many times: `make soak`, or `python -m tests.soak --help`.

A training on four ranks (two stages, two replicas) that saves every other step meets a failure at a
random place, and is then resumed on ranks that are threads of this process. Every try is judged:

- hang: a rank was still there `LATE_S` after the deadline;
- lost: a checkpoint that was whole before is not there any more;
- wrong: the resumed run has other losses or norms than a run in one process without failures;
- unnamed: the message does not name the rank at fault.

Then a long run must not grow, and ranks that torchrun or Ray started must be as fast as local ones.
"""

import functools
import importlib.util
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.multiprocessing as mp
from tqdm import tqdm

import piper_dynamo as piper
from benchmarks import netbed
from benchmarks.command import only as sections_of
from benchmarks.links import Links, missing
from piper_dynamo.runtime import failure, launch_local
from tests import jobs
from tests.resuming import MIXED, unbroken
from tests.soak_jobs import PRELOADED, RANKS, START_METHOD, Job, train, used

STEPS = 10
LATE_S = 5.0  # after the deadline nothing may be left
TIMEOUT_S = 6.0
TOLERANCE = 1e-9  # of losses and norms in float64, relative
DISK = "512k"
SLOW_KBIT = 64.0
START_S = 120.0  # what starting and compiling may take on a busy machine
GROWTH_KB = 2048  # of a rank's memory over the last three quarters of a long run
SLOWER = 1.02  # what a step may cost more under another engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """What came of one failure.

    Attributes:
        is_over: Whether all of the job had ended in time.
        seconds: From the last sign of progress to its end.
        text: What was told.
        names: What the text must have to name the rank at fault; "" where there is none.
        committed: The steps of the last checkpoint that was whole.
    """

    is_over: bool
    seconds: float
    text: str
    names: str
    committed: int


@dataclass(slots=True, kw_only=True)
class Tally:
    """The tries of one kind."""

    kind: str
    tries: int = 0
    hangs: int = 0
    lost: int = 0
    wrong: int = 0
    unnamed: int = 0
    slowest_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.hangs or self.lost or self.wrong or self.unnamed)

    def judge(self, found: Try, resumed: tuple[int, list[Any]] | None, want: list[Any]) -> None:
        """Count what is wrong with a try.

        Args:
            found: The try.
            resumed: The step that the next run went on from, and its losses and norms from there;
                None where it could not.
            want: Those of a run without failures, from the first step on.
        """
        self.tries += 1
        self.slowest_s = max(self.slowest_s, found.seconds)
        faults = []
        if not found.is_over:
            self.hangs += 1
            faults.append("a rank hangs")
        if resumed is None or resumed[0] < found.committed:
            self.lost += 1
            faults.append(f"the checkpoint of step {found.committed} is lost")
        elif not _are_close(resumed[1], want[resumed[0] :]):
            self.wrong += 1
            faults.append(f"resumed from step {resumed[0]} with other losses")
        if found.names and not re.search(found.names, found.text):
            self.unnamed += 1
            faults.append(f"not named: {found.names}")
        if faults:
            self.notes.append(f"{self.kind}, try {self.tries}: {'; '.join(faults)}\n{found.text}")


def _are_close(got: list[Any], want: list[Any]) -> bool:
    """(loss, norm) pairs of as many steps, up to rounding."""
    return len(got) == len(want) and all(
        abs(a - b) <= TOLERANCE * max(abs(b), 1.0)
        for pair, other in zip(got, want, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


def table(tallies: list[Tally]) -> str:
    """One line per kind."""
    head = ("failure", "tries", "hangs", "lost", "wrong", "unnamed", "slowest", "")
    rows = [head] + [
        (
            *(t.kind, str(t.tries), str(t.hangs), str(t.lost), str(t.wrong), str(t.unnamed)),
            *(f"{t.slowest_s:.1f} s", "ok" if t.is_good else "FAILED"),
        )
        for t in tallies
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


# One try of each kind.


def injected(fault: str, names: str, job: Job) -> Try:
    """A local launch with a failure on purpose."""
    return _launched(replace(job, fault=fault), names)


def _launched(job: Job, names: str) -> Try:
    text = "the job ended well"
    try:
        piper.launch(functools.partial(train, job), RANKS, timeout_s=job.timeout_s)
    except piper.PiperRuntimeError as error:
        text = str(error)
    seconds = time.time() - _last_sign(job)
    return Try(
        is_over=seconds < job.timeout_s + LATE_S,
        seconds=seconds,
        text=text,
        names=names,
        committed=_committed(job),
    )


def _place(draw: random.Random) -> tuple[int, str]:
    """A rank, and in the text of a fault where it happens."""
    rank = draw.randrange(RANKS)
    task = draw.choice(("", ",task=F", ",task=B"))
    return rank, f"rank={rank},step={draw.randrange(2, STEPS)}{task}"


def kill(draw: random.Random, job: Job) -> Try:
    rank, where = _place(draw)
    return injected(f"kill:{where}", rf"^rank {rank} failed[\s\S]*SIGKILL", job)


def raises(draw: random.Random, job: Job) -> Try:
    rank, where = _place(draw)
    return injected(f"raise:{where}", rf"^rank {rank} failed[\s\S]*PIPER_FAULT: raise", job)


def hang(draw: random.Random, job: Job) -> Try:
    rank, where = _place(draw)
    return injected(f"sleep:{where}", rf"^rank {rank} did not go on", job)


def nan(draw: random.Random, job: Job) -> Try:
    rank, where = _place(draw)
    return injected(f"nan:{where}", rf"not finite[\s\S]*first.* on rank {rank}\n", job)


def full_disk(draw: random.Random, job: Job) -> Try:
    """The folder of checkpoints is a small disk that something else fills after the first save."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "piper-soak", str(job.saved)]
    subprocess.run(mount, check=True)
    full = replace(job, fills=draw.randrange(2, STEPS - 1))
    found = _launched(full, r"save_checkpoint[\s\S]*No space left on device")
    (job.saved / "ballast").unlink(missing_ok=True)
    return found


def interrupt(draw: random.Random, job: Job) -> Try:
    """Ctrl-C, as a terminal sends it to all processes, or SIGTERM to the first alone."""
    command = [sys.executable, "-m", "tests.soak_jobs", "train", json.dumps(asdict(job))]
    long = json.dumps(asdict(replace(job, steps=10**6)))
    process = subprocess.Popen(
        [*command[:-1], long],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    _wait_for(job, draw.randrange(1, STEPS))
    begin = time.time()
    if draw.random() < 0.5:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    try:
        text, _ = process.communicate(timeout=LATE_S)
        time.sleep(1.5)  # ranks look for their parent every second
        left = _of_session(process.pid)
        is_over = not left and process.returncode != 0
        text = f"{text}\nexit code {process.returncode}, left: {left}"
    except subprocess.TimeoutExpired:
        is_over, text = False, f"still there after {LATE_S:g} s: {_of_session(process.pid)}"
    seconds = time.time() - begin
    for pid in _of_session(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return Try(is_over=is_over, seconds=seconds, text=text, names="", committed=_committed(job))


def partition(draw: random.Random, job: Job, links: Links) -> Try:
    """A host that nothing reaches any more."""
    rank = draw.randrange(RANKS)
    endless = replace(job, steps=10**6)
    hosts = netbed.Hosts.start(
        links, functools.partial(train, endless), timeout_s=job.timeout_s, method=START_METHOD
    )
    _wait_for(job, draw.randrange(1, STEPS))
    links.cut(rank)
    begin = time.time()
    outcomes = hosts.join(job.timeout_s + LATE_S)
    seconds = time.time() - begin
    links.mend(rank)
    failures = [o.failure for o in outcomes if o.failure is not None]
    return Try(
        is_over=not any(o.is_hung for o in outcomes),
        seconds=seconds,
        text=failure.message(failures) if failures else "no rank failed",
        names=rf"^rank {rank} did not go on",
        committed=_committed(job),
    )


def slow_link(draw: random.Random, job: Job, links: Links) -> Try:
    """A host whose link is slow for a while; nothing may fail for it."""
    rank = draw.randrange(RANKS)
    hosts = netbed.Hosts.start(
        links, functools.partial(train, job), timeout_s=job.timeout_s, method=START_METHOD
    )
    _wait_for(job, draw.randrange(1, STEPS - 1))
    links.slow(rank, SLOW_KBIT)
    begin = time.time()
    time.sleep(job.timeout_s / 2)
    was_slow = _step(job) < STEPS - 1
    links.mend(rank)
    outcomes = hosts.join(START_S)
    failures = [o.failure for o in outcomes if o.failure is not None]
    well = "the job ended well" if was_slow else "the job ended before its link was slow"
    return Try(
        is_over=not any(o.is_hung for o in outcomes),
        seconds=time.time() - begin,
        text=failure.message(failures) if failures else well,
        names="the job ended well",
        committed=_committed(job),
    )


LOCAL: dict[str, Callable[[random.Random, Job], Try]] = {
    "kill": kill,
    "raise": raises,
    "hang": hang,
    "nan": nan,
    "full disk": full_disk,
    "interrupt": interrupt,
}
NETWORK: dict[str, Callable[[random.Random, Job, Links], Try]] = {
    "partition": partition,
    "slow link": slow_link,
}


# What jobs leave behind.


def _last_sign(job: Job) -> float:
    """When a rank last began a step."""
    return max((p.stat().st_mtime for p in Path(job.folder).glob("at-*")), default=time.time())


def _committed(job: Job) -> int:
    path = Path(job.folder) / "committed"
    return int(path.read_text().split()[-1]) if path.exists() else 0


def _step(job: Job) -> int:
    """The step that rank 0 began last; -1: none yet."""
    path = Path(job.folder) / "at-0"
    return int(path.read_text() or -1) if path.exists() else -1


def _wait_for(job: Job, step: int) -> None:
    """Until a rank has begun this step."""
    deadline = time.monotonic() + START_S
    while _step(job) < step:
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} was not reached in {START_S:g} s")
        time.sleep(0.01)


def _of_session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(rest[3]) == leader and rest[0] != "Z":
            found.append(int(path.parent.name))
    return found


def resume(job: Job) -> tuple[int, list[Any]] | None:
    """Train to the end from what is saved; None where it cannot be loaded."""
    alone = replace(job, every=0)
    try:
        ranks = jobs.run_ranks(functools.partial(train, alone), RANKS)
    except piper.PiperError as error:
        click.echo(f"not resumed: {error}", err=True)
        return None
    first, trace = ranks[0]
    return (first, trace) if all(found == ranks[0] for found in ranks) else (first, [])


@contextmanager
def folder_of(zero: int) -> Iterator[Job]:
    """A job in a folder of its own, which is removed again."""
    with tempfile.TemporaryDirectory(prefix="piper-soak-") as folder:
        job = Job(folder=folder, steps=STEPS, zero=zero, timeout_s=TIMEOUT_S)
        job.saved.mkdir()
        try:
            yield job
        finally:
            if os.path.ismount(job.saved):
                subprocess.run(["umount", str(job.saved)], check=True)


# Long runs, and engines beside each other.


def growth(steps: int) -> tuple[str, bool]:
    """What every rank has in use in a long run, and whether that stays as it is."""
    ranks = piper.launch(functools.partial(used, steps), RANKS, timeout_s=60.0)
    lines = [f"{'rank':<6}{'step':>8}{'memory':>12}{'files':>7}{'threads':>9}{'objects':>9}"]
    is_good = True
    for rank, looks in enumerate(ranks):
        for one in looks:
            kb = f"{one['rss_kb']:,} kB"
            lines.append(
                f"{rank:<6}{one['step']:>8}{kb:>12}{one['files']:>7}{one['threads']:>9}"
                f"{one['objects']:>9}"
            )
        first, last = looks[0], looks[-1]
        same = all(first[name] == last[name] for name in ("files", "threads"))
        is_good &= same and last["rss_kb"] - first["rss_kb"] <= GROWTH_KB
    return "\n".join(lines), is_good


def _timed(engine: str, steps: int) -> tuple[float, float]:
    """Seconds to the end of the first step, and of a step."""
    command = [sys.executable]
    if engine == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(RANKS)]
    command += ["-m", "tests.soak_jobs", "time", str(steps), engine]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ready, seconds = json.loads(done.stdout.splitlines()[-1])
    return ready - begin, seconds


def overhead(rounds: int, steps: int = 300) -> tuple[str, bool]:
    """Start-up and step time of local ranks and of other engines' ranks, in turn."""
    others = ["torchrun"] + ["ray"] * (importlib.util.find_spec("ray") is not None)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("local", *others)}
    for _ in tqdm(range(rounds), desc="engines", disable=None):
        for name, rows in found.items():
            rows.append(_timed(name, steps))
    lines = [f"{'engine':<10}{'start':>9}{'step':>12}{'of local':>11}"]
    is_good = True
    for name, rows in found.items():
        start, step = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [mine / local for (_, mine), (_, local) in zip(rows, found["local"], strict=True)]
        middle = statistics.median(ratios)
        is_good &= middle <= SLOWER
        spread = f"({min(ratios):.3f} to {max(ratios):.3f} in {rounds} pairs)"
        lines.append(f"{name:<10}{start:>7.1f} s{step * 1e3:>9.3f} ms{middle:>11.3f}  {spread}")
    return "\n".join(lines), is_good


def soak(kinds: list[str], tries: int, seed: int) -> list[Tally]:
    """Try each kind so often."""
    want = unbroken(MIXED, STEPS)
    tallies = []
    with ExitStack() as stack:
        network = [kind for kind in kinds if kind in NETWORK]
        links = stack.enter_context(Links(RANKS, mbit=1000)) if network else None
        bar = stack.enter_context(tqdm(total=len(kinds) * tries, disable=None, unit="try"))
        for kind in kinds:
            tally = Tally(kind=kind)
            tallies.append(tally)
            for number in range(tries):
                bar.set_description(kind)
                draw = random.Random(f"{seed} {kind} {number}")
                with folder_of(draw.choice((0, 1, 2, 3))) as job:
                    if kind in NETWORK:
                        assert links is not None
                        found = NETWORK[kind](draw, job, links)
                    else:
                        found = LOCAL[kind](draw, job)
                    tally.judge(found, resume(job), want)
                bar.update()
            tqdm.write(table([tally]).splitlines()[-1], file=sys.stderr)
    return tallies


KINDS = [*LOCAL, *NETWORK]
SECTIONS = [*KINDS, "growth", "overhead"]


@click.command()
@sections_of(SECTIONS)
@click.option("--tries", default=20, show_default=True, help="Of each failure.")
@click.option("--steps", default=2000, show_default=True, help="Of the long run.")
@click.option("--rounds", default=5, show_default=True, help="Pairs of engines that are timed.")
@click.option("--seed", default=0, show_default=True, help="Where and when failures happen.")
def main(only: list[str], tries: int, steps: int, rounds: int, seed: int) -> None:
    """Let a training fail in every way, and see what is left of it."""
    launch_local.START_METHOD = START_METHOD
    mp.set_forkserver_preload(PRELOADED)
    kinds = [kind for kind in KINDS if kind in only]
    lacking = missing() if set(kinds) & {*NETWORK, "full disk"} else ""
    if lacking:
        raise click.ClickException(
            f"full disk, partition and slow link need {lacking}; leave them out with --only"
        )
    is_good = True
    if kinds:
        tallies = soak(kinds, tries, seed)
        for note in (note for tally in tallies for note in tally.notes):
            click.echo(note + "\n")
        click.echo(table(tallies))
        is_good &= all(tally.is_good for tally in tallies)
    for name, section in (
        ("growth", functools.partial(growth, steps)),
        ("overhead", functools.partial(overhead, rounds)),
    ):
        if name in only:
            text, fits = section()
            click.echo(f"\n{text}\n{name}: {'ok' if fits else 'FAILED'}")
            is_good &= fits
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
