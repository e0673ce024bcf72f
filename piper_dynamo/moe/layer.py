"""A ready mixture-of-experts layer, made of the vocabulary in `routing.py`.

Legend: T tokens in all, D model width, H width of an expert, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_dynamo.annotate import annotate
from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.moe.routing import combine, dispatch, grouped_mm

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


class Routed(NamedTuple):
    """What `MoELayer.routed` gives.

    Attributes:
        y: The layer's result, shaped like its input.
        balance_loss: 0-dim; 1 where experts are used evenly, more otherwise.
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
            factory: dtype and device of the parameters.

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
        self.normalize, self.scale, self._score = normalize, scale, _GATES[gate]
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
        self.register_buffer("bias", torch.zeros(num_experts, **factory))
        self.reset_parameters()

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
        Transformer (arXiv 2101.03961, 2.2), the scores of a token divided by their sum.
        """
        x_TD = x.flatten(0, -2)
        score_TE = self._score(self.gate(x_TD))
        index_TK = (score_TE.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weight_TK = score_TE.gather(1, index_TK)
        if self.normalize:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        rows, routing = dispatch(x_TD, index_TK, self.num_experts)
        with annotate(self.tag):
            inner = F.silu(grouped_mm(rows, self.w_gate, routing))
            inner = inner * grouped_mm(rows, self.w_up, routing)
            out = grouped_mm(inner, self.w_down, routing)
        y_TD = combine(out, routing, weight_TK * self.scale)
        if self.shared is not None:
            gate, up, down = self.shared
            y_TD = y_TD + down(F.silu(gate(x_TD)) * up(x_TD))
        share_E = routing.counts / index_TK.numel()
        mean_E = (score_TE / score_TE.sum(-1, keepdim=True)).mean(0)
        loss = self.num_experts * (share_E.to(mean_E.dtype) * mean_E).sum()
        return Routed(y_TD.view_as(x), loss, routing.counts)

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float = 1e-3) -> None:
        """Move the bias by `rate`: up for experts with less than the mean load, down for others.

        Auxiliary-loss-free balancing of DeepSeek-V3. With replicas, give every rank the load summed
        over them, so that their biases stay equal.
        """
        load = load.to(self.bias.dtype)
        self.bias.add_((load.mean() - load).sign(), alpha=rate)
