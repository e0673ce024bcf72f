"""Models built under `piper.deferred_init` get the values of those built as usual, bit for bit.

Each builder runs twice from one seed. Values, layouts and what the generators give afterwards are
compared; steps that train from such values are in test_deferred_steps.py.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import deferred, recording
from piper_dynamo.pending import PendingBuffer, PendingParameter, source_of
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import build as build_llama
from tests import jobs

Builder = Callable[[], nn.Module]


def module(**tensors: Any) -> nn.Module:
    """A module of these parameters, buffers and children."""
    made = nn.Module()
    for name, value in tensors.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            made.register_buffer(name, value)
        else:
            setattr(made, name, value)
    return made


class Pretrained(nn.Module):
    """As libraries of pretrained models do it: children first, then a pass over all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in "ab")
        self.head = nn.Linear(6, 11, bias=False)
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.scale = nn.Parameter(torch.full((6,), self.rates[-1]))
        self.apply(self._init)
        for name, parameter in self.named_parameters():
            if name.endswith("0.weight"):
                parameter.data.normal_(mean=0.0, std=0.02 / 2)
        self.head.weight = self.embedding.weight

    def _init(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            part.weight.data.normal_(mean=0.0, std=0.02)
            if part.bias is not None:
                part.bias.data.zero_()
        elif isinstance(part, nn.Embedding):
            part.weight.data.normal_(mean=0.0, std=0.02)
            with torch.no_grad():
                part.weight[part.padding_idx].zero_()
        elif isinstance(part, nn.LayerNorm):
            part.weight.data.fill_(1.0 + self.rates[1])


class Copies(nn.Module):
    """Values that come from other parameters, which change before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.empty(4, 4))
        self.b.data.copy_(self.a)
        with torch.no_grad():
            self.a.mul_(2.0)
            self.a[1:3] += self.b[:2]
            self.a.t()[0] = 5.0
        self.c = nn.Parameter((self.a @ self.b).softmax(-1).detach())
        self.part = nn.Parameter(torch.randn(9, 4)[2:4])
        q, k = torch.randn(8, 4).chunk(2)
        self.q, self.k = nn.Parameter(q.clone()), nn.Parameter(k.contiguous().clone())
        self.moved = nn.Parameter(torch.zeros(4, 4))
        self.moved.data = self.q.data.to(torch.float64)


class Tables(nn.Module):
    """Buffers of all kinds, and tensors in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(5), 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))
        self.rotations = torch.polar(torch.ones_like(angles), angles)
        self.lists = {"masks": [torch.ones(3, 3).tril().bool(), torch.randn(2)]}
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("conjugate", self.rotations.conj().resolve_conj().real.clone())
        self.norm = nn.BatchNorm1d(3)


class Looks(nn.Module):
    """Looks at its own values while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 5))
        if self.w.detach()[0, 0] > 0:
            nn.init.ones_(self.w[1:2])
        self.largest = float(self.w.detach().abs().max())
        self.rows = self.w.detach().sum(1).tolist()
        self.array = nn.Parameter(torch.from_numpy(self.w.detach().numpy() * 2))
        with torch.no_grad():
            self.w[self.w > 1] = 1.0
            kept = self.w[self.w > 0]
            self.w.clamp_(max=self.largest / 2)
        self.kept = nn.Parameter(kept)
        self.unique = nn.Parameter(torch.unique((self.w * 2).round().detach()))


def of_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return module(
        attention=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
        encoder=nn.TransformerEncoder(layer, 2),
        decoder=nn.TransformerDecoderLayer(8, 2, 16),
        memory=nn.LSTM(4, 3, num_layers=2, bidirectional=True),
        convolution=nn.Conv2d(3, 4, 3),
        turned=nn.ConvTranspose1d(3, 4, 3),
        bilinear=nn.Bilinear(3, 4, 5),
        norm=nn.BatchNorm2d(4),
        slope=nn.PReLU(),
    )


def of_init() -> nn.Module:
    """Every function of nn.init that makes values."""
    calls: list[Callable[[Tensor], Any]] = [
        lambda w: nn.init.uniform_(w, -1, 2),
        lambda w: nn.init.normal_(w, 1, 2),
        lambda w: nn.init.trunc_normal_(w, std=0.5),
        lambda w: nn.init.constant_(w, 3),
        nn.init.eye_,
        nn.init.xavier_uniform_,
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        lambda w: nn.init.kaiming_normal_(w, mode="fan_out"),
        nn.init.orthogonal_,
        lambda w: nn.init.sparse_(w, 0.4),
    ]
    made = nn.ParameterList(torch.empty(7, 5) for _ in calls)
    for call, parameter in zip(calls, made, strict=True):
        call(parameter)
    cubic = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
    return module(all=made, cubic=cubic)


def of_generators() -> nn.Module:
    """Random numbers of all kinds, some from a generator of the user's, some of strange layouts."""
    own = torch.Generator().manual_seed(9)
    with_own = torch.randn(5, generator=own), torch.empty(3, 3).uniform_(generator=own)
    turned = torch.empty(6, 4).t()
    return module(
        own=nn.Parameter(with_own[0]),
        filled=nn.Parameter(with_own[1]),
        turned=nn.Parameter(turned.normal_()),
        strided=nn.Parameter(torch.zeros(6, 6)[::2, ::3].normal_().clone()),
        order=torch.randperm(9),
        like=torch.randn_like(turned),
        whole=torch.randint(0, 99, (5,)),
        flips=torch.bernoulli(torch.rand(40)),
        gamma=torch._standard_gamma(torch.rand(6) + 0.5),
        picks=torch.multinomial(torch.rand(8), 3),
        dropped=nn.functional.dropout(torch.ones(30)),
        mixed=torch.normal(torch.zeros(4), torch.rand(4)),
        python=torch.full((2,), random.random()),
    )


def of_parametrizations() -> nn.Module:
    return module(
        weight=nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)),
        spectral=nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4)),
        orthogonal=nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    )


def of_old_constructors() -> nn.Module:
    made = module(
        a=nn.Parameter(torch.Tensor(3, 4)), b=nn.Parameter(torch.FloatTensor(3).uniform_())
    )
    made.a.data.uniform_(-1, 1)
    made.c = nn.Parameter(made.a.data.new(2, 2).fill_(4))
    made.d = nn.Parameter(torch.tensor([1.5, 2.5]))
    return made


def cast() -> nn.Module:
    """Casts and copies of the whole, also where the device is named."""
    made = Pretrained().to(torch.bfloat16)
    made.twin = copy.deepcopy(made.blocks)
    made.to(made.head.weight.device, torch.float64)
    made.wide = nn.Parameter(made.scale.detach().cpu().to("cpu", copy=True))
    assert made.scale.device.type == "cpu"
    assert not made.scale.is_meta
    return made.double()


def llama(**options: Any) -> Builder:
    return lambda: build_llama(Config(dim=32, layers=2, heads=2, kv_heads=1, seq=8, **options))


FAMILIES: dict[str, Builder] = {
    "layers": of_layers,
    "init": of_init,
    "generators": of_generators,
    "parametrizations": of_parametrizations,
    "old constructors": of_old_constructors,
    "pretrained": Pretrained,
    "copies": Copies,
    "tables": Tables,
    "looks": Looks,
    "cast": cast,
    "llama": llama(),
    "tied": llama(tied_head=True, dtype="float64"),
    "experts": llama(model="moe", experts=4),
}


def both(builder: Builder) -> tuple[nn.Module, nn.Module]:
    """The model as usual, and built without memory and then given its values."""
    torch.manual_seed(3)
    random.seed(3)
    usual = builder()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    random.seed(3)
    with piper.deferred_init():
        made = builder()
    assert torch.equal(torch.get_rng_state(), after)
    assert any(source_of(p) is not None for p in made.parameters())
    piper.materialize(made)
    assert torch.equal(torch.get_rng_state(), after)
    return usual, made


def check_same(usual: nn.Module, made: nn.Module) -> None:
    """Values, dtypes, layouts, ties and classes."""

    def state(model: nn.Module) -> dict[str, Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False))
        return named | dict(model.named_buffers(remove_duplicate=False))

    want, got = state(usual), state(made)
    assert list(got) == list(want)
    for name, value in got.items():
        assert type(value) is type(want[name]), name
        assert value.dtype == want[name].dtype, name
        assert value.stride() == want[name].stride(), name
        assert value.requires_grad == want[name].requires_grad, name
        assert torch.equal(value.nan_to_num(), want[name].nan_to_num()), name
    ties = [[a for a, v in named.items() if v is named[b]] for named in (want, got) for b in named]
    assert ties[: len(want)] == ties[len(want) :]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_the_model_built_as_usual(family: str) -> None:
    check_same(*both(FAMILIES[family]))


def test_attributes_have_their_values_at_once() -> None:
    usual, made = both(Tables)
    assert torch.equal(usual.rotations, made.rotations)  # type: ignore[arg-type]
    for one, other in zip(usual.lists["masks"], made.lists["masks"], strict=True):  # type: ignore[index]
        assert torch.equal(one, other)


def test_any_one_value_is_made_alone() -> None:
    """In an order of its own, and again after other random numbers were drawn."""
    torch.manual_seed(3)
    want = dict(Copies().named_parameters())
    torch.manual_seed(3)
    with piper.deferred_init():
        made = Copies()
    for name, parameter in reversed(list(made.named_parameters())):
        torch.rand(5)
        source = source_of(parameter)
        assert source is not None
        assert source.view is not None
        assert torch.equal(recording.values(source.view), want[name])
        assert isinstance(parameter, PendingParameter)


def test_what_is_overwritten_is_forgotten() -> None:
    """Values that nothing comes from any more cost nothing: no state of a generator is kept."""
    with piper.deferred_init():
        layer = nn.Linear(4, 4)
        for _ in range(50):
            layer.weight.data.normal_()
            layer.weight.data.mul_(2)
    source = source_of(layer.weight)
    assert source is not None
    assert source.view is not None
    assert len(recording._needed(source.view.memory)) == 2


@pytest.mark.parametrize("broken", ["state", "order"])
def test_a_recording_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    if broken == "state":  # of the generator after the draw rather than before
        draw = deferred._draw

        def late(*given: Any) -> Tensor:
            draw(*given)
            return torch.get_rng_state()

        monkeypatch.setattr(deferred, "_draw", late)
    else:  # every write is taken to leave nothing of what was there
        monkeypatch.setattr(
            deferred,
            "_overwrites",
            lambda func, written: recording.memory_of(written[0]) if written else None,
        )
    with pytest.raises((AssertionError, piper.PiperError)):
        check_same(*both(Copies))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.table)  # type: ignore[no-any-return]


def pending() -> Plain:
    with piper.deferred_init():
        return Plain()


def test_a_parameter_without_values_is_not_touched_by_mistake() -> None:
    model = pending()
    told = jobs.touched(
        {
            "print": lambda m: str(m.linear.weight),
            "arithmetic": lambda m: m.linear.weight * 2,
            "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
            "state_dict": lambda m: m.state_dict(),
            "call": lambda m: m.linear(torch.ones(3)),
            "cast": lambda m: m.double(),
            "numpy": lambda m: m.linear.weight.detach().numpy(),
        },
        model,
    )
    for text in told.values():
        jobs.mentions(text, "linear.weight", "deferred_init", "piper.materialize")
    weight = model.linear.weight
    assert weight.shape == (2, 3)
    assert weight.dtype == torch.float32
    assert str(weight.device) == "cpu"
    assert weight.numel() == 6
    weight.requires_grad_(False)
    model.linear.bias.requires_grad = False
    piper.materialize(model)
    assert not weight.requires_grad
    assert not model.linear.bias.requires_grad
    assert isinstance(model.linear(torch.ones(3)), Tensor)


def test_a_buffer_is_made_when_it_is_touched() -> None:
    model = pending()
    table: Any = model.table
    assert type(table) is PendingBuffer
    assert torch.equal(table + 1, torch.arange(3.0) + 1)
    assert type(table) is Tensor
    table.add_(1)
    assert torch.equal(model.table, torch.arange(3.0) + 1)  # type: ignore[arg-type]


def test_one_device_needs_values() -> None:
    text = jobs.refusal(lambda: torch.compile(pending(), backend="piper")(torch.ones(3)), Exception)
    jobs.mentions(text, "without a strategy", "linear", "piper.materialize")


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.other = nn.Parameter(layer.weight.data)
    return layer


def hooked() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.register_hook(lambda grad: grad)
    return layer


LARGE = torch.ones(2**19)


def changed_constant() -> None:
    copied = torch.empty(2**19)
    copied.copy_(LARGE)
    LARGE.add_(1)
    copied.sum().item()


def data_of_one_with_memory() -> None:
    REAL.data = torch.zeros(1)


BARE = torch.ones(3, device="meta")
REAL = nn.Parameter(torch.ones(1))
REFUSED: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "pointer": (lambda: nn.Linear(2, 2).weight.data_ptr(), ("test_deferred.py", "data_ptr")),
    "storage": (lambda: torch.ones(2).share_memory_(), ("test_deferred.py", "share_memory")),
    "lazy": (lambda: nn.LazyLinear(3), ("weight", "first call")),
    "shared": (shared, ("weight", "other", "share memory", "assigning the parameter")),
    "hook": (hooked, ("weight", "hook")),
    "constant": (changed_constant, ("test_deferred.py", "changed in place", "clone")),
    "meta": (lambda: torch.ones(3).add_(BARE), ("test_deferred.py", "meta device")),
    "meta asked for": (lambda: nn.Linear(2, 2, device="meta"), ("test_deferred.py", "on meta")),
    "data": (data_of_one_with_memory, ("test_deferred.py", ".data")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recorded_is_refused_with_its_line(case: str) -> None:
    call, words = REFUSED[case]

    def build() -> None:
        with piper.deferred_init():
            holder = call()
        del holder

    jobs.mentions(jobs.refusal(build), *words)


def test_arrays_cannot_be_written_to() -> None:
    with piper.deferred_init():
        layer = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="read-only"):
            layer.weight.detach().numpy()[0] = 1


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), piper.deferred_init():
        nn.Linear(2, 1 // 0)
    assert not nn.modules.module._global_parameter_registration_hooks
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    assert torch.ones(2).sum().item() == 2
