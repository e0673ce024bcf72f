"""Real text without a download: the source of the running Python's standard library, as bytes.

Files are dealt to training or validation by a hash of their name. A batch is a function of (seed,
step, row), so a run can be resumed, and any number of data ranks reads the same rows.
"""

import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VALIDATION_SHARE = 20  # one file in so many is held out
MAX_BYTES = (
    24 * 2**20
)  # enough for hours of training on a laptop; reading more would only take time


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two byte arrays and where they come from."""

    train: np.ndarray
    validation: np.ndarray
    files: int

    def batch(
        self,
        split: str,
        step: int,
        *,
        seed: int,
        rows: int,
        seq: int,
        data_rank: int = 0,
        data_world: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and targets, [rows / data_world, seq] int64 each, of one step.

        Args:
            split: "train" or "validation".
            step: Which step (or evaluation batch).
            seed: The run's seed.
            rows: Rows of the whole batch over all data ranks.
            seq: Tokens per row.
            data_rank: Which share of the rows.
            data_world: Of how many.
        """
        text = self.train if split == "train" else self.validation
        draw = np.random.default_rng([seed, step, 0 if split == "train" else 1])
        starts = draw.integers(0, len(text) - seq - 1, size=rows)
        share = rows // data_world
        mine = starts[data_rank * share : (data_rank + 1) * share]
        picked = np.stack([text[start : start + seq + 1] for start in mine]).astype(np.int64)
        whole = torch.from_numpy(picked)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def read_corpus(
    folder: str | Path | None = None, progress: Callable[[int], None] | None = None
) -> Corpus:
    """Read the corpus.

    Args:
        folder: Where to look for `*.py`; default: the standard library.
        progress: Called with the bytes read so far.

    Raises:
        FileNotFoundError: There is not enough text.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = files = 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name:
            continue
        content = path.read_bytes() + b"\n\0"
        held_out = zlib.crc32(name.encode()) % VALIDATION_SHARE == 0
        parts[held_out].append(content)
        total += len(content)
        files += 1
        if progress is not None:
            progress(total)
        if total > MAX_BYTES:
            break
    train, validation = (np.frombuffer(b"".join(parts[k]), dtype=np.uint8) for k in (False, True))
    if min(len(train), len(validation)) < 4096:
        raise FileNotFoundError(f"too little Python source under {root} to train on")
    return Corpus(train=train, validation=validation, files=files)
