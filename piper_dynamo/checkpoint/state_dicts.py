"""Whole state dicts by the user's names, for programs that know nothing of layouts."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from piper_dynamo.checkpoint.files import MODEL, Checkpoint, model_key
from piper_dynamo.checkpoint.job import Job, free_communicator, refuse_meta
from piper_dynamo.checkpoint.save import values_of
from piper_dynamo.files import written_whole
from piper_dynamo.meeting import Meeting
from piper_dynamo.runtime.comm import Communicator


def state_dict(step: Any, *, rank: int | None = None) -> dict[str, Tensor]:
    """The whole model, as its own `state_dict()` would be in one process; every rank calls it.

    Args:
        step: A compiled step, or a plain module.
        rank: The one rank that gets it; None: all do, and each then holds the whole model twice.

    Returns:
        Copies on the CPU by the user's names, tied ones under each (sharing memory), buffers too.
        Empty on ranks that were not asked for.

    Raises:
        PiperError: Not all ranks call this.
    """
    comm = free_communicator(step)
    jobs: list[Job] = []

    def look() -> None:
        jobs.append(Job.of(step))
        refuse_meta(jobs[0])

    Meeting(comm, f"state_dict(rank={rank})").together(look, lambda parts: None)
    (job,) = jobs
    blocks = {key: (at, block) for key, at, block in _blocks(values_of(job))}
    tensors, ties = job.tensors(), job.ties()
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name not in ties:
            whole = torch.zeros(value.shape, dtype=value.dtype)
            if model_key(name) in blocks:
                at, block = blocks[model_key(name)]
                _narrowed(whole, at, block.shape).copy_(block)
            whole = _everywhere(whole, comm)
            if rank in (None, comm.rank):
                found[name] = whole
    return {name: found[ties.get(name, name)] for name in tensors} if found else {}


def _blocks(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """(key, where it begins in the whole tensor, this rank's rows of it) of each tensor."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(values), None, False)
    for item in planner.create_local_plan().items:
        block = planner.resolve_data(item)
        assert isinstance(block, Tensor)
        yield item.index.fqn, tuple(item.index.offset or ()), block


def _narrowed(whole: Tensor, at: tuple[int, ...], shape: torch.Size) -> Tensor:
    for dim, (start, size) in enumerate(zip(at, shape, strict=True)):
        # An empty block may be said to begin anywhere.
        whole = whole.narrow(dim, min(start, whole.shape[dim]) if size == 0 else start, size)
    return whole


def _everywhere(value: Tensor, comm: Communicator) -> Tensor:
    """The sum over ranks, of which one has each element and the others zeros: of bytes, exactly."""
    if comm.world_size == 1 or not value.numel():
        return value
    whole = comm.reduce_now(value.reshape(-1).view(torch.uint8))
    return whole.view(value.dtype).reshape(value.shape)


def export_checkpoint(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint as one plain file, `torch.save` of its state dict.

    One process does it, without the model: `model.load_state_dict(torch.load(file))` reads it.
    Memory: the whole model.

    Args:
        folder: A whole checkpoint.
        file: Made, or replaced when the new one is whole.

    Raises:
        PiperError: There is no whole checkpoint.
    """
    checkpoint = Checkpoint(Path(folder))
    shapes = checkpoint.shapes(MODEL)
    places = checkpoint.places()
    same: dict[tuple[Any, ...], str] = {}
    first = {name: same.setdefault(places[model_key(name)], name) for name in shapes}
    targets = {
        model_key(name): torch.empty(shapes[name], dtype=checkpoint.dtype(model_key(name)))
        for name in same.values()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), checkpoint.metadata, False)
    plan = planner.create_local_plan()
    checkpoint.verify(item.storage_index for item in plan.items)
    checkpoint.read_data(planner.finish_plan(plan), planner).wait()
    with written_whole(Path(file)) as begun:
        torch.save({name: targets[model_key(first[name])] for name in shapes}, begun)
