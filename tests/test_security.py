"""What docs/security.md promises; of checkpoints see `test_checkpoint_files.py`."""

import ast
import os
import re
from pathlib import Path

import pytest

import piper_dynamo as piper
from piper_dynamo import files
from piper_dynamo.predict.profile import Profile
from tests import jobs
from tests.source_tree import ROOT, source_files
from tests.test_train_cli import alone

PACKAGE = ("piper_dynamo", "passes", "lowering", "runtime")

# Where pickles are read or made, and why that is safe.
PICKLES = {
    "piper_dynamo/checkpoint/files.py": "reads DCP's metadata, and makes DCP's own records alone",
    "piper_dynamo/weights.py": "names the error of torch's weights-only loader",
    "runtime/launch_local.py": "between a process and the ones that it has started, over a pipe",
}
# Calls of torch.distributed that pickle what they send.
OBJECTS = re.compile(r"\b\w*_object(_list)?\b|\bsend_object_list\b")


def package_files() -> list[Path]:
    return [path for path in source_files(".py") if path.parts[0] in PACKAGE]


def test_pickles_are_where_they_are_known_to_be() -> None:
    found = set()
    for path in package_files():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & set(names):
                found.add(path.as_posix())
    assert found == set(PICKLES)


def test_nothing_is_unpickled_freely() -> None:
    """`torch.load` without weights_only=True, or a collective of objects, would do it."""
    for path in package_files():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            assert not (called.startswith("dist.") and OBJECTS.search(called)), (path, called)
            if called == "torch.load":
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_the_search_finds_what_it_looks_for() -> None:
    """The control of the two tests above."""
    for name in ("dist.gather_object", "dist.broadcast_object_list", "dist.all_gather_object"):
        assert OBJECTS.search(name)
    assert not OBJECTS.search("dist.all_gather")


def test_a_strategy_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    monkeypatch.setattr("piper_dynamo.strategy_json.MOST_BYTES", 10)
    text = jobs.refusal(lambda: piper.Strategy.from_json('{"piper": 1, "directives": []}'))
    jobs.mentions(text, "the text of a strategy is too large", "10 bytes")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"piper": 1, "directives": ' + "9" * 10_000 + "}",
        '{"piper": 1, "directives": [{"op": "__import__"}]}',
        '{"piper": 1, "directives": [{"op": "split", "filter": {}, "loss": "exec(\'1\')"}]}',
        '{"piper": 1, "directives": [{"op": "split", "filter": {}, "__class__": "x"}]}',
    ],
    ids=lambda text: text[:50],
)
def test_a_strategy_is_data(text: str) -> None:
    """Whatever stands in it is refused, or a value; it is never run."""
    assert jobs.refusal(lambda: piper.Strategy.from_json(text))


def test_text_files_have_a_most(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("x" * 100, encoding="utf-8")
    assert files.read_text(path, 100) == "x" * 100
    jobs.mentions(jobs.refusal(lambda: files.read_text(path, 99)), str(path), "is too large")
    jobs.mentions(jobs.refusal(lambda: Profile.load(path)), "this is no profile")


def test_a_run_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the umask lets others read; afterwards that is as it was."""
    before = os.umask(0o022)
    try:
        alone(tmp_path / "run", monkeypatch, steps=1, eval_every=0, save_every=1)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    found = list((tmp_path / "run").rglob("*"))
    assert len(found) > 8
    for path in found:
        assert path.stat().st_mode & 0o077 == 0, path
