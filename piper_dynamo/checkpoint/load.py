"""`load_checkpoint`: check that a checkpoint fits and is sound, then read what this rank holds.

Terms: an *entry* is one value of an optimizer's state of a parameter, such as `exp_avg`. A *target*
is the memory that a saved tensor is read into.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from piper_dynamo.checkpoint import optimizers as optim
from piper_dynamo.checkpoint.files import MODEL, STATE, Checkpoint, model_key, state_key
from piper_dynamo.checkpoint.job import (
    EXTRA,
    GROUPS,
    RANDOM,
    SCALE,
    SCHEDULER,
    Job,
    Optimizers,
    check_names,
    free_communicator,
    refuse_meta,
)
from piper_dynamo.errors import PiperError, PiperRuntimeError, format_error
from piper_dynamo.meeting import Meeting
from piper_dynamo.pending import fill, source_of
from piper_dynamo.state import record_of


def load_checkpoint(
    folder: str | os.PathLike[str], step: Any, opt: Optimizers = None, *, scheduler: Any = None
) -> Any:
    """Resume what `save_checkpoint` saved, under whatever layout; every rank calls it.

    All is checked before anything changes: names, shapes, groups, and the checksums of what this
    rank reads. Values are converted to the dtypes that the model has here. The random state is
    restored on every rank: `torch.manual_seed` afterwards starts another.

    Args:
        folder: A whole checkpoint.
        step: A compiled step that is prepared, or a plain module in one process.
        opt: Its optimizer, or several; None leaves saved state unread.
        scheduler: A scheduler of the optimizer.

    Returns:
        The `extra` that rank 0 saved, on every rank.

    Raises:
        PiperError: There is no whole checkpoint, it does not fit, or not all ranks call this.
    """
    comm = free_communicator(step)
    path = Path(folder)
    meeting = Meeting(comm, f"load_checkpoint({str(path)!r})")
    found: list[_Loading] = []

    def look() -> str:
        job = Job.of(step, opt, scheduler)
        refuse_meta(job)
        found.append(_Loading.of(job, Checkpoint(path)))
        return found[0].checkpoint.save

    def agree(saves: list[str]) -> None:
        if len(set(saves)) > 1:
            raise PiperRuntimeError(
                format_error(
                    f"ranks see different checkpoints in {path}",
                    {f"rank {rank}": save for rank, save in enumerate(saves)},
                    hint="load from a folder on a file system that all ranks share",
                )
            )

    meeting.together(look, agree)
    (loading,) = found
    meeting.together(loading.take, lambda parts: None)
    return loading.extra


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loading:
    """A checkpoint that fits this rank, checked.

    Attributes:
        job: What it is loaded into.
        checkpoint: Where from.
        targets: By key, what is read into; those of the optimizer's state are new. What of the
            model is still to be made is blank here.
        state: The optimizer's new state, by parameter name.
        settings: The saved settings, by parameter name.
        scheduler: The saved schedule.
        extra: What the user saved.
        random: Torch's random state.
        scale: Of a dynamic loss scale its factor and good steps; zeros where none was saved.
    """

    job: Job
    checkpoint: Checkpoint
    targets: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    scheduler: dict[str, Any] | None
    extra: Any
    random: Tensor
    scale: Tensor

    @classmethod
    def of(cls, job: Job, checkpoint: Checkpoint) -> "_Loading":
        """Check that a checkpoint fits and is sound; changes nothing.

        Raises:
            PiperError: It does not or is not.
        """
        _check_model(job, checkpoint)
        targets = model_targets(job)
        saved = checkpoint.object(GROUPS) if job.optimizers else {}
        if saved is None:
            raise PiperError(
                f"{checkpoint.folder} was saved without an optimizer: load it without one"
            )
        settings = saved.get("settings", {})
        state: dict[str, dict[str, Any]] = {}
        if job.optimizers:
            optim.check_settings(settings, job.optimizers, job.named)
            state = _state_targets(job, checkpoint, saved["plain"])
        targets |= {
            state_key(name, key): value
            for name, entries in state.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }
        schedule = checkpoint.object(SCHEDULER) if job.scheduler is not None else None
        if job.scheduler is not None and schedule is None:
            raise PiperError(f"{checkpoint.folder} was saved without scheduler=")
        random = torch.empty_like(torch.get_rng_state())
        targets[RANDOM] = random
        scale = torch.zeros(2, dtype=torch.float64)
        is_saved = SCALE in checkpoint.metadata.state_dict_metadata
        if job.state.scaler.rule is not None and is_saved:
            targets[SCALE] = scale
        items = _planner(targets, checkpoint).create_local_plan().items
        checkpoint.refuse_objects(items)
        checkpoint.verify(item.storage_index for item in items)
        return cls(
            job=job,
            checkpoint=checkpoint,
            targets=targets,
            state=state,
            settings=settings,
            scheduler=schedule,
            extra=checkpoint.object(EXTRA)["value"],
            random=random,
            scale=scale,
        )

    def take(self) -> None:
        """Load."""
        job = self.job
        _fill_pending(job)
        planner = _planner(self.targets | model_targets(job), self.checkpoint)
        plan = planner.finish_plan(planner.create_local_plan())
        with torch.no_grad():
            self.checkpoint.read_data(plan, planner).wait()
        # Read into memory that autograd's counters of changes do not see.
        ties, state = job.ties(), job.state
        state.empty = [
            one for one in state.empty if model_key(ties.get(one[0], one[0])) not in self.targets
        ]
        optim.apply_settings(self.settings, job.optimizers, job.named)
        for optimizer in job.optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    name = job.named.get(id(param), "")
                    optimizer.state.pop(param, None)
                    if name in self.state:
                        optimizer.state[param] = self.state[name]
        if self.scheduler is not None:
            names = optim.group_names(job.scheduler.optimizer, job.named)
            rest, lists = self.scheduler["state"], self.scheduler["lists"]
            mine = job.scheduler.state_dict()
            job.scheduler.load_state_dict(optim.join_scheduler(rest, lists, mine, names))
        torch.set_rng_state(self.random)
        factor, good = self.scale.tolist()
        if factor:
            job.state.scaler.factor, job.state.scaler.good = factor, int(good)


def _planner(targets: Mapping[str, Tensor], checkpoint: Checkpoint) -> DefaultLoadPlanner:
    """Of the read of these."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), checkpoint.metadata, False)
    return planner


def _check_model(job: Job, checkpoint: Checkpoint) -> None:
    """Names and shapes are the model's own.

    Raises:
        PiperError: They are not; lists every fault.
    """
    check_names(
        {name: tuple(value.shape) for name, value in job.tensors().items()},
        checkpoint.shapes(MODEL),
        str(checkpoint.folder),
    )


def model_targets(job: Job) -> dict[str, Tensor]:
    """What this rank holds of the model, by key; blank where values are still to come."""
    found = {model_key(name): param.detach() for name, (param, _) in job.params.items()}
    for name, value in _whole(job).items():
        source = source_of(value)
        if source is None:
            found.setdefault(model_key(name), value.detach())
        else:  # one element in place of all: nothing is read into it
            blank = torch.empty((), dtype=source.spec.dtype).expand(source.spec.shape)
            found.setdefault(model_key(name), blank)
    return found


def _fill_pending(job: Job) -> None:
    """Make the tensors whose values are still to come, to be read into."""
    for name, value in _whole(job).items():
        if source_of(value) is not None and not fill(value, job.state.init):
            job.state.lacks(name, value)


def _whole(job: Job) -> dict[str, Tensor]:
    """By name, once each: buffers, and what no program uses yet, which is whole on every rank."""
    ties = job.ties()
    return {
        name: value
        for name, value in job.tensors().items()
        if name not in ties and (not isinstance(value, nn.Parameter) or record_of(value) is None)
    }


def _state_targets(
    job: Job, checkpoint: Checkpoint, plain: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """New optimizer state of this rank's parameters, to be read into.

    Raises:
        PiperError: An entry has no place on a rank that holds a block of its parameter.
    """
    shapes = checkpoint.shapes(MODEL)
    entries: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in checkpoint.shapes(STATE).items():
        name, _, entry = key.rpartition(".")
        entries.setdefault(name, {})[entry] = shape
    shaped = optim.shaped_keys(shapes, entries)
    found: dict[str, dict[str, Any]] = {}
    for optimizer in job.optimizers:
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for param in group["params"]:
                name = job.named.get(id(param), "")
                new: dict[str, Any] = dict(plain.get(name, {}))
                for entry, shape in entries.get(name, {}).items():
                    dtype = checkpoint.dtype(state_key(name, entry))
                    if entry in shaped:
                        new[entry] = torch.zeros_like(param.detach(), dtype=dtype)
                        continue
                    if torch.Size(shape).numel() != 1 and job.params[name][1] is not None:
                        _refuse_odd_entry(job, name, entry, shape)
                    device = param.device if on_device else "cpu"
                    new[entry] = torch.zeros(shape, dtype=dtype, device=device)
                if new:
                    found[name] = new
    return found


def _refuse_odd_entry(job: Job, name: str, entry: str, shape: tuple[int, ...]) -> None:
    """State of another shape than its parameter's can be whole only where that is.

    Raises:
        PiperError: It is not.
    """
    record = job.params[name][1]
    if record is not None and record.block is not None and record.block.home is not None:
        raise PiperError(
            format_error(
                f"the optimizer's {entry!r} of {name!r} cannot be split among ranks",
                {"its shape": shape, "the parameter's": tuple(record.spec.shape)},
                hint="load it where the parameter is whole (zero=0, no expert ranks)",
            )
        )
