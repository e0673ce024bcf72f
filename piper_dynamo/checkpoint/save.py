"""`save_checkpoint`, and its form that writes in the background."""

import os
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from piper_dynamo import wire
from piper_dynamo.checkpoint import optimizers as optim
from piper_dynamo.checkpoint.files import (
    SUFFIX,
    Written,
    commit,
    model_key,
    packed,
    state_key,
    write,
)
from piper_dynamo.checkpoint.job import (
    EXTRA,
    GROUPS,
    RANDOM,
    SCALE,
    SCHEDULER,
    Job,
    Optimizers,
    free_communicator,
    refuse_meta,
)
from piper_dynamo.errors import PiperError, PiperRuntimeError, format_error
from piper_dynamo.files import FOLDER_MODE
from piper_dynamo.meeting import Meeting
from piper_dynamo.runtime.local import current
from piper_dynamo.state import Record

# What ranks tell each other of a save.
wire.records(SavePlan, WriteItem, WriteItemType, BytesIOWriteData, TensorWriteData, MetadataIndex)
wire.records(ChunkStorageMetadata, TensorProperties, Written)


class Saving:
    """A save that goes on in the background; `wait` for it before the process ends."""

    def __init__(self, meeting: Meeting, folder: Path, save: str, ties: Mapping[str, str]) -> None:
        """See `save_checkpoint_async`, which makes it."""
        self._meeting, self._folder, self._save, self._ties = meeting, folder, save, ties
        self._items: list[tuple[WriteItem, Any]] = []
        self._metadata: Metadata | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until the checkpoint is whole.

        Raises:
            PiperError: It could not be written; the last whole one is still there.
        """
        if self._thread is not None:
            self._thread.join()
        comm = self._meeting.comm
        if comm.saving is self:
            comm.saving = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def plan(self, values: Mapping[str, Any]) -> None:
        """Agree who writes what."""
        # Each value stays one item: names have dots and are no paths.
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        rank = self._meeting.comm.rank

        def part() -> SavePlan:
            planner.set_up_planner(dict(values), None, rank == 0)
            local = planner.create_local_plan()
            return SavePlan([item for item in local.items if not _is_empty(item)])

        def join(parts: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(parts)
            return plans

        mine = planner.finish_plan(self._meeting.together(part, join)[rank])
        self._items = [(item, planner.resolve_data(item)) for item in mine.items]

    def write(self) -> None:
        """Write this rank's part; on rank 0, make all parts the checkpoint."""
        rank = self._meeting.comm.rank

        def part() -> list[Written]:
            if not self._folder.is_dir():
                raise PiperRuntimeError(
                    f"rank {rank} does not see {self._folder}, which rank 0 has made: save to a "
                    "folder on a file system that all ranks share"
                )
            return write(self._folder / f"{self._save}_{rank}{SUFFIX}", self._items)

        def join(parts: list[list[Written]]) -> None:
            assert self._metadata is not None
            commit(self._folder, self._save, self._metadata, parts, self._ties)

        self._meeting.together(part, join)
        self._items = []

    def start(self) -> None:
        """Write in a thread, from copies, so that training may go on."""
        # Tensors that nobody else writes to; objects are bytes already.
        self._items = [
            (item, value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value)
            for item, value in self._items
        ]
        self._meeting.go_to_background()
        self._thread = threading.Thread(target=self._run, name="piper save")
        self._meeting.comm.saving = self
        self._thread.start()

    def _run(self) -> None:
        try:
            self.write()
        except BaseException as error:  # raised in `wait`
            self._error = error


def _is_empty(item: WriteItem) -> bool:
    """A block without elements of a tensor with some: it may begin where another rank's does."""
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 and data.size.numel() > 0


def save_checkpoint(
    folder: str | os.PathLike[str],
    step: Any,
    opt: Optimizers = None,
    *,
    scheduler: Any = None,
    extra: Any = None,
) -> None:
    """Save a run; every rank calls it. `load_checkpoint` resumes it under any layout.

    Saved are parameters, buffers, the optimizer's state and settings, the learning-rate scheduler,
    torch's random state of rank 0, and `extra`: what else the loop needs, such as the number of
    steps done or the position in the data. Gradients are not.

    An earlier checkpoint in the folder is replaced when the new one is whole.

    Args:
        folder: Made if it is not there; on a file system that all ranks share.
        step: A compiled step, or a plain module in one process.
        opt: Its optimizer, or several.
        scheduler: A scheduler of the optimizer (`torch.optim.lr_scheduler`).
        extra: Numbers, text, tensors, lists and dicts of them; rank 0's is saved.

    Raises:
        PiperError: Something of it cannot be saved, or not all ranks call this.
    """
    _begin(Path(folder), step, opt, scheduler, extra).write()


def save_checkpoint_async(
    folder: str | os.PathLike[str],
    step: Any,
    opt: Optimizers = None,
    *,
    scheduler: Any = None,
    extra: Any = None,
) -> Saving:
    """As `save_checkpoint`, but returns once all is copied; writing goes on beside the next steps.

    Memory: a copy of what this rank writes. The next save or load waits for the end of it, and
    raises what went wrong. Ranks that are threads of one process write at once.

    Returns:
        What to `wait()` for before the process ends; `piper.launch` does.

    Raises:
        PiperError: Something of it cannot be saved, or not all ranks call this.
    """
    saving = _begin(Path(folder), step, opt, scheduler, extra)
    if current() is not None:
        saving.write()
    else:
        saving.start()
    return saving


def _begin(folder: Path, step: Any, opt: Optimizers, scheduler: Any, extra: Any) -> Saving:
    """Agree on a save and on who writes what."""
    comm = free_communicator(step)
    meeting = Meeting(comm, f"save_checkpoint({str(folder)!r})")

    jobs: list[Job] = []

    def look() -> dict[str, Any]:
        job = Job.of(step, opt, scheduler)
        refuse_meta(job)
        if comm.rank == 0:
            packed(extra, "extra")
            folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        jobs.append(job)
        return _told(job)

    def join(parts: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
        merged = {
            GROUPS: optim.merge([p["settings"] for p in parts], "settings"),
            "plain": optim.merge([p["plain"] for p in parts], "optimizer state"),
            "lists": optim.merge([p["lists"] for p in parts], "schedules"),
            SCHEDULER: parts[0]["scheduler"],
        }
        return uuid.uuid4().hex[:12], merged

    save, merged = meeting.together(look, join)
    (job,) = jobs
    saving = Saving(meeting, folder, save, job.ties())
    values = values_of(job)
    if comm.rank == 0:
        values |= {
            GROUPS: {"settings": merged[GROUPS], "plain": merged["plain"]}
            if job.optimizers
            else None,
            SCHEDULER: {"state": merged[SCHEDULER], "lists": merged["lists"]}
            if scheduler
            else None,
            EXTRA: {"value": extra},  # a bare tensor would be one of the model's
            RANDOM: torch.get_rng_state(),
        }
        scaler = job.state.scaler
        if scaler.rule is not None:
            values[SCALE] = torch.tensor([scaler.factor, scaler.good], dtype=torch.float64)
    saving.plan(values)
    return saving


def _told(job: Job) -> dict[str, Any]:
    """What rank 0 must know of this rank: settings and what of the state is no tensor."""
    settings = optim.settings_of(job.optimizers, job.named)
    packed(settings, "the optimizer's settings of")
    plain = {
        name: odd
        for name, entries in optim.state_of(job.optimizers, job.named).items()
        if (odd := {k: v for k, v in entries.items() if not isinstance(v, Tensor)})
    }
    packed(plain, "the optimizer's state of")
    rest: dict[str, Any] | None = None
    lists: dict[str, dict[str, Any]] = {}
    if job.scheduler is not None:
        names = optim.group_names(job.scheduler.optimizer, job.named)
        rest, lists = optim.split_scheduler(job.scheduler.state_dict(), names)
        packed(rest, "the scheduler's state")
        packed(lists, "the scheduler's state of")
    return {"settings": settings, "plain": plain, "lists": lists, "scheduler": rest}


def values_of(job: Job) -> dict[str, Any]:
    """The tensors that this rank may write, by key."""
    found: dict[str, Any] = {}
    counted = set()
    for name, (param, record) in job.params.items():
        if record is None or record.counts:
            found[model_key(name)] = param.detach()
            counted.add(name)
    for name, entries in optim.state_of(job.optimizers, job.named).items():
        for entry, value in entries.items():
            if name in counted and isinstance(value, Tensor):
                _check_entry(name, entry, value, job.params[name][1])
                found[state_key(name, entry)] = value.detach()
    ties = job.ties()
    for name, value in job.tensors().items():
        is_buffer = not isinstance(value, nn.Parameter) and name not in ties
        if is_buffer and job.state.buffer_ranks(value)[0] == job.state.rank:
            found[model_key(name)] = value.detach()
    return found


def _check_entry(name: str, entry: str, value: Tensor, record: Record | None) -> None:
    """Of a parameter in blocks, an entry is laid out by torch or is one number.

    Raises:
        PiperError: It is neither: whose rows these are, nobody knows.
    """
    in_blocks = record is not None and record.block is not None and record.block.home is not None
    if in_blocks and value.numel() != 1 and not isinstance(value, DTensor):
        raise PiperError(
            format_error(
                f"the optimizer's {entry!r} of {name!r} cannot be saved",
                {"it is": f"a plain tensor {tuple(value.shape)} of a parameter held in blocks"},
                hint="make it like the parameter (torch.zeros_like), as torch's optimizers do",
            )
        )
