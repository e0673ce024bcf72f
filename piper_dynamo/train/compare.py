"""`--compare`: the first steps of the job beside the plain model in one process."""

from dataclasses import dataclass

import torch

from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus
from piper_dynamo.train.model import build
from piper_dynamo.train.optim import make_optimizer, set_learning_rate

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Losses and gradient norms of the first steps in one process."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]

    def max_relative_difference(self, losses: list[float], norms: list[float]) -> float:
        """The largest relative difference of a loss or gradient norm over the compared steps."""
        pairs = [*zip(self.losses, losses, strict=False), *zip(self.norms, norms, strict=False)]
        return max(abs(have - want) / max(abs(want), 1e-30) for want, have in pairs)


def one_process(config: Config, corpus: Corpus) -> Reference:
    """Train an untouched copy of the model on whole batches, everything else alike."""
    model = build(config)
    optimizer = make_optimizer(model.parameters(), config)
    losses, norms = [], []
    for step in range(min(STEPS, config.steps)):
        set_learning_rate(optimizer, step, config)
        batch = corpus.batch("train", step, seed=config.seed, rows=config.batch, seq=config.seq)
        loss = model(*batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(norm))
    return Reference(losses=tuple(losses), norms=tuple(norms))
