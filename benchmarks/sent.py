"""Bytes that leave ranks in a step: what a strategy has to send, what its plan says, what is sent.

`bound` knows the model's shapes and the strategy, and no plan. A value of one stage that another
rank uses goes there once, and its gradient comes back once; a gradient enters a reduction as often
as its ZeRO level says, and a parameter a gather by each pass that reads it; the loss reaches every
rank. A group of n ranks moves in a sum 2(n-1) times its bytes (Patarasuk and Yuan 2009), in a
reduction to blocks and in a gather of blocks n-1 times (Thakur et al. 2005). Rows go to experts and
come back, forward and backward: how many, one process finds out by routing the same tokens.

`planned` reads the programs. `handed_over` counts what a step gives to torch.distributed, and
`on_sockets` what the kernel has sent: with gloo's own headers, and sums as gloo makes them.
"""

import functools
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import piper_dynamo as piper
from benchmarks.counts import EXPERTS, PAIR, SMALL, plan_of
from benchmarks.report import Row
from benchmarks.sides import batch_of
from piper_dynamo.ir.ops import block_spec
from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.schedules import SCHEDULES
from piper_dynamo.strategies import placement
from piper_dynamo.train.config import Config
from piper_dynamo.train.model import Llama, build, split_result

DOUBLE = replace(EXPERTS, dtype="float64")  # one process and two must route alike
# A bucket per layer. Where a stage is one bucket, its backward makes the embedding's values again
# rather than keep them, and so reads, and gathers, a parameter more.
BUCKET_MB = 0.05
JOBS: Mapping[str, Config] = {
    **{schedule: replace(SMALL, schedule=schedule) for schedule in SCHEDULES},
    "4 ranks": replace(SMALL, pp=4),
    **{
        f"2 replicas, zero {zero}": replace(PAIR, zero=zero, bucket_mb=BUCKET_MB)
        for zero in range(4)
    },
    "2 replicas, zbv, zero 2": replace(PAIR, zero=2, schedule="zbv"),
    "4 replicas, zero 2": replace(SMALL, pp=1, schedule="gpipe", dp=4, batch=16, zero=2),
    "experts": DOUBLE,
    "experts, dualpipev": replace(DOUBLE, schedule="dualpipev"),
}
COUNT_BYTES = 8  # how many rows go to an expert, int64
ROWS = "rows"


def bound(config: Config) -> dict[str, int]:
    """The least that all ranks together send in a step, by how they send it."""
    nbytes = getattr(torch, config.dtype).itemsize
    model = build(config)
    sizes = {name: p.numel() * nbytes for name, p in model.named_parameters()}
    whole = sum(n for name, n in sizes.items() if config.ep == 1 or ".moe.w_" not in name)
    copies, microbatches, two_way = config.replicas, config.microbatches, _is_two_way(config)
    placed = [ranks[0] for ranks in placement(config.schedule, config.pp).values()]
    crossings = sum(a != b for a, b in pairwise(placed))
    value = config.batch // copies // microbatches * config.seq * config.dim * nbytes
    # Half of the losses of two directions are at the other end.
    losses = config.pp - 1 + (microbatches // 2 if two_way else 0)
    found = {"messages": copies * (2 * microbatches * crossings * value + losses * nbytes)}
    if two_way:  # a stage has two holders, which send each other their part of every gradient
        found["messages"] += 2 * whole
    if copies == 1:
        return _without_zeros(found)
    others = copies - 1
    reductions = 1 if config.zero < 2 else microbatches
    # The loss is summed over the replicas of its stage.
    found["sums"] = 2 * others * (nbytes + (whole if config.zero == 0 else 0))
    if config.zero:
        found["blocks"] = others * reductions * whole
        found["gathers"] = others * whole
    if config.zero == 3:  # by every forward, and every backward but the embedding's
        found["gathers"] = others * microbatches * (2 * whole - sizes["embedding.weight"])
    if config.ep > 1:
        found[ROWS] = 4 * _rows_for_others(config, model) * config.dim * nbytes
        told = config.experts * COUNT_BYTES * others // copies
        found["counts"] = copies * microbatches * config.layers * told
    return _without_zeros(found)


def _is_two_way(config: Config) -> bool:
    return config.schedule == "dualpipe"


def _without_zeros(found: Mapping[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in found.items() if nbytes}


def _rows_for_others(config: Config, model: Llama) -> int:
    """Rows whose expert another rank has, over all replicas, microbatches and layers."""
    share = config.experts // config.ep
    total = 0
    for replica in range(config.replicas):
        columns = [x.chunk(config.microbatches) for x in share_of(config, replica)]
        for tokens, targets in zip(*columns, strict=True):
            with torch.no_grad():
                _, loads = split_result(model(tokens, targets))
            mine = replica % config.ep * share
            known = [load for load in loads if load is not None]
            assert len(known) == config.layers
            total += sum(int(load.sum() - load[mine : mine + share].sum()) for load in known)
    return total


def share_of(config: Config, replica: int) -> tuple[Tensor, Tensor]:
    """What a replica is given of the batch."""
    tokens, targets = (whole.chunk(config.replicas)[replica] for whole in batch_of(config))
    return tokens, targets


_KINDS = {
    Op.SEND: "messages",
    Op.ALL_REDUCE: "sums",
    Op.REDUCE_SCATTER: "blocks",
    Op.ALL_GATHER: "gathers",
    Op.EXCHANGE_COUNTS: "counts",
}


def planned(plan: piper.Plan) -> dict[str, int]:
    """What the programs of all ranks send; of rows only a step knows how many go."""
    found: Counter[str] = Counter()
    for program in plan.programs:
        for instr in program.instrs:
            if instr.op in _KINDS:
                found[_KINDS[instr.op]] += _leaving(instr)
    return _without_zeros(found)


def _leaving(instr: Instr) -> int:
    """Bytes that leave the rank."""
    if instr.op is Op.SEND:
        assert instr.spec is not None
        return instr.spec.nbytes
    size = len(instr.group)
    nbytes = sum(spec.nbytes for spec in instr.specs)
    if instr.op is Op.REDUCE_SCATTER:
        return nbytes * (size - 1)
    if instr.op is Op.ALL_GATHER:
        return sum(block_spec(spec, size).nbytes for spec in instr.specs) * (size - 1)
    if instr.op is Op.ALL_REDUCE:
        return _part(2 * nbytes * (size - 1), size)
    return instr.specs[0].nbytes * (size - 1)  # counts of the experts here, from each rank


def _part(total: int, ranks: int) -> int:
    """One rank's part of what all of a group send."""
    part, rest = divmod(total, ranks)
    assert not rest
    return part


@contextmanager
def handed_over() -> Iterator[Counter[str]]:
    """Counts what this process gives to torch.distributed for other ranks, by call."""
    found: Counter[str] = Counter()
    isend, all_reduce, exchange = dist.isend, dist.all_reduce, dist.all_to_all_single

    @functools.wraps(isend)
    def sending(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        found["isend"] += value.nbytes
        return isend(value, *args, **kwargs)

    @functools.wraps(all_reduce)
    def reducing(value: Tensor, *args: Any, **kwargs: Any) -> Any:
        size = dist.get_world_size(kwargs.get("group"))
        found["all_reduce"] += _part(2 * value.nbytes * (size - 1), size)
        return all_reduce(value, *args, **kwargs)

    @functools.wraps(exchange)
    def exchanging(room: Tensor, value: Tensor, come: Any, sent: Any, **kwargs: Any) -> Any:
        row = value.nbytes // value.shape[0] if value.shape[0] else 0
        others = sum(sent) - sent[dist.get_rank(kwargs["group"])]
        found["all_to_all"] += others * row
        return exchange(room, value, come, sent, **kwargs)

    with mock.patch.multiple(
        dist, isend=sending, all_reduce=reducing, all_to_all_single=exchanging
    ):
        yield found


_TCP = (socket.AF_INET, socket.AF_INET6)
_SENT = (200, 208)  # where tcp_info (linux/tcp.h) has bytes sent, and those sent again
_INFO_BYTES = 216


def on_sockets() -> int:
    """Bytes that the kernel has sent on this process's TCP connections (Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type != socket.SOCK_STREAM or one.family not in _TCP:
                    continue
                told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except FileNotFoundError:  # closed meanwhile
            continue
        sent, again = (int.from_bytes(told[at : at + 8], "little") for at in _SENT)
        total += sent - again
    return total


def measured(config: Config) -> tuple[int, int]:
    """What a step of this rank hands over, and what its sockets send meanwhile."""
    batch = share_of(config, piper.rank() % config.replicas)
    step = piper.compile(build(config), config.strategy(), batch, compile=config.compile)

    def once() -> None:
        split_result(step(*batch))[0].backward()
        for parameter in piper.parameters(step):
            parameter.grad = None

    once()
    dist.barrier()
    before = on_sockets()
    with handed_over() as found:
        once()
    return sum(found.values()), on_sockets() - before


def run() -> Iterator[Row]:
    """Every job: the bound, the plan, what is handed over, and what sockets send."""
    for name, config in JOBS.items():
        least, plan = bound(config), planned(plan_of(config))
        ranks = piper.launch(functools.partial(measured, config), config.world)
        handed, sockets = (sum(column) for column in zip(*ranks, strict=True))
        total = sum(least.values())
        is_planned = plan == {kind: n for kind, n in least.items() if kind != ROWS}
        yield Row(
            section="sent",
            what=name,
            figures=f"{handed} bytes handed over, the least is {total}; {sockets} on sockets "
            f"({sockets / total - 1:+.1%})",
            bar="= 1 x the least, to the byte",
            held=handed == total and is_planned,
            data={"ours": handed, "theirs": total, "unit": "bytes", "limit": 1.0}
            | {"sockets": sockets, "least": least, "plan": plan, "measured": "counted"},
        )
