"""Memory of what a step gathers again and again, on the CPU.

ZeRO-3 gathers the same sizes for every microbatch. From malloc each time, such blocks are either
parts of a heap that small things break up, or pages that the system has to clear anew: the first
costs memory, the second a third of a step's processor time. So a step uses its blocks again, and
gives them back when it ends.
"""

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

LEAST_BYTES = 2**20  # what is smaller is malloc's


class Blocks:
    """The free blocks of one rank's step, by size."""

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
        block = free.pop() if free else mmap.mmap(-1, nbytes)
        lent = (ctypes.c_char * nbytes).from_buffer(block)
        # The tensor's storage keeps `lent`; it dies with the last view.
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=like.dtype).view(*shape)

    def give_back(self) -> None:
        """The step is over: the system gets the free blocks, and later those still in use."""
        self._free = {}
