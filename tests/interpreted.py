"""Kernels beside their references, interpreted: python -m tests.interpreted, run by a test.

Triton decides when a kernel is defined whether it is interpreted, so this is a process of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from piper_dynamo.kernels import pack, rows
from piper_dynamo.kernels.launching import HAS_TRITON, can_launch


def check_rows() -> None:
    """Permute, bit for bit; combine, within the rounding of its sums."""
    for dtype, near in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        for n, k, d in ((5, 2, 7), (1, 1, 1), (33, 3, 300), (4, 8, 1025)):
            tokens = torch.randn(n, d).to(dtype)
            order = torch.randperm(n * k)
            got = rows.permute(tokens, order, k)
            assert torch.equal(got, rows.permute_reference(tokens, order, k)), (dtype, n, k, d)
            weights = torch.rand(n, k).to(dtype)
            made = torch.randn(n * k, d).to(dtype)
            got = rows.combine(made, order, weights)
            want = rows.combine_reference(made.double(), order, weights.double())
            torch.testing.assert_close(got.double(), want, rtol=near, atol=near)
    empty = rows.combine(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), torch.empty(0, 2))
    assert empty.shape == (0, 4)


def check_pack() -> None:
    """Both ways, cast and scaled; values end anywhere in the kernel's blocks."""
    widths = ((1,), (3, 1, 5), (1023, 2, 1024, 30), (0, 4, 0))
    for given, packed in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ):
        for count in (1, 3):
            for scale in (1.0, 0.5):
                for width in widths:
                    values = [torch.randn(count, w).to(given) for w in width]
                    flat = pack.pack(values, packed, scale)
                    want = torch.empty_like(flat)
                    pack.pack_reference(values, want, scale)
                    if packed == torch.bfloat16:  # the interpreter cuts off where GPUs round
                        torch.testing.assert_close(flat, want, rtol=2**-7, atol=0)
                    else:
                        assert torch.equal(flat, want), (given, packed, count, scale, width)
                    back = [torch.full_like(value, 9.0) for value in values]
                    other = [torch.full_like(value, 9.0) for value in values]
                    pack.unpack(flat, back, scale)
                    pack.unpack_reference(flat, other, scale)
                    if given == torch.float32 or scale == 1.0:
                        assert all(map(torch.equal, back, other)), (given, packed, width)
                    for one, two in zip(back, other, strict=True):
                        torch.testing.assert_close(one, two, rtol=2**-7, atol=0)
    exact = [torch.randn(2, 3, dtype=torch.float64)]  # not the kernel's: it computes in float32
    assert torch.equal(pack.pack(exact), exact[0])


def check_control() -> None:
    """A kernel that is wrong is seen: the order is another one."""
    tokens, order = torch.randn(6, 4), torch.randperm(6)
    assert not torch.equal(rows.permute(tokens, order.roll(1), 1), tokens[order])


if __name__ == "__main__":
    torch.manual_seed(0)
    assert HAS_TRITON
    assert can_launch(torch.empty(1))
    check_rows()
    check_pack()
    check_control()
    print("kernels equal their references")
