"""Patterns by which backends of torch.compile are tried: calls of functions and modules."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import xin

Pair = namedtuple("Pair", "left right")
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], list[Call]]] = {}


def case(make: Callable[[], Any]) -> Callable[[], Any]:
    """A case gives a callable and one or more calls of it: fresh at every time."""
    CASES[make.__name__] = make
    return make


def x(*shape: int, key: int = 0, grad: bool = True) -> Tensor:
    """An input."""
    return xin(shape or (3, 4), key).requires_grad_(grad)


def on(fn: Callable[..., Any], *calls: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """A callable, and the arguments of its calls."""
    return fn, [(call if isinstance(call, tuple) else (call,), kwargs) for call in calls]


# Arguments and results


@case
def keyword_arguments():
    return on(
        lambda a, *, scale=2.0, bias=None: a * scale + (0 if bias is None else bias), x(), bias=x(4)
    )


@case
def numbers_that_change():
    return on(
        lambda a, n, s: a * n + s, (x(), 2, 0.5), (x(), 3, 0.5), (x(), 3, 1.5), (x(), 4, -1.0)
    )


@case
def flags_and_texts():
    return on(
        lambda a, kind: a.relu() if kind == "relu" else a.tanh(), (x(), "relu"), (x(), "tanh")
    )


@case
def variable_arguments():
    return on(lambda *parts, **named: sum(parts) * named["by"], (x(), x(key=1), x(key=2)), by=x(4))


@case
def nested_inputs():
    def fn(batch):
        return batch["a"][0] @ batch["b"]["c"].T + batch["a"][1]

    return on(fn, ({"a": [x(), 2.0], "b": {"c": x(key=1)}},))


@case
def dict_outputs():
    return on(
        lambda a: {"logits": a.tanh(), "aux": {"n": 3, "none": None, "t": (a.sum(), "text")}}, x()
    )


@case
def named_tuples():
    return on(lambda pair: Pair(pair.right * 2, pair.left), (Pair(x(), x(key=1)),))


@case
def no_tensors_at_all():
    return on(lambda a: (None, 3, "text", a.shape[0]), x())


@case
def the_same_input_twice():
    a = x()
    return on(lambda a, b: a * 2 + b.sin(), (a, a))


# Changes in place


@case
def an_input_changes():
    return on(lambda a: a.add_(1).sum(), x(grad=False), x(grad=False))


@case
def a_view_of_an_input_changes():
    def fn(a):
        a[0].mul_(2)
        a.view(-1)[3:5] = 7.0
        return a * 2

    return on(fn, x(grad=False))


@case
def an_input_changes_and_is_returned():
    return on(lambda a: a.mul_(2), x(grad=False))


@case
def inputs_share_memory_and_one_changes():
    a = x(grad=False)
    return on(lambda a, b: (a.add_(1), b * 2)[1], (a, a.view(-1)))


@case
def a_copy_changes():
    def fn(a):
        b = a.clone()
        b[:, 1] = 0
        b.mul_(a.detach())
        return b.exp_()

    return on(fn, x())


@case
def shapes_change_in_place():
    def fn(a):
        b = a.clone()
        b.unsqueeze_(0).transpose_(0, 1)
        return b

    return on(fn, x())


@case
def index_puts():
    def fn(a, index):
        b = torch.zeros(5, 4, dtype=a.dtype)
        b.index_add_(0, index, a)
        b.index_put_((index,), a, accumulate=True)
        return b.scatter_add(0, index[:, None].expand(3, 4), a)

    return on(fn, (x(), torch.tensor([0, 4, 0])))


@case
def an_out_argument():
    def fn(a, out):
        torch.mul(a, 2, out=out)
        return out + 1

    return on(fn, (x(grad=False), torch.zeros(3, 4, dtype=torch.float64)))


@case
def foreach_operators():
    def fn(a, b):
        torch._foreach_mul_([a, b], 2.0)
        return a + b

    return on(fn, (x(grad=False), x(key=1, grad=False)))


# Views and memory that outputs share


@case
def views_of_an_input():
    return on(lambda a: (a[0], a.T, a.view(2, 6), a[:, 1:3], a.unsqueeze(1).expand(3, 2, 4)), x())


@case
def an_input_itself():
    return on(lambda a, b: (a, b, a), (x(), x(key=1, grad=False)))


@case
def views_of_a_result():
    def fn(a):
        h = a * 2
        return h, h[0], h.T, h.view(-1)

    return on(fn, x())


@case
def the_same_result_twice():
    def fn(a):
        h = a.sin()
        return [h, h, (h,)]

    return on(fn, x())


@case
def a_detached_result():
    def fn(a):
        h = a.sin()
        return h.detach(), h, h.detach()[0]

    return on(fn, x())


@case
def splits_and_stacks():
    def fn(a):
        parts = a.split([1, 3], dim=1) + a.chunk(2) + a.unbind(0)
        return torch.cat([p.flatten() for p in parts]), parts[0], torch.stack([a, a], -1)

    return on(fn, x())


@case
def strided_inputs():
    return on(
        lambda a, b: (a @ b, a.contiguous(), b.reshape(-1)),
        (x(4, 3).detach().T.requires_grad_(), x(4, 6).detach()[:, ::2].requires_grad_()),
    )


@case
def expanded_inputs():
    return on(lambda a: a * 2 + a.sum(0), x(1, 4).detach().expand(3, 4).requires_grad_())


@case
def channels_last():
    conv = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
    images = xin((2, 3, 4, 4), 0).to(memory_format=torch.channels_last).requires_grad_()
    return on(conv, images)


@case
def as_strided():
    return on(lambda a: a.as_strided((2, 2), (4, 2), 1) * 3, x())


# Dtypes and sizes


@case
def complex_numbers():
    def fn(a):
        z = torch.fft.fft(a)
        w = z * z.conj() + torch.view_as_complex(torch.stack([a, a], -1))
        return torch.view_as_real(w), w.abs(), w.real, w.imag.sum()

    return on(fn, x())


@case
def complex_parameters():
    weight = nn.Parameter(torch.complex(xin((4, 4), 0), xin((4, 4), 1)))
    return on(Holding(lambda self, a: (a.to(self.w.dtype) @ self.w).abs().sum(), w=weight), x())


@case
def rotary_positions():
    def fn(a):
        angle = torch.outer(torch.arange(3, dtype=a.dtype), 1.0 / torch.arange(1, 3, dtype=a.dtype))
        turn = torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(torch.view_as_complex(a.unflatten(-1, (2, 2))) * turn).flatten(1)

    return on(fn, x())


@case
def empty_tensors():
    def fn(a, b):
        return a @ b, torch.cat([a, a]), a.sum(), a.sum(0), F.softmax(a, -1), b[:0] * 2

    return on(fn, (x(0, 4), x(4, 2)), (x(0, 4), x(4, 2)))


@case
def empty_parameters():
    return on(
        Holding(
            lambda self, a: (a.sum() + self.w.sum(), self.w * 2), w=nn.Parameter(torch.zeros(0, 3))
        ),
        x(),
    )


@case
def numbers_without_dims():
    return on(lambda a: (a.sum() * torch.tensor(2.0), a.max(), a[0, 0]), x())


@case
def half_precision():
    return on(lambda a: (a.bfloat16() @ a.T.bfloat16()).float() + a.half().sum().float(), x())


@case
def autocast():
    def fn(a):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.linear(a, a) + 1

    return on(fn, x(3, 4).detach().float().requires_grad_())


@case
def integers_and_bools():
    def fn(ids, mask):
        return (
            ids * 2 + mask,
            ids.bool() & mask,
            torch.where(mask, ids, -1),
            ids // 3,
            ids.float().mean(),
        )

    return on(fn, (torch.arange(12).view(3, 4), torch.arange(12).view(3, 4) % 2 == 0))


@case
def sizes_that_change():
    def fn(a):
        return a.view(a.shape[0], -1, 2).sum(1), a.new_zeros(a.shape[0]), a.shape[0] * a.numel()

    return on(fn, *(x(n, 4) for n in (5, 1, 8, 3)))


@case
def several_sizes_that_change():
    return on(
        lambda a, b: F.pad(a @ b, (0, a.shape[0])).cumsum(0),
        *((x(n, m), x(m, n, key=1)) for n, m in ((2, 3), (4, 5), (5, 5), (1, 7))),
    )


@case
def values_decide_sizes():
    return on(lambda a: (a[a > 0], a.nonzero().shape[0], torch.unique(a)), x(grad=False))


# Random numbers


@case
def dropout():
    return on(
        Holding(
            lambda self, a: F.dropout(a @ self.w, 0.5, self.training),
            w=nn.Parameter(xin((4, 4), 1)),
        ),
        x(),
        x(),
    )


@case
def random_results():
    def fn(a):
        return (
            torch.rand_like(a) + a,
            torch.randn(3),
            torch.randint(0, 9, (2,)),
            torch.bernoulli(a.sigmoid()),
        )

    return on(fn, x(), x())


@case
def random_in_place():
    return on(lambda a: (a.normal_(), torch.randperm(5), a.uniform_(0, 1) * 2), x(grad=False))


# Modes and autograd


@case
def evaluation():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double().eval()
    return on(model, x(), x(key=1))


@case
def training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    return on(model, x(), x(key=1), x(5, 4))


@case
def grad_mode_inside():
    def fn(a):
        with torch.no_grad():
            b = a * 2
        with torch.enable_grad():
            c = a.sin()
        return b + c, b

    return on(fn, x())


@case
def inference_mode_inside():
    def fn(a):
        with torch.inference_mode():
            b = a.sum() * 2
        return a.sin(), b.clone()

    return on(fn, x(grad=False))


class Cubed(torch.autograd.Function):
    """A backward of its own, five times too large, with a result that has no gradient."""

    @staticmethod
    def forward(ctx, a, by):
        ctx.save_for_backward(a)
        ctx.by = by
        found = a.argmax()
        ctx.mark_non_differentiable(found)
        return a**3, found

    @staticmethod
    def backward(ctx, grad, _):
        (a,) = ctx.saved_tensors
        return grad * a * a * ctx.by, None


@case
def custom_functions():
    return on(lambda a: Cubed.apply(a * 2, 5.0), x())


@case
def checkpoints():
    from torch.utils.checkpoint import checkpoint

    return on(
        lambda a: checkpoint(lambda b: (b.sin() @ b.T).tanh(), a, use_reentrant=False) + 1, x()
    )


@case
def gradients_inside():
    return on(lambda a: torch.func.grad(lambda b: (b.sin() ** 2).sum())(a) * a, x())


@case
def vmapped():
    return on(lambda a, b: torch.func.vmap(lambda v: v @ b)(a), (x(), x(4, 2, key=1)))


@case
def branches_by_cond():
    def fn(a):
        return torch.cond(a.sum() > 0, lambda b: b.sin(), lambda b: b.cos(), (a,))

    return on(fn, x(), -x(key=3).detach())


@case
def hooks():
    def fn(a):
        h = a.sin()
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 3)
        return h * 2

    return on(fn, x())


@case
def module_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return on(model, x())


# Modules


class Holding(nn.Module):
    """A function of a module with these tensors."""

    def __init__(self, fn, **tensors):
        super().__init__()
        self.fn = fn
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(self, *args, **kwargs):
        return self.fn(self, *args, **kwargs)


@case
def buffers_change():
    def fn(self, a):
        self.mean.mul_(0.9).add_(a.detach().mean(0), alpha=0.1)
        self.steps.add_(1)
        return a - self.mean

    return on(Holding(fn, mean=torch.zeros(4).double(), steps=torch.zeros(1)), x(), x(key=1))


@case
def buffers_are_replaced():
    def fn(self, a):
        self.mean = self.mean * 0.5 + a.detach().mean(0)
        return a * self.mean

    return on(Holding(fn, mean=torch.zeros(4).double()), x(), x(key=1))


@case
def attributes_change():
    def fn(self, a):
        self.calls = getattr(self, "calls", 0) + 1
        self.last = a.detach() * 2
        return a * self.calls

    return on(Holding(fn), x(), x(key=1))


@case
def tied_and_frozen_parameters():
    weight = nn.Parameter(xin((4, 4), 2))
    frozen = nn.Parameter(xin((4,), 3), requires_grad=False)
    return on(
        Holding(lambda self, a: a @ self.w @ self.v.T + self.b, w=weight, v=weight, b=frozen), x()
    )


@case
def a_parameter_itself():
    return on(
        Holding(lambda self, a: (self.w, self.w[1:], a + self.w), w=nn.Parameter(xin((4,), 2))), x()
    )


@case
def recurrent():
    model = nn.GRU(4, 3, batch_first=True).double()
    return on(model, x(2, 5, 4), x(2, 5, 4, key=1))


@case
def attention_with_weights():
    return on(nn.MultiheadAttention(4, 2, batch_first=True).double(), (x(2, 3, 4),) * 3)


# Python around tensors


@case
def graph_breaks():
    def fn(a):
        b = a.sin()
        torch._dynamo.graph_break()
        if b.sum() > 0:
            b = b * 2
        return b, b.sum().item()

    return on(fn, x(), -x(key=2).detach())


@case
def generators_and_closures():
    scale = x(4, key=5)

    def fn(a):
        return sum(h for h in (a * k for k in range(3))), [scale * a for _ in range(2)][-1]

    return on(fn, x())


@case
def errors_pass():
    def fn(a):
        if a.shape[0] == 3:
            raise ValueError("three rows")
        return a * 2

    return on(fn, x(2, 4), x(3, 4), x(4, 4))
