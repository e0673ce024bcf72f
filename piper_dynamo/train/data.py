"""Real text without a download: the source of the running Python's standard library, as bytes.

Files are dealt to training or validation by a hash of their name. Which text a row holds is a hash
of (seed, split, step, row) alone: no state to save, so a run resumes anywhere, and every layout
of data ranks reads the same rows. Legend: B rows, T tokens.
"""

import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from piper_dynamo.errors import PiperError, format_error

Split = Literal["train", "validation"]

VALIDATION_SHARE = 20  # one file in so many is held out
# Enough for hours of training on a laptop; reading more would only take time.
MAX_BYTES = 24 * 2**20
LEAST_BYTES = 4096
SEPARATOR = b"\n\0"  # between files; no source file contains a zero byte
_SKIPPED = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two byte arrays and where they come from.

    Attributes:
        train: uint8, what is trained on.
        validation: uint8, what is held out.
        files: How many files were read.
        fingerprint: The same on two machines exactly if the text is.
    """

    train: np.ndarray
    validation: np.ndarray
    files: int
    fingerprint: int

    def batch(
        self,
        split: Split,
        step: int,
        *,
        seed: int,
        rows: int,
        seq: int,
        data_rank: int = 0,
        data_world: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, [rows / data_world, seq] int64 each, of one step.

        Args:
            split: "train" or "validation".
            step: Which step (or evaluation batch).
            seed: The run's seed.
            rows: Rows of the whole batch over all data ranks.
            seq: Tokens per row.
            data_rank: Which share of the rows.
            data_world: Of how many.

        Raises:
            PiperError: The rows do not divide, or a row is longer than the text.
        """
        text = self.train if split == "train" else self.validation
        windows = len(text) - seq  # a row takes seq + 1 bytes
        if windows < 1:
            raise PiperError(
                f"a row of {seq} tokens does not fit into the {len(text):,} bytes of {split} text; "
                f"the longest is {len(text) - 1}"
            )
        if rows % data_world:
            raise PiperError(f"{rows} rows do not divide among {data_world} data ranks")
        share = rows // data_world
        number = np.arange(data_rank * share, (data_rank + 1) * share, dtype=np.uint64)
        starts = _hash(seed, split == "validation", step, number) % np.uint64(windows)
        picked = text[starts[:, None] + np.arange(seq + 1, dtype=np.uint64)]
        whole_BT = torch.from_numpy(picked.astype(np.int64))
        return whole_BT[:, :-1].contiguous(), whole_BT[:, 1:].contiguous()


def _hash(seed: int, split: int, step: int, rows: np.ndarray) -> np.ndarray:
    """64 well-mixed bits per row: SplitMix64's finaliser (Steele et al. 2014) over the words.

    Not numpy's generators: their streams may change between versions, and ranks on two machines
    must draw the same rows.
    """
    found = np.zeros_like(rows)
    with np.errstate(over="ignore"):
        for word in (np.uint64(seed), np.uint64(split), np.uint64(step), rows):
            found = (found ^ word) + np.uint64(0x9E3779B97F4A7C15)
            found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            found = found ^ (found >> np.uint64(31))
    return found


def read_corpus(
    folder: str | Path | None = None, progress: Callable[[int], None] | None = None
) -> Corpus:
    """Read Python files, in order of their names, up to MAX_BYTES.

    Args:
        folder: Where to look for `*.py`, in subfolders too; default: the standard library. What
            is installed beside it (site-packages) is left out.
        progress: Called with the number of bytes read so far.

    Raises:
        PiperError: There is not enough text.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = files = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in _SKIPPED for part in name.split("/")):
            continue
        content = path.read_bytes() + SEPARATOR
        if total + len(content) > MAX_BYTES:
            break
        parts[is_held_out(name)].append(content)
        total += len(content)
        files += 1
        if progress is not None:
            progress(total)
    train, validation = (b"".join(parts[held_out]) for held_out in (False, True))
    if min(len(train), len(validation)) < LEAST_BYTES:
        raise PiperError(
            format_error(
                "too little text to train on",
                {
                    "where": root,
                    "found": f"{len(train):,} bytes to train on, {len(validation):,} held out",
                    "needed": f"{LEAST_BYTES:,} bytes of each",
                },
                hint="use a Python whose standard library is installed as *.py files",
            )
        )
    return Corpus(
        train=np.frombuffer(train, dtype=np.uint8),
        validation=np.frombuffer(validation, dtype=np.uint8),
        files=files,
        fingerprint=zlib.crc32(validation, zlib.crc32(train)),
    )


def is_held_out(name: str) -> bool:
    """Whether a file belongs to the validation text; by its name, so that it stays there."""
    return zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
