"""The training loop, run by every rank; rank 0 shows progress and writes the run folder."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from piper_dynamo.access import clip_grad_norm_, data_rank, data_world, explain, parameters, record
from piper_dynamo.api import compile as piper_compile
from piper_dynamo.runtime.launch import rank, world_size
from piper_dynamo.timeline import Timeline
from piper_dynamo.train.compare import STEPS, Reference, one_process
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus, read_corpus
from piper_dynamo.train.model import Llama, build, flops_per_token
from piper_dynamo.train.optim import make_optimizer, set_learning_rate
from piper_dynamo.train.report import RunFolder, curve

RECORDED_STEP = 3  # the first steps warm up caches and allocators


def run_rank(config: Config) -> dict[str, Any]:
    """Train; the returned summary is complete on rank 0."""
    return _Job(config).run()


class _Job:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_first = rank() == 0
        self.folder = RunFolder(config) if self.is_first else None
        self.say: Callable[[str], None] = self._progress_line if self.is_first else _nothing
        self.start = time.perf_counter()

    def _progress_line(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(f"[{time.perf_counter() - self.start:6.1f} s] {text}", file=_stderr())

    def run(self) -> dict[str, Any]:
        config = self.config
        self.say("reading the standard library's source")
        corpus = read_corpus()
        self.say(f"{len(corpus.train) / 1e6:.1f} MB to train on, {corpus.files} files")
        reference = self._reference(corpus)
        model = build(config)
        flops = flops_per_token(model, config)
        self.say(
            f"capturing and planning: {config.schedule}, {config.stages} stages, "
            f"{config.compile} chunks"
        )
        step = piper_compile(
            model,
            config.strategy(),
            self._batch(corpus, "train", 0),
            compile=config.compile,
            timeout_s=config.timeout_s,
        )
        if self.folder is not None:
            plan = explain(step)
            self.folder.write_plan(plan)
            for line in plan.summary().splitlines():
                self.say(line)
        result = self._train(step, model, corpus, flops)
        difference = None
        if reference is not None:
            difference = reference.max_relative_difference(result["losses"], result["norms"])
            self.say(f"equal to one process: max difference {difference:.1e} over {STEPS} steps")
        return self._summary(result, difference)

    def _reference(self, corpus: Corpus) -> Reference | None:
        if not self.config.compare or not self.is_first:
            return None
        self.say(f"training {STEPS} steps in one process, to compare with")
        return one_process(self.config, corpus)

    def _batch(self, corpus: Corpus, split: str, step: int, shard: tuple[int, int] = (0, 1)) -> Any:
        config = self.config
        return corpus.batch(
            split,
            step,
            seed=config.seed,
            rows=config.batch,
            seq=config.seq,
            data_rank=shard[0],
            data_world=shard[1],
        )

    def _train(self, step: Any, model: Llama, corpus: Corpus, flops: float) -> dict[str, Any]:
        from tqdm import tqdm

        config = self.config
        optimizer = make_optimizer(parameters(step), config)
        shard = data_rank(step), data_world(step)
        losses: list[float] = []
        norms: list[float] = []
        evaluation: list[float] = []
        tokens = config.batch * config.seq
        bar = tqdm(total=config.steps, disable=not self.is_first, unit="step", dynamic_ncols=True)
        steady = time.perf_counter()
        for number in range(config.steps):
            begin = time.perf_counter()
            rate = set_learning_rate(optimizer, number, config)
            recording = number == min(RECORDED_STEP, config.steps - 1)
            timeline = Timeline()
            with record(step) if recording else nullcontext(timeline) as timeline:
                loss = step(*self._batch(corpus, "train", number, shard))
            loss.backward()
            norm = float(clip_grad_norm_(step, config.clip))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            norms.append(norm)
            spent = time.perf_counter() - begin
            if number == 0:
                steady = time.perf_counter()  # the first step warms up
            self._note(bar, number, losses[-1], norm, rate, tokens / spent, flops)
            if recording:
                self._draw(step, timeline)
            if config.eval_every and (number + 1) % config.eval_every == 0:
                paused = time.perf_counter()
                evaluation.append(self._evaluate(step, corpus, shard))
                steady += time.perf_counter() - paused
                if self.folder is not None:
                    self.folder.metric(step=number + 1, validation_loss=evaluation[-1])
                self.say(f"step {number + 1}: validation {evaluation[-1]:.3f} nats per byte")
        bar.close()
        elapsed = time.perf_counter() - steady
        return {
            "losses": losses,
            "norms": norms,
            "evaluation": evaluation,
            "tokens_per_s": tokens * max(config.steps - 1, 1) / elapsed,
        }

    def _note(
        self,
        bar: Any,
        number: int,
        loss: float,
        norm: float,
        rate: float,
        speed: float,
        flops: float,
    ) -> None:
        if self.folder is None:
            return
        shown = f"loss {loss:.3f}, {speed:,.0f} tokens/s, {flops * speed / 1e9:.1f} GFLOP/s"
        bar.set_postfix_str(shown, refresh=False)
        bar.update()
        self.folder.metric(
            step=number + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens_per_s=speed,
            model_flops_per_s=flops * speed,
        )

    def _draw(self, step: Any, timeline: Timeline) -> None:
        """Collect every rank's events; one machine's clocks agree."""
        found: list[Any] = [None] * world_size()
        if world_size() > 1:
            dist.all_gather_object(found, timeline)
        else:
            found = [timeline]
        if self.folder is not None:
            self.folder.draw_timeline(explain(step), Timeline.merge(found))

    def _evaluate(self, step: Any, corpus: Corpus, shard: tuple[int, int]) -> float:
        batches = range(self.config.eval_batches)
        with torch.no_grad():
            found = [float(step(*self._batch(corpus, "validation", i, shard))) for i in batches]
        return sum(found) / len(found)

    def _summary(self, result: dict[str, Any], difference: float | None) -> dict[str, Any]:
        peaks = [peak_rss_mb()] * world_size()
        if world_size() > 1:
            dist.all_gather_object(peaks, peak_rss_mb())
        losses: list[float] = result["losses"]
        summary: dict[str, Any] = {
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "tokens_per_s": result["tokens_per_s"],
            "peak_mb": max(peaks),
        }
        if result["evaluation"]:
            summary["validation_loss"] = result["evaluation"][-1]
        if difference is not None:
            summary["max_rel_diff"] = difference
        if self.folder is not None:
            self.folder.draw_losses()
            self.folder.close()
            self.say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}  {curve(losses)}")
            self.say(f"run folder: {Path(self.config.out).resolve()}")
        if not all(map(math.isfinite, losses)):
            self.say("the loss is not finite: lower --lr")
        return summary


def peak_rss_mb() -> float:
    """The most memory this process ever held, imports included, in MB of 10^6 bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # bytes on macOS
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def _nothing(text: str) -> None:
    """Ranks other than 0 say nothing."""


def _stderr() -> Any:
    import sys

    return sys.stderr
