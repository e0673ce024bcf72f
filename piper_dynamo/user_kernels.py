"""Kernels of users: a function in the place of operators that compute the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from piper_dynamo.values import Faults, code, user_line

if TYPE_CHECKING:  # importing torch takes seconds, and strategies are made without
    from torch import Tensor

    from piper_dynamo.ir.spec import TensorSpec


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Kernel:
    """`Strategy(..., kernels=[Kernel(plain_norm, fast_norm, example=(x, w))])`.

    Wherever a task has the operators of `pattern`, on inputs of the shapes and dtypes of `example`,
    `kernel` makes the result instead. Operators of the pattern whose values something else needs,
    a backward for example, stay beside it.

    Attributes:
        pattern: Takes tensors and returns one, by torch's operators; it is traced, not run.
        kernel: Takes the same and returns the same, new and in the same layout.
        inputs: Shapes and dtypes of the inputs.
        where: The user's line.
    """

    pattern: "Callable[..., Tensor]"
    kernel: "Callable[..., Tensor]"
    inputs: "tuple[TensorSpec, ...]"
    where: str = field(compare=False)

    def __init__(
        self,
        pattern: "Callable[..., Tensor]",
        kernel: "Callable[..., Tensor]",
        *,
        example: "Sequence[Tensor]",
    ) -> None:
        """Check and store.

        Args:
            pattern: See above.
            kernel: See above.
            example: Tensors like the inputs in a task, so of a microbatch; their values and devices
                do not matter.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        import torch

        from piper_dynamo.ir.spec import TensorSpec

        where = user_line()
        faults = Faults("piper.Kernel", where)
        for name, given in (("pattern", pattern), ("kernel", kernel)):
            if not callable(given):
                faults.add(name, given, "must be a function of tensors")
        is_list = isinstance(example, Sequence)
        if not is_list or not example or not all(isinstance(e, torch.Tensor) for e in example):
            faults.add("example", example, "must be a tuple of one or more tensors")
        faults.check()
        specs = tuple(TensorSpec.of(torch.empty_like(e, device="meta")) for e in example)
        object.__setattr__(self, "pattern", pattern)
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "inputs", specs)
        object.__setattr__(self, "where", where)

    def __repr__(self) -> str:
        examples = tuple(_Example(spec) for spec in self.inputs)
        return f"piper.Kernel({code(self.pattern)}, {code(self.kernel)}, example={examples!r})"


@dataclass(frozen=True, slots=True)
class _Example:
    """Prints as the code of a tensor like it."""

    spec: "TensorSpec"

    def __repr__(self) -> str:
        shape, stride, dtype = self.spec.shape, self.spec.stride, self.spec.dtype
        if self.spec.is_contiguous:
            return f'torch.empty({shape!r}, dtype={dtype}, device="meta")'
        return f'torch.empty_strided({shape!r}, {stride!r}, dtype={dtype}, device="meta")'


def checked(given: Any, faults: Faults) -> tuple[Kernel, ...]:
    """A strategy's kernels; none for None."""
    if given is None:
        return ()
    if not isinstance(given, Sequence) or not all(isinstance(one, Kernel) for one in given):
        faults.add("kernels", given, "must be a list of piper.Kernel, or None")
        return ()
    return tuple(given)
