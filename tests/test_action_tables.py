"""Tables of actions of torch.distributed.pipelining: read, written, refused, run by both."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.ir.program import Op
from piper_dynamo.schedules import SCHEDULES
from tests import jobs
from tests.models import Stack4, rows
from tests.pool import Pool

NAMES = (
    *("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"),
    *("ZBVZeroBubble", "DualPipeV"),
)
VEES = ("ZBVZeroBubble", "DualPipeV")


class Stub:
    """As much of a stage as torch's schedules look at before they run."""

    def __init__(self, stage: int, num_stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size, self.group = 0, ranks, None
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.device, self.has_backward, self.submod = torch.device("cpu"), True, None


@pytest.fixture
def fake_ranks() -> Iterator[Callable[[int], None]]:
    """Torch's schedules ask a process group for its size."""

    def begin(ranks: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def torch_schedule(name: str, ranks: int, microbatches: int) -> Any:
    kind: Any = theirs.get_schedule_class(name)
    loss = nn.functional.mse_loss
    if issubclass(kind, theirs.PipelineScheduleSingle):
        return kind(Stub(0, ranks, ranks), microbatches, loss_fn=loss)
    other = 2 * ranks - 1 if name in VEES else ranks
    stages = [Stub(stage, 2 * ranks, ranks) for stage in (0, other)]
    return kind(stages, microbatches, loss_fn=loss)


def dumped(schedule: Any, form: str, path: Path) -> str:
    """What torch writes; schedules of one stage a rank have an order, but no way to write it."""
    if hasattr(schedule, "_dump_csv"):
        schedule._dump_csv(str(path), form)
        return path.read_text()
    text = io.StringIO()
    csv.writer(text).writerows(schedule._get_pipeline_order().values())
    return text.getvalue()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_of_torch_goes_both_ways(
    name: str, ranks: int, fake_ranks: Callable[[int], None], tmp_path: Path
):
    fake_ranks(ranks)
    schedule = torch_schedule(name, ranks, 2 * ranks)
    text = dumped(schedule, "compute_only", tmp_path / "theirs.csv")
    orders = piper.schedules.from_csv(text)
    ours = {comms: piper.schedules.to_csv(orders, comms=comms) for comms in (False, True)}
    computing = re.compile(r"\d+[FBIW]\d+|\(.*\)OVERLAP_F_B")
    rows_of_text = csv.reader(io.StringIO(text))
    cells = [[cell for cell in row if computing.fullmatch(cell)] for row in rows_of_text]
    assert list(csv.reader(io.StringIO(ours[False]))) == cells
    for comms, written in ours.items():
        assert piper.schedules.from_csv(written) == orders
        if hasattr(schedule, "_load_csv"):
            path = tmp_path / f"ours-{comms}.csv"
            path.write_text(written)
            schedule._load_csv(str(path), "compute_comms" if comms else "compute_only")
    if hasattr(schedule, "_dump_csv"):
        path = tmp_path / "comms.csv"
        again = torch_schedule(name, ranks, 2 * ranks)
        assert piper.schedules.from_csv(dumped(again, "compute_comms", path)) == orders
        assert piper.schedules.from_csv(path) == piper.schedules.from_csv(str(path)) == orders


def test_a_fault_of_torch_is_told(fake_ranks: Callable[[int], None], tmp_path: Path):
    """What torch 2.13 prints of 1F1B numbers the last rank's forwards from 1 on."""
    fake_ranks(2)
    text = dumped(torch_schedule("1F1B", 2, 4), "compute_only", tmp_path / "theirs.csv")
    want = piper.schedules.one_f_one_b({0: [0], 1: [1]}, 4)
    if "1F4" not in text:  # mended there
        assert piper.schedules.from_csv(text) == want
        return
    with pytest.raises(piper.PiperStrategyError, match="1F0 is missing"):
        piper.schedules.from_csv(text)
    mended = re.sub(r"1F(\d)", lambda found: f"1F{int(found[1]) - 1}", text)
    assert piper.schedules.from_csv(mended) == want


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipe"}))
def test_our_schedules_are_read_back(name: str):
    placement = piper.strategies.placement(name, 3)
    orders = SCHEDULES[name][0](placement, 6)
    for comms in (False, True):
        assert piper.schedules.from_csv(piper.schedules.to_csv(orders, comms=comms)) == orders


def test_how_a_table_looks():
    orders = piper.schedules.one_f_one_b({0: [0], 1: [1]}, 2)
    assert_expected_inline(
        piper.schedules.to_csv(orders).replace("\r", ""),
        """\
0F0,0F1,0B0,0B1
1F0,1B0,1F1,1B1
""",
    )
    assert_expected_inline(
        piper.schedules.to_csv(orders, comms=True).replace("\r", ""),
        """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1,0REDUCE_GRAD,0RESHARD
1RECV_F0,1RECV_F1,1UNSHARD,1F0,1B0,1SEND_B0,1F1,1B1,1REDUCE_GRAD,1RESHARD,1SEND_B1
""",
    )


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
FULL = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1RECV_F0,1RECV_F1,1UNSHARD,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


@pytest.mark.parametrize(
    "cell",
    [
        *("0X0", "F0", "0F", "0UNSHARD0", "0F0x", "-1F0", "0f0", "0F0;1F0", "(0F0)OVERLAP_F_B"),
        *("(0F0;1B0)", "(0F0;)OVERLAP_F_B", "(0F0;0SEND_F0)OVERLAP_F_B", "(0F0;1B0)F", "0 F0"),
    ],
)
def test_what_is_no_action_is_refused(cell: str):
    with pytest.raises(piper.PiperSyntaxError, match="row 0, column 4"):
        piper.schedules.from_csv(GOOD.replace("0B1\n", f"0B1,{cell}\n"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (GOOD + "\n", "row 2 has no actions"),
        (GOOD + ",,\n", "row 2 has no actions"),
        (GOOD.replace("1B1", ""), "stage 1 needs of microbatch 1 either 1B1, or 1I1 and 1W1"),
        (GOOD.replace("1B1", "1I1"), "it has 1I1"),
        (GOOD.replace("1B1", "1I1,1W1,1B1"), "it has 1B1, 1I1, 1W1"),
        (GOOD.replace("1B1", "1W1,1I1"), "1F1 before 1W1 before 1I1 cannot be"),
        (GOOD.replace("0F1", "0F0"), "row 0: 0F0 comes twice"),
        (GOOD.replace("0F1", "0F2"), "0F1 is missing"),
        (GOOD.replace("0F1", "0F999999999"), "microbatches are [0, 1, 999999999]; they must be 0"),
        (GOOD.replace("1F1", "0F1"), "row 1: 0F1: stage 0 is on row 0, too"),
        (GOOD.replace("1", "2").replace("2F2", "2F1"), "its stages are"),
        ("0B0,0F0\n1F0,1B0\n", "0B0 before 0F0 cannot be"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "row 0 waits at 0B0\n  row 1 waits at 1F1"),
        (FULL.replace("0SEND_F0,", ""), "0SEND_F0 is missing, though 0F0 makes what it moves"),
        (FULL.replace("1RECV_F0,", ""), "1RECV_F0 is missing, though 0F0 makes what it moves"),
        (FULL.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "0SEND_F0 comes before 0F0"),
        (FULL.replace("0RECV_B0,0B0", "0B0,0RECV_B0"), "0RECV_B0 comes after the action that"),
        (FULL.replace("1B0,", "1B0,1SEND_F0,"), "row 1: 1SEND_F0 moves nothing"),
        (FULL.replace("0SEND_F0,", "0SEND_F0,0SEND_F0,"), "row 0: 0SEND_F0 comes twice"),
        (FULL.replace("0UNSHARD,", ""), "row 0: 0F0 runs while stage 0 is not whole"),
        (FULL.replace("0F1", "0UNSHARD,0F1"), "row 0: 0UNSHARD of a stage that is whole already"),
        (FULL.replace(",0RESHARD", ""), "row 0: 0RESHARD is missing at the end"),
        (FULL.replace(",0RESHARD", ",0RESHARD,0RESHARD"), "of a stage that is not whole"),
        (FULL.replace(",0REDUCE_GRAD", ""), "row 0: 0REDUCE_GRAD comes 0 times, not once"),
        (FULL.replace(",0B1,0REDUCE_GRAD", ",0REDUCE_GRAD,0B1"), "0B1 comes after 0REDUCE_GRAD"),
    ],
)
def test_what_cannot_be_run_is_refused(text: str, why: str):
    assert piper.schedules.from_csv(GOOD) == piper.schedules.from_csv(FULL)
    with pytest.raises(piper.PiperStrategyError) as refused:
        piper.schedules.from_csv(text)
    assert why in str(refused.value)


@given(st.text(alphabet="0123FBIW,;()\nSENDRECV_FBOVLAPUH", max_size=40))
def test_other_text_is_refused_or_read(text: str):
    try:
        orders = piper.schedules.from_csv(text + "\n")
    except (piper.PiperSyntaxError, piper.PiperStrategyError):
        return
    assert piper.schedules.from_csv(piper.schedules.to_csv(orders)) == orders


def test_orders_that_no_table_can_hold_are_refused():
    with pytest.raises(piper.PiperStrategyError, match="names no single task by PP, MB and PASS"):
        piper.schedules.to_csv([piper.Order([{"PP": 0, "PASS": "F"}, {"PP": 0, "PASS": "B"}])])
    two_ways = piper.schedules.dualpipe({0: [0], 1: [1]}, 4)
    with pytest.raises(piper.PiperStrategyError, match="a table has each stage once"):
        piper.schedules.to_csv(two_ways)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(piper.PiperError, match="cannot be read"):
        piper.schedules.from_csv(tmp_path / "none.csv")


@pytest.mark.parametrize("name", ["LoopedBFS", "InterleavedZeroBubble", "DualPipeV"])
def test_a_step_trains_as_torch_orders_it(
    name: str, fake_ranks: Callable[[int], None], tmp_path: Path
):
    """Four stages on two ranks, in float64, with clipping, beside one process."""
    fake_ranks(2)
    text = dumped(torch_schedule(name, 2, 4), "compute_comms", tmp_path / "theirs.csv")
    dist.destroy_process_group()
    strategy = piper.strategies.from_orders(piper.schedules.from_csv(text))
    batches = [rows(8, step) for step in range(jobs.STEPS)]

    def job() -> jobs.Trace:
        step = piper.compile(Stack4(4), strategy, example_inputs=batches[0])
        check_order(piper.explain(step))
        return jobs.train(step, batches)

    found = jobs.run_ranks(job, 2)
    want = jobs.reference(Stack4(4), batches, 4)
    jobs.compare(found, want)
    with pytest.raises(AssertionError, match="losses"):  # the comparison sees a lost microbatch
        jobs.compare(found, jobs.reference(Stack4(4), [rows(6, k) for k in range(3)], 3))


def check_order(plan: piper.Plan) -> None:
    """Every rank runs its groups one after the other; the first stage has no input gradient."""
    for program, order in zip(plan.programs, plan.strategy.of(piper.Order), strict=True):
        tasks = [i.task for i in program.instrs if i.op is Op.RUN]
        for group in order.groups:
            names = {f"{t.tags['PASS']}.PP{t.tags['PP']}.MB{t.tags['MB']}" for t in group}
            names -= {name for name in names if name.startswith("BI.PP0")}
            now, tasks = tasks[: len(names)], tasks[len(names) :]
            assert set(now) == names
        assert tasks == []


class Stage(nn.Module):
    """One of the four weights of Stack4."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h @ self.weight.T)


def run_with_torch(text: str, form: str, placement: dict[int, list[int]], path: str) -> Any:
    """Gradients of torch's runtime under a table, on this rank."""
    rank = dist.get_rank()
    model, (x, y) = Stack4(4), rows(8)
    mine = [stage for stage, ranks in placement.items() if ranks == [rank]]
    modules = [Stage(list(model.parameters())[stage].detach()) for stage in mine]
    stages = [
        PipelineStage(module, stage, len(placement), torch.device("cpu"))
        for module, stage in zip(modules, mine, strict=True)
    ]
    runtime: Any = theirs._PipelineScheduleRuntime(stages, 4, loss_fn=nn.functional.mse_loss)
    own = Path(path) / f"{form}-{rank}.csv"
    own.write_text(text)
    runtime._load_csv(str(own), form)
    args = (x,) if 0 in mine else ()
    target = {"target": y} if len(placement) - 1 in mine else {}
    runtime.step(*args, **target)
    return {stage: m.weight.grad for stage, m in zip(mine, modules, strict=True)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


@pytest.mark.dist(2)
@pytest.mark.parametrize("comms", [False, True])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv", "dualpipev"])
def test_torch_runs_what_is_written(name: str, comms: bool, pool: Pool, tmp_path: Path):
    placement = piper.strategies.placement(name, 2)
    text = piper.schedules.to_csv(SCHEDULES[name][0](placement, 4), comms=comms)
    form = "compute_comms" if comms else "compute_only"
    found = pool.values(run_with_torch, text, form, placement, str(tmp_path))
    model, (x, y) = Stack4(4), rows(8)
    model(x, y).backward()
    for stage, (_, param) in enumerate(model.named_parameters()):
        (grad,) = [one[stage] for one in found if stage in one]
        torch.testing.assert_close(grad, param.grad, rtol=0, atol=1e-12)


STRATEGY = """\
import piper_dynamo as piper


def strategy():
    return piper.strategies.pipeline("zbv", ranks=2, num_microbatches=4, replicas=2, zero=2)
"""


def convert(*arguments: Any) -> str:
    done = CliRunner().invoke(main, ["convert", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_strategies_are_converted_on_the_command_line(tmp_path: Path):
    source, table, strategy = tmp_path / "job.py", tmp_path / "t.csv", tmp_path / "s.json"
    source.write_text(STRATEGY)
    output = convert(source, table, "--comms")
    assert 'left out, since tables of actions have no place for it: piper.Replicate({"PP"' in output
    convert(table, strategy, "--replicas", 2, "--zero", 2)
    made = piper.Strategy.from_json(strategy.read_text())
    assert made == piper.strategies.pipeline("zbv", ranks=2, num_microbatches=4, replicas=2, zero=2)
    convert(strategy, tmp_path / "again.csv", "--comms", "--json")
    assert (tmp_path / "again.csv").read_text() == table.read_text()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("none.csv", "s.json"), 2, "there is no file none.csv"),
        (("none.json", "s.json"), 2, "this is no strategy"),
        (("job.py", "s.txt"), 2, "names no form"),
        (("job.py", "s.json", "--comms"), 2, "--comms is about tables"),
        (("job.py", "s.csv", "--zero", "2"), 2, "are for tables of actions"),
        (("bad.csv", "s.json"), 1, "this is no table of actions"),
        (("plain.json", "s.csv"), 2, "the strategy has no orders"),
        (("job.py", "none/s.json"), 2, "cannot be written"),
    ],
)
def test_what_cannot_be_converted(
    words: tuple[str, ...], code: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(STRATEGY)
    Path("bad.csv").write_text("0F0,what\n")
    Path("plain.json").write_text(piper.Strategy().to_json())
    done = CliRunner().invoke(main, ["convert", *words])
    assert (done.exit_code, why in done.output) == (code, True), done.output


def test_orders_that_make_no_strategy():
    good = piper.schedules.from_csv(GOOD)
    with pytest.raises(piper.PiperStrategyError, match="is empty"):
        piper.strategies.from_orders([])
    for wrong in (None, good[0], [1], "F0"):
        with pytest.raises(piper.PiperStrategyError, match=r"must be a sequence of piper\.Order"):
            piper.strategies.from_orders(wrong)  # type: ignore[arg-type]
    with pytest.raises(piper.PiperStrategyError, match="replicas is 1"):
        piper.strategies.from_orders(good, zero=1)
    with pytest.raises(piper.PiperStrategyError, match=r"is of a stage of orders\[0\]"):
        piper.strategies.from_orders([*good, good[0]])
    with pytest.raises(piper.PiperStrategyError, match="names no single stage and microbatch"):
        piper.strategies.from_orders([piper.Order([{"PP": 0, "PASS": "F"}, {"PP": 0}])])
