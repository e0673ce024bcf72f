"""The training job's text: what is read, what is held out, which rows a step gets."""

from pathlib import Path

import numpy as np
import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.train import data
from piper_dynamo.train.data import SEPARATOR, Corpus, is_held_out, read_corpus

ROWS, SEQ = 8, 16


def write_files(folder: Path, count: int = 60) -> dict[str, bytes]:
    """Python files in a folder and a subfolder; by name, what is in each."""
    files = {}
    for number in range(count):
        name = f"{'package/' if number % 2 else ''}module_{number:02}.py"
        files[name] = f"value_{number} = {number}\n".encode() * 120
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(files[name])
    return files


def counting(size: int = 5000) -> Corpus:
    """A corpus in which a byte tells where it stands, modulo 251."""
    text = (np.arange(size) % 251).astype(np.uint8)
    return Corpus(train=text, validation=text[:1000], files=1, fingerprint=0)


def batch(corpus: Corpus, step: int = 0, **changed: int) -> torch.Tensor:
    """The tokens of a training step."""
    asked = {"seed": 0, "rows": ROWS, "seq": SEQ, **changed}
    return corpus.batch("train", step, **asked)[0]


def test_reads_all_files_in_order(tmp_path: Path):
    files = write_files(tmp_path)
    corpus = read_corpus(tmp_path)
    for held_out, text in ((False, corpus.train), (True, corpus.validation)):
        mine = [n for n in sorted(files, key=Path) if is_held_out(n) is held_out]
        assert mine
        assert text.tobytes() == b"".join(files[name] + SEPARATOR for name in mine)
    assert corpus.files == len(files)


def test_leaves_out_installed_packages(tmp_path: Path):
    write_files(tmp_path)
    before = read_corpus(tmp_path)
    for folder in ("site-packages", "dist-packages", "package/__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "more.py").write_text("more = 1\n")
    (tmp_path / "notes.txt").write_text("no Python")
    assert read_corpus(tmp_path).fingerprint == before.fingerprint


def test_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_files(tmp_path)
    whole = read_corpus(tmp_path)
    limit = (len(whole.train) + len(whole.validation)) - 100
    monkeypatch.setattr(data, "MAX_BYTES", limit)
    seen: list[int] = []
    corpus = read_corpus(tmp_path, progress=seen.append)
    assert corpus.files == whole.files - 1
    assert seen[-1] == len(corpus.train) + len(corpus.validation) <= limit
    assert seen == sorted(seen)


def test_refuses_too_little_text(tmp_path: Path):
    (tmp_path / "one.py").write_text("one = 1\n")
    with pytest.raises(piper.PiperError, match="too little text") as caught:
        read_corpus(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_standard_library():
    """What the job really reads: megabytes, a few per cent of them held out, no packages."""
    corpus = read_corpus()
    total = len(corpus.train) + len(corpus.validation)
    assert 1e6 < total <= data.MAX_BYTES
    assert 0.01 < len(corpus.validation) / total < 0.15
    assert b"class OrderedDict" in corpus.train.tobytes() + corpus.validation.tobytes()


def test_targets_are_the_bytes_that_follow():
    tokens, targets = counting().batch("train", 3, seed=0, rows=ROWS, seq=SEQ)
    assert tokens.shape == targets.shape == (ROWS, SEQ)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal((tokens + 1) % 251, targets)


def test_rows_are_a_function_of_seed_split_step_and_row():
    corpus = counting()
    assert torch.equal(batch(corpus, 5), batch(corpus, 5))
    assert torch.equal(batch(corpus, 5, rows=2 * ROWS)[:ROWS], batch(corpus, 5))
    first = batch(corpus, 5)
    assert not torch.equal(first, batch(corpus, 6))
    assert not torch.equal(first, batch(corpus, 5, seed=1))
    held_out = corpus.batch("validation", 5, seed=0, rows=ROWS, seq=SEQ)[0]
    assert not torch.equal(first, held_out)


def test_rows_do_not_change_between_versions():
    """Pinned: a resumed run and ranks on other machines draw these too."""
    starts = data._hash(7, 0, 3, np.arange(3, dtype=np.uint64)) % np.uint64(10**6)
    assert starts.tolist() == [660796, 302731, 430490]


@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_of_data_ranks_reads_the_same_rows(world: int):
    corpus = counting()
    whole = batch(corpus, 2)
    shares = [batch(corpus, 2, data_rank=r, data_world=world) for r in range(world)]
    assert torch.equal(torch.cat(shares), whole)


def test_rows_are_spread_over_the_text():
    """Starts fall evenly: a tenth of the text gets about a tenth of the rows."""
    starts = data._hash(0, 0, 0, np.arange(20_000, dtype=np.uint64)) % np.uint64(10)
    counts = np.bincount(starts.astype(np.int64), minlength=10)
    assert np.abs(counts - 2000).max() < 5 * 2000**0.5


def test_first_and_last_window_are_drawn():
    """The text is as long as a row and one: both windows appear, and nothing beside them."""
    text = np.arange(SEQ + 2, dtype=np.uint8)
    corpus = Corpus(train=text, validation=text, files=1, fingerprint=0)
    assert set(batch(corpus, rows=64)[:, 0].tolist()) == {0, 1}


def test_refuses_rows_longer_than_the_text():
    with pytest.raises(piper.PiperError, match="the longest is 999"):
        counting().batch("validation", 0, seed=0, rows=1, seq=1000)


def test_refuses_rows_that_do_not_divide():
    with pytest.raises(piper.PiperError, match="8 rows do not divide among 3"):
        batch(counting(), data_rank=0, data_world=3)
