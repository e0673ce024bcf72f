"""`--compare`: the first steps of the job beside the plain model in one process."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus
from piper_dynamo.train.model import balance, build, split_result
from piper_dynamo.train.optim import make_optimizer, set_learning_rate

STEPS = 3
# What rounding can explain: sums in another order, and inductor's own kernels.
TOLERANCES = {
    ("float32", "aten"): 1e-6,
    ("float32", "inductor"): 1e-4,
    ("float64", "aten"): 1e-12,
    ("float64", "inductor"): 1e-10,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses and gradient norms of the first steps in one process."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def max_relative_difference(self, losses: Sequence[float], norms: Sequence[float]) -> float:
        """The largest relative difference of a loss or gradient norm over the compared steps.

        Args:
            losses: Of the run, at least as many as were compared.
            norms: Likewise.

        Returns:
            The difference; infinity where a number is not finite on one side only.
        """
        count = len(self.losses)
        pairs = [
            *zip(self.losses, losses[:count], strict=True),
            *zip(self.norms, norms[:count], strict=True),
        ]
        return max(relative_difference(have, want) for want, have in pairs)


def relative_difference(have: float, want: float) -> float:
    """Of two numbers; infinity where one alone is not finite."""
    if not (math.isfinite(have) and math.isfinite(want)):
        # A comparison with NaN is false: max() could lose it.
        return 0.0 if repr(have) == repr(want) else math.inf
    return abs(have - want) / max(abs(want), 1e-30)


def allowed(config: Config) -> float:
    """The largest difference that rounding explains."""
    return TOLERANCES[config.dtype, config.compile]


def verdict(difference: float, config: Config, steps: int) -> str:
    """The outcome in one line."""
    found = f"max difference {difference:.1e} over {steps} step{'s' if steps > 1 else ''}"
    if difference <= allowed(config):
        return f"equal to one process: {found}"
    return f"DIFFERS from one process: {found}, where rounding explains {allowed(config):.0e}"


def one_process(config: Config, corpus: Corpus) -> Reference:
    """Train an untouched copy of the model on whole batches, everything else alike.

    Args:
        config: The job.
        corpus: Its text.
    """
    model = build(config)
    optimizer = make_optimizer(model.parameters(), config)
    losses, norms = [], []
    for step in range(min(STEPS, config.steps)):
        set_learning_rate(optimizer, step, config)
        batch = corpus.batch("train", step, seed=config.seed, rows=config.batch, seq=config.seq)
        loss, loads = split_result(model(*batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if loads:
            balance(model, loads, over_ranks=False)
        losses.append(loss.item())
        norms.append(float(norm))
    return Reference(losses=tuple(losses), norms=tuple(norms))
