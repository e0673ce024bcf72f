"""Models of kinds that users have, without a tag in their source; each with regions by path.

All take and return what such models usually do: batches by keyword, a dict or a loss, in float64.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from tests import zoo

Regions = dict[str, dict[str, int]]
ROWS, WIDTH, TOKENS, WORDS = 8, 8, 5, 11


def numbers(*shape: int, seed: int) -> Tensor:
    """Values of inputs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def words(*shape: int, seed: int) -> Tensor:
    """Numbers of words."""
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """A block of a ResNet: convolutions with BatchNorm, and a way around them."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += around
        return self.relu(out)


class ResNet(nn.Module):
    """The structure of torchvision's, with its names."""

    REGIONS: ClassVar[Regions] = {
        **{name: {"PP": 0} for name in ("conv1", "bn1", "maxpool", "layer1")},
        **{name: {"PP": 1} for name in ("layer2", "avgpool", "fc")},
    }

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 6, 2), Residual(6, 6, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(6, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer2(self.layer1(x))
        return F.cross_entropy(self.fc(torch.flatten(self.avgpool(x), 1)), labels)

    @staticmethod
    def batch(seed: int) -> dict[str, Any]:
        return {"images": numbers(ROWS, 3, 8, 8, seed=seed), "labels": words(ROWS, seed=seed) % 3}


class Double(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.GroupNorm(2, outer),
            nn.SiLU(),
            nn.Conv2d(outer, outer, 3, padding=1),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Skips from the way down to the way up: the longest goes over all stages between."""

    REGIONS: ClassVar[Regions] = {
        "down1": {"PP": 0},
        "down2": {"PP": 1},
        "middle": {"PP": 2},
        "lift2": {"PP": 2},
        "up2": {"PP": 2},
        "lift1": {"PP": 3},
        "up1": {"PP": 3},
        "head": {"PP": 3},
    }

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = Double(3, 4), Double(4, 6)
        self.middle = Double(6, 6)
        self.lift2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up2 = Double(12, 6)
        self.lift1 = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.up1 = Double(8, 4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.middle(F.max_pool2d(second, 2))
        deep = self.up2(torch.cat([self.lift2(deep), second], 1))
        found = self.head(self.up1(torch.cat([self.lift1(deep), first], 1)))
        return {"loss": F.mse_loss(found, images), "images": found}

    @staticmethod
    def batch(seed: int) -> dict[str, Any]:
        return {"images": numbers(ROWS, 3, 8, 8, seed=seed)}


class Translator(nn.Module):
    """`nn.Transformer` between an embedding and a head."""

    REGIONS: ClassVar[Regions] = {
        "words": {"PP": 0},
        "transformer.encoder": {"PP": 0},
        "transformer.decoder": {"PP": 1},
        "head": {"PP": 1},
    }

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1] - 1, dtype=torch.float64
        )
        found = self.transformer(
            self.words(source), self.words(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True
        )
        return F.cross_entropy(self.head(found).flatten(0, 1), target[:, 1:].flatten())

    @staticmethod
    def batch(seed: int) -> dict[str, Any]:
        return {
            "source": words(ROWS, TOKENS, seed=seed),
            "target": words(ROWS, TOKENS, seed=seed + 50),
        }


class TextLSTM(nn.Module):
    """Two LSTMs over text, and a head tied to the embedding."""

    REGIONS: ClassVar[Regions] = {"words": {"PP": 0}, "first": {"PP": 0}, "second": {"PP": 1}}

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        h, _ = self.first(self.words(ids[:, :-1]))
        h, _ = self.second(h)
        return F.cross_entropy((h @ self.words.weight.T).flatten(0, 1), ids[:, 1:].flatten())

    @staticmethod
    def batch(seed: int) -> dict[str, Any]:
        return {"ids": words(ROWS, TOKENS, seed=seed)}


class Clamped(torch.autograd.Function):
    """A straight-through estimator: rounds forwards, passes gradients on within a range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < ctx.limit), None


class Block(nn.Module):
    """Attention and a network after it, each beside a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Blocks in a list, as most decoders have them; the others differ in how they call one."""

    REGIONS: ClassVar[Regions] = {
        "words": {"PP": 0},
        "layers.[01]": {"PP": 0},
        "layers.[23]": {"PP": 1},
        "head": {"PP": 1},
    }
    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(type(self).block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = layer(x)
        return found

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids[:, :-1])
        for layer in self.layers:
            x = self.call(layer, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())

    @staticmethod
    def batch(seed: int) -> dict[str, Any]:
        return {"ids": words(ROWS, TOKENS, seed=seed)}


class Checkpointed(Decoder):
    """Every block under activation checkpointing."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(layer, x, use_reentrant=False)
        return found


class Rounded(Decoder):
    """A custom autograd.Function after every block."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = Clamped.apply(layer(x), 2.0)
        return found


class Nested(Decoder):
    """Blocks marked to be compiled once, by torch.compiler.nested_compile_region."""

    @torch.compiler.nested_compile_region
    def once(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = layer(x)
        return found

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.once(layer, x)


class FlexBlock(Block):
    """Attention by `flex_attention`, with a score that falls with the distance."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def near(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(i >= j, score - (i - j) / 4, -float("inf"))

        found = flex_attention(q, k, v, score_mod=near)
        assert isinstance(found, Tensor)
        return found


class Flex(Decoder):
    """With flex attention in every block."""

    block = FlexBlock


class Conditional(Decoder):
    """Chooses a computation by torch.cond."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda h: layer(h), lambda h: h * 2, (x,))
        return found


class Branching(Decoder):
    """Leaves a block out where the values are small."""

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        if x.abs().max() < 0.1:  # the branch
            return x
        return super().call(layer, x)


def subject(model: Any) -> zoo.Subject:
    """A class of this file as a subject: replica r's batch of step k is its own."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = model().double()
        return made

    return zoo.Subject(
        build=build,
        batch=lambda step, replica: model.batch(10 * step + replica),
        loss_of=lambda output: output["loss"] if isinstance(output, dict) else output,
    )
