"""A network with a custom `autograd.Function`, also where one stage ends and the next begins."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


class Round(torch.autograd.Function):
    """A straight-through estimator: rounds forwards, passes gradients on within a range."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.limit), None


class Rounded(nn.Module):
    """Values between its layers are quarters."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x, y):
        for layer in self.layers:
            x = Round.apply(layer(x), 2.0)
        return F.mse_loss(self.head(x), y)


def model():
    """Random weights."""
    return Rounded()


def inputs():
    """One replica's batch."""
    return {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}


def strategy():
    """What `Round` saves at the border stays on the first rank; gradients alone cross back."""
    regions = {"layers.[01]": {"PP": 0}, "layers.[23]": {"PP": 1}, "head": {"PP": 1}}
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
