"""A ResNet with torchvision's modules and names: BatchNorm, and ReLU in place; ZeRO-3."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        around = nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
        self.downsample = nn.Sequential(*around) if stride > 1 else None

    def forward(self, x):
        around = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        x += around
        return self.relu(x)


class ResNet(nn.Sequential):
    """One block in each layer."""

    def __init__(self, widths=(4, 4, 6, 8), classes=5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Block(widths[0], widths[0], 1))
        self.layer2 = nn.Sequential(Block(widths[0], widths[1], 2))
        self.layer3 = nn.Sequential(Block(widths[1], widths[2], 2))
        self.layer4 = nn.Sequential(Block(widths[2], widths[3], 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[3], classes)

    def forward(self, images, labels):
        return F.cross_entropy(super().forward(images), labels)


def model():
    """Random weights."""
    return ResNet()


def inputs():
    """One replica's batch of images and classes."""
    return {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(5, (8,))}


def strategy():
    """BatchNorm's statistics are those of a microbatch of a replica."""
    regions = {
        **{name: {"PP": 0} for name in ("conv1", "bn1", "maxpool", "layer[12]")},
        **{name: {"PP": 1} for name in ("layer[34]", "avgpool", "fc")},
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
