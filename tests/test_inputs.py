"""Inputs of every kind, and shapes and modes that change between calls."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from tests import jobs
from tests.jobs import LINE2, LOOP3ON2
from tests.models import (
    Dropped,
    Hidden,
    Masked,
    NormNet,
    Rich,
    Stack4,
    TiedLM,
    rows,
    xin,
)

F64 = torch.float64


def compiled(microbatches: int = 2, batch: tuple[Any, ...] | None = None) -> Any:
    """Stack4 on a line of two."""
    strategy = jobs.strategy(LINE2, microbatches)
    return piper.compile(Stack4(2), strategy, example_inputs=batch or rows(8))


# Inputs.


def test_none_int_bool_and_dict() -> None:
    """Three stages on two ranks; every border carries a mixture. Another int is another value."""
    mask = (xin([8, 4], 2) > 0).to(F64)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((xin([8, 4], 0),), {}),
        ((xin([8, 4], 0),), {"mask": mask, "n": 3, "flag": True}),
        ((xin([8, 4], 0),), {"mask": mask, "n": 5, "flag": False}),
        ((xin([8, 4], 0), None, 3, True), {}),
    ]

    def job() -> list[tuple[Any, dict[str, Tensor]]]:
        model = Rich()
        strategy = jobs.strategy(LOOP3ON2, 2, loss="loss")
        step = piper.compile(model, strategy, example_inputs=calls[0][0])
        found = []
        for args, kwargs in calls:
            out = step(*args, **kwargs)
            out["loss"].backward()
            found.append((out, jobs.grads(step)))
            for p in piper.parameters(step):
                p.grad = None
        return found

    ranks = jobs.run_ranks(job, 2)
    for i, (args, kwargs) in enumerate(calls):
        want = Rich()
        expected = want(*args, **kwargs)
        expected["loss"].backward()
        jobs.check_grads([rank[i][1] for rank in ranks], want)
        for rank in ranks:
            out = rank[i][0]
            assert list(out) == ["h", "extra", "n", "loss"]
            assert out["n"] == expected["n"]
            assert isinstance(out["extra"], tuple)
            assert isinstance(out["extra"][1], list)
            assert out["extra"][1][1] is None
            jobs.close(out["loss"].detach(), expected["loss"].detach(), f"call {i}: loss")
        first, second = (rank[i][0] for rank in ranks)
        jobs.close(first["h"], expected["h"], f"call {i}: h")
        jobs.close(second["extra"][0], expected["extra"][0], f"call {i}: extra[0]")
        jobs.close(second["extra"][1][0], expected["extra"][1][0], f"call {i}: extra[1][0]")


@pytest.mark.parametrize("named", [True, False], ids=["keywords", "positions"])
def test_inputs_of_a_late_stage(named: bool) -> None:
    """Labels and positions enter at the second stage; ranks hold real data for their own only."""
    ids, labels = TiedLM.batch()
    positions = torch.arange(3).expand(4, 3).contiguous()
    batch = {"ids": ids, "labels": labels, "positions": positions}
    needs = {"ids": 0, "labels": 1, "positions": 1}

    def job() -> tuple[float, dict[str, Tensor]]:
        mine = {
            name: value if needs[name] == piper.rank() else jobs.poison(value)
            for name, value in batch.items()
        }
        example: Any = mine if named else tuple(mine.values())
        step = piper.compile(TiedLM(), jobs.strategy(LINE2, 2), example_inputs=example)
        loss = step(**mine) if named else step(*mine.values())
        loss.backward()
        return loss.item(), jobs.grads(step)

    want = TiedLM()
    loss = want(**batch)
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got in ranks], want)
    jobs.close([value for value, _ in ranks], [loss.item()] * 2, "loss")


def test_inputs_that_are_replicated_or_have_no_batch() -> None:
    """The table has as many rows as the batch, but is kept whole; 0-dim and floats need no rule."""

    def job() -> tuple[float, dict[str, Tensor]]:
        strategy = jobs.strategy(LINE2, 2, inputs={"table": "replicate"})
        step = piper.compile(Masked(), strategy, example_inputs=Masked.batch())
        loss = step(*Masked.batch())
        loss.backward()
        return loss.item(), jobs.grads(step)

    want = Masked()
    loss = want(*Masked.batch())
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got in ranks], want)
    jobs.close([value for value, _ in ranks], [loss.item()] * 2, "loss")


class Columns(nn.Module):
    """The batch is the last dim of the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(xin([4, 4], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w.T)
        with piper.annotate("PP", 1):
            return (h - y.T).square().mean()


def test_an_input_is_sliced_along_the_dim_it_is_given() -> None:
    batch = (xin([8, 4], 0), xin([4, 8], 1))

    def job() -> tuple[float, dict[str, Tensor]]:
        strategy = jobs.strategy(LINE2, 4, inputs={"y": 1})
        step = piper.compile(Columns(), strategy, example_inputs=batch)
        loss = step(*batch)
        loss.backward()
        return loss.item(), jobs.grads(step)

    want = Columns()
    loss = want(*batch)
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got in ranks], want)
    jobs.close([value for value, _ in ranks], [loss.item()] * 2, "loss")


# Shapes and modes that change between calls.


def test_batch_sizes_may_change_between_calls() -> None:
    sizes = (8, 4, 8, 12)

    def job() -> list[tuple[float, dict[str, Tensor]]]:
        step, found = compiled(), []
        for size in sizes:
            loss = step(*rows(size))
            loss.backward()
            found.append((loss.item(), jobs.grads(step)))
            for p in piper.parameters(step):
                p.grad = None
        return found

    ranks = jobs.run_ranks(job, 2)
    for i, size in enumerate(sizes):
        want = Stack4(2)
        loss = want(*rows(size))
        loss.backward()
        jobs.check_grads([rank[i][1] for rank in ranks], want)
        jobs.close([rank[i][0] for rank in ranks], [loss.item()] * 2, f"loss of {size} rows")


def test_sequence_lengths_may_change_between_calls() -> None:
    lengths = (3, 5, 2)

    def batch(length: int) -> tuple[Tensor, Tensor]:
        ids = (7 * torch.arange(4 * length) + 3).remainder(11).reshape(4, length)
        return ids, ids.roll(1, 0)

    def job() -> list[tuple[float, dict[str, Tensor]]]:
        step = piper.compile(TiedLM(), jobs.strategy(LINE2, 2), example_inputs=batch(3))
        found = []
        for length in lengths:
            loss = step(*batch(length))
            loss.backward()
            found.append((loss.item(), jobs.grads(step)))
            for p in piper.parameters(step):
                p.grad = None
        return found

    ranks = jobs.run_ranks(job, 2)
    for i, length in enumerate(lengths):
        want = TiedLM()
        loss = want(*batch(length))
        loss.backward()
        jobs.check_grads([rank[i][1] for rank in ranks], want)
        jobs.close([rank[i][0] for rank in ranks], [loss.item()] * 2, f"loss of {length} tokens")


@pytest.mark.parametrize("size", [6, 3])
def test_a_later_batch_that_does_not_divide_is_refused_by_every_rank(size: int) -> None:
    """Never rows silently lost; the next good call works."""

    def job() -> tuple[str, float]:
        step = compiled(4)
        step(*rows(8)).backward()
        text = jobs.refusal(lambda: step(*rows(size)), Exception)
        return text, step(*rows(8)).item()

    for text, loss in jobs.run_ranks(job, 2):
        jobs.mentions(text, "x", str(size), "4")
        assert loss == pytest.approx(Stack4.LOSS, abs=1e-12)


def test_forward_only_before_between_and_after_training() -> None:
    """Under no_grad: right numbers, no gradient; training goes on as if it had not been there."""
    want = Stack4(2)
    losses = [want(*rows(4)).item()]
    optimizer = torch.optim.SGD(want.parameters(), lr=1.0)
    for _ in range(2):
        loss = want(*rows(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), want(*rows(4)).item()]

    def job() -> list[float]:
        step = compiled(4)

        def evaluate() -> float:
            with torch.no_grad():
                loss = step(*rows(4))
            assert not loss.requires_grad
            assert all(p.grad is None for p in piper.parameters(step))
            return loss.item()

        found = [evaluate()]
        optimizer = torch.optim.SGD(piper.parameters(step), lr=1.0)
        for _ in range(2):
            loss = step(*rows(8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [loss.item(), evaluate()]
        return found

    for rank, found in enumerate(jobs.run_ranks(job, 2)):
        jobs.close(found, losses, f"rank {rank}: losses")


def test_forward_only_outputs_come_in_row_order() -> None:
    def job() -> Any:
        x, _ = rows(8)
        step = torch.compile(
            Hidden(),
            backend="piper",
            options={"strategy": jobs.strategy(LINE2, 4, ""), "outputs": "everywhere"},
        )
        with torch.no_grad():
            piper.prepare(step, x)
            return step(x)

    want = Hidden()(rows(8)[0]).detach()
    for out in jobs.run_ranks(job, 2):
        jobs.close(out, want, "output")
        assert not out.requires_grad


def test_eval_alone_does_not_switch_off_the_backward() -> None:
    """Grad mode decides. Eval mode still means running statistics, as in eager."""

    def job() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        model = NormNet()
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=rows(8))
        step(*rows(8)).backward()
        for p in piper.parameters(step):
            p.grad = None
        step.eval()
        loss = step(*rows(8))
        loss.backward()
        return loss.item(), jobs.grads(step), {n: b.clone() for n, b in model.named_buffers()}

    want = NormNet()
    jobs.accumulate(want, rows(8), 2)
    want.zero_grad()
    want.eval()
    loss = want(*rows(8))
    loss.backward()
    ranks = jobs.run_ranks(job, 2)
    jobs.check_grads([got for _, got, _ in ranks], want)
    jobs.close([value for value, *_ in ranks], [loss.item()] * 2, "loss")
    for name, buffer in want.named_buffers():
        jobs.close(ranks[0][2][name], buffer, f"buffer {name}")


def test_evaluation_leaves_the_training_masks_alone() -> None:
    """The losses of training with dropout are the same with and without evaluation in between."""

    def run(evaluate: bool) -> list[list[float]]:
        def job() -> list[float]:
            model = Dropped()
            step = piper.compile(model, jobs.strategy(LINE2, 4), example_inputs=rows(8))
            torch.manual_seed(3)
            found = []
            for _ in range(2):
                if evaluate:
                    model.eval()
                    with torch.no_grad():
                        quiet = step(*rows(4)).item()
                    want = Dropped().eval()(*rows(4)).item()
                    assert quiet == pytest.approx(want, abs=1e-12)
                    model.train()
                loss = step(*rows(8))
                loss.backward()
                found.append(loss.item())
            return found

        return jobs.run_ranks(job, 2)

    with_evaluation, without = run(True), run(False)
    assert with_evaluation == without
    assert without[0] == without[1]
    assert without[0][0] != without[0][1]


def test_a_plain_first_call_compiles() -> None:
    """`torch.compile(backend="piper")` and a call, without prepare."""

    def job() -> dict[str, Tensor]:
        step = torch.compile(
            Stack4(2), backend="piper", options={"strategy": jobs.strategy(LINE2, 4)}
        )
        step(*rows(8)).backward()
        return jobs.grads(step)

    want = Stack4(2)
    want(*rows(8)).backward()
    jobs.check_grads(jobs.run_ranks(job, 2), want)


def test_data_rank_without_replicas() -> None:
    def job() -> tuple[int, int, int, int]:
        step = compiled()
        return piper.rank(), piper.world_size(), piper.data_rank(step), piper.data_world(step)

    assert jobs.run_ranks(job, 2) == [(0, 2, 0, 1), (1, 2, 0, 1)]


class SizeOnly(torch.nn.Module):
    """Divides by the size of an argument whose values it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x, mask):
        with piper.annotate("PP", 0):
            return (x * self.w).sum() / mask.shape[0]


@pytest.mark.parametrize("how", ["plain", "prepared"])
def test_a_size_read_from_an_argument_that_is_not_used_otherwise(how: str):
    """The microbatch's size would be that of the batch: no wrong number, a refusal."""
    strategy = piper.Strategy(piper.Split({}, num_microbatches=2), piper.Place({}, devices=[0]))
    x, mask = torch.ones(4, 3, dtype=torch.float64), torch.ones(4)
    step = torch.compile(SizeOnly(), backend="piper", options={"strategy": strategy})
    with pytest.raises(Exception, match="the size of argument 'mask' is used, but not its values"):
        step(x, mask) if how == "plain" else piper.prepare(step, x, mask)


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_of_a_replica_that_are_given_unlike_batches_are_warned_of(replicas: int) -> None:
    """Replicas may have batches of their own; the ranks of one must not. Seen at the first step."""
    placement = {stage: [2 * stage, 2 * stage + 1][:replicas] for stage in (0, 1)}
    placement = placement if replicas > 1 else LINE2
    sharing = [piper.Replicate({"PP": "*"})] if replicas > 1 else []
    strategy = piper.Strategy(*jobs.strategy(placement, 2).directives, *sharing)

    def train(unlike: bool) -> None:
        def job() -> None:
            step = piper.compile(Stack4(2), strategy, rows(8))
            x, y = rows(8, 2 * piper.data_rank(step))
            if unlike and piper.rank() == 2 * replicas - 1:
                y = y + 1
            for _ in range(2):
                step(x, y).backward()

        jobs.run_ranks(job, 2 * replicas)

    with pytest.warns(UserWarning, match="ranks of one replica were given different") as found:
        train(unlike=True)
    (only,) = found
    assert f"y: rank {2 * replicas - 1}" in str(only.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(unlike=False)
