"""Plain state dicts from memory and from files, loaded into whatever a rank holds."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import weights
from tests import jobs, replicas
from tests.jobs import LINE2
from tests.models import rows
from tests.replicas import LINE


def library() -> Any:
    """The optional library; where it is missing, a test that needs it is skipped."""
    return pytest.importorskip("safetensors.torch")


class Pair(nn.Module):
    """Two stages with a buffer each, one of them not in a state dict."""

    def __init__(self, stages: int = 2) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in "ab")
        self.register_buffer("table", torch.ones(4, dtype=torch.float64))
        self.register_buffer("scale", torch.full((4,), 0.5, dtype=torch.float64), persistent=False)
        self.stages = stages

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.a(x)) * self.table
        with piper.annotate("PP", self.stages - 1):
            return (self.b(h) * self.scale - y).square().mean()


def trained(make: Callable[[], nn.Module] = Pair) -> nn.Module:
    """Values that no model starts with."""
    torch.manual_seed(11)
    model = make()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(torch.rand_like(value))
    return model


def as_torch(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def as_safetensors(state: dict[str, Tensor], folder: Path) -> Path:
    library().save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_index(state: dict[str, Tensor], folder: Path) -> Path:
    """Two files and which of them holds what."""
    where = {name: f"part-{k % 2}.safetensors" for k, name in enumerate(state)}
    for file in sorted(set(where.values())):
        part = {name: value for name, value in state.items() if where[name] == file}
        library().save_file(part, folder / file)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


WRITERS: dict[str, Callable[[dict[str, Tensor], Path], Any]] = {
    "dict": lambda state, folder: state,
    "torch": as_torch,
    "safetensors": as_safetensors,
    "index": as_index,
}


def loaded(
    source: Any, *, zero: int, make: Callable[[], nn.Module] = Pair, strict: bool = True
) -> list[Any]:
    """What each rank has after loading: parameters, buffers and the loss of a step."""
    batch = rows(8)

    def job() -> tuple[dict[str, Tensor], dict[str, Tensor], float, Any]:
        model = make()
        wanted = replicas.strategy(LINE, 2, zero=zero)
        step = piper.compile(model, wanted, example_inputs=replicas.mine(batch, LINE))
        told = piper.load_state_dict(step, source, strict=strict)
        loss = step(*replicas.mine(batch, LINE)).item()
        return replicas.held(step), dict(model.named_buffers()), loss, told

    return jobs.run_ranks(job, 4)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_rank_loads_what_it_holds(tmp_path: Path, kind: str) -> None:
    model = trained()
    model.scale.fill_(0.5)  # not in a state dict  # type: ignore[operator, union-attr]
    source = WRITERS[kind](model.state_dict(), tmp_path)
    whole = dict(model.named_parameters())
    for rank, (held, buffers, loss, told) in enumerate(loaded(source, zero=3)):
        assert told == ([], [])
        assert set(held) == {f"{'ab'[rank // 2]}.{part}" for part in ("weight", "bias")}
        for name, value in held.items():
            assert torch.equal(value, replicas.part_of(whole[name], rank, LINE, 3)), name
        for name, value in model.named_buffers():
            assert torch.equal(buffers[name], value), name
        assert loss == pytest.approx(model(*rows(8)).item(), abs=1e-12)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_no_rank_reads_what_it_does_not_hold(
    kind: str, zero: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are asked for: the rank's parameters, or its rows of them, and the buffers."""
    asked: dict[int, int] = {}

    def counting(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            found = read(*args)
            asked[piper.rank()] = asked.get(piper.rank(), 0) + found.nbytes
            return found

        return run

    for reader in (weights._Mapped, weights._Safe):
        for name in ("rows", "whole"):
            monkeypatch.setattr(reader, name, counting(getattr(reader, name)))
    model = trained()
    source = WRITERS[kind](model.state_dict(), tmp_path)
    for rank, (held, *_) in enumerate(loaded(source, zero=zero)):
        own = sum(value.nbytes for value in held.values())
        assert asked[rank] == own + model.table.nbytes  # type: ignore[operator, union-attr]
    layer = sum(value.nbytes for value in model.a.parameters())  # type: ignore[union-attr]
    blocks = layer if zero == 0 else layer / 2
    assert set(asked.values()) == {blocks + 4 * 8}


def test_a_model_on_the_meta_device_takes_a_file(tmp_path: Path) -> None:
    """But a buffer that is in no state dict stays without values, and is named."""

    def bare() -> nn.Module:
        with torch.device("meta"):
            return Pair()

    path = as_torch(trained().state_dict(), tmp_path)
    text = jobs.refusal(lambda: loaded(path, zero=0, make=bare))
    jobs.mentions(text, "meta device", "scale", "deferred_init")
    assert "weight" not in text.partition("hint")[0]


def test_loaded_values_replace_those_that_are_still_to_come(tmp_path: Path) -> None:
    def deferred() -> nn.Module:
        with piper.deferred_init():
            return Pair()

    model = trained()
    path = as_safetensors(model.state_dict(), tmp_path)
    for _, buffers, *_ in loaded(path, zero=1, make=deferred):
        assert torch.equal(buffers["table"], model.table)  # type: ignore[arg-type]


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    """As safetensors write models: each memory once."""
    model = Twice()
    with torch.no_grad():
        model.a.weight.add_(1.5)
    library().save_model(model, str(tmp_path / "tied.safetensors"))
    batch = rows(8)

    def job() -> list[Tensor]:
        step = piper.compile(Twice(), jobs.strategy(LINE2, 2), example_inputs=batch)
        assert piper.load_state_dict(step, tmp_path / "tied.safetensors") == ([], [])
        return list(jobs.held(step).values())

    for (value,) in jobs.run_ranks(job, 2):
        assert torch.equal(value, model.a.weight)


class Twice(nn.Module):
    """One weight on both stages, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.constant_(self.a.weight, 0.25)
        self.b = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.a(x))
        with piper.annotate("PP", 1):
            return (self.b(h) - y).square().mean()


def changed(**changes: Any) -> dict[str, Any]:
    """The state dict with values replaced, and those that are None left out."""
    return {n: v for n, v in (trained().state_dict() | changes).items() if v is not None}


def test_what_does_not_fit_by_name_is_left_out_when_asked() -> None:
    source = changed(**{"a.weight": None, "other": torch.ones(1)})
    for *_, told in loaded(source, zero=0, strict=False):
        assert told == (["a.weight"], ["other"])


def broken_file(folder: Path) -> Path:
    library()
    (folder / "weights.safetensors").write_bytes(b"no tensors here at all")
    return folder / "weights.safetensors"


def old_format(folder: Path) -> Path:
    torch.save({"a": torch.ones(1)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


class Unsafe:
    """Something that a file of tensors must not hold."""


def pickled(folder: Path) -> Path:
    torch.save({"a": Unsafe()}, folder / "unsafe.pt")
    return folder / "unsafe.pt"


REFUSED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "names": (
        lambda folder: changed(**{"a.weight": None, "a.weigth": torch.ones(4, 4)}),
        ("no value for a.weight", "there is a.weigth", "nothing is named a.weigth", "strict=False"),
    ),
    "shape": (lambda folder: changed(**{"b.bias": torch.ones(3)}), ("b.bias", "(4,)", "(3,)")),
    "nested": (
        lambda folder: as_torch({"model": {}, "step": 3}, folder),
        ("model, step", '["model"]'),
    ),
    "list": (lambda folder: as_torch([1], folder), ("holds a list", "state dict")),
    "missing": (lambda folder: folder / "none.pt", ("none.pt", "missing")),
    "folder": (lambda folder: folder, ("a folder", ".index.json")),
    "safetensors": (broken_file, ("weights.safetensors", "cannot be read")),
    "format": (old_format, ("old.pt", "torch.save")),
    "pickle": (pickled, ("unsafe.pt", "nothing in the file is run")),
    "index": (lambda folder: write(folder / "a.index.json", "{}"), ("weight_map",)),
    "kind": (lambda folder: 7, ("int", "path")),
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_state_dict_of_this_model_is_refused(tmp_path: Path, case: str) -> None:
    source, words = REFUSED[case]
    given = source(tmp_path)

    def job() -> str:
        step = piper.compile(Pair(), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        return jobs.refusal(lambda: piper.load_state_dict(step, given))

    for text in jobs.run_ranks(job, 2):  # alike on every rank: none is left waiting
        jobs.mentions(text, *words)


def test_a_step_that_is_not_prepared_loads_whole_values() -> None:
    want = trained().state_dict()
    model = Pair()
    step = torch.compile(model, backend="piper")
    jobs.mentions(jobs.refusal(lambda: piper.load_state_dict(step, {})), "no value for a.weight")
    piper.load_state_dict(step, want)
    for name, value in model.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_safetensors_are_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_safetensors(trained().state_dict(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    step = piper.compile(Pair(), jobs.strategy({0: [0], 1: [0]}, 2), example_inputs=rows(8))
    jobs.mentions(
        jobs.refusal(lambda: piper.load_state_dict(step, path)), "pip install", "safetensors"
    )
