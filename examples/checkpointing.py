"""A transformer under activation checkpointing: every layer is computed again in the backward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper


class Checkpointed(nn.Module):
    """Says of each word what it is."""

    def __init__(self, words=32, width=16, kinds=4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 24, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, kinds)

    def forward(self, ids, labels):
        h = self.words(ids)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def model():
    """Random weights."""
    return Checkpointed()


def inputs():
    """One replica's batch of sentences, and a label for each word."""
    return {"ids": torch.randint(32, (8, 6)), "labels": torch.randint(4, (8, 6))}


def strategy():
    """What the checkpoints leave out, ranks do not keep for the backward."""
    regions = {
        "words": {"PP": 0},
        "layers.0": {"PP": 0},
        "layers.1": {"PP": 1},
        "head": {"PP": 1},
    }
    return piper.strategies.pipeline(
        "one_f_one_b", ranks=2, num_microbatches=2, replicas=2, zero=3, regions=regions
    )


def train(steps=10):
    """The ordinary loop; runs on every rank."""
    torch.manual_seed(0)  # every rank starts from the same values
    step = piper.compile(model(), strategy(), example_inputs=inputs())
    optimizer = torch.optim.AdamW(piper.parameters(step), lr=1e-2, foreach=True)
    torch.manual_seed(1 + piper.data_rank(step))  # every replica has its own data
    batch, losses = inputs(), []
    for _ in range(steps):
        loss = step(**batch)
        loss.backward()
        piper.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = piper.launch(train, ranks=4)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
