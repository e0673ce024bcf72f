"""Small models with fixed numbers, one per kind of structure that a pipeline must carry through.

No random numbers: every rank builds the same model. Element n (row-major) of a tensor is a formula
of n and a small key, so the reference numbers in the tests can be checked by hand or in eager
PyTorch. All in float64, where a wrong formula and rounding cannot be confused.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper_dynamo as piper


def fill(shape: Sequence[int], key: int) -> Tensor:
    """Values for parameters, between -3/8 and 3/8."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (((3 * n + 5 * key) % 7 - 3) / 8).reshape(shape)


def xin(shape: Sequence[int], key: int) -> Tensor:
    """Values for inputs, between -1 and 1."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (((5 * n + 3 * key) % 9 - 4) / 4).reshape(shape)


def tok(shape: Sequence[int], vocabulary: int) -> Tensor:
    """Token numbers."""
    return ((7 * torch.arange(torch.Size(shape).numel()) + 3) % vocabulary).reshape(shape)


def rows(count: int, key: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `count` rows for the models that take two [rows, 4] tensors."""
    return xin([count, 4], key), xin([count, 4], key + 1)


def weights(count: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(fill([4, 4], k)) for k in range(count))


class Stack4(nn.Module):
    """h <- tanh(h W_k^T), k = 0..3, over `stages` stages; mean squared error inside.

    `skip` sends the first stage's output on: "last" to the last layer, "all" to every later one.
    """

    LOSS = 0.42402861535817
    NORM = 0.07080781347
    NORMS = (0.02815917421, 0.04941786667, 0.02833534378, 0.03123763921)
    SKIP_LOSS = 0.39866140823
    SKIP_NORMS = (0.06993976616, 0.01674481837, 0.01552579023, 0.13842425960)

    def __init__(self, stages: int = 2, skip: str = "") -> None:
        super().__init__()
        self.w = weights(4)
        self.stages, self.skip = stages, skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = first = x
        for k in range(4):
            with piper.annotate("PP", k * self.stages // 4):
                if (self.skip == "last" and k == 3) or (self.skip == "all" and k > 0):
                    h = h + first
                h = torch.tanh(h @ self.w[k].T)
                if k == 0:
                    first = h
        with piper.annotate("PP", self.stages - 1):
            return F.mse_loss(h, y)


class BareLoss(nn.Module):
    """The second stage only takes the loss: its rank has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(torch.tanh(x @ self.w[0].T) @ self.w[1].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(h, y)


class TiedLM(nn.Module):
    """Embedding and head share one weight, on different stages; optional positions enter late."""

    LOSS, NORM_E, NORM_A = 2.32575142159, 0.13015871642, 0.11064516307

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Parameter(fill([11, 4], 2)), nn.Parameter(fill([4, 4], 1))

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(ids, self.e) @ self.a.T)
        with piper.annotate("PP", 1):
            if positions is not None:
                h = h + positions.unsqueeze(-1) / 8
            return F.cross_entropy((h @ self.e.T).flatten(0, 1), labels.flatten())

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        ids = tok([4, 3], 11)
        return ids, ids.roll(1, 0)


class NormNet(nn.Module):
    """BatchNorm in the first stage: statistics are those of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.norm(x @ self.w[0].T))
        with piper.annotate("PP", 1):
            return F.mse_loss(h @ self.w[1].T, y)


class NormOfOne(nn.Module):
    """BatchNorm over one feature, for running statistics that can be checked by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.norm(x)
        with piper.annotate("PP", 1):
            return (h * self.w).square().mean()

    @staticmethod
    def batch() -> tuple[Tensor]:
        return (torch.tensor([[0.0], [2.0], [4.0], [6.0]], dtype=torch.float64),)


class Counter(nn.Module):
    """A buffer that counts the calls and scales the second stage: by 1, 2, 3, ..."""

    count: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.w = weights(2)
        self.register_buffer("count", torch.zeros(shape, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            self.count.add_(1)
            return F.mse_loss((h * self.count) @ self.w[1].T, y)


class Rich(nn.Module):
    """None, int and bool among the inputs; dict, tuple, list, None and int among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(3)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, n: int = 3, flag: bool = True
    ) -> dict[str, Any]:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            if mask is not None:
                h = h * mask
        with piper.annotate("PP", 1):
            second = torch.tanh(h @ self.w[1].T) * n
            third = h + 1 if flag else h - 1
        with piper.annotate("PP", 2):
            t = torch.tanh(second @ self.w[2].T) + third
            loss = t.square().mean()
        return {"h": t, "extra": (second, [third, None]), "n": n, "loss": loss}


class Dropped(nn.Module):
    """Dropout in both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = F.dropout(torch.tanh(x @ self.w[0].T), 0.5, self.training)
        with piper.annotate("PP", 1):
            h = F.dropout(torch.tanh(h @ self.w[1].T), 0.5, self.training)
            return F.mse_loss(h, y)


class Tripled(torch.autograd.Function):
    """tanh whose backward is three times too large on purpose, so that another backward shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return 3 * grad * (1 - y * y)


class Custom(nn.Module):
    """A custom autograd.Function in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = Tripled.apply(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            return F.mse_loss(Tripled.apply(h @ self.w[1].T), y)


class Odd(nn.Module):
    """Tied, frozen, unused and detached parameters, and an unused buffer."""

    idle: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Parameter(fill([11, 4], 2)), nn.Parameter(fill([4, 4], 1))
        self.frozen = nn.Parameter(fill([4, 4], 3), requires_grad=False)
        self.unused = nn.Linear(4, 4, dtype=torch.float64)
        nn.init.constant_(self.unused.weight, 0.5)
        nn.init.constant_(self.unused.bias, 0.25)
        self.detached = nn.Parameter(fill([4], 6))
        self.register_buffer("idle", torch.ones(2, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(F.embedding(ids, self.e) @ self.a.T) @ self.frozen.T
        with piper.annotate("PP", 1):
            h = h + self.detached.detach()
            return F.cross_entropy((h @ self.e.T).flatten(0, 1), labels.flatten())


class Checkpointed(nn.Module):
    """Stack4 on two stages, each stage's body under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(4)

    def _pair(self, h: Tensor, k: int) -> Tensor:
        return torch.tanh(torch.tanh(h @ self.w[k].T) @ self.w[k + 1].T)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = checkpoint(self._pair, x, 0, use_reentrant=False)
        with piper.annotate("PP", 1):
            return F.mse_loss(checkpoint(self._pair, h, 2, use_reentrant=False), y)


class Layer(nn.Module):
    """One layer of `Paths`."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(fill([4, 4], key))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.weight.T)


class Paths(nn.Module):
    """Stack4's numbers without a tag in the source; regions come from module paths."""

    REGIONS: ClassVar = {"layers.[01]": {"PP": 0}, "layers.*": {"PP": 1}, "layers.0": {"PP": 0}}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k) for k in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(h, y)


class Outputs(nn.Module):
    """A loss and more: per-stage outputs, a 0-dim one, something for `loss=` to choose from."""

    def __init__(self, two_losses: bool = False) -> None:
        super().__init__()
        self.w = weights(2)
        self.two_losses = two_losses

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            early = h.square().mean()
        with piper.annotate("PP", 1):
            out = torch.tanh(h @ self.w[1].T)
            loss = F.mse_loss(out, y)
        first = early if self.two_losses else early.detach()
        return {"hidden": h, "early": first, "logits": out, "nested": {"loss": loss}, "none": None}


class Hidden(nn.Module):
    """No scalar output: nothing here can be the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            return torch.tanh(h @ self.w[1].T)


class Masked(nn.Module):
    """Attention-like inputs: a mask to slice, a table to keep whole, a 0-dim scale, a float."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        table: Tensor,
        scale: Tensor,
        factor: float = 1.0,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """x [4, 3, 4], mask [4, 1, 3, 3], table [4, 8], scale [], offsets [5]."""
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
            scores = (h @ h.transpose(1, 2)).unsqueeze(1) + mask
            h = (scores.softmax(-1) @ h.unsqueeze(1)).squeeze(1)
        with piper.annotate("PP", 1):
            h = (h @ self.w[1].T @ table).square() * scale * factor
            if offsets is not None:
                h = h * offsets.sum()
            return h.mean()

    @staticmethod
    def batch() -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        scale = torch.tensor(0.5, dtype=torch.float64)
        return xin([4, 3, 4], 0), xin([4, 1, 3, 3], 1), xin([4, 8], 2), scale, 1.5


class Printing(nn.Module):
    """Reads a value on the host in forward: a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            loss = F.mse_loss(torch.tanh(h @ self.w[1].T), y)
            if loss.item() > 1e9:  # the break
                print("large")
            return loss


class Branching(nn.Module):
    """Takes a branch that depends on the data: a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w[0].T)
        if h.sum() > 0:  # the branch
            h = h * 2
        return F.mse_loss(torch.tanh(h @ self.w[1].T), y)


class BakedIn(nn.Module):
    """Reshapes to a batch of exactly eight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w[0].T)
        with piper.annotate("PP", 1):
            h = h.view(8, 2, 2).flatten(1)  # the baked-in size
            return F.mse_loss(torch.tanh(h @ self.w[1].T), y)


class Fixed(nn.Module):
    """One parameter per stage; the gradients are 3 and 4."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = x * self.a * 3
        with piper.annotate("PP", 1):
            return (h + x * self.b * 4).mean()


class Pair(nn.Module):
    """w and b are 2 each, on unlike stages; the gradient of each is 1."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.w * x
        with piper.annotate("PP", 1):
            return (h + self.b * y).sum(1).mean()
