"""What only a GPU can show, in small sizes: sections of `benchmarks/gpu.py` that say right or not.

Without a GPU they are skipped; a rehearsal on the CPU runs what can run there.
"""

import json
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu
from benchmarks.gpu import Bench
from piper_dynamo.schedules import SCHEDULES

SMALL = {"compile": "aten", "pairs": 1, "dim": 128, "layers": 2, "seq": 64, "batch": 8}


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield Bench(device=torch.device("cuda", 0), **SMALL)
    torch.cuda.synchronize()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", list(gpu.NEAR))
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_schedules_on_streams(schedule: str, dtype: torch.dtype, bench: Bench):
    assert gpu.schedule_error(bench, schedule, dtype) <= gpu.NEAR[dtype]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("section", ["nccl", "kernels", "graph"])
def test_sections_run(section: str, bench: Bench):
    rows = list((gpu.ANYWHERE | gpu.ON_GPU)[section](bench))
    assert rows
    assert all(row.held is not False for row in rows if section == "nccl")


# On any machine


def test_a_rehearsal_runs_on_the_cpu():
    done = CliRunner().invoke(gpu.main, ["--rehearse", "--only", "host,kernels", "--pairs", "1"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.output.splitlines()[-1])
    assert facts["rehearsal"]
    assert [row["section"] for row in facts["rows"]] == ["host", *["kernels"] * 3]
    assert all(row["what"] != "failed" for row in facts["rows"]), done.output


def test_a_schedule_of_the_rehearsal_is_right():
    bench = Bench(device=torch.device("cpu"), **SMALL)
    assert gpu.schedule_error(bench, "zbv", torch.float32) <= gpu.NEAR[torch.float32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = CliRunner().invoke(gpu.main, [])
    assert done.exit_code == 1
    assert "no CUDA device" in done.output
    assert "choose from" in CliRunner().invoke(gpu.main, ["--rehearse", "--only", "x"]).output
