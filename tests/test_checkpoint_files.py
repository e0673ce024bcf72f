"""A checkpoint folder: replaced whole or not at all, checked when read, never unpickled."""

import os
import pickle
import signal
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import piper_dynamo as piper
from piper_dynamo import _torch_compat as compat
from piper_dynamo.checkpoint import files
from tests import jobs
from tests.resuming import MIXED, Alone


def start(folder: Path, steps: int = 1) -> Alone:
    """A run that has saved once."""
    run = Alone.start(MIXED)
    run.train(0, steps)
    run.save(folder, extra={"steps": steps})
    return run


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def check_unchanged(run: Alone, before: dict[str, torch.Tensor]) -> None:
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not run.optimizer.state


def refused(folder: Path) -> str:
    """What a fresh run that loads this is told; it must stay as it was."""
    run = Alone.start(MIXED)
    before = values(run.model)
    text = jobs.refusal(lambda: run.load(folder))
    check_unchanged(run, before)
    return text


# Killed at any moment


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(act: Callable[[], None]) -> int:
    """How a copy of this process that does `act` ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


MOMENTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "while data is written": lambda patch: patch.setattr(files, "_alone", lambda value: die()),
    "before the files are complete": lambda patch: patch.setattr(
        files, "_check_files", lambda *args: die()
    ),
    "while the metadata is written": lambda patch: patch.setattr(
        files.pickle, "dump", lambda metadata, file: (file.write(b"\x80"), file.flush(), die())
    ),
    "before the rename": lambda patch: patch.setattr(Path, "replace", lambda *args: die()),
    "after the rename": lambda patch: patch.setattr(files, "_sync", lambda folder: die()),
    "while old files are removed": lambda patch: patch.setattr(
        Path, "unlink", lambda *args, **options: die()
    ),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(moment: str, tmp_path: Path) -> None:
    run = start(tmp_path, 1)
    run.train(1, 1)

    def act() -> None:
        MOMENTS[moment](pytest.MonkeyPatch())
        run.save(tmp_path, extra={"steps": 2})

    assert os.WTERMSIG(in_a_child(act)) == signal.SIGKILL
    done = 2 if moment in ("after the rename", "while old files are removed") else 1
    again = Alone.start(MIXED)
    assert again.load(tmp_path) == {"steps": done}
    want = Alone.start(MIXED).train(0, 4)
    jobs.close(again.train(done, 2), want[done : done + 2], moment, 1e-12)
    again.save(tmp_path, extra={"steps": done + 2})  # and clears what the killed one left
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    assert [p.name for p in tmp_path.glob(".metadata*")] == [".metadata"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_first_save_that_is_killed_leaves_nothing_to_load(tmp_path: Path) -> None:
    run = Alone.start(MIXED)

    def act() -> None:
        MOMENTS["before the rename"](pytest.MonkeyPatch())
        run.save(tmp_path)

    in_a_child(act)
    jobs.mentions(refused(tmp_path), "no checkpoint in", "broken off")


def test_a_disk_that_is_full_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)

    def full(value: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_alone", full)
        text = jobs.refusal(lambda: run.save(tmp_path))
        jobs.mentions(text, "No space left on device")
        saving = piper.save_checkpoint_async(tmp_path, run.model)
        jobs.mentions(jobs.refusal(saving.wait), "No space left on device")
        piper.save_checkpoint_async(tmp_path, run.model)
        jobs.mentions(jobs.refusal(lambda: run.save(tmp_path)), "No space left on device")
    assert Alone.start(MIXED).load(tmp_path) == {"steps": 1}


# Damaged, or not what it seems


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_any_damage_to_the_data_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    start(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    whole = data.read_bytes()
    for at in range(0, len(whole), len(whole) // 7):
        flip(data, at)
        jobs.mentions(refused(tmp_path), "is damaged", data.name, "earlier one")
        data.write_bytes(whole)
    data.write_bytes(whole[:-100])
    jobs.mentions(refused(tmp_path), "is damaged")
    data.unlink()
    jobs.mentions(refused(tmp_path), data.name, "missing")


def test_a_damaged_metadata_is_found(tmp_path: Path) -> None:
    start(tmp_path)
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-20])
    jobs.mentions(refused(tmp_path), "is damaged", ".metadata")


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch owned",)


def test_nothing_that_is_loaded_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    start(folder)
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    jobs.mentions(refused(folder), "is damaged", "system", "no checkpoint needs")
    (folder / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    jobs.mentions(refused(folder), "holds a dict")

    # An object in the data, with the right checksum.
    run = Alone.start(MIXED)
    monkeypatch.setattr("piper_dynamo.checkpoint.save.packed", lambda value, what: value)
    run.save(folder, extra=Evil())
    jobs.mentions(refused(folder), "is damaged", "extra")
    assert not (tmp_path / "owned").exists()
    assert whole


def test_an_object_in_a_tensors_place_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's reader of objects, which torch.distributed.checkpoint calls, unpickles freely."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    start(folder)
    bomb = pickle.dumps(Evil())
    (folder / "evil.distcp").write_bytes(bomb)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["rng"] = BytesStorageMetadata()
    for index in [index for index in metadata.storage_data if index.fqn == "rng"]:
        del metadata.storage_data[index]
    index = MetadataIndex("rng")
    metadata.storage_data[index] = compat.storage_info("evil.distcp", 0, len(bomb))
    metadata.planner_data["piper"]["checks"]["rng", None] = zlib.crc32(bomb)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    jobs.mentions(refused(folder), "is damaged", "rng is no tensor in it")
    assert not (tmp_path / "owned").exists()
    # The control: without that check it runs.
    monkeypatch.setattr(files.Checkpoint, "refuse_objects", lambda self, items: None)
    run = Alone.start(MIXED)
    with pytest.raises(Exception):  # noqa: B017, PT011 (whatever torch makes of what it ran)
        run.load(folder)
    assert (tmp_path / "owned").exists()


def test_what_is_saved_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask lets others do; a folder that was there before stays as it was."""
    before = os.umask(0)
    try:
        start(tmp_path / "new")
        (tmp_path / "open").mkdir(0o755)
        start(tmp_path / "open")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755
    for path in [*(tmp_path / "new").iterdir(), *(tmp_path / "open").iterdir()]:
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_data_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    start(tmp_path / "run")
    (data,) = (tmp_path / "run").glob("*.distcp")
    data.rename(tmp_path / data.name)
    metadata = pickle.loads((tmp_path / "run" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{data.name}"
    (tmp_path / "run" / ".metadata").write_bytes(pickle.dumps(metadata))
    jobs.mentions(refused(tmp_path / "run"), "lies nowhere in this folder")


def test_what_another_program_wrote(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"model": MIXED.build(1).state_dict()}, checkpoint_id=tmp_path)
    jobs.mentions(refused(tmp_path), "save_checkpoint did not write", "load_state_dict")


def test_where_there_is_none(tmp_path: Path) -> None:
    jobs.mentions(refused(tmp_path / "missing"), "no checkpoint in", "no such folder")
    start(tmp_path / "step-000010")
    jobs.mentions(refused(tmp_path), "step-000010", "name one of them")


# What does not fit, and what cannot be saved


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, 4))
        self.new = nn.Parameter(torch.zeros(2))


def test_another_model(tmp_path: Path) -> None:
    start(tmp_path)
    text = jobs.refusal(lambda: piper.load_checkpoint(tmp_path, Other()))
    jobs.mentions(text, "another model", "new is not in it", "frozen is in it", "a is (4, 4)")


def test_another_optimizer(tmp_path: Path) -> None:
    run = start(tmp_path)
    model = MIXED.build(1)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    adam = torch.optim.Adam([p for _, p in named])
    jobs.mentions(load(tmp_path, model, adam), "stepped by AdamW, and here by Adam")
    mixed = torch.optim.AdamW([p for _, p in named])
    jobs.mentions(load(tmp_path, model, mixed), "a and bias are in one group", "weight_decay 0.1")
    part = torch.optim.AdamW([p for n, p in named if n not in ("bias", "scale")])
    jobs.mentions(load(tmp_path, model, part), "bias was stepped when it was saved")
    more = torch.optim.AdamW([model.frozen])
    jobs.mentions(load(tmp_path, model, more), "frozen is stepped here and was not")
    piper.save_checkpoint(tmp_path, run.model)
    jobs.mentions(load(tmp_path, model, adam), "saved without an optimizer")
    piper.save_checkpoint(tmp_path, run.model, run.optimizer)
    jobs.mentions(refused(tmp_path), "saved without scheduler=")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    return jobs.refusal(lambda: piper.load_checkpoint(folder, model, optimizer))


def test_what_cannot_be_saved_is_told_at_once(tmp_path: Path) -> None:
    run = Alone.start(MIXED)

    def save(**options: Any) -> str:
        return jobs.refusal(lambda: piper.save_checkpoint(tmp_path, run.model, **options))

    jobs.mentions(save(extra={"fine": 1, "run": run}), "extra['run']", "state_dict()")
    jobs.mentions(save(extra=run.optimizer), "extra cannot be saved")
    jobs.mentions(save(opt="adam"), "torch.optim.Optimizer", "str")
    other = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    jobs.mentions(save(opt=other), "no parameter of this step", "piper.parameters")
    jobs.mentions(save(opt=[run.optimizer, run.optimizer]), "in two optimizers")
    jobs.mentions(save(opt=other, scheduler=run.schedule), "no parameter")
    mine = torch.optim.SGD(run.model.parameters(), lr=0.1)
    jobs.mentions(save(opt=mine, scheduler=run.schedule), "not a scheduler of the optimizer")
    with torch.device("meta"):
        bare = Other()
    text = jobs.refusal(lambda: piper.save_checkpoint(tmp_path, bare))
    jobs.mentions(text, "without values", "new")
    jobs.refusal(lambda: piper.save_checkpoint(tmp_path, object()))
    assert not list(tmp_path.iterdir())


# Plain files


def test_to_a_plain_file_and_back(tmp_path: Path) -> None:
    run = start(tmp_path / "run", 2)
    file = tmp_path / "plain" / "model.pt"
    piper.export_checkpoint(tmp_path / "run", file)
    found = torch.load(file, weights_only=True)
    want = run.model.state_dict()
    assert list(found) == list(want) or set(found) == set(want)
    for name, value in want.items():
        assert torch.equal(found[name], value), name
    assert found["head"].data_ptr() == found["a"].data_ptr()
    plain = MIXED.build(1)
    plain.load_state_dict(found)
    other = MIXED.build(1)
    piper.load_state_dict(other, file)
    for name, value in other.state_dict().items():
        assert torch.equal(value, want[name]), name


def test_state_dicts_that_do_not_fit(tmp_path: Path) -> None:
    model = MIXED.build(1)
    before = values(model)
    given = {
        name: value for name, value in before.items() if name != "head"
    }  # tied: may be left out
    piper.load_state_dict(model, given)

    def told(source: Any) -> str:
        text = jobs.refusal(lambda: piper.load_state_dict(model, source))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        return text

    jobs.mentions(told({**given, "new": torch.zeros(1)}), "nothing is named new")
    jobs.mentions(told({k: v for k, v in given.items() if k != "b"}), "no value for b")
    jobs.mentions(told({**given, "b": torch.zeros(2)}), "b is (5, 4) and (2,) in the source")
    jobs.mentions(told({**given, "b": 3}), "holds more than tensors", "b")
    jobs.mentions(told(tmp_path / "missing.pt"), "no state dict", "missing")
    torch.save([1], tmp_path / "list.pt")
    jobs.mentions(told(tmp_path / "list.pt"), "holds a list")
    torch.save(Evil(), tmp_path / "evil.pt")
    jobs.mentions(told(tmp_path / "evil.pt"), "cannot be read as a state dict")
