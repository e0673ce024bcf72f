"""Several steps before one update, with their reductions put off."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from tests import experts, jobs, replicas

STEPS = 3


class Tied(torch.nn.Module):
    """A parameter shared by both stages, one with uneven rows, and one without dims."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.e = torch.nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.float64))
        self.s = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.w = torch.nn.Parameter(torch.randn(3, 5, generator=generator, dtype=torch.float64))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.e) * self.s
        with piper.annotate("PP", 1):
            return (torch.tanh(h @ self.e.T) @ self.w).square().mean()


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


def one_process() -> dict[str, torch.Tensor]:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for scale, batch in enumerate(batches(STEPS), start=1):
            (model(batch) / scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def train(zero: int, outside: Callable[[int], bool], schedule: str = "one_f_one_b"):
    """Steps for which `outside` is false run inside no_sync."""
    placement = {0: [0, 1], 1: [2, 3]}
    strategy = piper.Strategy(
        piper.Split({}, num_microbatches=4),
        *jobs.places(placement, schedule, 4),
        piper.Replicate({"PP": "*"}, zero=zero),
        *jobs.orders(schedule, placement, 4),
    )
    replica = piper.rank() % 2
    mine = [batch.chunk(2)[replica] for batch in batches(STEPS)]
    step = piper.compile(Tied(), strategy, (mine[0],))
    optimizer = torch.optim.SGD(piper.parameters(step), lr=0.1)
    counts = []
    for _ in range(2):
        for k, batch in enumerate(mine):
            if outside(k):
                (step(batch) / (k + 1)).backward()
            else:
                with piper.no_sync(step):
                    (step(batch) / (k + 1)).backward()
                if zero < 2:
                    assert all(p.grad is None for p in piper.parameters(step))
            program = piper.explain(step).programs[piper.rank()]
            reducing = (Op.REDUCE_SCATTER, Op.ALL_REDUCE)
            counts.append(sum(i.op in reducing and i.task != "loss" for i in program.instrs))
        piper.clip_grad_norm_(step, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    held = {n: p.detach() for n, p in piper.named_parameters(step)}
    local = {n: getattr(p, "_local_tensor", p).clone() for n, p in held.items()}
    return local, counts


@pytest.mark.parametrize(
    ("zero", "schedule"),
    [*((zero, "one_f_one_b") for zero in range(4)), (0, "dualpipe"), (1, "dualpipe")],
)
def test_put_off_reductions_change_no_number(zero: int, schedule: str):
    want = one_process()
    found = piper.launch(
        lambda: train(zero, lambda k: k == STEPS - 1, schedule), ranks=4, engine="inprocess"
    )
    for rank, (held, counts) in enumerate(found):
        for name, value in held.items():
            whole = want[name]
            chunks = whole.chunk(2) if zero and whole.dim() else (whole, whole)
            jobs.close(value, chunks[rank % 2], f"rank {rank} {name}")
        inside = counts[0]
        assert (inside == 0) == (zero < 2), "ZeRO 0 and 1 reduce nothing inside"
        assert counts[STEPS - 1] > 0


def test_control_without_the_last_reduction_the_numbers_differ():
    want = one_process()
    found = piper.launch(lambda: train(0, lambda k: k != 0), ranks=4, engine="inprocess")
    jobs.close(found[0][0]["e"], want["e"], "e")
    never = piper.launch(lambda: train(0, lambda k: False), ranks=4, engine="inprocess")
    with pytest.raises(AssertionError):  # nobody reduces: the optimizer sees no gradient
        jobs.close(never[0][0]["e"], want["e"], "e")


def accumulate_experts(zero: int, last: int) -> dict[str, torch.Tensor]:
    """Steps of which those before `last` put their reductions off; what this rank then holds."""
    placement = {0: [0, 1, 2, 3]}
    case = experts.case()
    mine = [replicas.mine(case.batch(k), placement) for k in range(STEPS)]
    step = piper.compile(case.build(1), experts.copies(2, placement, "gpipe", zero=zero), mine[0])
    optimizer = torch.optim.SGD(piper.parameters(step), lr=0.1)
    for _ in range(2):
        for k, batch in enumerate(mine):
            with piper.no_sync(step) if k < last else nullcontext():
                (step(*batch) / (k + 1)).backward()
        piper.clip_grad_norm_(step, 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return replicas.held(step)


def experts_alone() -> dict[str, torch.Tensor]:
    case = experts.case()
    model = case.build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for k in range(STEPS):
            (model(*case.batch(k)) / (k + 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_put_off_reductions_of_copies_of_experts(zero: int):
    """Rows are exchanged in every step; experts' gradients are summed over their copies once."""
    want, part = experts_alone(), experts.part_of(2)

    def compare(last: int) -> None:
        found = jobs.run_ranks(lambda: accumulate_experts(zero, last), 4)
        for rank, held in enumerate(found):
            for name, value in held.items():
                mine = part(want[name], rank, {0: [0, 1, 2, 3]}, zero)
                jobs.close(value, mine, f"rank {rank} {name}")

    compare(STEPS - 1)
    with pytest.raises(AssertionError, match="off by"):  # control: nothing is ever reduced
        compare(STEPS)


def test_it_needs_a_prepared_step():
    with pytest.raises(piper.PiperError, match="prepare"), piper.no_sync(torch.nn.Linear(2, 2)):
        pass
