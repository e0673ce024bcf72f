"""LSTMs over text; the head is the embedding's weight, a plain product in `forward`."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


class TextLSTM(nn.Module):
    """Predicts the next word."""

    def __init__(self, words=32, width=16):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, ids):
        h, _ = self.first(self.words(ids[:, :-1]))
        h, _ = self.second(h)
        logits = h @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def model():
    """Random weights."""
    return TextLSTM()


def inputs():
    """One replica's batch of sentences."""
    return {"ids": torch.randint(32, (8, 5))}


def strategy():
    """What `forward` does by itself goes where its inputs are: the head is on the last stage."""
    regions = {"words": {"PP": 0}, "first": {"PP": 0}, "second": {"PP": 1}}
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
