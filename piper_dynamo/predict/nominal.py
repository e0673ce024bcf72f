"""Costs where none are given: rooflines of usual hardware, in round numbers.

They tell strategies apart, by how work, memory and messages are to one another on such hardware;
how long a step takes on a machine at hand is what its profile predicts (`profile.py`).

Signature: the device of a call's arguments -> costs of chunks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from piper_dynamo.costs import Costs
from piper_dynamo.ir.chunk import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Nominal:
    """Usual hardware; costs of chunks, in seconds, where it is called.

    Attributes:
        name: What it stands for.
        flops: Floating-point operations that a rank does in a second.
        memory_bandwidth: Bytes that it reads and writes in a second.
        alpha: Seconds that a message takes whatever its size.
        bandwidth: Bytes that a link carries in a second.
    """

    name: str
    flops: float
    memory_bandwidth: float
    alpha: float
    bandwidth: float

    def __call__(self, chunks: Mapping[str, Chunk]) -> Costs:
        """Their roofline."""
        return Costs.roofline(
            chunks,
            flops=self.flops,
            memory_bandwidth=self.memory_bandwidth,
            alpha=self.alpha,
            bandwidth=self.bandwidth,
        )

    def __str__(self) -> str:
        return (
            f"none were given, so those of {self.name}: {self.flops:.0e} FLOP/s, memory "
            f"{self.memory_bandwidth:.0e} B/s, messages {self.alpha:.0e} s and "
            f"{self.bandwidth:.0e} B/s; piper profile measures this machine"
        )


# A core at what BLAS gets of it in float32, and copies between processes of one machine.
CPU = Nominal(
    name="a CPU core a rank",
    flops=4e10,
    memory_bandwidth=1e10,
    alpha=3e-5,
    bandwidth=1e9,
)
# Products in bfloat16, memory of stacked dies, and links between those of a host and of a network.
GPU = Nominal(
    name="a data-center GPU a rank",
    flops=3e14,
    memory_bandwidth=2e12,
    alpha=1e-5,
    bandwidth=5e10,
)


def nominal(devices: Iterable[str]) -> Nominal:
    """The usual hardware of these devices: GPUs where one of them is no CPU."""
    return CPU if all(device in ("cpu", "meta") for device in devices) else GPU
