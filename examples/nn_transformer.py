"""A translator by `nn.Transformer`: the encoder on one rank, the decoder on the next."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


class Translator(nn.Module):
    """`nn.Transformer` between an embedding and a head."""

    def __init__(self, words=32, width=16):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source, target):
        source, before = self.words(source), self.words(target[:, :-1])
        mask = self.transformer.generate_square_subsequent_mask(
            before.shape[1], before.device, before.dtype
        )
        found = self.transformer(source, before, tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(found).flatten(0, 1), target[:, 1:].flatten())


def model():
    """Random weights."""
    return Translator()


def inputs():
    """One replica's batch: sources of 6 words, targets of 5."""
    return {"source": torch.randint(32, (8, 6)), "target": torch.randint(32, (8, 5))}


def strategy():
    """Both ranks use the embedding: each has a copy, and they sum its gradients."""
    regions = {
        "words": {"PP": 0},
        "transformer.encoder": {"PP": 0},
        "transformer.decoder": {"PP": 1},
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
