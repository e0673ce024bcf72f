"""Rank programs: the text form of an instruction is strict, and a program says what it is."""

from contextlib import suppress
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import piper_dynamo as piper
from piper_dynamo.errors import PiperSyntaxError
from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram
from piper_dynamo.ir.spec import TensorSpec, contiguous_stride
from tests import jobs
from tests.jobs import LINE2, V2
from tests.models import Dropped, NormNet, Outputs, Stack4, TiedLM, rows

MANY = settings(max_examples=max(200, settings.default.max_examples))


@pytest.fixture(scope="module")
def plans() -> dict[str, piper.Plan]:
    """Between them: every instruction but collectives, seeds, views, halves, outputs, buffers."""

    def make(model: nn.Module, batch: tuple, schedule: str, placement=LINE2) -> piper.Plan:
        return piper.plan(model, jobs.strategy(placement, 4, schedule), batch)

    return {
        "1f1b": make(Stack4(2), rows(8), "one_f_one_b"),
        "zbv": make(Stack4(4, skip="all"), rows(8), "zbv", V2),
        "tied": make(TiedLM(), TiedLM.batch(), "gpipe"),
        "buffers": make(NormNet(), rows(8), "gpipe"),
        "cast": piper.plan(
            Stack4(2),
            piper.Strategy(piper.Precision({}, param="bf16"), *jobs.strategy(LINE2, 4).directives),
            rows(8),
        ),
        "random": make(Dropped(), rows(8), "zb_h1"),
        "outputs": piper.plan(
            Outputs(), jobs.strategy(LINE2, 4), rows(8), compile="aten", outputs="everywhere"
        ),
    }


@pytest.mark.parametrize("name", ["1f1b", "zbv", "tied", "buffers", "cast", "random", "outputs"])
def test_real_instructions_round_trip(plans: dict[str, piper.Plan], name: str):
    for program in plans[name].programs:
        assert program.instrs
        for instr in program.instrs:
            assert Instr.parse(str(instr)) == instr


def test_the_plans_hold_every_instruction(plans: dict[str, piper.Plan]):
    instrs = [i for plan in plans.values() for p in plan.programs for i in p.instrs]
    assert {i.op for i in instrs} == set(Op) - COLLECTIVES
    assert any(i.seed is not None for i in instrs)
    assert {i.task.split(".")[0] for i in instrs if i.op is Op.RUN} == {"F", "B", "BI", "BW"}


words = st.text("abcxyz_019", min_size=1, max_size=6)
numbers = st.integers(-1, 10**9)
registers = st.lists(words, max_size=3).map(tuple)
specs = st.builds(
    lambda shape, dtype, device: TensorSpec(
        shape=tuple(shape), dtype=dtype, stride=contiguous_stride(shape), device=device
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.sampled_from(["cpu", "cuda:1"]),
)
instrs = st.builds(
    Instr,
    op=st.sampled_from(Op),
    task=st.text(max_size=5) | st.just("F.PP0.MB1"),
    outputs=registers,
    inputs=registers,
    target=words | st.just(""),
    bundle_in=words | st.just(""),
    bundle_out=words | st.just(""),
    num_primals=numbers,
    seed=st.none() | st.tuples(numbers, numbers),
    peer=numbers,
    message=numbers,
    group=st.lists(numbers, max_size=3).map(tuple),
    dim=st.none() | st.integers(-3, 3),
    part=numbers,
    parts=numbers,
    spec=st.none() | specs,
    nbytes=st.lists(numbers, max_size=2).map(tuple),
    stream=words,
    where=st.text(max_size=8) | st.just('odd {"file".py:3 = (x)'),
)


@MANY
@given(instrs)
def test_any_instruction_round_trips(instr: Instr):
    assert Instr.parse(str(instr)) == instr


@MANY
@given(instrs, st.data())
def test_what_parses_is_written_that_way(instr: Instr, data: st.DataObject):
    text = str(instr)
    at = data.draw(st.integers(0, len(text)))
    drop = data.draw(st.integers(0, 2))
    text = text[:at] + data.draw(st.text('=(){}[]",: a1\n', max_size=2)) + text[at + drop :]
    parsed = None
    with suppress(PiperSyntaxError):
        parsed = Instr.parse(text)
    assert parsed is None or str(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = wait(h)",
        "x = wait(h {}",
        "x = wait h) {}",
        "x = wait(h) {",
        "x = wait(h) {'peer': 1}",
        "x = await(h) {}",
        'x = wait(h) {"pier": 1}',
        'x = wait(h) {"op": "send"}',
        'x = wait(h) {"spec": [[2], "float32"]}',
        'x = wait(h) {"spec": [[2], "float33", [1], "cpu"]}',
        'x = wait(h) {"spec": 3}',
        "x = wait(h) {} and more",
        "x = wait(h) {}{}",
        "x = wait(h) {}\n",
    ],
)
def test_what_is_no_instruction_is_refused(text: str):
    with pytest.raises(PiperSyntaxError, match="not an instruction"):
        Instr.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        " x = wait(h) {}",
        "x = wait(h)  {}",
        "x=wait(h) {}",
        "x,y = wait(h) {}",
        "x = wait(h,g) {}",
        " = wait(h) {}",
        "x = wait(h) { }",
        'x = wait(h) {"peer":1}',
        'x = wait(h) {"peer": -1}',
        'x = wait(h) {"message": 1, "peer": 1}',
        'x = wait(h) {"peer": 0, "peer": 1}',
        'x = wait(h) {"peer": 1.0}',
    ],
)
def test_another_way_to_write_an_instruction_is_refused(text: str):
    with pytest.raises(PiperSyntaxError, match="not an instruction"):
        Instr.parse(text)


@pytest.mark.parametrize(
    "extra",
    [
        '{"peer": "1"}',
        '{"peer": null}',
        '{"peer": true}',
        '{"task": 3}',
        '{"group": ["a"]}',
        '{"group": 3}',
        '{"seed": [1, 2, 3]}',
        '{"where": [1]}',
        '{"spec": [[2], "nn", [1], "cpu"]}',
        '{"spec": [["2"], "float32", [1], "cpu"]}',
    ],
)
def test_fields_of_a_wrong_type_are_refused(extra: str):
    with pytest.raises(PiperSyntaxError, match="not an instruction"):
        Instr.parse(f"x = wait(h) {extra}")


def test_reads_and_writes_include_bundles():
    run = Instr(
        op=Op.RUN, outputs=("a", "_"), inputs=("w", "x"), bundle_in="kept", bundle_out="left"
    )
    assert run.reads() == ("w", "x", "kept")
    assert run.writes() == ("a", "_", "left")
    plain = replace(run, bundle_in="", bundle_out="")
    assert (plain.reads(), plain.writes()) == (("w", "x"), ("a", "_"))


def test_results_and_sources(plans: dict[str, piper.Plan]):
    first, second = plans["outputs"].programs
    assert first.loss
    for program in (first, second):
        assert program.loss in program.results()
        assert {r for _, r in program.grads} < program.results()
        assert program.sources() == {
            *(r for r, _ in program.state),
            *(r for r, _ in program.data),
            *program.weights,
            *(r for _, r in program.tangents),
        }
        assert not program.results() & program.sources()


def test_program_text_tells_any_difference(plans: dict[str, piper.Plan]):
    program = plans["buffers"].programs[0]
    changed = {
        "rank": 1,
        "world_size": 3,
        "instrs": program.instrs[:-1],
        "state": program.state[:-1],
        "data": (),
        "weights": ("other",),
        "tangents": ((0, "other"),),
        "loss": "other",
        "outputs": ((0, "other"),),
        "grads": program.grads[:-1],
        "buffers": program.buffers[:-1],
        "chunks": program.chunks[:-1],
        "contributors": ((0, (0, 1)),),
        "shards": ((0, (0, 1)),),
        "experts": ((0, (0, 1)),),
        "peak_bytes": program.peak_bytes + 1,
    }
    assert set(changed) == {f.name for f in fields(RankProgram)}
    texts = {program.text()}
    for name, value in changed.items():
        other = replace(program, **{name: value})
        assert other != program, f"{name} is not changed"
        texts.add(other.text())
    assert len(texts) == 1 + len(changed)
