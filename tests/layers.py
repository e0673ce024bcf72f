"""Pieces of random models: what a layer of each kind makes and does, as Python text.

Terms: in a piece's lines `h` is the layer's input and result, `k` its number and `of` that of an
earlier layer whose parameter or value it uses, which is how values without a batch, numbers and
masks come from one stage to another. An *input* is an argument of the model beside x and y, which
the pieces that use it ask for.
"""

from dataclasses import dataclass

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

import piper_dynamo as piper


def fill(shape, key):
    generator = torch.Generator().manual_seed(key)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 2


def filled(module, key):
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.copy_(fill(param.shape, 50 * key + number))
    return module
"""

CUSTOM = """

class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 3 * grad * (1 - y * y)  # too large on purpose, so that another backward shows
"""

WEIGH = """

def weigh(y):
    return (y > 0.5).sum()  # of a microbatch: not all weigh alike, and some nothing
"""

# By name: how `data` makes it, and along which dim it is sliced; None: not at all.
INPUTS: dict[str, tuple[str, int | None]] = {
    "x": ("torch.randn(rows, 4, generator=g, dtype=torch.float64)", 0),
    "y": (
        "torch.randn(rows, 4, generator=g, dtype=torch.float64)"
        ".index_fill(0, torch.tensor([0]), 1.0)",  # something weighs, see WEIGH
        0,
    ),
    "ids": ("torch.randint(7, (rows,), generator=g)", 0),
    "turned": ("torch.randn(4, rows, generator=g, dtype=torch.float64)", 1),
    "table": ("torch.randn(4, 4, generator=g, dtype=torch.float64)", None),
    "factor": ("torch.tensor(0.5 + key / 16, dtype=torch.float64)", None),
    "times": ("2", None),
    "extra": ("None", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A kind of layer.

    Attributes:
        made: Lines of `__init__`.
        run: Lines of `forward`.
        asks: The input that it uses.
        of: The kind of layer that it uses something of.
        adds: What it adds to the loss.
        least: The fewest bits that it computes or holds something in.
    """

    made: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    asks: str = ""
    of: str = ""
    adds: str = ""
    least: int = 64


def _experts(*chosen: str, mix: str) -> Piece:
    return Piece(
        made=(
            "self.g{k} = nn.Parameter(fill([4, 4], 20 + {k}))",
            "self.u{k} = nn.Parameter(fill([4, 4, 3], 40 + {k}))",
            "self.d{k} = nn.Parameter(fill([4, 3, 4], 60 + {k}))",
        ),
        run=(
            *chosen,
            "s{k}, r{k} = piper.moe.dispatch(h, i{k}, 4)",
            'with piper.annotate("EP"):',
            "    s{k} = torch.tanh(piper.moe.grouped_mm(s{k}, self.u{k}, r{k}))",
            "    s{k} = piper.moe.grouped_mm(s{k}, self.d{k}, r{k})",
            mix,
        ),
    )


def _checkpoint(what: str) -> str:
    return f"h = h + torch.utils.checkpoint.checkpoint({what}, h, use_reentrant=False)"


_WEIGHT = "self.w{k} = nn.Parameter(fill([4, 4], {k}))"
_LINEAR = "h = torch.tanh(h @ self.w{k}.T)"

PIECES: dict[str, Piece] = {
    "linear": Piece(made=(_WEIGHT,), run=(_LINEAR,)),
    "frozen": Piece(
        made=("self.w{k} = nn.Parameter(fill([4, 4], {k}), requires_grad=False)",),
        run=(_LINEAR,),
    ),
    "uneven": Piece(
        made=(
            "self.a{k}, self.b{k} = (nn.Parameter(fill(s, {k})) for s in ([7, 4], [4, 7]))",
            "self.s{k} = nn.Parameter(torch.tensor(0.75, dtype=torch.float64))",
        ),
        run=("h = torch.tanh(torch.tanh(h @ self.a{k}.T) @ self.b{k}.T * self.s{k})",),
    ),
    "tied": Piece(run=("h = torch.tanh(h @ self.w{of}.T)",), of="linear"),
    "target": Piece(run=("h = h + 0.5 * y",)),
    "views": Piece(run=("h = torch.cat(h.chunk(2, -1)[::-1], -1).t().t()",)),
    "inplace": Piece(run=("h = h.clone().mul_(1.5)",)),
    "dropout": Piece(run=("h = F.dropout(h, 0.25)",)),
    "norm": Piece(
        made=("self.norm{k} = nn.BatchNorm1d(4, dtype=torch.float64)",),
        run=("h = h + self.norm{k}(h)",),
    ),
    "count": Piece(
        made=('self.register_buffer("n{k}", torch.zeros((), dtype=torch.float64))',),
        run=("self.n{k}.add_(1)", "h = h * self.n{k}"),
    ),
    "average": Piece(
        made=('self.register_buffer("m{k}", torch.zeros(4, dtype=torch.float64))',),
        run=(
            "h = h + self.m{k}.type_as(h)",
            "self.m{k}.mul_(0.5).add_(h.detach().mean(0).type_as(self.m{k}))",
        ),
    ),
    "constant": Piece(
        made=('self.register_buffer("r{k}", fill([4], {k}))',),
        run=("h = h * (1 + self.r{k}.type_as(h))",),
    ),
    "experts": _experts(
        "p{k}, i{k} = (h @ self.g{k}).softmax(-1).topk(2)",
        mix="h = torch.tanh(h + piper.moe.combine(s{k}, r{k}, p{k}))",
    ),
    # Rows whose experts do not follow from numbers that may be rounded.
    "routed": _experts(
        "i{k} = (torch.arange(h.shape[0], device=h.device) * 7 % 4).unsqueeze(1)",
        mix="h = torch.tanh(h @ self.g{k} + piper.moe.combine(s{k}, r{k}).squeeze(1))",
    ),
    "experts again": Piece(
        run=(
            "i{k} = (torch.arange(h.shape[0], device=h.device) * 5 % 4).unsqueeze(1)",
            "s{k}, r{k} = piper.moe.dispatch(h, i{k}, 4)",
            'with piper.annotate("EP"):',
            "    s{k} = torch.tanh(piper.moe.grouped_mm(s{k}, self.u{of}, r{k}))",
            "    s{k} = piper.moe.grouped_mm(s{k}, self.d{of}, r{k})",
            "h = h + piper.moe.combine(s{k}, r{k}).squeeze(1)",
        ),
        of="experts",
    ),
    "moe": Piece(
        made=("self.moe{k} = filled(piper.moe.MoELayer(4, 3, 4, dtype=torch.float64), {k})",),
        run=("m{k} = self.moe{k}.routed(h)", "h = torch.tanh(h + m{k}.y)"),
        adds="0.01 * m{k}.balance_loss",
    ),
    "checkpointed moe": Piece(
        made=("self.moe{k} = filled(piper.moe.MoELayer(4, 3, 4, dtype=torch.float64), {k})",),
        run=(_checkpoint("self.moe{k}"),),
    ),
    "layernorm": Piece(
        made=("self.ln{k} = filled(nn.LayerNorm(4, dtype=torch.float64), {k})",),
        run=("h = h + self.ln{k}(h)",),
    ),
    "conv": Piece(
        made=("self.c{k} = filled(nn.Conv1d(1, 2, 3, padding=1, dtype=torch.float64), {k})",),
        run=("h = torch.tanh(h + self.c{k}(h.unsqueeze(1)).sum(1))",),
    ),
    "embed": Piece(
        made=("self.e{k} = filled(nn.Embedding(7, 4, dtype=torch.float64), {k})",),
        run=("h = h + self.e{k}(ids)",),
        asks="ids",
    ),
    "attention": Piece(
        made=("self.q{k} = filled(nn.Linear(2, 6, dtype=torch.float64), {k})",),
        run=(
            "q{k} = self.q{k}(h.reshape(-1, 1, 2, 2)).chunk(3, -1)",
            "h = torch.tanh(h + F.scaled_dot_product_attention(*q{k}).reshape(-1, 4))",
        ),
    ),
    "checkpoint": Piece(
        made=(_WEIGHT,), run=(_checkpoint("lambda v: torch.tanh(v @ self.w{k}.T).square()"),)
    ),
    "checkpointed dropout": Piece(
        made=(_WEIGHT,), run=(_checkpoint("lambda v: F.dropout(v @ self.w{k}.T, 0.25).tanh()"),)
    ),
    "custom": Piece(made=(_WEIGHT,), run=("h = Tripled.apply(h @ self.w{k}.T)",)),
    "unused": Piece(
        made=(
            "self.u{k} = nn.Parameter(fill([3], {k}))",
            "self.v{k} = nn.Parameter(fill([4], {k}))",
        ),
        run=("h = h + self.v{k}.detach()",),
    ),
    "stop": Piece(made=(_WEIGHT,), run=("h = h.detach() @ self.w{k}.T",)),
    "part": Piece(run=("h = h + F.pad(h @ self.w{of}[:3].T, (0, 1))",), of="linear"),
    "decay": Piece(run=("h = h * 1.25",), of="linear", adds="0.1 * self.w{of}.square().mean()"),
    "head": Piece(
        run=("h = h + F.linear(h, self.e{of}.weight).softmax(-1) @ self.e{of}.weight",),
        of="embed",
    ),
    "early": Piece(run=("a{k} = h.square().mean()", "h = h * 1.25"), adds="0.1 * a{k}"),
    # In other dtypes.
    "half": Piece(
        made=("self.w{k} = nn.Parameter(fill([4, 4], {k}).bfloat16())",),
        run=("h = h + (h.bfloat16() @ self.w{k}.bfloat16().T).tanh().type_as(h)",),
        least=16,
    ),
    "mixed": Piece(
        made=("self.w{k} = nn.Parameter(fill([4, 4], {k}).float())",),
        run=("h = h + (h.bfloat16() @ self.w{k}.bfloat16().T).tanh().type_as(h)",),
        least=16,
    ),
    "float": Piece(
        made=("self.w{k} = nn.Parameter(fill([4, 4], {k}).float())",),
        run=("h = h + F.linear(h.float(), self.w{k}.float()).tanh().type_as(h)",),
        least=32,
    ),
    # What is no row of the batch, from a layer to a later one.
    "mean": Piece(run=("m{k} = h.square().mean()", "h = h * 1.25")),
    "scaled": Piece(run=("h = h / (1 + m{of})",), of="mean"),
    "size": Piece(run=("n{k} = h.shape[0]", "h = h * 1.25")),
    "sized": Piece(run=("h = h * (n{of} / 4)",), of="size"),
    "mask": Piece(run=("b{k} = h > 0", "h = h * 1.25")),
    "masked": Piece(run=("h = h * b{of}",), of="mask"),
    "apart": Piece(run=("p{k}, t{k} = h.split([1, 3], -1)", "h = h * 1.25")),
    "doubled": Piece(
        run=("d{k} = torch.cat([h, 2 * h], -1).reshape(-1, 4).tanh()", "h = h * 1.25")
    ),
    "halved": Piece(run=("h = h + d{of}.reshape(-1, 2, 4).mean(1)",), of="doubled"),
    "joined": Piece(run=("h = h + torch.cat([t{of}, p{of}], -1)",), of="apart"),
    # Of other inputs.
    "turned": Piece(run=("h = h + turned.t()",), asks="turned"),
    "table": Piece(run=("h = torch.tanh(h @ table)",), asks="table"),
    "factor": Piece(run=("h = h * factor",), asks="factor"),
    "times": Piece(run=("h = h * times",), asks="times"),
    "extra": Piece(run=("h = h * 1.25 if extra is None else h + extra",), asks="extra"),
}
