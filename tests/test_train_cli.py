"""`piper train`: what it refuses, what it shows, and one run over two real processes."""

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import piper_dynamo as piper
from piper_dynamo.cli import main
from piper_dynamo.ir.task import TaskName
from piper_dynamo.measure import measured_costs
from piper_dynamo.schedules import SCHEDULES, schedule_name
from piper_dynamo.timeline import Event, Timeline
from piper_dynamo.train import compare, job, progress, report
from piper_dynamo.train.compare import one_process
from piper_dynamo.train.config import Config
from piper_dynamo.train.data import Corpus
from piper_dynamo.train.model import balance, build, split_result
from piper_dynamo.train.optim import make_optimizer, set_learning_rate
from piper_dynamo.train.progress import Progress
from tests import jobs
from tests.source_tree import ROOT
from tests.test_train_data import counting

TINY = "--dim 16 --layers 4 --heads 2 --kv-heads 1 --seq 16 --batch 4 --microbatches 2"


def refusal(*arguments: str) -> str:
    """What `piper train` says when it refuses its options."""
    result = CliRunner().invoke(main, ["train", *arguments])
    assert result.exit_code == 2, result.output
    assert not result.stdout
    return result.stderr


# Refusals: in this process, before any other starts


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (
            "--batch 6",
            "--batch 6 does not divide into --microbatches 4; numbers that do: 1, 2, 3, 6",
        ),
        (
            "--layers 1",
            "--layers is 1, fewer than the 2 stages of --schedule one_f_one_b on --pp 2",
        ),
        ("--schedule zbv --layers 3", "--layers is 3, fewer than the 4 stages of --schedule zbv"),
        ("--heads 4 --kv-heads 3", "--heads 4 must be a multiple of --kv-heads 3"),
        ("--dim 36", "--dim 36 must be a multiple of 2 x --heads 4"),
        ("--ranks 3", "--ranks is 3, but --pp 2 needs 2"),
        ("--schedule gpip", "--schedule is 'gpip'; did you mean gpipe? choose one of gpipe, one_f"),
        ("--compile eager", "--compile is 'eager'; choose one of aten, inductor"),
        ("--dtype float16", "--dtype is 'float16'; did you mean float64? choose one of float32"),
        ("--microbatches 0", "--microbatches is 0; give a number of at least 1"),
        ("--pp 0", "--pp is 0; give a number of at least 1"),
        ("--steps 0", "--steps is 0"),
        ("--seed -1", "--seed is -1; give a number of at least 0"),
        ("--seed 9223372036854775808", "give a number below 2^63"),
        ("--lr 0", "--lr is 0.0; give a number above 0"),
        ("--lr nan", "--lr is nan"),
        ("--clip -1", "--clip is -1.0"),
        ("--timeout-s inf", "--timeout-s is inf"),
        ("--weight-decay -0.1", "--weight-decay is -0.1; give 0 or a number above"),
        ("--schedule dualpipev --microbatches 2", "must be a whole number of at least 4"),
        ("--schedule dualpipe --microbatches 2", "must be a whole number of at least 4"),
        ("--schedule dualpipe --pp 3", "ranks=3: must be even, for dualpipe"),
        ("--steps many", "'many' is not a valid integer"),
        ("--stepz 3", "No such option"),
        ("--dp 0", "--dp is 0; give a number of at least 1"),
        ("--dp 2 --zero 4", "--zero is 4; choose one of 0, 1, 2, 3"),
        ("--dp 2 --bucket-mb 0", "--bucket-mb is 0.0; give a number above 0"),
        ("--dp 2 --zero 3 --prefetch -1", "--prefetch is -1; give a number of at least 0"),
        ("--dp 2 --zero 3 --keep 0", "--keep is '0'; choose chunk, step, or how many buckets stay"),
        ("--dp 2 --zero 3 --keep all", "--keep is 'all'; choose chunk, step, or how many"),
        ("--zero 3", "--zero 3 needs replicas, but --dp is 1; give --dp 2 or more"),
        ("--bucket-mb 1", "--bucket-mb 1.0 needs replicas, but --dp is 1"),
        ("--prefetch 2", "--prefetch 2 needs replicas, but --dp is 1"),
        ("--keep step", "--keep step needs replicas, but --dp is 1"),
        ("--dp 2 --prefetch 0", "--prefetch 0 is about gathers, and --zero 0 has none"),
        (
            "--dp 2 --zero 1 --keep 2",
            "--keep 2 needs --zero 3: --zero 1 keeps parameters whole from their first use to the",
        ),
        (
            "--dp 2 --keep step",
            "--keep step needs --zero 3: --zero 0 keeps parameters whole always",
        ),
        ("--dp 3", "--batch 16 does not divide among --dp 3 replicas; numbers that do: 1, 2, 4, 8"),
        (
            "--dp 8 --microbatches 4",
            "--batch 16 (the share of --dp 8 is 2) does not divide into --microbatches 4; "
            "numbers that do: 1, 2",
        ),
        ("--model llam", "--model is 'llam'; did you mean llama? choose one of llama, moe"),
        ("--ep 2", "--ep 2 is about experts; give --model moe"),
        ("--top-k 1 --experts 4", "--experts 4 is about experts; give --model moe"),
        ("--model moe --ep 3 --batch 12", "--experts 8 do not divide among --ep 3 ranks"),
        ("--model moe --top-k 9", "--top-k 9 is more than --experts 8"),
        ("--capacity 1.25", "--capacity 1.25 is about experts; give --model moe"),
        ("--model moe --capacity 0", "--capacity is 0.0; give a number above 0"),
        ("--model moe --capacity 2 --compare", "--capacity 2 drops tokens"),
        ("--precision int8", "--precision is 'int8'; choose one of bf16, fp16"),
        ("--nan-check rais", "--nan-check is 'rais'; did you mean raise?"),
        ("--precision bf16 --compare", "--precision bf16 rounds"),
        ("--precision fp16 --nan-check raise", "give --nan-check skip"),
        ("--model moe --ep 2 --ranks 2", "--ranks is 2, but --pp 2 x --ep 2 needs 4"),
        ("--save-every -1", "--save-every is -1; give a number of at least 0"),
        ("--recompute half", "--recompute is 'half'; choose full, or how much is kept: 0 to 1"),
        ("--recompute 1.5", "--recompute is '1.5'; choose full"),
        ("--keep-last 3", "--keep-last 3 keeps nothing without --save-every"),
        ("--save-every 5 --keep-last 0", "--keep-last is 0; give a number of at least 1"),
        ("--resume runs --compare", "--compare is about a run's first steps"),
        ("--dp 2 --ranks 2", "--ranks is 2, but --pp 2 x --dp 2 needs 4; leave --ranks out"),
        (
            "--dp 2 --zero 3 --schedule dualpipev --microbatches 2",
            "must be a whole number of at least 4",
        ),
    ],
)
def test_refuses(arguments: str, want: str):
    assert want in refusal(*arguments.split())


def test_refuses_all_at_once():
    text = refusal("--batch", "6", "--heads", "3", "--compile", "fast", "--layers", "1")
    assert text.startswith("piper: this job cannot be run\n")
    for flag in ("--batch 6", "--dim 128", "--compile", "--layers", "--heads 3"):
        assert flag in text


def test_refuses_a_run_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["train", "--out", str(tmp_path / "file")])
    assert result.exit_code == 1
    assert "the run folder cannot be written" in result.stderr


def test_help_shows_every_option_with_its_default():
    text = CliRunner().invoke(main, ["train", "--help"]).output
    for name, value in Config().as_dict().items():
        assert "--" + name.replace("_", "-") in text
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            assert f"default: {value}" in " ".join(text.split())


def test_names_of_schedules():
    assert schedule_name("1f1b") == schedule_name("1F1B") == "one_f_one_b"
    assert schedule_name("zb-h1") == "zb_h1"
    assert [schedule_name(name) for name in SCHEDULES] == list(SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "pp"),
    [(name, pp) for name in SCHEDULES for pp in (1, 2, 4) if (name, pp) != ("dualpipe", 1)],
)
def test_every_schedule_has_a_strategy(schedule: str, pp: int):
    config = Config(schedule=schedule, pp=pp, layers=8, microbatches=8)
    places = config.strategy().of(piper.Place)
    assert {place.filter.tags["PP"] for place in places} == set(range(config.stages))
    assert len(places) == config.stages * (2 if schedule == "dualpipe" else 1)
    assert {rank for place in places for rank in place.devices} == set(range(pp))
    assert not config.strategy().of(piper.Replicate)


def test_replicas_are_in_the_strategy():
    config = Config(pp=2, dp=3, batch=12, zero=3, bucket_mb=2.0, prefetch=2, keep="4")
    assert config.world == 6
    strategy = config.strategy()
    assert [place.devices for place in strategy.of(piper.Place)] == [(0, 1, 2), (3, 4, 5)]
    (replicate,) = strategy.of(piper.Replicate)
    assert replicate == piper.Replicate({"PP": "*"}, zero=3, bucket_mb=2.0, prefetch=2, keep=4)


def test_experts_are_in_the_strategy():
    config = Config(model="moe", pp=2, ep=2, zero=3)
    assert config.world == 4
    assert config.strategy().of(piper.Shard) == (piper.Shard({"EP": "*"}),)
    copies = Config(model="moe", pp=2, dp=2, ep=2, batch=32).strategy()
    assert copies.mesh == piper.Mesh((2, 2, 2), ("pp", "dp", "ep"))
    assert copies.of(piper.Shard) == (piper.Shard({"EP": "*"}, axes=("ep",)),)
    assert [place.devices for place in copies.of(piper.Place)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    half = Config(precision="bf16", dp=2, zero=3)
    assert half.strategy().of(piper.Precision) == (piper.Precision({}, param="bf16"),)
    assert half.loss_scale is None
    assert Config(precision="fp16").loss_scale == "dynamic"
    bounded = Config(model="moe", pp=2, ep=2, capacity=1.25).strategy()
    assert bounded.of(piper.Shard) == (piper.Shard({"EP": "*"}, capacity=1.25),)
    for asked, budget in (("full", 0.0), ("0.5", 0.5)):
        wanted = Config(recompute=asked).strategy()
        assert wanted.of(piper.Recompute) == (piper.Recompute({"PP": "*"}, budget=budget),)
    assert not Config().strategy().of(piper.Recompute)


# The run folder


def test_a_new_folder_is_named_by_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = report.claim_folder(None)
    assert folder.parent.name == "runs"
    assert folder.is_dir()


def test_a_run_replaces_an_older_one_and_nothing_else(tmp_path: Path):
    for name in ("program_rank7.py", "timeline.png", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    report.claim_folder(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "notes.txt"}


def test_a_run_that_fails_leaves_its_losses(tmp_path: Path):
    folder = report.RunFolder(report.claim_folder(str(tmp_path)))
    folder.metric(step=1, loss=5.5)
    with pytest.raises(KeyboardInterrupt), folder:
        raise KeyboardInterrupt
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 5.5}
    assert not (tmp_path / "timeline.png").exists()


def event(name: str, seconds: float) -> Event:
    kind = name.partition(".")[0]
    return Event(rank=0, stream="compute", name=name, kind=kind, start_s=1.0, end_s=1 + seconds)


def test_costs_are_mean_times_of_a_regions_pass():
    events = [event("F.PP0.MB0", 1), event("F.PP0.MB1", 3), event("B.PP1.MB0", 5)]
    cost = measured_costs(Timeline(events)).of
    assert cost is not None
    parse = TaskName.parse
    assert [cost(parse(f"{task}.MB9")) for task in ("F.PP0", "B.PP1", "F.PP1")] == [2, 5, 0]


def test_curve_in_one_line():
    assert report.curve([]) == ""
    assert report.curve([3.0]) == "▁"
    assert report.curve([2.0, 1.0]) == "█▁"
    long = report.curve([float(i) for i in range(1000)])
    assert len(long) == 40
    assert (long[0], long[-1]) == ("▁", "█")


# Progress


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_other_ranks_show_nothing():
    file = Terminal()
    shown = Progress(is_shown=False, file=file)
    with shown.phase("planning"), shown.steps(2) as step:
        step("loss 1")
        shown.say("text")
    assert file.getvalue() == ""


def test_a_log_gets_whole_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "LOG_TICK_S", 0.02)
    file = io.StringIO()
    shown = Progress(is_shown=True, file=file)
    with shown.phase("planning"):
        while "so far" not in file.getvalue():
            pass
    monkeypatch.setattr(progress, "LOG_TICK_S", 1e9)
    with shown.steps(200) as step:
        for number in range(200):
            step(f"loss {number}")
    text = file.getvalue()
    assert "\r" not in text
    lines = [line.partition("] ")[2] for line in text.splitlines()]
    assert lines[0] == "planning"
    assert lines[1] == "... planning: 0 s so far"
    assert lines[-2].startswith("step 1 of 200: loss 0, ")
    assert lines[-1] == "step 200 of 200: loss 199, 0:00 left"


def test_a_terminal_gets_a_bar_and_a_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "TICK_S", 0.02)
    file = Terminal()
    shown = Progress(is_shown=True, file=file)
    with shown.phase("planning"):
        while "planning: 0 s" not in file.getvalue():
            pass
    assert file.getvalue().endswith(progress.CLEAR)
    with shown.steps(3) as step:
        for number in range(3):
            step(f"loss {number}")
    assert "3/3" in file.getvalue()
    assert "loss 2" in file.getvalue()


# The loop


def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> dict[str, Any]:
    """A job of one rank in this process, on a small text."""
    monkeypatch.setattr(job, "read_corpus", counting)
    options: dict[str, Any] = {
        "pp": 1, "dim": 16, "heads": 2, "kv_heads": 1, "layers": 1, "seq": 16, "batch": 4,
        "microbatches": 2, "steps": 2, "out": str(tmp_path), **changed,
    }  # fmt: skip
    return job.run_rank(Config(**options))


def test_stops_when_the_loss_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(piper.PiperError, match="no longer a number in step 2") as caught:
        alone(tmp_path, monkeypatch, lr=1e30, warmup=0, weight_decay=1e10, steps=5)
    assert "lower --lr" in str(caught.value)
    assert (tmp_path / "loss.png").exists()


def test_refuses_rows_longer_than_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(piper.PiperError, match="a row of 2000 tokens does not fit"):
        alone(tmp_path, monkeypatch, seq=2000)


def test_one_step_without_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    summary = alone(tmp_path, monkeypatch, steps=1, eval_every=0)
    assert summary["loss_first"] == summary["loss_last"]
    assert summary["tokens_per_s"] > 0
    assert "validation_loss" not in summary
    assert (tmp_path / "timeline.png").exists()


def test_ranks_with_other_text_are_told():
    def check(by: int) -> None:
        mine = replace(counting(), fingerprint=by * piper.rank())
        job.check_same_text(mine, job.communicator(5.0))

    jobs.run_ranks(lambda: check(0), 2)
    text = jobs.refusal(lambda: jobs.run_ranks(lambda: check(1), 2))
    jobs.mentions(text, "different text", "rank 1 ", "Python 3.")


def test_clocks_of_other_machines_are_moved(monkeypatch: pytest.MonkeyPatch):
    def gathered(_: Any, __: str, mine: tuple[str, float, Timeline]) -> list[Any]:
        here, now, timeline = mine
        late = Timeline([event("F.PP1.MB0", 1)]).shifted(1000)
        return [(here, now, timeline), (here, now + 5, timeline), ("other", now + 1000, late)]

    monkeypatch.setattr(job, "gathered", gathered)
    merged = job.merge_ranks(Timeline([event("F.PP0.MB0", 1)]), job.communicator(5.0))
    assert merged is not None
    assert [e.start_s for e in merged.events] == pytest.approx([1, 1, 1])


# Replicas

MIXES = [
    (schedule, zero, options)
    for zero, options in (
        (0, {}),
        (1, {"bucket_mb": 0.005}),
        (2, {"prefetch": 0, "tied_head": True}),
        (3, {"bucket_mb": 0.005, "prefetch": 2, "keep": "2"}),
    )
    for schedule in ("one_f_one_b", "zb_h1", "zbv", "dualpipev", "dualpipe")
]
QUICK = {("one_f_one_b", 3)}  # ranks of other tests are of one process


RATE = 0.05  # so large that biases decide


def move_biases(model: Any, ranks: list[list[Any]]) -> None:
    """As `piper train` does over processes: by the sum of all ranks' loads."""
    experts = model.layers[0].moe.num_experts
    loads = [
        sum(load.reshape(-1, experts).sum(0) for load in layer if load is not None)
        for layer in zip(*ranks, strict=True)
    ]
    balance(model, loads, rate=RATE, over_ranks=False)


def train_rank(
    config: Config, corpus: Corpus, posted: Any = None, share: int | None = None
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of this rank, on its replica's share of the rows.

    With `posted`, which all ranks write their loads to, by step and rank, biases of experts move.
    """
    found: tuple[list[float], list[float]] = ([], [])
    share = piper.rank() % config.replicas if share is None else share
    batches = [
        corpus.batch(
            "train", number, seed=config.seed, rows=config.batch, seq=config.seq, data_rank=share,
            data_world=config.replicas,
        )
        for number in range(config.steps)
    ]  # fmt: skip
    model = build(config)
    step = piper.compile(model, config.strategy(), batches[0])
    assert (piper.data_rank(step), piper.data_world(step)) == (share, config.replicas)
    optimizer = make_optimizer(piper.parameters(step), config)
    for number, batch in enumerate(batches):
        set_learning_rate(optimizer, number, config)
        loss, loads = split_result(step(*batch))
        loss.backward()
        if posted is not None:
            posted[number, piper.rank()] = loads
        found[1].append(piper.clip_grad_norm_(step, config.clip).item())
        if posted is not None:  # the norm is of all ranks, so each has posted its loads
            move_biases(model, [posted[number, rank] for rank in range(config.world)])
        found[0].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("schedule", "zero", "options"),
    [
        pytest.param(
            *mix, marks=[] if mix[:2] in QUICK else [pytest.mark.slow], id=f"{mix[0]}-{mix[1]}"
        )
        for mix in MIXES
    ],
)
def test_replicas_equal_one_process(schedule: str, zero: int, options: dict[str, Any]):
    """Each replica has its share of the rows that one process has whole; all ranks agree."""
    config = Config(
        dim=16, layers=4, heads=2, kv_heads=1, seq=8, batch=8, microbatches=4, steps=3, pp=2, dp=2,
        dtype="float64", schedule=schedule, zero=zero, **options,
    )  # fmt: skip
    corpus = counting()

    want = one_process(config, corpus)
    for losses, norms in jobs.run_ranks(lambda: train_rank(config, corpus), config.world):
        assert want.max_relative_difference(losses, norms) < 1e-12


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        pytest.param("one_f_one_b", {"ep": 2}, marks=pytest.mark.slow),
        pytest.param("dualpipev", {"ep": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param("dualpipe", {"ep": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param("zbv", {"ep": 2, "dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_experts_equal_one_process(
    schedule: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """Each rank has its share of rows and experts; biases move by what all ranks' experts got."""
    monkeypatch.setattr(compare, "balance", partial(balance, rate=RATE))
    config = Config(
        model="moe", dim=16, layers=4, heads=2, kv_heads=1, seq=8, batch=16, microbatches=4,
        steps=3, experts=4, dtype="float64", schedule=schedule, **sizes,
    )  # fmt: skip
    corpus = counting()

    want, posted = one_process(config, corpus), {}
    for losses, norms in jobs.run_ranks(lambda: train_rank(config, corpus, posted), config.world):
        assert want.max_relative_difference(losses, norms) < 1e-12


@pytest.mark.parametrize("moved", [pytest.param(True, marks=pytest.mark.slow), False])
def test_control_biases_that_stay(moved: bool, monkeypatch: pytest.MonkeyPatch):
    config = Config(
        model="moe", dim=16, layers=2, heads=2, kv_heads=1, seq=8, batch=16, microbatches=2,
        steps=3, experts=4, pp=1, ep=2, dtype="float64", schedule="gpipe",
    )  # fmt: skip
    corpus = counting()
    monkeypatch.setattr(compare, "balance", partial(balance, rate=RATE))
    want, posted = one_process(config, corpus), {} if moved else None
    found = jobs.run_ranks(lambda: train_rank(config, corpus, posted), config.world)
    difference = want.max_relative_difference(*found[0])
    assert difference < 1e-12 if moved else difference > 1e-6


# Processes


def run(
    *arguments: str, env: Mapping[str, str] = {}, timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-m", "piper_dynamo", "train", *TINY.split(), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run wrote of its steps and evaluations."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_ranks(count: int) -> set[str]:
    """The files of a run folder that ranks have."""
    return {name for r in range(count) for name in (f"program_rank{r}.py", f"rank-{r}.log")}


@pytest.mark.dist(2)
def test_two_ranks_equal_one_process(tmp_path: Path):
    done = run("--steps", "5", "--eval-every", "2", "--compare", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)  # nothing else is there
    assert result["max_rel_diff"] < 1e-6
    assert result["loss_first"] == pytest.approx(math.log(256), rel=0.05)
    assert result["tokens_per_s"] > 0
    assert 50 < result["peak_mb"] < 10_000
    assert "equal to one process: max difference" in done.stderr
    assert done.stderr.count("capturing, planning and compiling") >= 1
    assert done.stderr.count("run folder:") == 1  # rank 0 alone speaks
    assert {p.name for p in tmp_path.iterdir()} == {*report.FILES, *of_ranks(2)}
    assert json.loads((tmp_path / "summary.json").read_text()) == result
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"]["dim"] == 16
    assert config["data"]["train_bytes"] > 1e6
    lines = metrics(tmp_path)
    steps = [one for one in lines if "loss" in one]
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5]
    assert [one["step"] for one in lines if "validation_loss" in one] == [2, 4, 5]
    assert (steps[0]["loss"], steps[-1]["loss"]) == (result["loss_first"], result["loss_last"])
    compile((tmp_path / "program_rank1.py").read_text(), "program_rank1.py", "exec")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tasks = [e["name"] for e in trace if e.get("cat") in ("F", "B")]
    assert sorted(tasks) == sorted(
        f"{kind}.PP{stage}.MB{mb}" for kind in "FB" for stage in (0, 1) for mb in (0, 1)
    )


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(200)
def test_experts_on_two_ranks(tmp_path: Path):
    """One stage; the ranks share the experts, and the loads that balance them."""
    asked = "--model moe --experts 4 --pp 1 --ep 2 --steps 4 --eval-every 4 --compare --json --out"
    done = run(*asked.split(), str(tmp_path), timeout_s=180)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["max_rel_diff"] < 1e-6
    assert "2 share the experts" in done.stderr
    assert all(1 <= one["busiest_expert"] <= 4 for one in metrics(tmp_path) if "loss" in one)
    assert "exchange" in (tmp_path / "program_rank0.py").read_text()


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(200)
def test_training_in_bfloat16(tmp_path: Path):
    asked = "--precision bf16 --nan-check raise --pp 1 --dp 2 --zero 3 --dim 32 --layers 1"
    more = "--heads 2 --steps 3 --batch 4 --microbatches 2 --seq 32 --eval-every 0 --out"
    done = run(*asked.split(), *more.split(), str(tmp_path), timeout_s=180)
    assert done.returncode == 0, done.stderr
    assert all(0 < one["loss"] < 6 for one in metrics(tmp_path))
    assert "bfloat16" in done.stderr  # what gathers carry


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(200)
def test_experts_with_a_capacity_say_what_they_drop(tmp_path: Path):
    asked = "--model moe --experts 4 --pp 1 --ep 2 --steps 2 --eval-every 0 --capacity 0.5 --out"
    done = run(*asked.split(), str(tmp_path), timeout_s=180)
    assert done.returncode == 0, done.stderr
    # Half of the rows find room where experts are used evenly, and fewer where they are not.
    assert all(0.5 <= one["dropped"] < 1 for one in metrics(tmp_path))
    assert "% dropped" in done.stderr


@pytest.mark.dist(4)
@pytest.mark.slow
@pytest.mark.timeout(320)
def test_sharded_replicas_of_two_stages(tmp_path: Path):
    """Two stages by two replicas: one process's losses, tokens of all replicas, all the files."""
    sharded = "--dp 2 --zero 3 --pp 2 --steps 5 --eval-every 5 --compare"
    done = run(*sharded.split(), "--json", "--out", str(tmp_path), timeout_s=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["max_rel_diff"] < 1e-6
    assert "2 replicas, ZeRO-3" in done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {*report.FILES, *of_ranks(4)}
    seconds = [4 * 16 / one["tokens_per_s"] for one in metrics(tmp_path) if "loss" in one][1:]
    assert result["tokens_per_s"] == pytest.approx(4 * 16 * len(seconds) / sum(seconds))
    plan = (tmp_path / "plan.txt").read_text()
    assert plan.startswith("plan of 4 ranks, 2 replicas, 2 microbatches, training")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace if e.get("cat") == "B"} == {0, 1, 2, 3}
