"""Whether kernels can run, and how they are compiled ahead of time.

`TRITON_INTERPRET=1` in the environment, before Triton is imported, runs kernels on the CPU.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton as _triton
    import triton.language as _language
except ImportError:  # an extra: references take over
    _triton = _language = None

triton: Any = _triton
HAS_TRITON = triton is not None
# Kernels annotate their constants with it.
tl: Any = _language if HAS_TRITON else SimpleNamespace(constexpr=int)

ARCHITECTURES = (80, 90, 100)  # Ampere, Hopper, Blackwell
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of a kernel, as the compiler is given it.

    Attributes:
        kernel: The kernel.
        signature: Triton's types of its arguments, by name.
        constants: Values of its constants, by name.
        num_warps: Of the configuration.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4


def can_launch(*tensors: torch.Tensor) -> bool:
    """Whether a kernel can run on these tensors."""
    return HAS_TRITON and (IS_INTERPRETED or all(tensor.is_cuda for tensor in tensors))


def tuned(configs: Sequence[tuple[Mapping[str, int], int]], key: Sequence[str]) -> Any:
    """Choose by measuring among constants and numbers of warps, once for each key; on CUDA.

    The interpreter measures nothing, so it takes the first.
    """

    def around(kernel: Any) -> Any:
        if not HAS_TRITON:
            return kernel
        found = [triton.Config(dict(c), num_warps=warps) for c, warps in configs]
        chosen = found[:1] if IS_INTERPRETED else found
        return triton.autotune(configs=chosen, key=list(key))(triton.jit(kernel))

    return around


def compiled(form: Form, architecture: int) -> Any:
    """A kernel compiled for a kind of GPU, with none at hand; `.asm` has its PTX and binary."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(form.kernel, "fn", form.kernel)  # without its tuning
    while not hasattr(kernel, "arg_names"):
        kernel = kernel.fn
    source = ASTSource(
        fn=kernel, signature=dict(form.signature), constexprs=_places(kernel, form.constants)
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": form.num_warps})


def _places(kernel: Any, constants: Mapping[str, Any]) -> dict[tuple[int], Any]:
    names: list[str] = list(kernel.arg_names)
    return {(names.index(name),): value for name, value in constants.items()}
