"""Bad input: a clear error before any message is sent, on every rank, and nothing left hanging.

Each test states the words the message must hold: the values, the argument, the ranks, and what
would work instead.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piper_dynamo as piper
from piper_dynamo import backend
from tests import jobs
from tests.jobs import LINE2, LINE4, ONE, V2, by_hand, mentions, places, refusal
from tests.models import (
    BakedIn,
    Branching,
    Hidden,
    Masked,
    Outputs,
    Paths,
    Printing,
    Stack4,
    TiedLM,
    rows,
    xin,
)

MODELS = Path(__file__).with_name("models.py")


def split(microbatches: int = 2) -> piper.Split:
    return piper.Split({}, dim="MB", num_microbatches=microbatches)


def refused(
    *directives: Any,
    stages: int = 2,
    batch: tuple[Any, ...] | None = None,
    model: nn.Module | None = None,
    kind: type[BaseException] = piper.PiperError,
    world_size: int | None = None,
    **named: Any,
) -> str:
    """The message of the plan that these directives must not get."""

    def call() -> None:
        strategy = piper.Strategy(*directives, **named)
        piper.plan(model or Stack4(stages), strategy, batch or rows(8), world_size=world_size)

    return refusal(call, kind)


def line_of(model: type, mark: str) -> str:
    """`models.py:<line>` of the line of this model that holds `mark`."""
    lines = MODELS.read_text().splitlines()
    start = lines.index(f"class {model.__name__}(nn.Module):")
    found = next(i for i in range(start, len(lines)) if mark in lines[i])
    return f"models.py:{found + 1}"


# The batch.


@pytest.mark.parametrize(
    ("size", "microbatches", "divisors"),
    [
        (5, 2, ("1", "5")),
        (8, 3, ("1", "2", "4", "8")),
        (1, 2, ("1",)),
        (6, 4, ("1", "2", "3", "6")),
    ],
)
def test_a_batch_that_does_not_divide(
    size: int, microbatches: int, divisors: tuple[str, ...]
) -> None:
    text = refused(split(microbatches), *places(LINE2), batch=rows(size))
    mentions(text, "x", str(size), str(microbatches))
    found = set(re.findall(r"\d+", text.splitlines()[-1] + text))
    assert set(divisors) <= found, f"the sizes that would work are missing:\n{text}"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "4", None])
def test_a_number_of_microbatches_that_is_none(wrong: Any) -> None:
    text = refusal(lambda: split(wrong), piper.PiperStrategyError)
    mentions(text, "num_microbatches", repr(wrong), "1")


class Loose(nn.Module):
    """Any number of rows in either input makes sense to it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(xin([4, 4], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(x @ self.w.T).mean()
        with piper.annotate("PP", 1):
            return (h - y.mean()).square()


def test_inputs_whose_batches_disagree() -> None:
    x, y = rows(8)
    text = refused(split(), *places(LINE2), batch=(x, y[:4]), model=Loose())
    mentions(text, "x", "y", "8", "4", "replicate")


def test_an_input_about_which_one_would_have_to_guess() -> None:
    """Offsets of five entries beside a batch of four: nothing says what they are."""
    offsets = torch.tensor([0, 3, 6, 9, 12])
    strategy = jobs.strategy(LINE2, 2, inputs={"table": "replicate"})
    text = refusal(
        lambda: piper.plan(Masked(), strategy, (*Masked.batch(), offsets)), piper.PiperError
    )
    mentions(text, "offsets", "5", "4", "replicate")


def test_a_rule_for_an_argument_that_does_not_exist() -> None:
    strategy = jobs.strategy(LINE2, 2, inputs={"lables": 0})
    text = refusal(lambda: piper.plan(TiedLM(), strategy, TiedLM.batch()))
    mentions(text, "lables", "labels")


def test_a_rule_for_a_dim_that_does_not_exist() -> None:
    strategy = jobs.strategy(LINE2, 2, inputs={"labels": 5})
    text = refusal(lambda: piper.plan(TiedLM(), strategy, TiedLM.batch()))
    mentions(text, "labels", "(4, 3)", "5")


def test_a_batch_size_baked_into_the_model() -> None:
    text = refused(split(), *places(LINE2), model=BakedIn())
    mentions(text, line_of(BakedIn, "the baked-in size"), "hint")


def test_a_batch_size_baked_into_the_model_at_a_plain_first_call() -> None:
    def job() -> str:
        options = {"strategy": jobs.strategy(LINE2, 2)}
        step = torch.compile(BakedIn(), backend="piper", options=options)
        return refusal(lambda: step(*rows(8)), Exception)

    line = line_of(BakedIn, "the baked-in size").partition(":")[2]
    for text in jobs.run_ranks(job, 2):
        mentions(text, "models.py", line, "x.shape[0]")


# Placement.


def test_a_region_that_is_placed_twice() -> None:
    text = refused(split(), piper.Place({"PP": 0}, [0]), piper.Place({"PP": [0, 1]}, [1]))
    mentions(text, "PP", "0", "[0]", "[1]", "twice")


def test_a_region_that_is_never_placed() -> None:
    text = refused(split(), piper.Place({"PP": 0}, [0]), piper.Place({"PP": 2}, [1]), stages=4)
    mentions(text, "PP1", "PP3")


def test_a_region_on_a_rank_that_does_not_exist() -> None:
    text = refused(split(), *places({0: [0], 1: [5]}), world_size=2)
    mentions(text, "[5]", "0-1", "PP")


def test_several_devices_without_replicate_or_shard() -> None:
    text = refused(split(), *places({0: [0], 1: [0, 1]}))
    mentions(text, "PP1", "Replicate", "Shard")


@pytest.mark.parametrize("wrong", [[], [0, 0], [-1], ["0"], 0, "0"])
def test_devices_that_mean_nothing(wrong: Any) -> None:
    text = refusal(lambda: piper.Place({"PP": 0}, wrong), piper.PiperStrategyError)
    mentions(text, "devices", repr(wrong))


def test_a_world_of_another_size() -> None:
    """Four stages on four ranks in a world of two; every rank says the same."""

    def job() -> str:
        strategy = jobs.strategy(LINE4, 2)
        return refusal(lambda: piper.compile(Stack4(4), strategy, example_inputs=rows(8)))

    first, second = jobs.run_ranks(job, 2)
    assert first == second
    mentions(first, "2", "3")


def test_a_world_with_ranks_to_spare() -> None:
    text = refused(split(), *places(LINE2), world_size=3)
    mentions(text, "3", "2")


def test_every_fault_of_the_placement_at_once() -> None:
    text = refused(
        split(),
        piper.Place({"PP": 0}, [0]),
        piper.Place({"PP": 0}, [1]),
        piper.Place({"PP": 1}, [7]),
        stages=4,
        world_size=2,
    )
    mentions(text, "twice", "7", "PP2", "PP3")


def test_a_strategy_of_a_function_is_told_by_its_arguments() -> None:
    """What to change is what the user wrote, which is no Place."""
    made = piper.strategies.pipeline(ranks=2, num_microbatches=2)
    text = refusal(lambda: piper.plan(Stack4(2), made, rows(8), world_size=3))
    mentions(text, "start 2 ranks, or change ranks= or replicas= of piper.strategies.pipeline")
    mentions(text, "test_refusals.py:", ", made by piper.strategies.pipeline")
    for count, tagged in ((2, 4), (4, 2)):
        made = piper.strategies.pipeline("gpipe", ranks=2, stages=count, num_microbatches=2)
        text = refusal(lambda m=made, t=tagged: piper.plan(Stack4(t), m, rows(8)))
        mentions(
            text, f"the model has {tagged} stages (PP=0, 1", f"and {count} are placed (PP=0, 1"
        )
        mentions(text, "change ranks= or stages= of piper.strategies.pipeline")
        assert "add piper.Place" not in text
    orders = piper.schedules.gpipe({0: [0], 1: [1]}, 4)
    text = refused(split(), *places(LINE2), *orders)
    mentions(text, "(piper.schedules.gpipe): the filter", "give piper.schedules.gpipe as many")


def test_errors_name_the_lines_of_their_own_strategy() -> None:
    """Not those of an equal one, for which Dynamo has the code already."""
    model, batch = Stack4(2), rows(8)

    def first() -> piper.Strategy:
        return piper.Strategy(split(), piper.Place({"PP": 0}, [0]), piper.Place({"PP": 1}, [1]))

    def second() -> piper.Strategy:
        return piper.Strategy(split(), piper.Place({"PP": 0}, [0]), piper.Place({"PP": 1}, [1]))

    assert first() == second()
    for one, other in ((first, second), (second, first)):
        piper.plan(model, one(), batch)
        text = refusal(lambda other=other: piper.plan(model, other(), batch, world_size=3))
        mentions(text, other().directives[1].where)
        assert one().directives[1].where not in text


def test_a_strategy_of_the_same_lines_takes_the_code_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    real = backend.CompiledStep

    def counted(*args: Any, **named: Any) -> Any:
        made.append(real(*args, **named))
        return made[-1]

    def job() -> int:
        model = Stack4(2)
        found = []
        for _ in range(3):
            options = {"strategy": jobs.strategy(ONE, 2)}
            piper.prepare(torch.compile(model, backend="piper", options=options), *rows(8))
            found.append(len(made))
        return len(set(found))

    monkeypatch.setattr(backend, "CompiledStep", counted)
    assert jobs.run_ranks(job, 1) == [1]


# Filters.


@pytest.mark.parametrize(
    ("filter", "words"),
    [
        ({"PP": 7}, ("7", "0", "1")),
        ({"pp": 0}, ("pp", "PP")),
        ({"PPP": 0}, ("PPP", "PP")),
        ({"PP": range(4, 6)}, ("4", "0", "1")),
    ],
    ids=["index", "case", "name", "range"],
)
def test_a_filter_that_matches_nothing(filter: dict[str, Any], words: tuple[str, ...]) -> None:
    """Near misses are listed: what there is to match."""
    text = refused(split(), *places(LINE2), piper.Place(filter, [1]))
    mentions(text, *words)


def test_an_order_of_tasks_that_do_not_exist() -> None:
    tasks = [{"PP": 0, "MB": 9, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "F"}]
    text = refused(split(), *places(LINE2), piper.Order(tasks))
    mentions(text, "9", "MB")
    text = refusal(lambda: piper.Order([{"PP": 0, "PASS": "FB"}]))
    mentions(text, "FB", "BI", "BW")


def test_regions_by_a_path_that_matches_nothing() -> None:
    strategy = jobs.strategy(LINE2, 2, regions={"layers.[01]": {"PP": 0}, "layer.[23]": {"PP": 1}})
    text = refusal(lambda: piper.plan(Paths(), strategy, rows(8)))
    mentions(text, "layer.[23]", "layers.2")


# Orders.


def ordered(*ranks: str, placement: jobs.Placement = LINE2) -> str:
    directives = (split(), *places(placement), *by_hand(*ranks))
    return refused(*directives, stages=len(placement), kind=piper.PiperError)


GOOD = ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")


def test_control_the_good_order_is_accepted() -> None:
    strategy = piper.Strategy(split(), *places(LINE2), *by_hand(*GOOD))
    piper.plan(Stack4(2), strategy, rows(8)).verify()


def test_an_order_against_dataflow_shows_the_cycle() -> None:
    text = ordered("B0.0 F0.0 F0.1 B0.1", GOOD[1])
    mentions(text, "F.PP0.MB0", "B.PP0.MB0", "rank 0")


def test_two_orders_that_contradict_each_other() -> None:
    """The second asks rank 0 for the other sequence of the two forwards."""
    text = ordered("F0.0 F0.1 B0.0 B0.1", GOOD[1], "F0.1 F0.0")
    mentions(text, "F.PP0.MB0", "F.PP0.MB1")


def test_orders_of_one_line_are_told_apart() -> None:
    """A loop made both; neither puts a task before itself."""
    text = refused(split(), *places(LINE2), *by_hand("F0.0 F0.1", "F0.1 F0.0"))
    assert "number 1 of 2 there: F.PP0.MB0 before F.PP0.MB1, on rank 0" in text
    assert "number 2 of 2 there: F.PP0.MB1 before F.PP0.MB0, on rank 0" in text


def test_orders_that_deadlock_across_ranks() -> None:
    """Rank 0 wants its first backward before its second forward; rank 1 the reverse."""
    text = ordered("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    mentions(text, "rank 0", "rank 1", "B.PP0.MB0", "F.PP0.MB1", "F.PP1.MB1", "B.PP1.MB0")


def test_orders_that_deadlock_on_every_rank_alike() -> None:
    """The error is raised where the step is compiled, with one text, before anything is sent."""

    def job() -> str:
        strategy = piper.Strategy(
            split(), *places(LINE2), *by_hand("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
        )
        return refusal(lambda: piper.compile(Stack4(2), strategy, example_inputs=rows(8)))

    first, second = jobs.run_ranks(job, 2)
    assert first == second


def test_an_order_that_names_a_task_twice() -> None:
    text = ordered("F0.0 F0.0 F0.1 B0.0 B0.1", GOOD[1])
    mentions(text, "F.PP0.MB0", "twice")


def test_an_order_that_leaves_a_task_out() -> None:
    """Of a sequence that names the other tasks of its kind: one is missing."""
    text = ordered(
        "F0.0 F0.1 F3.0 F3.1 B3.0 B3.1 B0.0 B0.1",
        "F1.0 F1.1 F2.0 F2.1 B2.0 B1.0 B1.1",
        placement=V2,
    )
    mentions(text, "B.PP2.MB1")


def test_an_order_that_spans_device_groups() -> None:
    text = ordered("F0.0 F1.0 F0.1 B0.0 B0.1", "B1.0 F1.1 B1.1")
    mentions(text, "F.PP0.MB0", "F.PP1.MB0")


def test_every_fault_of_the_orders_at_once() -> None:
    text = ordered("F0.0 F0.0 F0.1 B0.0 B0.1 F7.0", GOOD[1])
    mentions(text, "twice", "7")


def test_a_whole_backward_and_its_halves_in_one_strategy() -> None:
    """Naming BI or BW splits that backward, so B is no task of its own any more."""
    text = ordered("F0.0 F0.1 B0.0 B0.1", "F1.0 BI1.0 BW1.0 B1.0 F1.1 B1.1")
    mentions(text, "PP1", "MB0", "BI", "BW")


# What ranks must agree on.


def test_ranks_with_different_strategies() -> None:
    """Both raise, and say what differs."""

    def job() -> str:
        strategy = jobs.strategy(LINE2, 2 if piper.rank() == 0 else 4)

        def run() -> None:
            step = piper.compile(Stack4(2), strategy, example_inputs=rows(8), timeout_s=10.0)
            step(*rows(8))

        return refusal(run)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "rank 0", "rank 1")
        mentions(text, "strateg")


def test_ranks_with_different_batch_sizes() -> None:
    def job() -> str:
        strategy = jobs.strategy(LINE2, 2)
        step = piper.compile(Stack4(2), strategy, example_inputs=rows(8), timeout_s=10.0)
        step(*rows(8)).backward()
        return refusal(lambda: step(*rows(8 if piper.rank() == 0 else 4)), Exception)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "rank 0", "rank 1", "8", "4")


def test_ranks_with_different_grad_modes() -> None:
    def job() -> str:
        strategy = jobs.strategy(LINE2, 2)
        step = piper.compile(Stack4(2), strategy, example_inputs=rows(8), timeout_s=10.0)

        def run() -> None:
            with torch.set_grad_enabled(piper.rank() == 0):
                step(*rows(8))

        return refusal(run, Exception)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "rank 0", "rank 1", "grad")


class Flagged(Stack4):
    """A Python flag that may differ by rank."""

    flag = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss * 2 if self.flag else loss


def test_ranks_whose_models_differ() -> None:
    def job() -> str:
        model = Flagged(2)
        model.flag = piper.rank() == 1

        def run() -> None:
            strategy = jobs.strategy(LINE2, 2)
            step = piper.compile(model, strategy, example_inputs=rows(8), timeout_s=10.0)
            step(*rows(8))

        return refusal(run, Exception)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "rank 0", "rank 1")


# The model.


@pytest.mark.parametrize(
    ("build", "mark"), [(Printing, "# the break"), (Branching, "# the branch")]
)
def test_a_graph_break_names_the_users_line(build: type, mark: str) -> None:
    text = refused(split(), *places(LINE2), model=build())
    mentions(text, "graph break", line_of(build, mark), "hint")


def test_a_graph_break_at_a_plain_first_call() -> None:
    def job() -> str:
        options = {"strategy": jobs.strategy(LINE2, 2)}
        step = torch.compile(Printing(), backend="piper", options=options)
        return refusal(lambda: step(*rows(8)), Exception)

    for text in jobs.run_ranks(job, 2):
        mentions(text, "graph break", "models.py")


def test_no_output_that_can_be_the_loss_under_an_interleaving_order() -> None:
    text = refused(
        split(), *places(LINE2), *by_hand(*GOOD), model=Hidden(), batch=(xin([8, 4], 0),)
    )
    mentions(text, "loss", "order")


def test_two_outputs_that_can_be_the_loss() -> None:
    text = refused(split(), *places(LINE2), model=Outputs(two_losses=True))
    mentions(text, "loss=", "early", "nested")


@pytest.mark.parametrize("loss", ["los", "nested.los", ("nested", "x"), "none"])
def test_a_loss_that_is_not_there(loss: Any) -> None:
    """No such output, or not a tensor: what there is, is listed."""
    text = refused(split(), *places(LINE2), model=Outputs(), loss=loss)
    mentions(text, "nested.loss", str(loss))


def test_a_loss_that_says_how_microbatches_combine() -> None:
    text = refused(split(), *places(LINE2), model=Outputs(), loss="sum")
    mentions(text, "Split(loss=)", "combine=")


def test_a_batch_that_is_not_split() -> None:
    text = refused(*places(LINE2), by_hand("F0.0 F0.1 B0.0 B0.1")[0])
    mentions(text, "the batch is not split; add piper.Split")


def test_a_loss_that_is_no_scalar() -> None:
    text = refused(split(), *places(LINE2), model=Outputs(), loss="hidden")
    mentions(text, "hidden", "scalar")


# Options and arguments.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compil": "aten"}, ("compil", "compile")),
        ({"compile": "atne"}, ("compile", "atne", "aten", "inductor")),
        ({"timeout": 3.0}, ("timeout", "timeout_s")),
        ({"timeout_s": 0}, ("timeout_s", "0")),
        ({"outputs": "all"}, ("outputs", "all", "everywhere")),
    ],
    ids=["name", "value", "near name", "number", "choice"],
)
def test_misspelt_options(options: dict[str, Any], words: tuple[str, ...]) -> None:
    strategy = jobs.strategy(LINE2, 2)
    for call in (
        lambda: piper.compile(Stack4(2), strategy, example_inputs=rows(8), **options),
        lambda: piper.plan(Stack4(2), strategy, rows(8), **options),
    ):
        mentions(refusal(call, piper.PiperStrategyError), *words)


def test_misspelt_options_of_torch_compile() -> None:
    """torch wraps what a backend raises at a call; the text comes through."""
    step = torch.compile(Stack4(2), backend="piper", options={"strategi": jobs.strategy(LINE2, 2)})
    text = refusal(lambda: step(*rows(8)), Exception)
    mentions(text, "strategi", "strategy")


def test_something_else_instead_of_a_strategy() -> None:
    for wrong in (None, [split()], "gpipe"):
        text = refusal(
            lambda w=wrong: piper.compile(Stack4(2), w, example_inputs=rows(8)), piper.PiperError
        )
        mentions(text, "strategy")


def test_a_directive_twice() -> None:
    """Two splits over one tag contradict each other; both are named."""
    text = refused(split(2), split(4), *places(LINE2))
    mentions(text, "Split", "2", "4")


@pytest.mark.parametrize(
    "call",
    [
        lambda: piper.launch(lambda: None, 0, engine="inprocess"),
        lambda: piper.launch(lambda: None, 2, engine="inproces"),
    ],
    ids=["ranks", "engine"],
)
def test_launch_arguments(call: Callable[[], Any]) -> None:
    mentions(refusal(call), "inprocess" if "engine" in refusal(call) else "ranks")


def test_a_deadlock_of_the_users_own_making_raises_at_once() -> None:
    """One rank leaves out its step: the other cannot wait for ever."""

    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        if piper.rank() == 0:
            step(*rows(8))

    text = refusal(lambda: jobs.run_ranks(job, 2))
    mentions(text, "rank 1", "every rank must call the step")
    assert "inf s" not in text, f"no deadline was given, and none can be infinite:\n{text}"


def test_the_first_failure_of_a_job_is_the_one_that_is_told() -> None:
    def job() -> None:
        step = piper.compile(Stack4(2), jobs.strategy(LINE2, 2), example_inputs=rows(8))
        if piper.rank() == 1:
            raise ValueError("boom")
        step(*rows(8))

    mentions(refusal(lambda: jobs.run_ranks(job, 2), Exception), "boom")
