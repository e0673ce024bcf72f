"""A ready mixture-of-experts layer, made of the vocabulary in `routing.py`.

Legend: T tokens in all, D model width, H width of an expert, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_dynamo.annotation import annotate
from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.moe.routing import combine, dispatch, grouped_mm


def _softmax(logits_TE: Tensor) -> Tensor:
    return logits_TE.softmax(-1)


_GATES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": _softmax, "sigmoid": torch.sigmoid}
_LEAST = 1e-20  # that is divided by: sigmoids may all be zero


class Routed(NamedTuple):
    """What `MoELayer.routed` gives.

    Attributes:
        y: The layer's result, shaped like its input.
        balance_loss: 0-dim, at least float32; see `MoELayer.routed`.
        load: How many assignments each expert got: [E], int64.
    """

    y: Tensor
    balance_loss: Tensor
    load: Tensor


class MoELayer(nn.Module):
    """SwiGLU experts behind a gate: y = sum over K of weight * expert(x), plus a shared expert.

    The gate scores experts by softmax, or by sigmoid as DeepSeek-V3 (arXiv 2412.19437, 2.1.2); the
    K best of score + `bias` are chosen, and their scores (without bias) weigh their results. The
    bias gets no gradient: `balance` moves it towards experts that are used too little.

    Scores, bias and balancing loss are float32 where the layer has a smaller dtype, float64 where
    it has that: bfloat16 has steps of 1/256 below 1, in which a bias would not move.

    The experts are tagged `piper.annotate(tag)`, so `piper.Shard({tag: "*"})` splits them.
    """

    bias: Tensor

    def __init__(  # noqa: PLR0913  (each is a choice of the layer's user)
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        gate: str = "softmax",
        shared_hidden: int = 0,
        normalize: bool = True,
        scale: float = 1.0,
        tag: str = "EP",
        **factory: Any,
    ) -> None:
        """Make the layer.

        Args:
            dim: D.
            hidden: H.
            num_experts: E.
            top_k: K.
            gate: "softmax" or "sigmoid".
            shared_hidden: Width of the expert that every token goes to; 0: there is none.
            normalize: Whether a token's K weights are divided by their sum.
            scale: A factor on the weights.
            tag: The annotation of the experts' region.
            factory: dtype and device of the parameters; the bias is at least float32.

        Raises:
            PiperStrategyError: An argument is not allowed.
        """
        super().__init__()
        if gate not in _GATES:
            raise PiperStrategyError(f"MoELayer(gate={gate!r}): choose from {', '.join(_GATES)}")
        if not 1 <= top_k <= num_experts:
            raise PiperStrategyError(
                f"MoELayer(top_k={top_k}, num_experts={num_experts}): a token goes to at least "
                "one expert and at most to all"
            )
        self.num_experts, self.top_k, self.tag = num_experts, top_k, tag
        self.normalize, self.scale, self.scoring = normalize, scale, gate
        self.gate = nn.Linear(dim, num_experts, bias=False, **factory)
        self.w_gate = nn.Parameter(torch.empty(num_experts, dim, hidden, **factory))
        self.w_up = nn.Parameter(torch.empty(num_experts, dim, hidden, **factory))
        self.w_down = nn.Parameter(torch.empty(num_experts, hidden, dim, **factory))
        self.shared: nn.ModuleList | None = None
        if shared_hidden:
            self.shared = nn.ModuleList(
                nn.Linear(a, b, bias=False, **factory)
                for a, b in ((dim, shared_hidden), (dim, shared_hidden), (shared_hidden, dim))
            )
        bias = torch.zeros(num_experts, **factory)
        self.register_buffer("bias", bias.to(_precise(bias.dtype)))
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `half` and their like do; the bias keeps its precision."""
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.bias.dtype != _precise(self.bias.dtype):
            self.bias = before.to(self.bias.device)
        return self

    def reset_parameters(self) -> None:
        """Each expert as an `nn.Linear` of its shape would be."""
        for weight in (self.w_gate, self.w_up, self.w_down):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.routed(x).y

    def routed(self, x: Tensor) -> Routed:
        """As `forward`, with the balancing loss and the load.

        The loss is E * sum over experts of (share of assignments * mean score), as in Switch
        Transformer (arXiv 2101.03961, 2.2), the scores of a token divided by their sum. It is 1
        where experts are chosen evenly, or scored evenly, and at most E, where all tokens choose
        one alone; where those that are scored high are chosen seldom it is below 1.

        It is a statistic of the tokens that are given here: under `piper.Split` and
        `piper.Replicate` of one microbatch of one replica. Their mean is what a step has, as in
        other systems; it is not the loss of the whole batch, since shares are multiplied.
        """
        x_TD = x.flatten(0, -2)
        logits_TE = self.gate(x_TD)
        score_TE = _GATES[self.scoring](logits_TE.to(_precise(logits_TE.dtype)))
        index_TK = (score_TE.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weight_TK = score_TE.gather(1, index_TK)
        if self.normalize:
            weight_TK = _shares(weight_TK)
        rows, routing = dispatch(x_TD, index_TK, self.num_experts)
        with annotate(self.tag):
            inner = F.silu(grouped_mm(rows, self.w_gate, routing))
            inner = inner * grouped_mm(rows, self.w_up, routing)
            out = grouped_mm(inner, self.w_down, routing)
        y_TD = combine(out, routing, (weight_TK * self.scale).to(x.dtype))
        if self.shared is not None:
            gate, up, down = self.shared
            y_TD = y_TD + down(F.silu(gate(x_TD)) * up(x_TD))
        mean_E = _shares(score_TE).mean(0)
        share_E = routing.counts.to(mean_E.dtype) / index_TK.numel()
        loss = self.num_experts * (share_E * mean_E).sum()
        return Routed(y_TD.view_as(x), loss, routing.counts)

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float = 1e-3) -> None:
        """Move the bias by `rate`: up for experts with less than the mean load, down for others.

        Auxiliary-loss-free balancing of DeepSeek-V3. With replicas, give every rank the load summed
        over them, so that their biases stay equal.

        Args:
            load: `Routed.load`, [E], or several, [..., E], such as one per microbatch: they are
                added.
            rate: By how much, in scores.

        Raises:
            PiperStrategyError: The load is of another number of experts, or is no whole numbers.
        """
        if load.dim() == 0 or load.shape[-1] != self.num_experts or load.is_floating_point():
            raise PiperStrategyError(
                f"MoELayer.balance takes how many assignments each of {self.num_experts} experts "
                f"got, whole numbers [..., {self.num_experts}]; this load is {load.dtype} "
                f"{list(load.shape)}"
            )
        load_E = load.reshape(-1, self.num_experts).sum(0)
        way_E = (load_E.sum() - load_E * self.num_experts).sign()  # exact, however many there are
        self.bias.add_(way_E.to(self.bias), alpha=rate)


def _precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _shares(score: Tensor) -> Tensor:
    """A token's scores [T, ...], divided by their sum."""
    return score / score.sum(-1, keepdim=True).clamp(min=_LEAST)
