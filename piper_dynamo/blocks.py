"""Memory that a step uses again and again, on the CPU: whole parameters and whole gradients.

With sharded state such values come and go with every microbatch, in a few sizes. From malloc each
time, they are either parts of a heap that small things break up, or pages that the system has to
clear anew: the first costs memory, the second a third of a step's processor time. So a step uses
its blocks again, and gives them back when it ends.
"""

import ctypes
import mmap
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

LEAST_BYTES = 2**20  # what is smaller is malloc's
HUGE_BYTES = 2**21  # the size of a huge page, where there are such


class Blocks:
    """The free blocks of a process's step, by size; ranks that are its threads share them."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor without values, of the dtype and device of `like`.

        Its block is free again once no tensor uses it.
        """
        nbytes = prod(shape) * like.itemsize
        if like.device.type != "cpu" or nbytes < LEAST_BYTES:
            return like.new_empty(shape)
        free = self._free.setdefault(nbytes, [])
        try:
            block = free.pop()
        except IndexError:
            block = _of_the_system(nbytes)
        lent = (ctypes.c_char * nbytes).from_buffer(block)
        # The tensor's storage keeps `lent`; it dies with the last view.
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=like.dtype).view(*shape)

    def give_back(self) -> None:
        """The step is over: the system gets the free blocks, and later those still in use."""
        self._free = {}


def _of_the_system(nbytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, nbytes)
    block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages: small ones do as well
            block.madvise(mmap.MADV_HUGEPAGE)
    return block


POOL = Blocks()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """See `Blocks.empty`."""
    return POOL.empty(shape, like)
