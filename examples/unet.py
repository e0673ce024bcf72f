"""A U-Net: its skips go over all stages between the way down and the way up; interleaved."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


def double(inner, outer):
    """Two convolutions."""
    first, second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
    return nn.Sequential(first, nn.GroupNorm(2, outer), nn.SiLU(), second, nn.SiLU())


class UNet(nn.Module):
    """Removes noise from images; `first` and `second` are the skips."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = double(3, 4), double(4, 6)
        self.middle = double(6, 6)
        self.lift2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up2 = double(12, 6)
        self.lift1 = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.up1 = double(8, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, noisy, images):
        first = self.down1(noisy)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.middle(F.max_pool2d(second, 2))
        deep = self.up2(torch.cat([self.lift2(deep), second], 1))
        found = self.head(self.up1(torch.cat([self.lift1(deep), first], 1)))
        return {"loss": F.mse_loss(found, images), "images": found}


def model():
    """Random weights."""
    return UNet()


def inputs():
    """One replica's batch: smooth images, and the same with noise."""
    images = torch.randn(8, 3, 1, 1).expand(8, 3, 8, 8).contiguous()
    return {"noisy": images + 0.1 * torch.randn_like(images), "images": images}


def strategy():
    """Stages 0 and 2 on rank 0, stages 1 and 3 on rank 1: both skips cross over."""
    stages = ["down1"], ["down2"], ["middle", "lift2", "up2"], ["lift1", "up1", "head"]
    regions = {name: {"PP": stage} for stage, names in enumerate(stages) for name in names}
    return piper.strategies.pipeline(
        "interleaved_1f1b",
        ranks=2,
        num_microbatches=4,
        replicas=2,
        zero=3,
        loss="loss",
        regions=regions,
    )


def train(steps=10):
    """The ordinary loop; runs on every rank."""
    torch.manual_seed(0)  # every rank starts from the same values
    step = piper.compile(model(), strategy(), example_inputs=inputs())
    optimizer = torch.optim.AdamW(piper.parameters(step), lr=1e-2, foreach=True)
    torch.manual_seed(1 + piper.data_rank(step))  # every replica has its own data
    batch, losses = inputs(), []
    for _ in range(steps):
        loss = step(**batch)["loss"]
        loss.backward()
        piper.clip_grad_norm_(step, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = piper.launch(train, ranks=4)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
