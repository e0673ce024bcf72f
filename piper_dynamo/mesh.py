"""Mesh: the ranks of a job as a grid with named axes.

It names groups of ranks that are not simply all devices of a region.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from piper_dynamo.values import Faults, code, is_whole, user_line


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Mesh:
    """Ranks 0 to size-1 laid out row-major: the last axis of `order` runs fastest.

    mesh = Mesh((2, 2, 2), ("pp", "dp", "ep"));  mesh.ranks(pp=0) == [0, 1, 2, 3];  mesh.ranks(dp=1,
    ep=0) == [2, 6]

    Hosts have ranks that follow each other, so what is last in `order` stays within one:

    mesh = Mesh((2, 2, 2), ("pp", "dp", "ep"), order=("dp", "pp", "ep"));  mesh.ranks(dp=0) == [0,
    1, 2, 3];  mesh.ranks(pp=0) == [0, 1, 4, 5]

    Attributes:
        shape: Size of each axis.
        names: Name of each axis.
        order: The axes, from the one that changes last from rank to rank to the one that changes
            first; by default `names`.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    order: tuple[str, ...]

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], order: Sequence[str] | None = None
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Sizes below 1, names that repeat, not one name per size, or an order
                of other axes.
        """
        faults = Faults("piper.Mesh", user_line())
        if isinstance(shape, str) or not isinstance(shape, Sequence) or not shape:
            faults.add("shape", shape, "must be a tuple of one or more sizes, such as (2, 2)")
        elif not all(is_whole(size) and size >= 1 for size in shape):
            faults.add("shape", shape, "each size must be a whole number of at least 1")
        faults.names("names", names)
        if not faults and len(shape) != len(names):
            faults.say(f"{len(shape)} sizes but {len(names)} names; give one name per size")
        if order is not None and not faults:
            faults.names("order", order)
            if not faults and sorted(order) != sorted(names):
                faults.add("order", order, f"must have the axes {', '.join(names)}, each once")
        faults.check()
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "names", tuple(names))
        object.__setattr__(self, "order", tuple(names if order is None else order))

    def __repr__(self) -> str:
        order = "" if self.order == self.names else f", order={code(self.order)}"
        return f"piper.Mesh({code(self.shape)}, {code(self.names)}{order})"

    def laid_out(self) -> "Mesh":
        """The same ranks, with the axes named in their order."""
        return Mesh([self.shape[self.names.index(name)] for name in self.order], self.order)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Number of ranks along the axis `name`.

        Raises:
            PiperStrategyError: There is no such axis.
        """
        self._check_axes("axis_size", [name])
        return self.shape[self.names.index(name)]

    def ranks(self, **coords: int | Sequence[int]) -> list[int]:
        """The ranks at these coordinates, ascending.

        Args:
            **coords: An index, or several, per axis; an axis left out takes all its indices.

        Raises:
            PiperStrategyError: There is no such axis, or an index is outside it.
        """
        self._check_axes("ranks", coords)
        faults = Faults(f"{self!r}.ranks", user_line())
        wanted: list[Sequence[int]] = []
        for name, size in zip(self.names, self.shape, strict=True):
            given = coords.get(name, range(size))
            several = [given] if isinstance(given, int) else list(given)
            if not several or not all(is_whole(one) and 0 <= one < size for one in several):
                faults.add(name, given, f"must be in 0-{size - 1}")
            wanted.append(several)
        faults.check()
        sizes = self.laid_out().shape
        strides = [prod(sizes[self.order.index(name) + 1 :]) for name in self.names]
        points = product(*wanted)
        return sorted({sum(i * s for i, s in zip(at, strides, strict=True)) for at in points})

    def _check_axes(
        self, method: str, names: Sequence[str] | dict[str, int | Sequence[int]]
    ) -> None:
        faults = Faults(f"{self!r}.{method}", user_line())
        for name in names:
            if name not in self.names:
                faults.say(f"there is no axis {name!r}; there are: {', '.join(self.names)}")
        faults.check()
