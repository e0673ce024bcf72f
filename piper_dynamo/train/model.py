"""A Llama-style decoder over bytes: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

The layers follow Touvron et al. 2023 (arXiv 2302.13971) and Ainslie et al. 2023 (arXiv 2305.13245).
Each layer is computed under the tag of its pipeline stage; embedding and head are in the first and
last.

Legend: B batch, T tokens, D model dim, H heads, K key-value heads, C head dim, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_dynamo.annotate import annotate
from piper_dynamo.train.config import Config

VOCAB = 256  # bytes


def rotary_table(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, [T, C], of position times 10000^(-2i/C) (Su et al. 2021, 2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Turn pairs (i, i + C/2) of each head by their position's angle."""
    half = x_BHTC.shape[-1] // 2
    turned = torch.cat((-x_BHTC[..., half:], x_BHTC[..., :half]), dim=-1)
    return x_BHTC * cos_TC + turned * sin_TC


class Attention(nn.Module):
    """Causal self-attention whose keys and values are shared by groups of heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, tokens, dim = x_BTD.shape
        q = self.query(x_BTD).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.key(x_BTD).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.value(x_BTD).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos_TC, sin_TC), rotate(k, cos_TC, sin_TC)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return out


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside a residual."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(8 * dim / 3 / 32)
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC)
        y_BTD = self.mlp_norm(x_BTD)
        out: Tensor = x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))
        return out


class Llama(nn.Module):
    """The main job's model; `forward(tokens, targets)` is the mean cross entropy, nats per byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.stage_of = [i * config.stages // config.layers for i in range(config.layers)]
        self.last = config.stages - 1
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(
            Block(dim, config.heads, config.kv_heads) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        cos, sin = rotary_table(config.seq, dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init(config.layers)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        self.to(getattr(torch, config.dtype))

    def _init(self, layers: int) -> None:
        """Normal(0, 0.02); what ends in a residual is scaled by 1/sqrt(2 layers), as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if ends else 1.0))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Token bytes and the bytes that follow, [B, T] int64 each -> 0-dim loss."""
        with annotate("PP", 0):
            x_BTD = self.embedding(tokens_BT)
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            with annotate("PP", stage):
                x_BTD = layer(x_BTD, self.cos, self.sin)
        with annotate("PP", self.last):
            logits_BTV = self.head(self.norm(x_BTD))
            return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def build(config: Config) -> Llama:
    """The model with the seed's initial values, the same on every rank."""
    torch.manual_seed(config.seed)
    return Llama(config)


def flops_per_token(model: Llama, config: Config) -> float:
    """Forward and backward floating-point operations per token.

    6 per weight that multiplies (2 forward, 4 backward; Kaplan et al. 2020, arXiv 2001.08361), and
    6 D T per layer for causal attention scores and mixing, half of the 12 D T of full attention.
    """
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embedding" not in n
    )
    if config.tied_head:
        weights += model.embedding.weight.numel()
    return 6.0 * weights + 6.0 * config.layers * config.dim * config.seq
