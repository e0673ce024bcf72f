"""Starting ranks: what is refused, what becomes of logs, and restarts of processes."""

import functools
import io
import multiprocessing
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import counters
from torch.distributed import HashStore

import piper_dynamo as piper
from piper_dynamo.errors import PiperRuntimeError
from piper_dynamo.lowering.chunks import one_at_a_time
from piper_dynamo.runtime import launch as launching
from piper_dynamo.runtime import world
from piper_dynamo.runtime.failure import Failure
from piper_dynamo.runtime.launch_local import check_sendable
from piper_dynamo.runtime.launch_torchrun import Hosts
from piper_dynamo.runtime.logs import Tee, kept, log_file
from piper_dynamo.runtime.outcomes import JobFailedError, collect, job_failed
from piper_dynamo.runtime.world import Outcome
from tests import jobs, replicas, restarting
from tests.models import Stack4, rows


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: piper.launch(int, ()), "ranks=()"),
        (lambda: piper.launch(int, (4, 0)), "ranks=(4, 0)"),
        (lambda: piper.launch(int, "42"), "ranks='42'"),
        (lambda: piper.launch(int, True), "ranks=True"),
        (lambda: piper.launch(int, 2, timeout_s=float("nan")), "timeout_s=nan"),
        (lambda: piper.launch(int, 2, max_restarts=-1), "max_restarts=-1"),
        (lambda: piper.launch(int, 2, max_restarts=True), "max_restarts=True"),
        (lambda: piper.launch(int, 2, engine="mpi"), "local, torchrun, ray, inprocess"),
        (lambda: piper.launch(int, 2, address="h:1"), "Ray cluster"),
        (lambda: piper.launch(int, (2, 1), engine="inprocess"), "one process"),
        (lambda: piper.launch(int, 2, engine="inprocess", max_restarts=1), "one process"),
        (lambda: piper.launch(int, 2, engine="inprocess", logs="x"), "no logs"),
    ],
)
def test_arguments(call: Callable[[], Any], words: str) -> None:
    jobs.mentions(jobs.refusal(call), words)


def main_module(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    """This process as one that runs that file, or none."""
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_a_script_in_no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_main() -> None: ...

    in_main.__module__, in_main.__qualname__ = "__main__", "in_main"
    for file, fn in (("<stdin>", int), ("<stdin>", in_main), (None, in_main)):
        main_module(monkeypatch, file)
        sys.modules["__main__"].__dict__["in_main"] = in_main
        for engine in ("local", "torchrun"):
            text = jobs.refusal(lambda fn=fn, e=engine: piper.launch(fn, 2, engine=e))
            jobs.mentions(text, "it is in no file", "save it as a file", 'engine="inprocess"')
    main_module(monkeypatch, None)
    check_sendable(int)  # found without the script
    main_module(monkeypatch, __file__)
    check_sendable(int)


def test_a_process_that_reads_the_script_again_starts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit) as caught:
        piper.launch(int, 2)
    guard = 'if __name__ == "__main__":'
    jobs.mentions(capsys.readouterr().err, "read the script again", guard)
    assert isinstance(caught.value.code, int)
    told = Failure.ended(1, caught.value.code, has_begun=False).text
    jobs.mentions(told, "read the script again", guard)
    assert guard not in Failure.ended(1, caught.value.code).text  # the user's own exit code


def test_a_process_that_did_not_begin_is_told_as_such() -> None:
    assert "before it called the function" in Failure.ended(1, 3, has_begun=False).text
    assert "before it called the function" not in Failure.ended(1, 3).text


UNGUARDED = """
import piper_dynamo as piper

def train():
    return piper.rank()

if __name__ != "__main__" and {leaves}:
    raise SystemExit(3)
piper.launch(train, 2, {arguments})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "leaves", "words"),
    [
        ("max_restarts=3", False, 'if __name__ == "__main__":'),
        ("engine='torchrun'", False, 'if __name__ == "__main__":'),
        ("", True, "exit code 3 before it called the function"),
    ],
)
def test_a_script_without_a_guard(arguments: str, leaves: bool, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED.format(arguments=arguments, leaves=leaves))
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    jobs.mentions(found.stderr.rpartition("JobFailedError")[2], "failed", words)
    assert "restart 1 of 3" not in found.stderr


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    text = jobs.refusal(lambda: piper.launch(int, 2, engine="ray"))
    jobs.mentions(text, "Ray, which is not installed", "pip install 'piper-dynamo[ray]'")


# Which start takes how many ranks


def started(faults: list[bool | None], sizes: tuple[int, ...], most: int) -> list[Any]:
    """The numbers of ranks that were left at each start; a fault is told with its kind."""
    seen: list[Any] = []

    def start(left: Any, count: int) -> list[Any]:
        assert count == len(seen)
        seen.append(tuple(left))
        fault = faults[count]
        if fault is not None:
            raise JobFailedError("rank 1 failed", is_refusal=fault)
        return seen

    return launching._started(start, sizes, most)


def test_each_start_takes_the_next_number() -> None:
    assert started([None], (4, 2), 3) == [(4, 2)]
    assert started([False, False, None], (4, 2), 3) == [(4, 2), (2,), (2,)]
    assert started([False, None], (4, 4, 2), 1) == [(4, 4, 2), (4, 2)]
    with pytest.raises(JobFailedError):
        started([False, False], (4,), 1)
    with pytest.raises(JobFailedError):
        started([True], (4,), 5)  # a refusal is not tried again


def test_the_first_failure_is_told() -> None:
    def failed(rank: int, when: float, text: str, *, is_echo: bool = False) -> Outcome:
        return Outcome(failure=Failure(rank=rank, when=when, text=text, is_echo=is_echo))

    echo = failed(0, 1.0, "recv: Connection closed by peer", is_echo=True)
    error = job_failed({0: echo, 2: failed(2, 3.0, "boom"), 3: failed(3, 2.0, "bang")})
    jobs.mentions(str(error), "rank 3 failed", "also failed  rank 0, rank 2", "bang")
    assert job_failed({0: echo, 1: Outcome()}).args[0].startswith("rank 0 failed")
    coming = [{1: Outcome(value=5)}, {0: Outcome()}]
    assert collect(2, lambda: coming.pop(0))[1].value == 5
    coming = [{1: Outcome()}, {0: Outcome.of(0, piper.PiperStrategyError("no"))}]
    with pytest.raises(JobFailedError, match="rank 0 failed") as caught:
        collect(2, lambda: coming.pop(0))
    assert caught.value.is_refusal


def test_a_refusal_is_where_it_was_called_for() -> None:
    """Not in the model's forward, in which it is found while the model is captured."""

    def ask() -> None:
        piper.plan(Stack4(2), jobs.strategy({0: [0], 1: [7]}, 2), rows(4), world_size=2)

    with pytest.raises(piper.PiperError) as caught:
        ask()
    line = ask.__code__.co_firstlineno + 1
    assert Failure.of(0, caught.value).where == f"{__file__}:{line}"


def test_refusals_are_told_from_failures() -> None:
    assert Outcome.of(1, piper.PiperStrategyError("no")).is_refusal
    assert not Outcome.of(1, PiperRuntimeError("late")).is_refusal
    told = Outcome.of(1, ValueError("boom"))
    assert not told.is_refusal
    assert told.failure is not None
    assert "ValueError: boom" in told.failure.text


def test_ranks_agree_on_a_name_that_no_earlier_start_had() -> None:
    """One store serves several starts, as torchrun's agent does it; each leaves its keys there."""
    store = HashStore()
    names: list[str] = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda me: world.agreed_name(store, me, 3, 20.0), range(3)))
        assert len(set(found)) == 1
        names += set(found)
    assert len(set(names)) == 3
    for me, words in ((1, "rank 0 did not meet"), (0, "rank 1, 2 did not meet")):
        text = jobs.refusal(lambda me=me: world.agreed_name(HashStore(), me, 3, 0.05))
        jobs.mentions(text, words)


# torchrun's hosts


@pytest.mark.parametrize(
    ("hosts", "ranks", "words"),
    [
        ({"nnodes": "two"}, (4,), "nnodes is 'two'"),
        ({"nnodes": "2:1"}, (4,), "nnodes is '2:1'"),
        ({"nnodes": "0"}, (4,), "nnodes is '0'"),
        ({"nnodes": "3"}, (4,), "4 ranks do not divide among 3 hosts"),
        ({"nnodes": "2", "nproc_per_node": 3}, (4,), "2 hosts of 3 ranks are 6 ranks"),
        ({"nnodes": "1:2", "nproc_per_node": 3}, (4, 2), "are 3, 6 ranks, and the job has 4 or 2"),
    ],
)
def test_hosts_that_do_not_fit(hosts: dict[str, Any], ranks: tuple[int, ...], words: str) -> None:
    jobs.mentions(jobs.refusal(lambda: Hosts(**hosts).ranks_here(ranks)), words)


def test_hosts() -> None:
    assert Hosts().ranks_here((4,)) == 4
    assert Hosts(nnodes="1:2").ranks_here((4, 2)) == 2
    assert Hosts(nnodes="2", nproc_per_node=1).ranks_here((2,)) == 1
    text = jobs.refusal(Hosts(nnodes="2").meeting)
    jobs.mentions(text, "rdzv_endpoint=host:port")
    alone = Hosts(rdzv_conf="timeout=5,read_timeout=7").meeting()
    assert alone == {
        "rdzv_backend": "c10d",
        "rdzv_configs": {"timeout": "5", "read_timeout": "7"},
    }
    fixed = Hosts(nnodes="2", node_rank=1, rdzv_endpoint="h:1").meeting()
    assert fixed == {"rdzv_backend": "static", "rdzv_configs": {"rank": 1}}


# Logs


def test_a_line_that_is_written_over_stands_once() -> None:
    stream, log = io.StringIO(), io.StringIO()
    tee = Tee(stream, log)
    for part in ("a", "b\n1%\r2%", "\r\x1b[K3%", "\ndone\r\n", "half"):
        tee.write(part)
    assert stream.getvalue() == "ab\n1%\r2%\r\x1b[K3%\ndone\r\nhalf"
    assert log.getvalue() == "ab\n3%\ndone\n"
    for number in range(1000):
        tee.write(f"\r{number}%")
    assert len(tee._line) < 10
    tee.end()
    assert log.getvalue() == "ab\n3%\ndone\n999%\n"
    assert not tee.isatty()


WRITES = """
import os, sys
from piper_dynamo.runtime.logs import kept
rank = int(sys.argv[1])
try:
    with kept(sys.argv[2], rank):
        print("printed")
        sys.stderr.write("told\\n")
        os.system("echo of another process")
        raise ValueError("boom")
except ValueError:
    print("after", "Tee" in type(sys.stdout).__name__)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_logs(rank: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(rank), str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = log_file(tmp_path / "logs", rank).read_text()
    first, *rest = log.splitlines()
    assert first.startswith(f"-- rank {rank}, process ")
    jobs.mentions(log, "printed", "told", "ValueError: boom")
    assert ("of another process" in log) == (rank == 1)
    shown = {"printed", "of another process"} if rank == 0 else set()
    assert set(done.stdout.splitlines()) == {*shown, "after False"}
    assert done.stderr == ("told\n" if rank == 0 else "")
    assert rest


def test_no_folder_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    with kept(None, 3):
        print("shown")
    assert capsys.readouterr().out == "shown\n"


# A strategy for each number of ranks


def test_a_strategy_by_the_number_of_ranks() -> None:
    strategies = {n: jobs.strategy({0: [0], 1: [n - 1]}, 2) for n in (1, 2)}

    def job() -> float:
        step = piper.compile(Stack4(2), strategies, example_inputs=rows(8))
        return step(*rows(8)).item()

    for ranks in (1, 2):
        assert jobs.run_ranks(job, ranks) == [pytest.approx(Stack4.LOSS, abs=1e-12)] * ranks
    text = jobs.refusal(lambda: jobs.run_ranks(job, 3))
    jobs.mentions(text, "no strategy for 3 ranks", "for 1, 2")


# Artifacts


def test_one_rank_compiles_at_a_time(tmp_path: Path) -> None:
    """The lock is of the file: it holds between threads as between processes."""
    order: list[str] = []

    def second() -> None:
        with one_at_a_time(tmp_path, "k"):
            order.append("second")

    other = threading.Thread(target=second)
    with one_at_a_time(tmp_path, "k"):
        other.start()
        other.join(0.5)
        with one_at_a_time(tmp_path, "another"):
            order.append("first")
    other.join(20)
    assert order == ["first", "second"]


def compiled() -> tuple[int, int, list[str]]:
    """How often inductor found a chunk and how often it did not, and the chunks."""
    strategy = replicas.strategy(replicas.PAIR, 2, "")
    step = piper.compile(Stack4(1), strategy, example_inputs=rows(8), compile="inductor")
    found = counters["inductor"]
    keys = {key for program in piper.explain(step).programs for _, key in program.chunks}
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], sorted(keys)


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(400)
def test_a_chunk_is_compiled_once_for_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas start together on an empty cache; a second job finds everything there."""
    monkeypatch.setenv("PIPER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    ranks = piper.launch(compiled, 2)
    assert ranks[0][2] == ranks[1][2]
    count = len(ranks[0][2])
    assert sum(misses for _, misses, _ in ranks) == sum(hits for hits, _, _ in ranks) == count
    assert [rank[:2] for rank in piper.launch(compiled, 2)] == [(count, 0)] * 2


# Processes


@pytest.mark.dist(2)
@pytest.mark.timeout(200)
def test_a_killed_rank_starts_the_job_again_on_fewer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """From two pipeline ranks to one process, with the numbers of an unbroken run."""
    job = functools.partial(restarting.train, str(tmp_path / "saved"))
    logs = tmp_path / "logs"
    found = piper.launch(job, (2, 1), max_restarts=1, logs=logs, timeout_s=60.0)
    assert len(found) == 1
    restarting.check(found, 1)
    first = log_file(logs, 0).read_text()
    assert first.count("-- rank 0, process") == 2
    jobs.mentions(first, "rank 0 of 2, start 0", "rank 0 of 1, start 1")
    second = log_file(logs, 1).read_text()
    assert "rank 1 of 2, start 0" in second
    shown = capfd.readouterr()
    assert "rank 1 of 2" not in shown.out
    assert "rank 0 of 2" in shown.out


@pytest.mark.slow
@pytest.mark.dist(2)
def test_a_refusal_is_not_tried_again(tmp_path: Path) -> None:
    text = jobs.refusal(lambda: piper.launch(restarting.refused, 2, max_restarts=3, logs=tmp_path))
    jobs.mentions(text, "as it was asked for")
    assert log_file(tmp_path, 0).read_text().count("-- rank 0") == 1


@pytest.mark.slow
@pytest.mark.dist(4)
@pytest.mark.timeout(300)
def test_sharded_replicas_go_on_on_fewer(tmp_path: Path) -> None:
    job = functools.partial(restarting.train, str(tmp_path), restarting.SHARDED)
    restarting.check(piper.launch(job, (4, 2), max_restarts=1, timeout_s=60.0), 2)


@pytest.mark.slow
@pytest.mark.dist(2)
@pytest.mark.timeout(300)
def test_without_restarts_left_the_failure_is_told(tmp_path: Path) -> None:
    job = functools.partial(restarting.train, str(tmp_path))
    text = jobs.refusal(lambda: piper.launch(job, 2, timeout_s=60.0), PiperRuntimeError)
    jobs.mentions(text, "rank 1 failed", "SIGKILL")
