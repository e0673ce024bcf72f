"""NCCL: what a step on streams takes for granted is made so before the first one.

    communicators     one per stream and group, and per direction of messages, all made by
                      `prepare_groups` in one order on all ranks; connected then, not in a step
    kernels           loaded then: a first launch may synchronize the device
    memory            not recorded on streams by torch: programs order what frees it
    launches          in one order on all ranks, which is the plan's (`lowering/launches.py`)

Without GPUs none of this does anything: ranks meet over gloo.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper_dynamo.errors import PiperRuntimeError, format_error
from piper_dynamo.ir.program import Group

PAIR = "pair"  # the stream of messages from the first rank to the second
_SETTINGS = {
    "CUDA_MODULE_LOADING": "EAGER",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",  # the default from torch 2.8 on
}


def start_group(timeout: timedelta, **where: Any) -> None:
    """Start the default process group: gloo, with NCCL for CUDA where each rank has a GPU.

    Args:
        timeout: How long ranks may take to meet.
        where: What `init_process_group` takes beside.
    """
    device = own_gpu()
    if device is None:
        dist.init_process_group("gloo", timeout=timeout, **where)
        return
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device, **where)


def own_gpu() -> torch.device | None:
    """This rank's GPU by its local number; None where ranks of the machine would share one."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if not dist.is_nccl_available() or here > torch.cuda.device_count():
        return None
    return torch.device("cuda", local)


def bound_device(world: Any) -> torch.device | None:
    """The GPU that the default process group was started for, if it was for one."""
    device = getattr(world, "bound_device_id", None)
    return device if device is not None and device.type == "cuda" else None


def refuse_unbound(world: Any) -> None:
    """Communicators that torch would make when they are first used are refused.

    Raises:
        PiperRuntimeError: The process group was started without its device.
    """
    if bound_device(world) is None:
        raise PiperRuntimeError(
            format_error(
                "the process group was started without its GPU, so NCCL would connect ranks "
                "inside of a step, in an order of its own",
                {"backend": dist.get_backend(world)},
                hint="dist.init_process_group('cpu:gloo,cuda:nccl', device_id=torch.device("
                "'cuda', local_rank)), or start ranks with piper.launch",
            )
        )


def connect(groups: Sequence[tuple[Group, Any]], rank: int, device: torch.device) -> None:
    """Connect communicators and load their kernels; every rank with the same groups in order.

    Args:
        groups: Communicators, and torch's groups for them.
        rank: This rank.
        device: Its GPU, or the CPU in its place.
    """
    one = torch.zeros(1, device=device)
    for (stream, members), made in groups:
        if rank not in members or len(members) < 2:
            continue
        if stream != PAIR:
            dist.all_reduce(one, group=made)
        elif rank == members[0]:
            dist.send(one, members[1], group=made)
        else:
            dist.recv(one, members[0], group=made)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
