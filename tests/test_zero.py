"""Replicas that shard nothing, optimizer state, gradients or parameters equal one process.

One process trains on the global batch; the ranks get different parts of it, and NaN or an illegal
index for the inputs that their stages do not use. Losses, gradient norms and each rank's shard of
each parameter are compared within 1e-12 in float64, over clipped SGD and AdamW steps. The controls
at the end show that the comparison fails for the mistakes it is there to find.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo.ir.program import Instr, Op
from piper_dynamo.ir.spec import show_bytes
from piper_dynamo.planning import Plan
from piper_dynamo.runtime.local import LocalCommunicator
from tests import jobs, replicas
from tests.jobs import Placement, Trace
from tests.models import Stack4, fill, rows
from tests.replicas import CASES, LAST_LEVEL, LINE, LOOP, PAIR, SCHEDULES, TRIPLE, VEE, Case

TINY_MB = 0.0001  # less than one weight of Stack4: a bucket each


def check(
    case: str, placement: Placement, microbatches: int, schedule: str, zero: int, **options: Any
) -> None:
    wanted = replicas.strategy(placement, microbatches, schedule, zero=zero, **options)
    ranks = replicas.run(CASES[case], placement, wanted)
    replicas.compare(ranks, replicas.reference(CASES[case]), placement, zero)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_that_of_microbatches(case: str) -> None:
    """The mean over replicas of the mean over equal microbatches is the mean over the batch."""
    model, want = CASES[case].build(1), CASES[case].build(1)
    total = jobs.accumulate(model, CASES[case].batch(0), 4)
    loss = want(*CASES[case].batch(0))
    loss.backward()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    jobs.check_grads([{n: g for n, g in jobs.gradients(model).items() if g is not None}], want)


# Parity.


@pytest.mark.parametrize(
    ("zero", "schedule", "case"),
    [
        (1, "one_f_one_b", "tied"),
        (3, "zb_h1", "tied"),
        (3, "dualpipev", "frozen"),
        (0, "dualpipe", "plain"),
        (1, "dualpipe", "frozen"),
        (3, "dualpipe", "tied"),
    ],
)
def test_pipelines(zero: int, schedule: str, case: str) -> None:
    """Some of those of the sweep."""
    check(case, *SCHEDULES[schedule], schedule, zero)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "tied", "frozen", "skip"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", range(4))
def test_sweep_pipelines(zero: int, schedule: str, case: str) -> None:
    check(case, *SCHEDULES[schedule], schedule, zero)


@pytest.mark.parametrize("zero", range(4))
def test_one_stage(zero: int) -> None:
    check("plain", PAIR, 2, "gpipe", zero)


@pytest.mark.parametrize("zero", LAST_LEVEL)
def test_no_order_and_one_microbatch(zero: int) -> None:
    check("tied", PAIR, 1, "", zero)


@pytest.mark.parametrize("zero", [1, 3])
def test_shards_of_unlike_size(zero: int) -> None:
    """Three replicas of parameters with 7, 2, 1 and no rows: shards of one row more, of none."""
    check("uneven", TRIPLE, 2, "gpipe", zero)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "tied", "uneven", "frozen"])
@pytest.mark.parametrize(
    "placement", [TRIPLE, {0: [0, 1, 2], 1: [3, 4, 5]}, {0: [0, 1, 2, 3]}], ids=["3", "2x3", "4"]
)
@pytest.mark.parametrize("zero", range(4))
def test_sweep_shards_of_unlike_size(zero: int, placement: Placement, case: str) -> None:
    check(case, placement, 2, "gpipe", zero)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_replicas_in_another_order_of_ranks(zero: int) -> None:
    """Devices are listed in replica order: ranks 1 and 3 are the first replica."""
    check("plain", {0: [1, 0], 1: [3, 2]}, 2, "one_f_one_b", zero)


@pytest.mark.parametrize(
    ("zero", "options"),
    [
        pytest.param(*(0, {"bucket_mb": TINY_MB}), marks=pytest.mark.slow),
        pytest.param(*(1, {"bucket_mb": TINY_MB, "prefetch": 0}), marks=pytest.mark.slow),
        (2, {"bucket_mb": TINY_MB, "reduce_stream": "dp"}),
        (3, {"bucket_mb": TINY_MB}),
        (3, {"bucket_mb": TINY_MB, "prefetch": 0, "keep": 1}),
        (3, {"bucket_mb": TINY_MB, "prefetch": 3, "gather_stream": "ag", "reduce_stream": "rs"}),
        (3, {"keep": "step"}),
    ],
    ids=str,
)
def test_options_change_no_number(zero: int, options: dict[str, Any]) -> None:
    check("uneven", PAIR, 2, "gpipe", zero, **options)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["chunk", "step", 1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_sweep_options(schedule: str, prefetch: int, keep: Any) -> None:
    options = {"prefetch": prefetch, "keep": keep, "bucket_mb": TINY_MB}
    check("skip", *SCHEDULES[schedule], schedule, 3, **options)


def test_axes_of_a_mesh() -> None:
    """The same groups by name."""
    mesh = piper.Mesh((2, 2), ("pp", "dp"))
    placement = {s: mesh.ranks(pp=s) for s in range(2)}
    assert placement == LINE
    check("plain", LINE, 2, "one_f_one_b", 2, axes=("dp",), mesh=mesh)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_hybrid_shards(zero: int) -> None:
    """Four replicas of which each pair shards: rank 2 * i + j has part j of two."""
    placement = {0: [0, 1, 2, 3]}
    axes = {"axes": ("copy", "part"), "shard_axes": ("part",)}
    mesh = piper.Mesh((2, 2), ("copy", "part"))
    wanted = replicas.strategy(placement, 2, zero=zero, mesh=mesh, **axes)
    ranks = replicas.run(CASES["uneven"], placement, wanted)

    def part(whole: Tensor, rank: int, placement: Placement, zero: int) -> Tensor:
        return replicas.shard(whole, 2, rank % 2)

    replicas.compare(ranks, replicas.reference(CASES["uneven"]), placement, zero, part=part)


@pytest.mark.parametrize(("case", "levels"), [("plain", (0, 3)), ("tied", (1, 3))])
def test_levels_that_differ_by_stage(case: str, levels: tuple[int, int]) -> None:
    """Stages on ranks of their own may shard differently; if they share a parameter, alike."""
    wanted = piper.Strategy(
        piper.Split({}, num_microbatches=2),
        *jobs.places(LINE),
        *(piper.Replicate({"PP": k}, zero=zero) for k, zero in enumerate(levels)),
        *jobs.orders("one_f_one_b", LINE, 2),
    )

    def part(whole: Tensor, rank: int, placement: Placement, zero: int) -> Tensor:
        return replicas.part_of(whole, rank, placement, levels[rank // 2])

    ranks = replicas.run(CASES[case], LINE, wanted)
    replicas.compare(ranks, replicas.reference(CASES[case]), LINE, 3, part=part)


@pytest.mark.parametrize(
    ("schedule", "ranks", "placement", "zero", "options"),
    [
        ("zbv", 2, VEE, 2, {}),
        ("gpipe", 1, PAIR, 3, {"bucket_mb": TINY_MB, "prefetch": 2, "keep": 1}),
    ],
)
def test_a_strategy_in_one_call(
    schedule: str, ranks: int, placement: Placement, zero: int, options: dict[str, Any]
) -> None:
    wanted = piper.strategies.pipeline(
        schedule, ranks=ranks, num_microbatches=4, replicas=2, zero=zero, **options
    )
    found = replicas.run(CASES["plain"], placement, wanted)
    replicas.compare(found, replicas.reference(CASES["plain"]), placement, zero)


def test_the_last_backward_need_not_be_of_the_last_microbatch() -> None:
    """Backwards from the last microbatch to the first: the reduction comes after the first's."""
    orders = [
        piper.Order(
            [{"PP": s, "MB": k, "PASS": "F"} for k in range(3)]
            + [{"PP": s, "MB": k, "PASS": "B"} for k in (2, 1, 0)]
        )
        for s in range(2)
    ]
    directives = (piper.Split({}, num_microbatches=3), *jobs.places(LINE), *orders)
    wanted = piper.Strategy(*directives, piper.Replicate({"PP": "*"}, zero=1))
    ranks = replicas.run(CASES["plain"], LINE, wanted)
    replicas.compare(ranks, replicas.reference(CASES["plain"]), LINE, 1)


# Gradients.


@pytest.mark.parametrize("zero", replicas.levels(0, 2))
@pytest.mark.parametrize(
    ("calls", "factor"),
    [(2, 0.5), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.5), (2, 1.0)))],
)
def test_gradients_add_up_and_scale(zero: int, calls: int, factor: float) -> None:
    """Two calls before `zero_grad` add; `(loss * factor).backward()` scales."""
    case = CASES["uneven"]

    def job() -> dict[str, Tensor]:
        step = replicas.compiled(case, PAIR, replicas.strategy(PAIR, 2, zero=zero))
        for _ in range(calls):
            (step(*replicas.mine(case.batch(0), PAIR)) * factor).backward()
        return replicas.grads(step)

    model = case.build(1)
    model(*case.batch(0)).backward()
    for rank, got in enumerate(jobs.run_ranks(job, 2)):
        want = {n: p.grad * calls * factor for n, p in model.named_parameters()}
        assert set(got) == set(want)
        for name, grad in got.items():
            mine = replicas.part_of(want[name], rank, PAIR, zero)
            jobs.close(grad, mine, f"rank {rank}: gradient of {name}")


class Line(nn.Module):
    """loss = mean(w x): its gradient is mean(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            return (x * self.w).mean()


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("reduction", "want"), [("mean", 2.0), ("sum", 8.0)])
def test_gradients_by_hand(zero: int, reduction: str, want: float) -> None:
    """Replicas with gradients 1 and 3 over two microbatches: mean 2, sum 8."""

    def job() -> tuple[float, list[float], float]:
        x = torch.full((4, 1), 1.0 + 2.0 * piper.rank(), dtype=torch.float64)
        wanted = replicas.strategy(PAIR, 2, zero=zero, reduction=reduction)
        step = piper.compile(Line(), wanted, example_inputs=(x,))
        loss = step(x)
        loss.backward()
        norm = float(piper.clip_grad_norm_(step, 1.0))
        found = [g for grad in replicas.grads(step).values() for g in grad.tolist()]
        return loss.item(), found, norm

    ranks = jobs.run_ranks(job, 2)
    for rank, (loss, grads, norm) in enumerate(ranks):
        assert loss == pytest.approx(want, abs=1e-12)
        assert norm == pytest.approx(want, abs=1e-12)
        clipped = want / (want + 1e-6)
        assert grads == pytest.approx([clipped] if zero == 0 or rank == 0 else [], abs=1e-12)


def some_labels(step: int) -> tuple[Tensor, Tensor]:
    """From one to all of the labels of a row count; the others are ignored."""
    ids, labels = replicas.tokens(step)
    counts = 1 + torch.arange(len(ids)) % 3 * (torch.arange(len(ids)) // 12)
    return ids, torch.where(torch.arange(3) < counts[:, None], labels, -100)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_weights_are_summed_over_replicas(zero: int) -> None:
    """The mean over all labels that count, wherever they are; the replicas' counts differ."""
    case = Case(build=replicas.Tied, batch=some_labels)
    counts = [(part != -100).sum().item() for part in some_labels(0)[1].chunk(2)]
    assert counts[0] != counts[1]
    wanted = replicas.strategy(
        LINE, 2, "one_f_one_b", zero=zero, reduction=lambda labels: (labels != -100).sum()
    )
    replicas.compare(replicas.run(case, LINE, wanted), replicas.reference(case), LINE, zero)


# What the plan says: counted on two microbatches of two stages with two weights each.


def plan_of(zero: int, **options: Any) -> Plan:
    return piper.plan(Stack4(2), replicas.strategy(LINE, 2, zero=zero, **options), rows(8))


def counts(plan: Plan) -> tuple[list[int], list[int]]:
    """Reductions and gathers of each rank."""
    reduced = [len(replicas.reductions(p)) for p in plan.programs]
    return reduced, [len(replicas.gathers(p)) for p in plan.programs]


@pytest.mark.parametrize(
    ("zero", "options", "reduced", "gathered"),
    [
        (0, {}, 1, 0),
        (0, {"bucket_mb": TINY_MB}, 2, 0),
        (1, {}, 1, 1),
        (1, {"bucket_mb": TINY_MB}, 2, 2),
        (2, {}, 2, 1),
        (2, {"bucket_mb": TINY_MB}, 4, 2),
        (3, {"keep": "step"}, 2, 1),
        (3, {"keep": "step", "bucket_mb": TINY_MB}, 4, 2),
        (3, {"keep": "chunk", "prefetch": 0}, 2, 4),
        (3, {}, 2, 4),
    ],
)
def test_how_often_a_bucket_is_reduced_and_gathered(
    zero: int, options: dict[str, Any], reduced: int, gathered: int
) -> None:
    """Reduced per step, from ZeRO-2 on per microbatch; gathered per step, in ZeRO-3 per use."""
    assert counts(plan_of(zero, **options)) == ([reduced] * 4, [gathered] * 4)


def of_several_buckets(kind: str, stages: Placement, **options: Any) -> Plan:
    """Each a stage of one weight, or a weight of one stage on the same ranks."""
    if kind == "weights":
        groups = list(dict.fromkeys(map(tuple, stages.values())))
        stages = {stage: list(ranks) for stage, ranks in enumerate(groups)}
        options["bucket_mb"] = TINY_MB
    wanted = replicas.strategy(stages, 2, zero=3, **options)
    return piper.plan(Stack4(len(stages)), wanted, rows(8))


@pytest.mark.parametrize("kind", ["stages", "weights"])
def test_how_many_buckets_stay(kind: str) -> None:
    """More that stay, fewer gathers; two are all that a rank has here. Shown on the last stage."""
    found = [
        counts(of_several_buckets(kind, LOOP, prefetch=0, keep=keep))[1][2]
        for keep in ("step", 2, 1, "chunk")
    ]
    assert found[0] == found[1] == 2
    assert found[1] < found[2] <= found[3] == 8


@pytest.mark.parametrize("kind", ["stages", "weights"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_how_far_ahead_a_bucket_is_gathered(prefetch: int, kind: str) -> None:
    """How many chunks run between a gather's start and its end, of four buckets in turn.

    A gather for one of the first uses is ahead by as many as there are before it.
    """
    plan = of_several_buckets(kind, {stage: [0, 1] for stage in range(4)}, prefetch=prefetch)
    for program in plan.programs:
        runs = [(k, i.task) for k, i in enumerate(program.instrs) if i.op is Op.RUN]
        first_backward = next(k for k, task in runs if task.startswith("B"))
        ahead = []
        for start in replicas.gathers(program):
            end = replicas.end_of(program, start)
            if end < first_backward:
                ahead.append(sum(start < k < end for k, _ in runs))
        assert len(ahead) >= 4
        assert ahead == [min(use, prefetch) for use in range(len(ahead))]


def test_streams_of_the_collectives() -> None:
    plan = plan_of(3, reduce_stream="rs", gather_stream="ag")
    for program in plan.programs:
        assert {program.instrs[k].stream for k in replicas.reductions(program)} == {"rs"}
        assert {program.instrs[k].stream for k in replicas.gathers(program)} == {"ag"}


@pytest.mark.parametrize("zero", range(4))
def test_collectives_stay_among_the_replicas(zero: int) -> None:
    plan = plan_of(zero)
    kinds = {0: Op.ALL_REDUCE}
    for program in plan.programs:
        places = [*replicas.reductions(program), *replicas.gathers(program)]
        group = (0, 1) if program.rank < 2 else (2, 3)
        assert {program.instrs[k].group for k in places} == {group}
        reduced = {program.instrs[k].op for k in replicas.reductions(program)}
        assert reduced == {kinds.get(zero, Op.REDUCE_SCATTER)}


def test_frozen_parameters_are_not_reduced() -> None:
    """A stage that is frozen as a whole has nothing to reduce."""
    wanted = replicas.strategy(VEE, 4, "zbv", zero=0)
    plan = piper.plan(replicas.frozen(4), wanted, rows(8))
    assert counts(plan)[0] == [1] * 4  # PP3 on ranks 0 and 1, PP1 on ranks 2 and 3


@pytest.mark.parametrize("zero", [0, 3])
def test_the_order_of_directives_changes_nothing(zero: int) -> None:
    wanted = replicas.strategy(LINE, 2, "zb_h1", zero=zero, bucket_mb=TINY_MB)
    backwards = piper.Strategy(*reversed(wanted.directives))
    first, second = (piper.plan(Stack4(2), s, rows(8)) for s in (wanted, backwards))
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize("zero", range(4))
def test_instructions_round_trip(zero: int) -> None:
    for program in plan_of(zero, reduce_stream="dp").programs:
        for instr in program.instrs:
            assert Instr.parse(str(instr)) == instr


@pytest.mark.parametrize(
    ("zero", "options", "want"),
    [
        # 128 bytes per weight: two per stage, of two replicas. Held, gathered, reduced.
        (0, {}, {"parameters": "256 B", "reductions": "1 (256 B)"}),
        (1, {}, {"sharded": "128 B", "gathers": "1 (256 B)", "reductions": "1 (256 B)"}),
        (2, {}, {"sharded": "128 B", "gathers": "1 (256 B)", "reductions": "2 (512 B)"}),
        (3, {}, {"sharded": "128 B", "gathers": "4 (1.0 KiB)", "reductions": "2 (512 B)"}),
        (
            3,
            {"bucket_mb": TINY_MB, "keep": "step"},
            {"sharded": "128 B", "gathers": "2 (256 B)", "reductions": "4 (512 B)"},
        ),
    ],
)
def test_summary(zero: int, options: dict[str, Any], want: dict[str, str]) -> None:
    """What a rank holds whole, as a shard or not at all; columns are there only where used."""
    plan = plan_of(zero, **options)
    title, head, *lines = plan.summary().splitlines()
    assert title == "plan of 4 ranks, 2 replicas, 2 microbatches, training"
    heads = re.split("  +", head.strip())
    common = ["rank", "regions", "absent", "tasks", "sends", "step peak"]
    assert set(heads) == {*common, *want}
    for program, line in zip(plan.programs, lines[:4], strict=True):
        row = dict(zip(heads, re.split("  +", line.strip()), strict=True))
        if program.rank >= 2 or zero < 3:  # the first stage's backward reads one weight only
            assert {name: row[name] for name in want} == want
        stage = f"PP{program.rank // 2}"
        assert row["regions"] == (f"{stage} x2" if "bucket_mb" in options else stage)
        assert row["absent"] == "256 B"
        assert row["step peak"] == show_bytes(program.peak_bytes)
    assert lines[4].startswith("gathers and reductions of a step")


def test_summary_counts_filled_up_blocks_and_what_stays_whole() -> None:
    """Of 7, 2 and 1 rows three replicas hold 3, 1 and 1; two numbers have no rows."""
    wanted = replicas.strategy(TRIPLE, 2, zero=1)
    plan = piper.plan(CASES["uneven"].build(1), wanted, replicas.numbers(0))
    _, head, line, *_ = plan.summary().splitlines()
    row = dict(zip(*(re.split("  +", text.strip()) for text in (head, line)), strict=True))
    assert row["parameters"] == f"{2 * 8} B"
    assert row["sharded"] == f"{(3 * 4 + 1 * 7 + 1) * 8} B"
    assert row["gathers"] == f"1 ({3 * (3 * 4 + 1 * 7 + 1) * 8} B)"
    assert "absent" not in row


# Controls: what the comparison must notice.


@cache
def example() -> tuple[tuple[Trace, ...], Trace]:
    """A right run and its reference."""
    ranks = replicas.run(CASES["plain"], PAIR, replicas.strategy(PAIR, 2, zero=2))
    want = replicas.reference(CASES["plain"])
    replicas.compare(ranks, want, PAIR, 2)
    return tuple(ranks), want


def wrong_references() -> dict[str, Callable[[], Trace]]:
    plain = CASES["plain"]
    return {
        "summed over replicas": lambda: replicas.reference(plain, factor=2.0),
        "one replica's data": lambda: replicas.reference(plain, rows_of=lambda v: v[:12]),
        "a microbatch lost": lambda: replicas.reference(plain, rows_of=lambda v: v[6:]),
    }


@pytest.mark.parametrize("wrong", wrong_references())
def test_control_a_wrong_reference_is_noticed(wrong: str) -> None:
    ranks, _ = example()
    with pytest.raises(AssertionError, match="off by"):
        replicas.compare(ranks, wrong_references()[wrong](), PAIR, 2)


def test_control_each_part_of_the_comparison_is_alive() -> None:
    ranks, want = example()
    last = ranks[1]
    first_shard = {"w.0": ranks[0].params["w.0"]}
    for broken, told in (
        (replace(last, losses=[*last.losses[:-1], last.losses[-1] + 1e-11]), "losses"),
        (replace(last, norms=[*last.norms[:-1], last.norms[-1] + 1e-11]), "norms"),
        (replace(last, params=last.params | first_shard), "shard of w.0"),
        (replace(last, params=last.params | {"w.0": fill([4, 4], 0)}), "shape"),
        (replace(last, params=last.params | {"other": fill([4, 4], 0)}), "'other'"),
    ):
        with pytest.raises(AssertionError, match=told):
            replicas.compare([ranks[0], broken], want, PAIR, 2)


def doubled(name: str, value: Tensor, number: int, rank: int) -> Tensor:
    """The sum over replicas where the mean should be."""
    return value * 2 if name == "reduce_scatter" else value


def alone(name: str, value: Tensor, number: int, rank: int) -> Tensor:
    """The other replica's gradients never arrive."""
    return value * 2 * (rank == 0) if name == "reduce_scatter" else value


def lost(name: str, value: Tensor, number: int, rank: int) -> Tensor:
    """The gradients of every other microbatch are lost."""
    return value * (number % 2) if name == "reduce_scatter" else value


@pytest.mark.parametrize("tamper", [doubled, alone, lost])
def test_control_a_wrong_reduction_is_noticed(
    tamper: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, numbers = LocalCommunicator.start_collective, {}

    def tampered(self: Any, name: str, values: Any, *rest: Any, **named: Any) -> Any:
        key = (self.rank, name)
        numbers[key] = numbers.get(key, -1) + 1
        changed = [tamper(name, value, numbers[key], self.rank) for value in values]
        return start(self, name, changed, *rest, **named)

    monkeypatch.setattr(LocalCommunicator, "start_collective", tampered)
    ranks = replicas.run(CASES["plain"], PAIR, replicas.strategy(PAIR, 2, zero=2))
    with pytest.raises(AssertionError, match="off by"):
        replicas.compare(ranks, replicas.reference(CASES["plain"]), PAIR, 2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_control_parameters_that_are_not_gathered_again_are_noticed(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gather of a shard gives what the first one gave: the values before the updates."""
    start, first = LocalCommunicator.start_collective, {}

    def stale(self: Any, name: str, values: Any, *rest: Any, **named: Any) -> Any:
        if name == "all_gather":
            values = [
                first.setdefault((self.rank, v.data_ptr()), v.detach().clone()) for v in values
            ]
        return start(self, name, values, *rest, **named)

    monkeypatch.setattr(LocalCommunicator, "start_collective", stale)
    ranks = replicas.run(CASES["plain"], PAIR, replicas.strategy(PAIR, 2, zero=zero))
    assert len(first) == 2 * 4  # a rank has one shard of each weight, in one place
    assert len({trace.losses[0] for trace in ranks}) == 1
    with pytest.raises(AssertionError, match="losses: off by"):
        replicas.compare(ranks, replicas.reference(CASES["plain"]), PAIR, zero)


def test_control_copies_of_a_shared_parameter_that_drift_are_noticed() -> None:
    want = replicas.reference(CASES["tied"], steps=1)
    ranks = [
        replace(want, params={n: replicas.part_of(p, r, LINE, 1) for n, p in want.params.items()})
        for r in range(4)
    ]
    replicas.compare(ranks, want, LINE, 1)
    drifted = ranks[3].params | {"e": ranks[3].params["e"] + 1e-14}
    with pytest.raises(AssertionError, match="copies of e differ"):
        replicas.compare([*ranks[:3], replace(ranks[3], params=drifted)], want, LINE, 1)
