"""Models of kinds that users have, without a tag in their source; each with regions by path.

Those that are trained are examples; here are a plain decoder, and what of it is refused.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from tests import example, zoo
from tests.example import load

Regions = dict[str, dict[str, int]]
ROWS, WIDTH, TOKENS, WORDS = 8, 8, 5, 11


def words(*shape: int, seed: int) -> Tensor:
    """Numbers of words."""
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


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


# Kinds that are trained, and the examples that have them.
EXAMPLES: dict[Any, str] = {
    load(name).__dict__[kind]: name
    for kind, name in (
        ("ResNet", "resnet"),
        ("UNet", "unet"),
        ("Translator", "nn_transformer"),
        ("TextLSTM", "lstm"),
        ("Rounded", "autograd_function"),
        ("Checkpointed", "checkpointing"),
        ("Nested", "nested_region"),
    )
}
ResNet, UNet, Translator, TextLSTM, Rounded, Checkpointed, Nested = EXAMPLES


def subject(model: Any) -> zoo.Subject:
    """A kind as a subject: replica r's batch of step k is its own."""
    if model in EXAMPLES:
        return example.subject(EXAMPLES[model])

    def build() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = model().double()
        return made

    return zoo.Subject(build=build, batch=lambda step, replica: model.batch(10 * step + replica))
