"""An MLP-Mixer whose blocks are marked to be compiled once, by `nested_compile_region`."""

import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


def network(width):
    """Two layers."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    """Mixes what the patches of an image say, then what the channels say."""

    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches, self.channels = network(patches), network(width)

    def forward(self, x):
        x = x + self.patches(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Nested(nn.Module):
    """A Mixer of four blocks."""

    def __init__(self, width=8, classes=5):
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(4, width) for _ in range(4))
        self.head = nn.Linear(width, classes)

    @torch.compiler.nested_compile_region
    def once(self, block, x):
        return block(x)

    def forward(self, images, labels):
        x = self.cut(images).flatten(2).mT
        for block in self.blocks:
            x = self.once(block, x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


def model():
    """Random weights."""
    return Nested()


def inputs():
    """One replica's batch of images and classes."""
    return {"images": torch.randn(8, 3, 8, 8), "labels": torch.randint(5, (8,))}


def strategy():
    """Each call of the region is placed by itself, with the block that it is given."""
    regions = {
        "cut": {"PP": 0},
        "blocks.[01]": {"PP": 0},
        "blocks.[23]": {"PP": 1},
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
