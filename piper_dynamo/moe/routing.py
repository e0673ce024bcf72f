"""Mixtures of experts: tokens to experts, the experts' matrix products, and back.

    x, routing = piper.moe.dispatch(tokens, expert_index, num_experts)
    with piper.annotate("EP"):
        y = piper.moe.grouped_mm(x, weight, routing)
    out = piper.moe.combine(y, routing, weights)

Legend: n tokens, k experts per token, E experts, r = n * k rows, d and h widths.

On one device rows are sorted by expert, multiplied, and put back. `piper.Shard` splits the experts
over ranks and puts all-to-alls where the three `exchange` operators are (`passes/shard.py`). These
copy, until programs leave them out (`lowering/aten.py`). The sort is stable, so that an expert sees
its rows in the order of the tokens, and rows that come from several ranks in the order of the
ranks: as one process on all tokens would.

`Shard(capacity=)` puts the operators of `slots.py` in the place of some of these
(`passes/capacity.py`).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from piper_dynamo.errors import PiperStrategyError, format_error


class Routing(NamedTuple):
    """Where rows are; made by `dispatch`, for `grouped_mm` and `combine`.

    `counts` may be read, outside of the expert region; the rest is theirs.

    Attributes:
        order: Which of the n * k assignments each sorted row is: [r], int64.
        counts: Rows of each expert, as this rank's tokens ask for them: [E], int64. With a
            capacity too: before any is dropped.
        arrived: Rows of each expert where it is computed: [E], int64; [E / ranks] under Shard.
        chosen: The experts asked for, [n, k].
    """

    order: Tensor
    counts: Tensor
    arrived: Tensor
    chosen: Tensor


def dispatch(tokens: Tensor, expert_index: Tensor, num_experts: int) -> tuple[Tensor, Routing]:
    """Rows for the experts: one per token and expert it goes to, sorted by expert.

    Args:
        tokens: [n, d].
        expert_index: [n, k] or [n], whole numbers from 0 to num_experts - 1.
        num_experts: E.

    Returns:
        Rows [n * k, d], and what `grouped_mm` and `combine` need.

    Raises:
        PiperStrategyError: A shape or dtype is wrong. An index out of range raises when it is seen.
    """
    if expert_index.dim() == 1:
        expert_index = expert_index.unsqueeze(1)
    _check_dispatch(tokens, expert_index, num_experts)
    ops = torch.ops.piper
    order, counts = ops.route(expert_index, num_experts)
    arrived = ops.exchange_counts(counts)
    rows = ops.permute(tokens, order, expert_index.shape[1])
    return ops.exchange(rows, arrived), Routing(order, counts, arrived, expert_index)


def grouped_mm(x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """Each expert's rows times its matrix; under autocast in its dtype, as other products are.

    Args:
        x: Rows by expert, [r, d].
        weight: [E, d, h].
        routing: From `dispatch`.

    Returns:
        [r, h].

    Raises:
        PiperStrategyError: A shape or dtype does not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        _refuse("grouped_mm takes x [r, d] and weight [E, d, h]", x=x.shape, weight=weight.shape)
    x, weight = _autocast(x), _autocast(weight)
    if x.dtype != weight.dtype:
        _refuse(
            "grouped_mm takes x and weight of one dtype",
            x=x.dtype,
            weight=weight.dtype,
            hint="give weight.to(x.dtype), or the rows in the weight's dtype",
        )
    if weight.shape[0] != routing.counts.shape[0]:
        _refuse(
            "grouped_mm takes one matrix for each expert of the routing",
            weight=weight.shape,
            experts=routing.counts.shape[0],
        )
    if x.shape[0] != routing.order.shape[0]:
        _refuse(
            "grouped_mm takes the rows [r, d] of its routing",
            x=x.shape,
            rows=routing.order.shape[0],
        )
    found: Tensor = torch.ops.piper.grouped_mm(x, weight, routing.arrived)
    return found


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """The experts' rows back in the order of the tokens.

    Args:
        y: Rows by expert, [n * k, d].
        routing: From `dispatch`.
        weights: [n, k]: what each expert's result counts for its token; None keeps them apart.

    Returns:
        [n, k, d], or with weights their sum over k, [n, d].

    Raises:
        PiperStrategyError: A shape does not fit.
    """
    if y.dim() != 2 or y.shape[0] != routing.order.shape[0]:
        _refuse("combine takes rows [r, d] of its routing", y=y.shape, rows=routing.order.shape[0])
    if weights is not None and weights.shape != routing.chosen.shape:
        _refuse(
            "combine takes one weight for each token and expert, [n, k]",
            weights=weights.shape,
            expert_index=routing.chosen.shape,
        )
    ops = torch.ops.piper
    rows = ops.unpermute(ops.unexchange(y, routing.arrived), routing.order)
    apart: Tensor = rows.unflatten(0, routing.chosen.shape)
    if weights is None:
        return apart
    weighed = apart * weights.unsqueeze(-1)
    return weighed.squeeze(1) if weights.shape[1] == 1 else weighed.sum(1)


def _autocast(value: Tensor) -> Tensor:
    """The value in the dtype that autocast asks matrix products for; float64 stays, as there."""
    device = value.device.type
    # Models on "meta" are planned, too, and asking about a device without autocast raises.
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if not is_on or value.dtype == torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(device)) if value.is_floating_point() else value


def _check_dispatch(tokens: Tensor, index: Tensor, num_experts: int) -> None:
    if tokens.dim() != 2 or index.dim() != 2 or index.shape[0] != tokens.shape[0]:
        _refuse(
            "dispatch takes tokens [n, d] and expert_index [n, k] or [n]",
            tokens=tokens.shape,
            expert_index=index.shape,
        )
    if index.dtype not in (torch.int64, torch.int32):
        _refuse("dispatch takes whole numbers as expert_index", dtype=index.dtype)
    if num_experts < 1:
        _refuse("dispatch takes at least one expert", num_experts=num_experts)


def _refuse(title: str, hint: str = "", **details: Any) -> None:
    if torch.compiler.is_compiling():  # sizes are no text there: the message would be lost
        raise PiperStrategyError(f"piper.moe.{title}")
    shown = {key.replace("_", " "): str(value) for key, value in details.items()}
    raise PiperStrategyError(format_error(f"piper.moe.{title}", shown, hint=hint))


# Operators. Each is functional, so that they can be captured, split and scheduled like any other.


@torch.library.custom_op("piper::route", mutates_args=())
def _route(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable order of the assignments by expert, and how many each expert gets."""
    flat = index.reshape(-1)
    # An accelerator checks by itself, where it counts; asking it here would wait for it.
    is_here = flat.device.type == "cpu" and flat.numel()
    if is_here and (int(flat.min()) < 0 or int(flat.max()) >= num_experts):
        raise IndexError(
            f"expert_index has {int(flat.min())} to {int(flat.max())}, "
            f"but there are experts 0 to {num_experts - 1}"
        )
    # Not bincount, which asks an accelerator how many bins there are.
    counts = flat.new_zeros(num_experts, dtype=torch.int64)
    counts.scatter_add_(0, flat.long(), counts.new_ones(1).expand(flat.shape[0]))
    return flat.argsort(stable=True), counts


@_route.register_fake
def _(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    order = index.new_empty((index.shape[0] * index.shape[1],), dtype=torch.int64)
    return order, index.new_empty((num_experts,), dtype=torch.int64)


@torch.library.custom_op("piper::permute", mutates_args=())
def _permute(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    """Row i is the token of assignment order[i]; each token has `copies` assignments."""
    if tokens.is_cuda:
        from piper_dynamo.kernels import rows  # takes a while: Triton

        return rows.permute(tokens, order, copies)
    return tokens.index_select(0, order if copies == 1 else order // copies)


@_permute.register_fake
def _(tokens: Tensor, order: Tensor, copies: int) -> Tensor:
    return tokens.new_empty((order.shape[0], *tokens.shape[1:]))


@torch.library.custom_op("piper::unpermute", mutates_args=())
def _unpermute(rows: Tensor, order: Tensor) -> Tensor:
    """Assignment order[i] is row i."""
    return torch.empty_like(rows).index_copy_(0, order, rows)


@_unpermute.register_fake
def _(rows: Tensor, order: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op("piper::exchange_counts", mutates_args=())
def _exchange_counts(counts: Tensor) -> Tensor:
    """How many rows come to the experts that are here: on one device, those that are sent."""
    return counts.clone()


@_exchange_counts.register_fake
def _(counts: Tensor) -> Tensor:
    return torch.empty_like(counts)


@torch.library.custom_op("piper::exchange", mutates_args=())
def _exchange(rows: Tensor, arrived: Tensor) -> Tensor:
    """Rows to where their experts are."""
    return rows.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("piper::unexchange", mutates_args=())
def _unexchange(rows: Tensor, arrived: Tensor) -> Tensor:
    """Rows from their experts back to where they came from."""
    return rows.clone(memory_format=torch.contiguous_format)


@_exchange.register_fake
@_unexchange.register_fake
def _(rows: Tensor, arrived: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op("piper::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    """X of each expert's rows @ weight of that expert."""
    _check_experts(weight, arrived)
    if _is_fast(x, weight):
        found: Tensor = F.grouped_mm(x, weight, offs=_ends(arrived))
        return found
    counts = _counts(x, arrived)
    result = x.new_empty((x.shape[0], weight.shape[2]))
    start = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(x.narrow(0, start, count), weight[expert], out=result.narrow(0, start, count))
            start += count
    return result


def _check_experts(weight: Tensor, arrived: Tensor) -> None:
    if weight.shape[0] != arrived.shape[0]:
        raise RuntimeError(f"{weight.shape[0]} matrices for {arrived.shape[0]} experts")


def _is_fast(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes these.

    It reads on the device where each expert's rows end, so the host need not wait for their number;
    on a CPU it takes as long as a product per expert.
    """
    return all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.numel() > 0 and _is_aligned(t)
        for t in operands
    )


def _is_aligned(matrix: Tensor) -> bool:
    """Rows, or columns, lie one after the other and begin at multiples of 16 bytes."""
    *_, outer, inner = matrix.stride()
    step = max(outer, inner) * matrix.element_size()
    return min(outer, inner) == 1 and step % 16 == 0 and matrix.data_ptr() % 16 == 0


def _ends(arrived: Tensor) -> Tensor:
    """Where each expert's rows end."""
    return arrived.cumsum(0, dtype=torch.int32)


def _counts(x: Tensor, arrived: Tensor) -> list[int]:
    """Rows of each expert; x must have all of them."""
    counts: list[int] = arrived.tolist()
    if x.shape[0] != sum(counts):
        raise RuntimeError(f"x has {x.shape[0]} rows, but its routing has {sum(counts)}")
    return counts


@_grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, arrived: Tensor) -> Tensor:
    _check_experts(weight, arrived)
    return x.new_empty((x.shape[0], weight.shape[2]))


@torch.library.custom_op("piper::grouped_outer", mutates_args=())
def _grouped_outer(x: Tensor, y: Tensor, arrived: Tensor) -> Tensor:
    """For each expert x^T @ y over its rows; zeros where it has none."""
    if _is_fast(x, y):
        found: Tensor = F.grouped_mm(x.t(), y, offs=_ends(arrived))
        return found
    result = x.new_empty((arrived.shape[0], x.shape[1], y.shape[1]))
    start = 0
    for expert, count in enumerate(_counts(x, arrived)):
        if not count:
            result[expert].zero_()
            continue
        rows = x.narrow(0, start, count)
        torch.mm(rows.t(), y.narrow(0, start, count), out=result[expert])
        start += count
    return result


@_grouped_outer.register_fake
def _(x: Tensor, y: Tensor, arrived: Tensor) -> Tensor:
    return x.new_empty((arrived.shape[0], x.shape[1], y.shape[1]))


# Autograd formulas.


def _keep_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, copies = inputs
    ctx.save_for_backward(order)
    ctx.copies = copies


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (order,) = ctx.saved_tensors
    rows = torch.ops.piper.unpermute(grad.contiguous(), order)
    if ctx.copies > 1:
        rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
    return rows, None, None


def _keep_second(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _unpermute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (order,) = ctx.saved_tensors
    return torch.ops.piper.permute(grad, order, 1), None


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (arrived,) = ctx.saved_tensors
    return torch.ops.piper.unexchange(grad, arrived), None


def _unexchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (arrived,) = ctx.saved_tensors
    return torch.ops.piper.exchange(grad, arrived), None


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, arrived = ctx.saved_tensors
    ops = torch.ops.piper
    grad = grad.contiguous()
    to_x = (
        ops.grouped_mm(grad, weight.transpose(1, 2), arrived) if ctx.needs_input_grad[0] else None
    )
    to_weight = ops.grouped_outer(x, grad, arrived) if ctx.needs_input_grad[1] else None
    return to_x, to_weight, None


_permute.register_autograd(_permute_backward, setup_context=_keep_permute)
_unpermute.register_autograd(_unpermute_backward, setup_context=_keep_second)
_exchange.register_autograd(_exchange_backward, setup_context=_keep_second)
_unexchange.register_autograd(_unexchange_backward, setup_context=_keep_second)
_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_keep_all)
