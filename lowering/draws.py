"""What a chunk draws at random depends on the numbers of its draws alone, however it is compiled.

Terms: a *draw* is a call that takes random numbers; its *number* counts it among the model's, from
the first of its region. The program seeds every generator before a chunk; a draw seeds that of its
device once more, with its number. So a mask does not depend on what was drawn before it, on where a
region is cut or on what compiles it, and a backward that makes it again gets the forward's.

Two forms, each a rewrite of a copy of a chunk's graph: `seed_draws` for chunks that run operator by
operator, `hide_draws` for those that Inductor fuses: it would draw a chunk's numbers one after the
other, and decomposes draws into some that it cannot compile here.
"""

import functools
from typing import Any

import torch
from torch import Tensor, default_generator, fx
from torch._ops import OpOverload
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo.ir.program import mix_seed

_LIBRARY: Any = torch.library.Library("piper_draws", "FRAGMENT")  # type: ignore[no-untyped-call]


def seed_draws(graph: fx.Graph) -> None:
    """Give each draw a seed of its own: that of the chunk, and its number.

    rewrite:   y = draw(x)   ->   s = chunk_seed() ; ... ; seed(s, number, device) ; y = draw(x)
    """
    draws = _draws(graph)
    if not draws:
        return
    with graph.inserting_before(draws[0]):
        seed = graph.call_function(_chunk_seed)
    for node in draws:
        with graph.inserting_before(node):
            graph.call_function(_seed_draw, (seed, node.meta["draw"], _device_of(node)))


def hide_draws(graph: fx.Graph) -> None:
    """Let each draw be an operator that seeds itself, into which a compiler does not look.

    rewrite:   y = draw(x)   ->   y = seeded_draw(number, x)
    keeps:     what `seed_draws` gives, bit by bit
    """
    for node in _draws(graph):
        assert isinstance(node.target, OpOverload)
        node.args = (node.meta["draw"], *node.args)
        node.target = _seeded(node.target)


def _draws(graph: fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if "draw" in node.meta]


def _chunk_seed() -> int:
    """What the program seeded every device's generator with before this chunk."""
    return default_generator.initial_seed()


def _seed_draw(seed: int, number: int, device: torch.device) -> None:
    compat.generator_of(device).manual_seed(mix_seed(seed + number))


def _device_of(node: Node) -> torch.device:
    """Where an operator draws."""
    value = node.meta["val"]
    found: torch.device = (value[0] if isinstance(value, tuple | list) else value).device
    return found


@functools.cache
def _seeded(draw: OpOverload) -> OpOverload:
    """A draw as an operator that takes its number first, and seeds itself.

    It reads the chunk's seed from the CPU's generator, and leaves that there for the next one.
    """

    def run(number: int, *args: Any, **kwargs: Any) -> Any:
        given = (one.device for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        device = next(given, None) or torch.device(kwargs.get("device") or "cpu")
        seed = _chunk_seed()
        _seed_draw(seed, number, device)
        try:
            return draw(*args, **kwargs)
        finally:
            default_generator.manual_seed(seed)

    def fake(number: int, *args: Any, **kwargs: Any) -> Any:
        return draw(*args, **kwargs)

    # Chunks are functional: what draws makes its results anew.
    assert not any(one.alias_info for one in (*draw._schema.arguments, *draw._schema.returns))
    taken = str(draw._schema).partition("(")[2]
    name = f"{draw._schema.name}_{draw._overloadname}".replace("::", "_")
    _LIBRARY.define(f"{name}(int number, {taken}")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piper_draws::{name}", fake, lib=_LIBRARY)
    found: OpOverload = getattr(torch.ops.piper_draws, name).default
    return found
