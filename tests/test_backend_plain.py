"""Without a strategy: a correct backend for any model on one device."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import jobs
from tests.models import (
    Branching,
    Checkpointed,
    Counter,
    Custom,
    NormNet,
    Odd,
    Outputs,
    Printing,
    Rich,
    Stack4,
    TiedLM,
    rows,
    weights,
    xin,
)

# torch's own, while Dynamo traces: it makes an instance of a custom Function, and reads `.grad` of
# what a graph break leaves behind. The same warnings come with backend="eager".
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def plain(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="piper", **options)


def same_gradients(got: nn.Module, want: nn.Module) -> None:
    expected = dict(want.named_parameters())
    for name, p in got.named_parameters():
        other = expected[name].grad
        assert (p.grad is None) == (other is None), name
        if p.grad is not None:
            jobs.close(p.grad, other, f"gradient of {name}")


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (Stack4, rows(8)),
        (TiedLM, TiedLM.batch()),
        (Custom, rows(8)),
        (Checkpointed, rows(8)),
        (NormNet, rows(8)),
        (lambda: Counter((1,)), rows(8)),
        (Odd, TiedLM.batch()),
    ],
)
def test_losses_gradients_and_buffers(
    build: Callable[[], nn.Module], batch: tuple[Tensor, ...]
) -> None:
    """Annotations mean nothing; mutated buffers, ties and missing gradients are as in eager."""
    model, want = build(), build()
    step = plain(model)
    for _ in range(2):
        got, expected = step(*batch), want(*batch)
        jobs.close(got.detach(), expected.detach(), "loss")
        got.backward()
        expected.backward()
    same_gradients(model, want)
    for name, buffer in model.named_buffers():
        jobs.close(buffer, dict(want.named_buffers())[name], f"buffer {name}")


@pytest.mark.xfail(
    torch.__version__ < "2.14",  # 2.11 is the oldest that is supported
    strict=True,
    reason="torch before 2.14 drops updates of 0-dim float64 CPU buffers, in aot_eager too",
)
def test_a_float64_buffer_without_dims() -> None:
    model = Counter()
    plain(model)(*rows(8))
    assert model.count.item() == 1


@dataclasses.dataclass
class Pair:
    """A user's own output type."""

    left: Tensor
    right: Tensor | None


torch.utils._pytree.register_dataclass(Pair)


class Structures(nn.Module):
    """Every kind of output structure, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weights(2)

    def forward(self, x: Tensor, kind: str) -> Any:
        h = torch.tanh(x @ self.w[0].T)
        k = h @ self.w[1].T
        match kind:
            case "tensor":
                return h
            case "tuple":
                return h, k
            case "list":
                return [h, (k, None), 3, "text", True]
            case "dict":
                return {"h": h, "inner": {"k": k, "none": None}}
            case "dataclass":
                return Pair(h, None)
            case "view":
                return h, h[0], h.T
            case "input":
                return x, h
            case "twice":
                return h, h
            case "scalar":
                return h.sum(), k.mean()
            case _:
                return None


@pytest.mark.parametrize(
    "kind",
    ["tensor", "tuple", "list", "dict", "dataclass", "view", "input", "twice", "scalar", "none"],
)
def test_output_structures(kind: str) -> None:
    model, want = Structures(), Structures()
    got, expected = plain(model)(xin([4, 4], 0), kind), want(xin([4, 4], 0), kind)
    assert type(got) is type(expected)
    flat, spec = torch.utils._pytree.tree_flatten(got)
    wanted, wanted_spec = torch.utils._pytree.tree_flatten(expected)
    assert spec == wanted_spec
    for one, other in zip(flat, wanted, strict=True):
        if not isinstance(other, Tensor):
            assert one == other
            continue
        assert one.requires_grad == other.requires_grad
        jobs.close(one.detach(), other.detach(), kind)
    for tensors in (flat, wanted):
        used = [t.square().sum() for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        if used:
            torch.stack(used).sum().backward()
    same_gradients(model, want)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda out: out["nested"]["loss"], id="one"),
        pytest.param(lambda out: out["nested"]["loss"] + 2 * out["early"], id="both"),
        pytest.param(lambda out: out["logits"].square().sum(), id="a tensor"),
    ],
)
def test_several_losses(use: Callable[[Any], Tensor]) -> None:
    model, want = Outputs(two_losses=True), Outputs(two_losses=True)
    use(plain(model)(*rows(8))).backward()
    use(want(*rows(8))).backward()
    same_gradients(model, want)


def test_inputs_of_any_kind_and_a_changing_int() -> None:
    model, want = Rich(), Rich()
    step = plain(model)
    mask = (xin([8, 4], 2) > 0).double()
    for kwargs in ({}, {"n": 5}, {"mask": mask, "n": 4, "flag": False}):
        got, expected = step(xin([8, 4], 0), **kwargs), want(xin([8, 4], 0), **kwargs)
        assert got["n"] == expected["n"]
        assert got["extra"][1][1] is None
        jobs.close(got["extra"][0].detach(), expected["extra"][0].detach(), "extra")
        got["loss"].backward()
        expected["loss"].backward()
    same_gradients(model, want)


def test_gradient_of_an_input() -> None:
    x, y = rows(8)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(Stack4())(ours, y).backward()
    Stack4()(theirs, y).backward()
    assert ours.grad is not None
    jobs.close(ours.grad, theirs.grad, "gradient of x")


def test_no_grad_is_forward_only() -> None:
    model = Stack4()
    step = plain(model)
    with torch.no_grad():
        loss = step(*rows(8))
    assert not loss.requires_grad
    jobs.close(loss, Stack4.LOSS, "loss", 1e-12)
    step(*rows(8)).backward()
    with torch.no_grad():
        jobs.close(step(*rows(4)), Stack4()(*rows(4)).detach(), "loss of 4 rows")
    assert model.w[0].grad is not None
    assert model.w[0].grad.norm().item() == pytest.approx(Stack4.NORMS[0], abs=1e-10)


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_may_change(dynamic: bool | None) -> None:
    model, want = Stack4(), Stack4()
    step = plain(model, dynamic=dynamic)
    for size in (8, 5, 1, 12, 3):
        got, expected = step(*rows(size)), want(*rows(size))
        jobs.close(got.detach(), expected.detach(), f"loss of {size} rows")
        got.backward()
        expected.backward()
    same_gradients(model, want)


@pytest.mark.parametrize("build", [Printing, Branching])
def test_graph_breaks_work(build: Callable[[], nn.Module]) -> None:
    model, want = build(), build()
    step = plain(model)
    for sign in (1, -1):
        x, y = rows(8)
        step(sign * x, y).backward()
        want(sign * x, y).backward()
    same_gradients(model, want)


def test_one_compilation_per_grad_mode_and_shape() -> None:
    counted = torch._dynamo.utils.counters
    step = plain(Stack4())
    counted.clear()
    for _ in range(3):
        step(*rows(8)).backward()
        with torch.no_grad():
            step(*rows(8))
    assert counted["stats"]["unique_graphs"] == 2


def test_retained_graph_and_two_backwards() -> None:
    """With no strategy the loss is an ordinary one."""
    model, want = Stack4(), Stack4()
    for use in (plain(model), want):
        loss = use(*rows(8))
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(model, want)


def test_dropout_follows_the_seed() -> None:
    step = plain(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(step(torch.ones(4, 4)).detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_functions_and_submodules_compile_too() -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return F.softmax(a @ b, -1)

    a, b = xin([3, 4], 0), xin([4, 5], 1)
    jobs.close(torch.compile(f, backend="piper")(a, b), f(a, b), "function")


@pytest.mark.dist(2)
def test_the_entry_point_needs_no_import() -> None:
    """`backend="piper"` in a process that never imports the package by itself."""
    script = (
        "import torch; from torch import nn\n"
        "m = nn.Linear(3, 2); x = torch.ones(4, 3)\n"
        "torch.testing.assert_close(torch.compile(m, backend='piper')(x), m(x)); print('same')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if "Invalid backend: 'piper'" in done.stderr:
        pytest.skip("the distribution is not installed; a bare checkout has no entry points")
    assert done.stdout.strip() == "same", done.stderr
