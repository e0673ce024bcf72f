"""The training loop, run by every rank; rank 0 shows progress and writes the run folder."""

import math
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_dynamo import wire
from piper_dynamo.access import clip_grad_norm_, data_rank, data_world, explain, parameters, record
from piper_dynamo.api import compile as piper_compile
from piper_dynamo.checkpoint.load import load_checkpoint
from piper_dynamo.checkpoint.save import Saving, save_checkpoint_async
from piper_dynamo.deferred import deferred_init
from piper_dynamo.errors import PiperError, format_error
from piper_dynamo.files import private_files
from piper_dynamo.meeting import Meeting, gathered
from piper_dynamo.planning import Plan
from piper_dynamo.programs import AlikePrograms
from piper_dynamo.runtime.comm import Communicator
from piper_dynamo.runtime.logs import kept
from piper_dynamo.runtime.world import communicator, host, is_alone, rank, restarts, world_size
from piper_dynamo.timeline import Event, Message, Timeline
from piper_dynamo.topology import describe
from piper_dynamo.train.compare import Reference, allowed, one_process, verdict
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus, Split, read_corpus
from piper_dynamo.train.model import balance, build, dropped, flops_per_token, split_result
from piper_dynamo.train.optim import make_optimizer, set_learning_rate
from piper_dynamo.train.progress import Progress
from piper_dynamo.train.report import RunFolder, claim_folder, curve, is_restart
from piper_dynamo.train.resume import prune, step_folder, whole_checkpoints

# Options that change the numbers, and not only where they are made.
NUMBERS = (
    *("steps", "batch", "seq", "dtype", "precision"),
    *("lr", "warmup", "weight_decay", "clip", "seed"),
)
wire.records(Timeline, Event, Message)
RECORDED_STEP = 3  # the first steps warm up caches and allocators


def run_rank(config: Config, fallbacks: Sequence[Config] = ()) -> dict[str, Any]:
    """Train, as one of the ranks of a job with a process group.

    A job that was started again goes on from the run folder's last checkpoint.

    Args:
        config: What to train.
        fallbacks: The same on other numbers of ranks: that of the ranks there are is what runs.

    Returns:
        On rank 0: `loss_first`, `loss_last` (training, nats per byte), `validation_loss` if there
        was an evaluation, `tokens_per_s` (without the first step), `peak_mb` (the most memory that
        any rank's process held, imports included, in 10^6 bytes), and with `compare`
        `max_rel_diff` and `is_equal`, whether rounding explains it. Nothing on other ranks.

    Raises:
        PiperError: The job is refused, or the loss is no longer a number.
    """
    config = {one.world: one for one in (*fallbacks, config)}[world_size()]
    comm = communicator(config.timeout_s)

    def claim() -> tuple[str, str | None]:
        if rank():
            return "", None
        again = is_restart(config.out)
        last = whole_checkpoints(Path(str(config.out)))[-1:] if again else []
        resume = str(last[0]) if last else config.resume
        return str(claim_folder(config.out, resume, restarted=again)), resume

    with ExitStack() as stack:
        stack.enter_context(private_files())
        out, resume = Meeting(comm, "the run folder").together(claim, lambda found: found[0])
        compares = config.compare and resume is None  # its first steps, and not a restart's
        is_skipped = config.compare and not compares
        config, path = replace(config, out=out, resume=resume, compare=compares), Path(out)
        if is_alone():
            stack.enter_context(kept(path, rank()))
        folder = stack.enter_context(RunFolder(path)) if rank() == 0 else None
        made = _Job(config, folder, comm)
        if is_skipped:
            made.progress.say("--compare: the first steps are done, so that none is compared")
        return made.run()


@dataclass(slots=True, kw_only=True)
class _History:
    """What the steps so far came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    difference: float | None = None
    loads: torch.Tensor | None = None
    dropped: float | None = None

    def experts(self) -> dict[str, float]:
        """What became of the experts' rows in the last step.

        `busiest_expert` is what was asked of the busiest expert of any layer, 1 where all are
        alike; `dropped`, with a capacity, the share of all rows that were dropped.
        """
        if self.loads is None:
            return {}
        shares = self.loads / self.loads.sum(1, keepdim=True) * self.loads.shape[1]
        found = {"busiest_expert": shares.max().item()}
        return found if self.dropped is None else found | {"dropped": self.dropped}


class _Job:
    def __init__(self, config: Config, folder: RunFolder | None, comm: Communicator) -> None:
        self.config = config
        self.folder = folder
        self.comm = comm
        self.progress = Progress(is_shown=rank() == 0)
        self.history = _History()
        self.recorded = 0  # the step whose timeline is kept
        self.saving: Saving | None = None
        self.shard = (0, config.replicas)  # until the step says which: batches of the right size

    def run(self) -> dict[str, Any]:
        config, say = self.config, self.progress.say
        with self.progress.phase("reading the standard library's source"):
            corpus = read_corpus()
            check_same_text(corpus, self.comm)
        say(
            f"{len(corpus.train) / 1e6:.1f} MB to train on, {len(corpus.validation) / 1e6:.1f} MB "
            f"held out, {corpus.files} files"
        )
        batch = self._batch(corpus, "train", 0)
        self._batch(corpus, "validation", 0)  # refused now rather than at the first evaluation
        reference = self._reference(corpus)
        with deferred_init():
            self.model = model = build(config)
        flops = flops_per_token(model, config)
        count = sum(p.numel() for p in model.parameters())
        doing = (
            f"capturing, planning and compiling {count / 1e6:.2f} M parameters: "
            f"{config.schedule}, {config.stages} stages, {_replicas(config)}{config.compile} chunks"
        )
        with self.progress.phase(doing):
            step = piper_compile(
                model,
                config.strategy(),
                batch,
                compile=config.compile,
                timeout_s=config.timeout_s,
                nan_check=config.nan_check,
                loss_scale=config.loss_scale,
            )
        if self.folder is not None:
            self.folder.write_config(config, corpus)
            plan = explain(step)
            self.folder.write_plan(plan)
            for line in plan.summary().splitlines():
                say(line)
        self._tell_topology(explain(step))
        self.shard = data_rank(step), data_world(step)
        self._train(step, corpus, reference, flops)
        return self._summary()

    def _tell_topology(self, plan: Plan) -> None:
        """Where ranks sit; every rank comes here."""
        hosts = Meeting(self.comm, "the topology").together(host, list)
        if self.folder is not None:
            # Of very many ranks not all programs are made.
            found = None if isinstance(plan.programs, AlikePrograms) else plan.programs
            for line in describe(found, hosts).splitlines():
                self.progress.say(line)

    def _reference(self, corpus: Corpus) -> Reference | None:
        if not self.config.compare or self.folder is None:
            return None
        with self.progress.phase("training the first steps in one process, to compare with"):
            return one_process(self.config, corpus)

    def _batch(self, corpus: Corpus, split: Split, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return corpus.batch(
            split,
            step,
            seed=self.config.seed,
            rows=self.config.batch,
            seq=self.config.seq,
            data_rank=self.shard[0],
            data_world=self.shard[1],
        )

    def _train(self, step: Any, corpus: Corpus, reference: Reference | None, flops: float) -> None:
        config, history = self.config, self.history
        optimizer = make_optimizer(parameters(step), config)
        first = self._resume(step, optimizer, corpus)
        self.recorded = min(first + RECORDED_STEP, config.steps - 1)
        with self.progress.steps(config.steps, first) as show:
            for number in range(first, config.steps):
                rate = set_learning_rate(optimizer, number, config)
                self._step(step, optimizer, corpus, number)
                speed = config.batch * config.seq / history.seconds[-1]
                shown = f"loss {history.losses[-1]:.3f}, {speed:,.0f} tokens/s, "
                experts = history.experts()
                if "busiest_expert" in experts:
                    shown += f"busiest expert {experts['busiest_expert']:.1f} x, "
                if "dropped" in experts:
                    shown += f"{experts['dropped']:.1%} dropped, "
                show(shown + f"{flops * speed / 1e9:.1f} GFLOP/s")
                if self.folder is not None:
                    self.folder.metric(
                        step=number + 1,
                        loss=history.losses[-1],
                        grad_norm=history.norms[-1],
                        learning_rate=rate,
                        tokens_per_s=speed,
                        model_flops_per_s=flops * speed,
                        **experts,
                    )
                self._check_finite(number)
                if reference is not None and number + 1 == len(reference.losses):
                    self._compare(reference)
                is_last = number + 1 == config.steps
                if config.eval_every and (is_last or (number + 1) % config.eval_every == 0):
                    self._evaluate(step, corpus, number)
                if config.save_every and (is_last or (number + 1) % config.save_every == 0):
                    self._save(step, optimizer, corpus, number + 1)
        if self.saving is not None:
            self.saving.wait()
            self._prune(None)

    def _resume(self, step: Any, optimizer: torch.optim.Optimizer, corpus: Corpus) -> int:
        """Load what was asked for; returns how many steps are done.

        Raises:
            PiperError: It is another model's, or all steps are done.
        """
        config, say = self.config, self.progress.say
        if config.resume is None:
            if restarts():
                say("no checkpoint is whole: starting again from step 1")
            return 0
        with self.progress.phase(f"loading {config.resume}"):
            extra = load_checkpoint(config.resume, step, optimizer)
        done: int = extra["steps"]
        if done >= config.steps:
            raise PiperError(f"{config.resume} has done {done} steps; give --steps above that")
        now = config.as_dict()
        other = [name for name in NUMBERS if extra["config"].get(name) != now[name]]
        if other:
            shown = ", ".join(
                f"{name} {extra['config'].get(name)} -> {now[name]}" for name in other
            )
            say(f"going on with other options than it was saved with: {shown}")
        if extra["text"] != corpus.fingerprint:
            say("going on with another text than it was saved with: this is another Python")
        say(f"going on after step {done}")
        return done

    def _save(
        self, step: Any, optimizer: torch.optim.Optimizer, corpus: Corpus, steps: int
    ) -> None:
        """Save beside the next steps; every rank comes here."""
        folder = step_folder(Path(str(self.config.out)), steps)
        extra = {"steps": steps, "config": self.config.as_dict(), "text": corpus.fingerprint}
        self.saving = save_checkpoint_async(folder, step, optimizer, extra=extra)
        self._prune(folder)

    def _prune(self, saving: Path | None) -> None:
        if self.folder is not None:
            prune(self.folder.path, self.config.keep_last, saving)

    def _step(
        self, step: Any, optimizer: torch.optim.Optimizer, corpus: Corpus, number: int
    ) -> None:
        begin = time.perf_counter()
        is_recorded = number == self.recorded
        with record(step) if is_recorded else nullcontext(Timeline()) as timeline:
            loss, loads = split_result(step(*self._batch(corpus, "train", number)))
        loss.backward()
        norm = clip_grad_norm_(step, self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        self.history.loads = balance(self.model, loads) if loads else None
        if loads and self.config.capacity is not None:
            self.history.dropped = dropped(loads, self.config.capacity)
        self.history.losses.append(loss.item())
        self.history.norms.append(norm.item())
        self.history.seconds.append(time.perf_counter() - begin)
        if is_recorded:
            merged = merge_ranks(timeline, self.comm)
            if self.folder is not None and merged is not None:
                self.folder.keep_timeline(number + 1, explain(step), merged)

    def _check_finite(self, number: int) -> None:
        """Every rank has the same loss and norm, so all stop together."""
        loss, norm = self.history.losses[-1], self.history.norms[-1]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise PiperError(
                format_error(
                    f"the loss or its gradient is no longer a number in step {number + 1}",
                    {"loss": loss, "gradient norm": norm},
                    hint="lower --lr, or raise --warmup; the run folder has the steps so far",
                )
            )

    def _compare(self, reference: Reference) -> None:
        history = self.history
        history.difference = reference.max_relative_difference(history.losses, history.norms)
        self.progress.say(verdict(history.difference, self.config, len(reference.losses)))

    def _evaluate(self, step: Any, corpus: Corpus, number: int) -> None:
        """The mean loss of the same held-out batches each time, by the same compiled model."""
        if not self.history.validation:
            self.progress.say("evaluating; the program for it is made now")
        with torch.no_grad():
            losses = [
                split_result(step(*self._batch(corpus, "validation", i)))[0].item()
                for i in range(self.config.eval_batches)
            ]
        found = sum(losses) / len(losses)
        self.history.validation.append(found)
        if self.folder is not None:
            self.folder.metric(step=number + 1, validation_loss=found)
        self.progress.say(f"step {number + 1}: validation {found:.3f} nats per byte")

    def _summary(self) -> dict[str, Any]:
        peaks = gathered(self.comm, "gathering peaks of memory", peak_rss_mb())
        if self.folder is None or peaks is None:
            return {}
        config, history, say = self.config, self.history, self.progress.say
        steady = history.seconds[1:] or history.seconds  # the first step warms up
        summary: dict[str, Any] = {
            "loss_first": history.losses[0],
            "loss_last": history.losses[-1],
            "tokens_per_s": config.batch * config.seq * len(steady) / sum(steady),
            "peak_mb": max(peaks),
        }
        if history.validation:
            summary["validation_loss"] = history.validation[-1]
        if history.difference is not None:
            finite = math.isfinite(history.difference)
            summary["max_rel_diff"] = history.difference if finite else None  # JSON has no Infinity
            summary["is_equal"] = history.difference <= allowed(config)
        self.folder.write_summary(summary)
        losses = history.losses
        say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}  {curve(losses)}")
        say(f"{summary['tokens_per_s']:,.0f} tokens/s, peak memory of a rank {max(peaks):,.0f} MB")
        say(f"run folder: {self.folder.path.resolve()}")
        return summary


def _replicas(config: Config) -> str:
    if config.replicas == 1:
        return ""
    shared = f", {config.ep} share the experts" if config.ep > 1 else ""
    return f"{config.replicas} replicas, ZeRO-{config.zero}{shared}, "


def merge_ranks(timeline: Timeline, comm: Communicator) -> Timeline | None:
    """All ranks' events on rank 0's clock; None on other ranks.

    On one machine the clocks agree. Between machines the moment at which all leave a barrier is
    taken to be the same, which is right up to the time of a message.
    """
    if world_size() > 1:
        dist.barrier()
    mine = (platform.node(), time.perf_counter(), timeline)
    found = gathered(comm, "gathering a step's timeline", mine)
    if found is None:
        return None
    here, now, _ = found[0]
    offsets = [0.0 if node == here else now - then for node, then, _ in found]
    return Timeline.merge([events for _, _, events in found], offsets)


def check_same_text(corpus: Corpus, comm: Communicator) -> None:
    """All ranks read the same files; each reads its own machine's.

    Raises:
        PiperError: They do not: their Pythons differ.
    """
    mine = (corpus.fingerprint, platform.node(), platform.python_version())
    found = Meeting(comm, "comparing the text").together(lambda: mine, lambda parts: parts)
    if len({fingerprint for fingerprint, _, _ in found}) > 1:
        rows = {
            f"rank {r}": f"{node}, Python {version}" for r, (_, node, version) in enumerate(found)
        }
        raise PiperError(
            format_error(
                "ranks read different text from their standard libraries",
                rows,
                hint="run all ranks with the same Python",
            )
        )


def peak_rss_mb() -> float:
    """The most memory this process ever held, imports included, in 10^6 bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
