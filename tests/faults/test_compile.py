"""Section V: ranks that compile unlike programs, and graphs that break."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.differences import account, first_difference
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT
from tests.jobs import LINE2
from tests.models import Branching, Printing, Stack4, rows
from tests.replicas import LINE, PAIR


class Flagged(Stack4):
    """A Python flag that may differ by rank."""

    flag = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss * 2 if self.flag else loss  # the flag


def line_of(mark: str, file: Path = Path(__file__)) -> int:
    """The first line that ends with a comment."""
    return 1 + next(
        k for k, line in enumerate(file.read_text().splitlines()) if line.endswith(mark)
    )


@pytest.mark.parametrize("what", ["batch", "flag"])
def test_ranks_that_would_run_other_programs_raise_together(what: str) -> None:
    """R74, one rank recompiles: all ranks say what differs, before they run."""

    def job() -> str:
        model = Flagged(2)
        odd = piper.rank() == 1
        step = piper.compile(model, jobs.strategy(LINE2, 2), example_inputs=EIGHT, timeout_s=10.0)
        step(*EIGHT).backward()
        model.flag = odd and what == "flag"
        batch = rows(4) if odd and what == "batch" else EIGHT
        return jobs.refusal(lambda: step(*batch), Exception)

    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "different programs", "rank 0", "rank 1")
        if what == "batch":
            jobs.mentions(text, "(8, 4)", "(4, 4)")
        else:
            here = f"[test_compile.py:{line_of('# the flag')}]"
            jobs.mentions(text, "they part in      F.PP1", "rank 0 has there  the end, with")
            jobs.mentions(text, "rank 1 has there  aten.mul.Tensor (%", f", 2)  {here}")


@pytest.mark.parametrize(
    ("build", "mark"), [(Printing, "# the break"), (Branching, "# the branch")]
)
def test_a_graph_break_is_told_with_the_users_line(build: type[nn.Module], mark: str) -> None:
    """R74, a print or a branch on data: refused with file and line, why, and what to do."""
    lines = (Path(__file__).parents[1] / "models.py").read_text().splitlines()
    start = lines.index(f"class {build.__name__}(nn.Module):")
    line = next(k for k in range(start, len(lines)) if mark in lines[k]) + 1
    text = jobs.refusal(lambda: piper.plan(build(), jobs.strategy(LINE2, 2), EIGHT))
    jobs.mentions(text, "graph break", f"models.py:{line}", "decide before the call")
    assert "zuf0" not in text


# More inputs of the kind.


@pytest.mark.parametrize("zero", replicas.levels(1))
def test_replicas_with_unlike_batches_raise_together(zero: int) -> None:
    """Another layout, in float32: the last replica's last batch is smaller."""
    batch = tuple(value.float() for value in EIGHT)

    def job() -> str:
        wanted = replicas.strategy(LINE, 2, zero=zero)
        step = piper.compile(Stack4(2).float(), wanted, example_inputs=batch, timeout_s=10.0)
        step(*batch).backward()
        size = 4 if piper.rank() % 2 else 8
        return jobs.refusal(lambda: step(*(value[:size] for value in batch)), Exception)

    for text in jobs.run_ranks(job, 4):
        jobs.mentions(text, "different programs", "(8, 4)", "(4, 4)")


@pytest.mark.slow
def test_ranks_whose_experts_differ_raise_together() -> None:
    """Another model: one rank chooses one expert per token, the other two."""

    def job() -> str:
        def run() -> None:
            wanted = experts.strategy(PAIR, 2, "")
            given = fx.part(rows(24), wanted)
            model = experts.Mixture(1, top=1 + piper.rank())
            piper.compile(model, wanted, example_inputs=given, timeout_s=10.0)(*given)

        return jobs.refusal(run, Exception)

    top = line_of("weights, index = chances.topk(self.top)", Path(experts.__file__))
    for text in jobs.run_ranks(job, 2):
        jobs.mentions(text, "different programs", "they part in      F.PP0")
        for rank, count in ((0, 1), (1, 2)):
            has = f"rank {rank} has there  aten.topk.default (%"
            jobs.mentions(text, has, f", {count})  [experts.py:{top}]")


def test_programs_that_are_shared_otherwise_part_in_a_directive_or_an_order() -> None:
    """What differs between plans of one model: the directive, the order, or nothing at all."""

    def made(schedule: str = "gpipe", placement: jobs.Placement = LINE2) -> str:
        return account(piper.plan(Stack4(2), jobs.strategy(placement, 2, schedule), EIGHT))

    mine = made()
    assert first_difference(mine, made()) is None
    place = first_difference(mine, made(placement={0: [0], 1: [0]}))
    assert place is not None
    assert place.place == "a directive"
    assert place.mine == 'piper.Place({"PP": 1}, devices=[1])'
    assert place.theirs == 'piper.Place({"PP": 1}, devices=[0])'
    order = first_difference(mine, made("one_f_one_b"))
    assert order is not None
    assert order.place == "the order of rank 1's tasks, from the 2. on", order
    assert (order.mine, order.theirs) == ("F.PP1.MB1", "B.PP1.MB0")


def test_calls_of_the_same_sizes_compile_once() -> None:
    """What need not be compiled again is not: five steps, one graph for training."""
    stats = torch._dynamo.utils.counters["stats"]

    def job() -> list[int]:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=EIGHT)
        found = []
        for _ in range(5):
            step(*EIGHT).backward()
            found.append(stats["unique_graphs"])
        return found

    for counts in jobs.run_ranks(job, 2):
        assert counts[0] == counts[-1]
