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
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import Groups
from piper_dynamo.ir.spec import TensorSpec


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
        like: Any = self.param
        return _distributed(local, like.device_mesh, like.placements, self.spec)


def _distributed(local: Tensor, mesh: Any, placements: Any, spec: TensorSpec) -> DTensor:
    return DTensor.from_local(
        local,
        mesh,
        placements,
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
    local, home, rows = whole, None, 0
    placements: list[Any] = [Replicate() for _ in range(mesh.ndim)]
    if groups:
        (group,) = [g for g in groups if rank in g]
        block = block_spec(spec, len(group))
        height, size = block.shape[0], spec.shape[0]
        start = min(group.index(rank) * height, size)
        rows = min(height, size - start)
        home = whole.new_zeros(block.shape)
        local = home.narrow(0, 0, rows)
        local.copy_(whole.narrow(0, start, rows))
        placements[-1] = Shard(0)
    stepped = _distributed(local, mesh, placements, spec)
    return Block(
        param=nn.Parameter(stepped, requires_grad=param.requires_grad),
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
