"""Triton kernels: interpreted beside their references, and compiled for GPUs that are not here."""

import os
import subprocess
import sys

import pytest
import torch

from piper_dynamo.kernels import launching, pack, rows
from piper_dynamo.kernels.launching import ARCHITECTURES, Form, compiled

FORMS = [*rows.forms(), *pack.forms()]
FIRST = [rows.forms()[0], rows.forms()[-1], *pack.forms()[:2]]  # each kernel, both ways

needs_triton = pytest.mark.skipif(not launching.HAS_TRITON, reason="Triton is not installed")


def test_fallbacks_are_the_references():
    """Without the interpreter no kernel runs on a CPU."""
    tokens, order = torch.randn(4, 3), torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    assert not launching.can_launch(tokens)
    assert torch.equal(rows.permute(tokens, order, 2), tokens[order // 2])
    made, weights = torch.randn(8, 3, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    place = torch.empty_like(order)
    place[order] = torch.arange(8)
    want = (made[place].view(4, 2, 3) * weights.unsqueeze(-1)).sum(1)
    assert torch.equal(rows.combine(made, order, weights), want)
    values = [torch.randn(2, 3), torch.randn(2, 1)]
    flat = pack.pack(values, torch.float64, 0.5)
    assert torch.equal(flat, torch.cat(values, 1).double() / 2)
    back = [torch.empty_like(value) for value in values]
    pack.unpack(flat, back, 2.0)
    assert all(map(torch.equal, back, values))


@needs_triton
def test_kernels_equal_their_references():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "kernels equal their references"


def check_compiled(form: Form, architecture: int) -> None:
    made = compiled(form, architecture)
    assert f".target sm_{architecture}" in made.asm["ptx"]
    assert made.asm["cubin"][:4] == b"\x7fELF"


@needs_triton
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_without_a_gpu(architecture: int):
    for form in FIRST:
        check_compiled(form, architecture)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_configuration_compiles(architecture: int):
    for form in [*FORMS, *rows.forms("fp32"), *pack.forms("fp32", "bf16")]:
        check_compiled(form, architecture)


def test_everything_works_without_triton():
    """What is imported in its place takes the references."""
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from piper_dynamo.kernels import launching, pack, rows\n"
        "assert not launching.HAS_TRITON\n"
        "assert rows.permute(torch.eye(2), torch.tensor([1, 0]), 1).tolist() == [[0, 1], [1, 0]]\n"
        "assert pack.pack([torch.ones(1, 2)]).tolist() == [[1, 1]]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
