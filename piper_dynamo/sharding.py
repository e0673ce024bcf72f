"""Parameters held in blocks of rows: DTensors for the optimizer, plain blocks for the program.

Why DTensor: optimizers, checkpoints and users know it; its `Shard(0)` is what a replica holds here.
A program sees the block with as many rows on every rank, the last ones filled up with zeros, so
that gathering needs no copy.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.spec import TensorSpec

Groups = tuple[tuple[int, ...], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """A parameter as one rank holds it: whole, or some of its rows.

    Attributes:
        param: What the optimizer steps: a DTensor.
        spec: The whole parameter.
        home: The rows with their filling; None where the parameter is whole.
        rows: How many rows are its own.
    """

    param: nn.Parameter
    spec: TensorSpec
    home: Tensor | None
    rows: int

    def value(self) -> Tensor:
        """What the program reads: the block, filled up, with the optimizer's last values."""
        local = compat.local_tensor(self.param)
        if self.home is None or self.rows == self.home.shape[0]:
            return local
        if self.rows and local.data_ptr() != self.home.data_ptr():  # somebody replaced it
            self.home.narrow(0, 0, self.rows).copy_(local)
        return self.home

    def gradient(self, found: Tensor) -> Tensor:
        """The program's gradient as the parameter's: without the filling, a DTensor."""
        local = found if self.home is None else found.narrow(0, 0, self.rows)
        return _distributed(local, self.param, self.spec)


def _distributed(local: Tensor, like: Any, spec: TensorSpec) -> DTensor:
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.stride,
    )


def take_block(param: nn.Parameter, groups: Groups, mesh: Any, rank: int) -> Block:
    """This rank's block of a whole parameter, in memory of its own.

    Args:
        param: The whole parameter.
        groups: The ranks of each copy, in row order; () keeps the parameter whole.
        mesh: The ranks that hold it: their copies, where there are several, by their blocks.
        rank: This rank.
    """
    spec = TensorSpec.of(param)
    whole = param.detach()
    if not groups:
        copies = [Replicate() for _ in range(mesh.ndim)]
        local = DTensor.from_local(whole, mesh, copies, run_check=False)
        return Block(
            param=nn.Parameter(local, requires_grad=param.requires_grad),
            spec=spec,
            home=None,
            rows=0,
        )
    (group,) = [g for g in groups if rank in g]
    height = -(-spec.shape[0] // len(group))
    start = min(group.index(rank) * height, spec.shape[0])
    rows = min(height, spec.shape[0] - start)
    home = whole.new_zeros((height, *spec.shape[1:]))
    home.narrow(0, 0, rows).copy_(whole.narrow(0, start, rows))
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    local = DTensor.from_local(
        home.narrow(0, 0, rows),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.stride,
    )
    return Block(
        param=nn.Parameter(local, requires_grad=param.requires_grad),
        spec=spec,
        home=home,
        rows=rows,
    )


def digest(tensors: Sequence[Tensor]) -> list[str]:
    """A short text per tensor, equal where the bytes are."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        found.append(hashlib.sha1(flat.numpy().data, usedforsecurity=False).hexdigest()[:12])
    return found
