"""Private and version-dependent names of Inductor (torch 2.11 - 2.14).

The rest is in `_torch_compat.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.compiler import config as compiler_config

from piper_dynamo import version
from piper_dynamo._torch_compat import FakeTensorMode, ShapeEnv, fake_tracing


def inductor_backend(*, tuned: bool) -> Any:
    """Torch's own default backend; where `tuned`, with kernels chosen by measuring."""
    from torch._dynamo.backends.inductor import inductor
    from torch._inductor import config

    return config.patch(max_autotune=True)(inductor) if tuned else inductor


def inductor_settings(*, tuned: bool) -> dict[str, Any]:
    """How Inductor compiles chunks, of the settings that this torch has.

    The program puts chunks on streams, and captures them: Inductor is to do neither, and to move no
    communication, of which chunks have none.

    Args:
        tuned: Choose kernels by measuring.
    """
    from torch._inductor import config

    overlaps = "aten_distributed_optimizations"
    wanted: dict[str, Any] = {
        "triton.cudagraphs": False,
        "reorder_for_compute_comm_overlap": False,
        f"{overlaps}.enable_overlap_scheduling": False,
        f"{overlaps}.enable_simple_overlap": False,  # 2.14: on by default
        "max_autotune": tuned,
    }
    known = config._config  # type: ignore[attr-defined]
    return {name: value for name, value in wanted.items() if name in known}


def compile_with_inductor(
    gm: fx.GraphModule, specs: Any, *, tuned: bool = False
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a flat, undecomposed graph on fixed shapes; called with one list."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        fakes = [
            torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device)
            if s is not None
            else 0
            for s in specs
        ]
    with torch.no_grad(), fake_tracing(mode), V.set_fake_mode(mode), mode:
        traced = make_fx(gm, decomposition_table=select_decomp_table())(*fakes)
    (output,) = traced.graph.find_nodes(op="output")
    # All outputs keep their strides: the next chunk was traced with them.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    settings = config.patch(inductor_settings(tuned=tuned))
    with torch.no_grad(), fake_tracing(mode), V.set_fake_mode(mode), settings, _own_entries():
        return compile_fx_inner(traced, fakes)


def _own_entries() -> AbstractContextManager[Any]:
    """Let what is kept on disk be found again by this version of Piper alone.

    The key has the graph, the shapes, the settings and the version of torch already, but not what a
    version of Piper takes for granted of compiled code: outputs' strides, and who may change which
    argument. The user's own tag stays in it.
    """
    tag = f"{compiler_config.cache_key_tag} piper {version.__version__}".strip()
    patched: AbstractContextManager[Any] = compiler_config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    return patched


def inductor_folder() -> str:
    """Where inductor keeps what it has compiled, for all processes."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
