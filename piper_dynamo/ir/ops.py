"""The functions that nodes of the Global Training DAG call beside chunks.

Those before placement compute, so that the DAG runs on one process; those that only a rank program
can do (`send`, `recv`, the collectives) raise when called, and their shapes come from
`result_spec`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError
from piper_dynamo.ir.spec import TensorSpec, contiguous_stride
from piper_dynamo.ir.task import Kind


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


def weighted_loss(losses: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The loss whose gradient is taken: the microbatches' losses times their weights, summed."""
    total = losses[0] * weights[0]
    for loss, weight in zip(losses[1:], weights[1:], strict=True):
        total = total + loss * weight
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


def send(value: Tensor, *, source: tuple[int, ...], target: tuple[int, ...]) -> Tensor:
    """Send a value from each rank of `source` to the rank of `target` at the same place."""
    raise _only_in_programs("send")


def recv(sent: Tensor) -> Tensor:
    """The value of a `send`, on its target."""
    raise _only_in_programs("recv")


def all_reduce(value: Tensor, *, group: tuple[int, ...]) -> Tensor:
    """The sum over the group, on every rank of it."""
    raise _only_in_programs("all_reduce")


def all_gather(shard: Tensor, *, group: tuple[int, ...]) -> Tensor:
    """The group's equal shards joined along dim 0."""
    raise _only_in_programs("all_gather")


def reduce_scatter(value: Tensor, *, group: tuple[int, ...]) -> Tensor:
    """This rank's slice, along dim 0, of the sum over the group."""
    raise _only_in_programs("reduce_scatter")


def all_to_all(value: Tensor, *, group: tuple[int, ...]) -> Tensor:
    """Equal slices along dim 0: the i-th goes to the group's i-th rank."""
    raise _only_in_programs("all_to_all")


COMMUNICATION = {
    send: Kind.SEND,
    recv: Kind.RECV,
    all_reduce: Kind.ALL_REDUCE,
    all_gather: Kind.ALL_GATHER,
    reduce_scatter: Kind.REDUCE_SCATTER,
    all_to_all: Kind.ALL_TO_ALL,
}


def result_spec(kind: Kind, spec: TensorSpec, group_size: int) -> TensorSpec:
    """The spec of a communication's result, per rank.

    Raises:
        PiperError: A reduce-scatter or all-to-all of a dim 0 that the group does not divide.
    """
    rows = spec.shape[0] if spec.shape else 1
    if kind is Kind.ALL_GATHER:
        rows *= group_size
    elif kind is Kind.REDUCE_SCATTER:
        if rows % group_size:
            raise PiperError(
                f"reduce_scatter: dim 0 of {spec} does not divide over {group_size} ranks"
            )
        rows //= group_size
    elif kind is Kind.ALL_TO_ALL and rows % group_size:
        raise PiperError(f"all_to_all: dim 0 of {spec} does not divide over {group_size} ranks")
    if not spec.shape:
        return spec
    shape = (rows, *spec.shape[1:])
    return replace(spec, shape=shape, stride=contiguous_stride(shape))
