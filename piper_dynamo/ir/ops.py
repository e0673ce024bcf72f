"""The functions that nodes of the Global Training DAG call beside chunks.

Those before placement compute, so that the DAG runs on one process; those that only a rank program
can do (`send`, `recv`, the collectives) raise when called. A collective takes several values,
which travel as one, and gives as many; their specs are those of its picks. The ranks between which
it is are in the node's `meta`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.spec import TensorSpec


def slice_batch(batch: Tensor, dim: int | None, index: int, parts: int) -> Tensor:
    """Microbatch `index` of `parts` equal slices along `dim`, contiguous; of a stack if None."""
    if dim is None:
        return batch[index].contiguous()
    size = batch.shape[dim] // parts
    return batch.narrow(dim, index * size, size).contiguous()


def accumulate(*parts: Tensor) -> Tensor:
    """The sum of partial gradients. A rank adds them in the order its tasks finish."""
    return add(*parts)


def add(*parts: Tensor) -> Tensor:
    """The sum of a tied parameter's gradients, in one order on every holder."""
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total


def cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in another dtype."""
    return value.to(dtype)


def weighted_loss(losses: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The loss whose gradient is taken: the microbatches' losses times their weights, summed.

    A microbatch that weighs nothing adds nothing, whatever its loss is.
    """
    total, *rest = (
        torch.where(weight == 0, weight, loss * weight)
        for loss, weight in zip(losses, weights, strict=True)
    )
    for part in rest:
        total = total + part
    return total


def concat(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    """An output over all microbatches: joined along its batch dim, or stacked."""
    return torch.stack(list(parts)) if dim is None else torch.cat(list(parts), dim)


def nothing() -> tuple[()]:
    """A phase without work; it keeps its place in an order."""
    return ()


def _only_in_programs(name: str) -> PiperError:
    return PiperError(
        f"{name} runs in a rank program only; use the in-process communicator to run a placed plan"
    )


def send(value: Tensor) -> Tensor:
    """Send a value from each rank of its source to the rank of its target at the same place."""
    raise _only_in_programs("send")


def recv(sent: Tensor) -> Tensor:
    """The value of a `send`, on its target."""
    raise _only_in_programs("recv")


def all_reduce(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sums over the group, on every rank of it, in place of the values."""
    raise _only_in_programs("all_reduce")


def all_gather(shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The group's equal blocks joined along dim 0; what the last ones have too much is cut off."""
    raise _only_in_programs("all_gather")


def reduce_scatter(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This rank's block of rows of the sums over the group; zeros make up for missing rows."""
    raise _only_in_programs("reduce_scatter")


def all_to_all(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Equal blocks along dim 0: the i-th goes to the group's i-th rank."""
    raise _only_in_programs("all_to_all")


def exchange_counts(counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """How many rows come to each expert of this rank, and how many go and come by rank."""
    raise _only_in_programs("exchange_counts")


def exchange(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows sent to the ranks of their experts; what came, sorted by expert and then by rank.

    Without splits as many rows go to every rank, and what came is as it came: by rank.
    """
    raise _only_in_programs("exchange")


def unexchange(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Rows sent back to the ranks they came from, in the order they had there.

    Without splits as many rows, sorted by rank, go to every rank.
    """
    raise _only_in_programs("unexchange")


def block_spec(spec: TensorSpec, parts: int) -> TensorSpec:
    """One of `parts` blocks of rows, as a shard is stored and sent: rows rounded up."""
    rows = -(-spec.shape[0] // parts)
    return replace(spec, shape=(rows, *spec.shape[1:])).contiguous()
