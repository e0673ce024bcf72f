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
from piper_dynamo.ir.graph import Layout
from piper_dynamo.ir.spec import TensorSpec


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """A parameter as one rank holds it: whole, or some of its rows.

    Attributes:
        param: What the optimizer steps: a DTensor.
        spec: The whole parameter.
        home: The rows with their filling; None where the parameter is whole.
        rows: How many rows are its own.
        start: The first of them in the whole parameter.
    """

    param: nn.Parameter
    spec: TensorSpec
    home: Tensor | None
    rows: int
    start: int

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


def take_block(param: nn.Parameter, layout: Layout | None, mesh: Any, rank: int) -> Block:
    """This rank's block of a whole parameter, in memory of its own.

    Args:
        param: The whole parameter.
        layout: How it is held; None keeps it whole.
        mesh: The ranks that hold it: copies by blocks, blocks alone where there are no copies, or
            experts by blocks of each rank's.
        rank: This rank.
    """
    spec = TensorSpec.of(param)
    whole = param.detach()
    local, home, start, rows = whole, None, 0, 0
    placements: list[Any] = [Replicate() for _ in range(mesh.ndim)]
    levels = [g for g in (layout.expert_groups, layout.shard_groups) if g] if layout else []
    if levels:
        assert layout is not None
        start, rows = 0, spec.shape[0]
        for dim, groups in enumerate(levels, start=mesh.ndim - len(levels)):
            (group,) = [g for g in groups if rank in g]
            height = -(-rows // len(group))
            above = min(group.index(rank) * height, rows)
            start, rows = start + above, min(height, rows - above)
            placements[dim] = Shard(0)
        home = whole.new_zeros(layout.held(spec).shape)
        local = home.narrow(0, 0, rows)
        local.copy_(whole.narrow(0, start, rows))
    stepped = _distributed(local, mesh, placements, spec)
    return Block(
        param=nn.Parameter(stepped, requires_grad=param.requires_grad),
        spec=spec,
        home=home,
        rows=rows,
        start=start,
    )


def digest(tensors: Sequence[Tensor]) -> list[str]:
    """A short text per tensor, equal where the bytes are."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        found.append(hashlib.sha1(flat.numpy().data, usedforsecurity=False).hexdigest()[:12])
    return found
