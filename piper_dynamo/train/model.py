"""A Llama-style decoder over bytes: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

The layers follow Touvron et al. 2023 (arXiv 2302.13971) and Ainslie et al. 2023 (arXiv 2305.13245).
Each layer is computed under the tag of its pipeline stage; embedding and head are in the first and
last.

Legend: B batch, T tokens, D model dim, H heads, K key-value heads, C head dim, V vocabulary.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from piper_dynamo.annotation import annotate
from piper_dynamo.moe import MoELayer
from piper_dynamo.moe import dropped as dropped_rows
from piper_dynamo.runtime.world import world_size
from piper_dynamo.state import AbsentOutput
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
    return (x_BHTC * cos_TC + turned * sin_TC).type_as(x_BHTC)  # tables may have more bits


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


class MoEBlock(nn.Module):
    """Attention and a mixture of experts, each behind an RMSNorm and beside a residual.

    Experts as in DeepSeek-V3 (arXiv 2412.19437): sigmoid gate, one shared expert beside the routed
    ones. A token's experts together are as wide as the dense block's MLP.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, experts: int, top_k: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(8 * dim / 3 / 32 / (top_k + 1))
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.moe = MoELayer(dim, hidden, experts, top_k, gate="sigmoid", shared_hidden=hidden)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, T, D], and the load of each expert."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC)
        routed = self.moe.routed(self.mlp_norm(x_BTD))
        return x_BTD + routed.y, routed.load


class Llama(nn.Module):
    """The main job's model; `forward(tokens, targets)` is the mean cross entropy, nats per byte.

    With experts it is that and the load of each layer's experts.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, stages: int | None = None) -> None:
        super().__init__()
        dim = config.dim
        stages = config.stages if stages is None else stages
        self.stage_of = [i * stages // config.layers for i in range(config.layers)]
        self.last = stages - 1
        self.names_stages = stages > 0
        self.has_experts = config.model == "moe"
        self.embedding = nn.Embedding(VOCAB, dim)
        shape = (dim, config.heads, config.kv_heads)
        self.layers = nn.ModuleList(
            MoEBlock(*shape, config.experts, config.top_k) if self.has_experts else Block(*shape)
            for _ in range(config.layers)
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
                ends = name.endswith(("out.weight", "down.weight", "w_down", "shared.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if ends else 1.0))

    def _stage(self, index: int) -> AbstractContextManager[None]:
        return annotate("PP", index) if self.names_stages else nullcontext()

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Token bytes and the bytes that follow, [B, T] int64 each -> 0-dim loss (and loads)."""
        loads: list[Tensor] = []
        with self._stage(0):
            x_BTD = self.embedding(tokens_BT)
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            with self._stage(stage):
                x_BTD = layer(x_BTD, self.cos, self.sin)
                if self.has_experts:
                    x_BTD, load = x_BTD
                    loads.append(load)
        with self._stage(self.last):
            logits_BTV = self.head(self.norm(x_BTD)).type_as(self.cos)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        return (loss, loads) if self.has_experts else loss


def build(config: Config, stages: int | None = None) -> Llama:
    """The model with the seed's initial values, the same on every rank.

    Args:
        config: The job.
        stages: How many pipeline stages it is cut into; 0: it does not say; None: as the job's
            schedule wants.
    """
    torch.manual_seed(config.seed)
    return Llama(config, stages)


def split_result(result: Any) -> tuple[Any, list[Tensor | None]]:
    """The loss, and the load of each layer's experts where this rank has it."""
    if not isinstance(result, tuple):
        return result, []
    loss, loads = result
    return loss, [None if isinstance(load, AbsentOutput) else load for load in loads]


def balance(
    model: Llama, loads: Sequence[Tensor | None], *, rate: float = 1e-3, over_ranks: bool = True
) -> Tensor:
    """Move every layer's bias towards even use of its experts; call it on every rank.

    Args:
        model: Has experts.
        loads: Of each layer, over any microbatches ([E] or [M, E]); None where another rank has it.
        rate: See `MoELayer.balance`.
        over_ranks: Whether ranks have seen different tokens, whose loads are added.

    Returns:
        Loads over all ranks, [layers, E].
    """
    layers = [layer for layer in model.layers if isinstance(layer, MoEBlock)]
    total = torch.zeros(len(loads), layers[0].moe.num_experts, dtype=torch.int64)
    for row, load in zip(total, loads, strict=True):
        if load is not None:
            row += load.reshape(-1, row.shape[0]).sum(0)
    if over_ranks and world_size() > 1:
        dist.all_reduce(total)
    for layer, load in zip(layers, total, strict=True):  # several ranks may have a layer
        layer.moe.balance(load, rate)
    return total


def dropped(loads: Sequence[Tensor | None], capacity: float, *, over_ranks: bool = True) -> float:
    """Which share of all rows experts with a capacity drop; call it on every rank.

    Args:
        loads: Of each layer, one row per microbatch: [M, E] (or [E] of one); None where another
            rank has it.
        capacity: As a factor of the even share.
        over_ranks: See `balance`.
    """
    mine = [load for load in loads if load is not None]
    lost = sum(int(dropped_rows(load, capacity).sum()) for load in mine)
    total = torch.tensor([lost, sum(int(load.sum()) for load in mine)])
    if over_ranks and world_size() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


def flops_per_token(model: Llama, config: Config) -> float:
    """Forward and backward floating-point operations per token.

    6 per weight that multiplies (2 forward, 4 backward; Kaplan et al. 2020, arXiv 2001.08361), and
    6 D T per layer for causal attention scores and mixing, half of the 12 D T of full attention.
    """
    weights = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embedding" not in n
    )
    if config.model == "moe":  # a token goes to some of them only
        routed = sum(p.numel() for n, p in model.named_parameters() if ".moe.w_" in n)
        weights -= routed - routed * config.top_k // config.experts
    if config.tied_head:
        weights += model.embedding.weight.numel()
    return 6.0 * weights + 6.0 * config.layers * config.dim * config.seq
