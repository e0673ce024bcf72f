"""`PIPER_DEBUG=comm`: what gloo does without a word is an error that names both sides.

Each fault is made twice on two real processes: as gloo has it, which shows that it is silent, and
with headers, which must tell it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import piper_dynamo as piper
from piper_dynamo.ir.program import Op
from piper_dynamo.ir.spec import TensorSpec
from piper_dynamo.runtime import headers, world
from piper_dynamo.runtime.comm import TorchCommunicator
from piper_dynamo.runtime.exchange import Splits
from piper_dynamo.runtime.headers import CheckedCommunicator
from tests import experts, jobs, replicas
from tests.faults import fixtures as fx
from tests.faults.fixtures import EIGHT, about
from tests.jobs import LINE2, V2
from tests.models import Stack4, TiedLM, rows
from tests.pool import Pool
from tests.replicas import PAIR

pytestmark = pytest.mark.dist(2)

# Steps; first, since what is left of the faults below is on its way for ever.


MADE: list[Any] = []  # one for all steps of this process


@contextmanager
def asking(first: int = 10**6) -> Iterator[None]:
    """This process asks for headers; its first step has a number that no plain one has."""
    before = world._torch_comm
    os.environ[headers.VARIABLE] = headers.COMM
    world._torch_comm = MADE[0] if MADE else None
    try:
        if not MADE:
            made = world.communicator(20.0)
            made.steps = made.adoptions = first
            MADE.append(made)
        yield
    finally:
        del os.environ[headers.VARIABLE]
        world._torch_comm = before


STEPS: dict[str, tuple[Callable[[], Any], piper.Strategy, fx.Batch]] = {
    "v": (lambda: Stack4(4), jobs.strategy(V2, 4, "zbv"), EIGHT),
    "tied": (TiedLM, jobs.strategy(LINE2, 2, "one_f_one_b"), TiedLM.batch()),
    "zero 3": (lambda: Stack4(1), replicas.strategy(PAIR, 2, zero=3), EIGHT),
    "experts": (lambda: experts.Mixture(1), experts.strategy(PAIR, 2, ""), rows(24)),
    "two ways": (lambda: Stack4(2), jobs.strategy(LINE2, 4, "dualpipe"), EIGHT),
}


def two_steps(name: str) -> tuple[list[float], str]:
    """Losses of two steps, and the communicator that they had."""
    build, wanted, batch = STEPS[name]
    with asking():
        mine = fx.part(batch, wanted)
        step = piper.compile(build(), wanted, example_inputs=mine, timeout_s=20.0)
        optimizer = fx.sgd(piper.parameters(step))
        losses = []
        for _ in range(2):
            loss = step(*mine)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, type(world._torch_comm).__name__


@pytest.mark.parametrize(
    "name",
    ["zero 3", "experts"]
    + [pytest.param(n, marks=pytest.mark.slow) for n in ("v", "tied", "two ways")],
)
def test_steps_with_headers_are_right(pool: Pool, name: str) -> None:
    """Nothing waits for ever, no filling of buffers reaches a result (R77), losses are eager's."""
    build, _, batch = STEPS[name]
    model = build()
    optimizer, want = fx.sgd(model.parameters()), []
    for _ in range(2):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    for losses, kind in pool.values(two_steps, name):
        assert losses == about(want, 1e-12)
        assert kind == "CheckedCommunicator"


# Faults.

GROUP = ("dp", (0, 1))


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


SENT = "F.PP0.MB0"


def ends(comm: Any, sent: Tensor, awaited: TensorSpec, message: int, task: str = SENT) -> Any:
    """Rank 0 sends, rank 1 receives; what rank 1 has then."""
    if comm.rank == 0:
        comm.about("F.PP0.MB0")
        comm.send(sent, 1, message)
        if not comm.is_checked:
            comm.drain(1, message)
        return None
    comm.about(task)
    return comm.wait(comm.post(0, message, awaited)).tolist()


def too_large_a_buffer(comm: Any) -> Any:
    return ends(comm, torch.ones(2), spec(4), 100)


def floats_into_ints(comm: Any) -> Any:
    return ends(comm, torch.ones(2), spec(2, dtype=torch.int32), 101)


def another_task(comm: Any) -> Any:
    return ends(comm, torch.ones(2), spec(2), 102, "F.PP0.MB1")


def another_shape_of_as_many(comm: Any) -> Any:
    return ends(comm, torch.arange(4.0).reshape(2, 2), spec(4), 103)


def another_bit(comm: Any) -> Any:
    """Of the same task, shape and dtype, but damaged on the way."""
    if comm.rank == 0:
        comm.damage_next()
    return ends(comm, torch.ones(2), spec(2), 104)


def swapped_collectives(comm: Any) -> Any:
    """Two sums of one size, in another order on the other rank."""
    comm.prepare_groups([GROUP])
    order = ["grads.a", "grads.b"] if comm.rank == 0 else ["grads.b", "grads.a"]
    values = {"grads.a": torch.ones(2), "grads.b": torch.full((2,), 10.0)}
    handles = {}
    for name in order:
        comm.about(name)
        handles[name] = comm.start_collective(Op.ALL_REDUCE, [values[name]], GROUP, [spec(2)])
    return {name: comm.wait_all(handles[name])[0].tolist() for name in order}


def sums_of_unlike_dtypes(comm: Any) -> Any:
    """Of as many bytes: gloo adds them as what each rank says that they are."""
    comm.prepare_groups([GROUP])
    dtype = torch.float32 if comm.rank == 0 else torch.int32
    value = torch.ones(2, dtype=dtype)
    comm.about("grads.a")
    handle = comm.start_collective(Op.ALL_REDUCE, [value], GROUP, [spec(2, dtype=dtype)])
    return comm.wait_all(handle)[0].tolist()


# What gloo gives rank 1, or None where it does not matter what; words of the error with headers.
SILENT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], tuple[str, ...]]] = {
    "too large a buffer": (
        too_large_a_buffer,
        lambda got: got[:2] == [1.0, 1.0] and len(got) == 4,
        ("waits for", "F.PP0.MB0 float32(4,)", "rank 0 sends", "F.PP0.MB0 float32(2,)"),
    ),
    "floats into ints": (
        floats_into_ints,
        lambda got: got == [1065353216] * 2,
        ("F.PP0.MB0 int32(2,)", "F.PP0.MB0 float32(2,)"),
    ),
    "another task": (
        another_task,
        lambda got: got == [1.0, 1.0],
        ("F.PP0.MB1 float32(2,)", "F.PP0.MB0 float32(2,)"),
    ),
    "another shape": (
        another_shape_of_as_many,
        lambda got: got == [0.0, 1.0, 2.0, 3.0],
        ("float32(4,)", "float32(2, 2)"),
    ),
    "another bit": (
        another_bit,
        lambda got: got[0] == 1.0 and got[1] != 1.0,
        ("rank 1 received other bytes than were sent to it", "checksum"),
    ),
    "swapped collectives": (
        swapped_collectives,
        lambda got: got == {"grads.b": [11.0] * 2, "grads.a": [11.0] * 2},
        ("ranks 1 and 0 are in different collectives", "grads.a", "grads.b"),
    ),
    "sums of unlike dtypes": (
        sums_of_unlike_dtypes,
        lambda got: got != [2, 2],
        ("different collectives", "all_reduce of grads.a: int32(2,)", "float32(2,)"),
    ),
}


def attempt(name: str, checked: bool) -> Any:
    """What a fault comes to on this rank: a value, or the text of an error."""
    made: type[TorchCommunicator] = CheckedCommunicator if checked else TorchCommunicator
    comm = made(10.0)
    try:
        return SILENT[name][0](comm)
    except piper.PiperError as error:
        return str(error)


@pytest.mark.parametrize("name", SILENT)
def test_what_gloo_does_silently_is_told(pool: Pool, name: str) -> None:
    """A message or collective that does not fit: silent on gloo, an error with headers."""
    _, is_silent, words = SILENT[name]
    assert is_silent(pool.values(attempt, name, False)[1])
    jobs.mentions(str(pool.values(attempt, name, True)[1]), *words)


# What ends the process, or lets the peer wait, without headers.


def loud(name: str) -> str:
    comm = CheckedCommunicator(4.0)
    try:
        if name == "too small a buffer":
            ends(comm, torch.ones(4), spec(2), 110)
        elif name == "sums of unlike sizes":
            comm.prepare_groups([GROUP])
            size = 2 + comm.rank
            comm.about("grads.a")
            handle = comm.start_collective(Op.ALL_REDUCE, [torch.ones(size)], GROUP, [spec(size)])
            comm.wait_all(handle)
        elif name == "strided":
            ends(comm, torch.ones(2, 4).T, spec(4, 2), 111)
        elif name == "missing":
            comm.prepare_groups([GROUP])
            comm.about("grads.a")
            if comm.rank == 1:
                comm.wait_all(
                    comm.start_collective(Op.ALL_REDUCE, [torch.ones(2)], GROUP, [spec(2)])
                )
        elif name == "unlike rows":
            comm.prepare_groups([GROUP])
            comm.about("exchange.PP0")
            awaited = [[1, 1], [2, 1]][comm.rank]  # of rank 0 one more than it sends
            told = Splits(sent=[1, 1], received=awaited, by_expert=None, by_rank=None)
            rows_ = [torch.ones(2, 4), told]
            comm.wait_all(comm.start_collective(Op.EXCHANGE, rows_, GROUP, [spec(3, 4)]))
        elif name == "changed" and comm.rank == 0:
            value = torch.ones(2)
            comm.about("F.PP0.MB0")
            comm.send(value, 1, 112)
            value.fill_(7.0)
            comm.drain(1, 112)
        elif name == "changed":
            comm.about("F.PP0.MB0")
            assert comm.wait(comm.post(0, 112, spec(2))).tolist() == [1.0, 1.0]
    except piper.PiperError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "rank", "words"),
    [
        ("too small a buffer", 1, ("float32(2,)", "float32(4,)")),
        ("sums of unlike sizes", 0, ("different collectives", "float32(2,)", "float32(3,)")),
        ("unlike rows", 0, ("different collectives", "sent [1, 1], to come [1, 1]", "[2, 1]")),
        ("unlike rows", 1, ("different collectives", "sent [1, 1], to come [2, 1]", "[1, 1]")),
        ("strided", 0, ("not contiguous", "F.PP0.MB0")),
        ("strided", 1, ("strided", "F.PP0.MB0 float32(4, 2)")),
        ("missing", 1, ("nothing came within 4 s", "ranks [0]")),
        ("changed", 0, ("message 112 to rank 1", "changed before it had left")),
    ],
)
def test_what_gloo_ends_or_waits_for_is_told(
    pool: Pool, name: str, rank: int, words: tuple[str, ...]
) -> None:
    """What aborts the process or lets the peer wait on gloo is an error that says what."""
    jobs.mentions(pool.values(loud, name)[rank], *words)


def changed_dtype() -> str:
    """A step whose first rank sends whole numbers of as many bytes as it should send floats."""
    with asking():
        step = piper.compile(
            Stack4(2), jobs.strategy(LINE2, 2), example_inputs=EIGHT, timeout_s=5.0
        )
        if piper.rank() == 0:
            send = CheckedCommunicator.send

            def other(self: Any, value: Tensor, target: int, message: int) -> None:
                send(self, value.view(torch.int64), target, message)

            with fx.patched((CheckedCommunicator, "send", other)):
                return jobs.refusal(lambda: step(*EIGHT))
        return jobs.refusal(lambda: step(*EIGHT))


def test_a_step_names_the_task_and_the_line(pool: Pool) -> None:
    """A message of the wrong dtype in a step: the receiver names task, both forms and the line."""
    text = pool.values(changed_dtype)[1]
    pool.close()  # rank 0's message is still on its way
    jobs.mentions(text, "rank 1 failed in F.PP0.MB0", "int64(4, 4)", "float64(4, 4)", "models.py")


@pytest.mark.slow
def test_ranks_of_which_one_asks_for_headers_are_told(pool: Pool) -> None:
    """Headers on one rank alone: ranks say so, and do not wait for each other."""
    pool.close()  # both begin with their first step
    try:
        for text in pool.values(one_asks):
            jobs.mentions(text, "different programs", "PIPER_DEBUG=comm")
    finally:
        pool.close()


def one_asks() -> str:
    def run() -> None:
        step = piper.compile(
            Stack4(2), jobs.strategy(LINE2, 2), example_inputs=EIGHT, timeout_s=10.0
        )
        step(*EIGHT)

    if piper.rank():
        return jobs.refusal(run)
    with asking(0):
        return jobs.refusal(run)


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for and not known is refused."""
    monkeypatch.setenv(headers.VARIABLE, "com")
    text = jobs.refusal(headers.is_asked_for)
    jobs.mentions(text, "PIPER_DEBUG", "'com'", "'comm'")
    monkeypatch.setenv(headers.VARIABLE, "")
    assert not headers.is_asked_for()
