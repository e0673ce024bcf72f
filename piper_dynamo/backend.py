"""The `torch.compile` backend.

Without a strategy it is a plain backend for one device: AOTAutograd splits forward and backward,
chunks run operator by operator or through inductor. With a strategy, the graph of the call becomes
a `CompiledStep`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import fx

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo import _torch_inductor as inductor
from piper_dynamo.capture import read_args
from piper_dynamo.errors import PiperCaptureError, PiperError, PiperStrategyError, format_error
from piper_dynamo.inlining import inline_regions
from piper_dynamo.ir.alias import called
from piper_dynamo.ir.joint import Arg, ArgKind
from piper_dynamo.ir.spec import user_line
from piper_dynamo.lowering.aten import drop_stand_ins
from piper_dynamo.naming import name_modules
from piper_dynamo.options import FUSED, TUNED, Options
from piper_dynamo.passes.split import data_dims
from piper_dynamo.pending import source_of
from piper_dynamo.plan_checks import refuse_unsupported
from piper_dynamo.planning import split_of
from piper_dynamo.step import CompiledStep
from piper_dynamo.stores import Effects, take_effects
from piper_dynamo.strategy import Strategy
from piper_dynamo.tagging import tag_by_path


def piper(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="piper", options={...})`; see `piper_dynamo.options.Options`.

    Raises:
        PiperError: The options, the strategy or the model are refused; Dynamo wraps it in
            BackendCompilerFailed.
    """
    if mode is not None:
        raise PiperCaptureError(
            f"torch.compile(mode={mode!r}) means nothing to the piper backend; use options={{...}}"
        )
    chosen = Options.of(options)
    if chosen.strategy is None:
        return _one_device(gm, list(example_inputs), chosen)
    try:
        return _step(gm, example_inputs, chosen, chosen.strategy)
    except PiperError:
        compat.unmark_dynamic()  # the inputs are the user's, who may give them to others
        raise


def _step(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, strategy: Strategy
) -> CompiledStep:
    split = split_of(strategy)
    refuse_unsupported(strategy, split)
    args, effects = read_call(gm, example_inputs)
    if strategy.regions:
        tag_by_path(gm, strategy.regions)
    dims = data_dims(args, split)
    if split.num_microbatches > 1:
        make_batch_symbolic(gm, args, example_inputs, dims)
    return CompiledStep(gm, args, options, training=is_training(args), effects=effects)


def read_call(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[tuple[Arg, ...], Effects]:
    """Make Dynamo's graph the whole of a call that a strategy can be applied to.

    Returns:
        Its arguments, and what it does beside computing.

    Raises:
        PiperCaptureError: It is not the whole call, or has what no strategy works with.
    """
    compat.raise_recompile_limit()
    compat.recompile_for_unknown_reasons()
    dynamo.guard_shared_parameters()  # the guards are made after this
    _refuse_graph_break(gm)
    _refuse_read_values(gm)
    effects = take_effects(gm)
    name_modules(gm)
    inline_regions(gm)
    return read_args(gm, example_inputs), effects


def is_training(args: Sequence[Arg]) -> bool:
    """Whether what is traced now has a backward."""
    return torch.is_grad_enabled() and any(a.requires_grad for a in args)


def _one_device(gm: fx.GraphModule, inputs: list[Any], options: Options) -> Callable[..., Any]:
    plain = Options(compile=options.compile)
    given = [f.name for f in fields(Options) if getattr(options, f.name) != getattr(plain, f.name)]
    if given:
        raise PiperStrategyError(
            f"the options {', '.join(given)} mean something only with a strategy; leave them out"
        )
    _refuse_pending(gm)
    mode = options.compile_for(inputs)
    if mode in FUSED:
        return inductor.inductor_backend(tuned=mode == TUNED)(gm, inputs)  # type: ignore[no-any-return]
    return compat.aten_backend(drop_stand_ins)(gm, inputs)  # type: ignore[no-any-return]


def _refuse_pending(gm: fx.GraphModule) -> None:
    """Only a strategy's programs give values to what has none."""
    found = [
        source.name
        for node in gm.graph.find_nodes(op="placeholder")
        if (source := source_of(compat.example_of(node))) is not None
    ]
    if found:
        raise PiperCaptureError(
            format_error(
                "the model has no values yet, and is compiled for one device, without a strategy",
                {"without": ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")},
                hint="make the values that piper.deferred_init put off: piper.materialize(model)",
            )
        )


def _refuse_graph_break(gm: fx.GraphModule) -> None:
    found = dynamo.graph_break_of(gm)
    if found is None:
        return
    reason, where = found
    raise PiperCaptureError(graph_break(where, reason.strip().splitlines()[0]))


def _refuse_read_values(gm: fx.GraphModule) -> None:
    """A number or a shape that follows from what a tensor holds has no fixed place in a program."""
    parts = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    found = [n for part in parts for n in part.graph.nodes if n.meta.get("unbacked_bindings")]
    if not found:
        return
    shaped = [n for n in found if isinstance(n.meta.get("example_value"), torch.Tensor)]
    raise PiperCaptureError(
        format_error(
            "a number or a shape follows from what a tensor holds",
            {user_line(n) or n.name: called(n) for n in found},
            hint="; ".join(([_SHAPE] if shaped else []) + ([_READ] if shaped != found else [])),
        )
    )


_SYMBOL = re.compile(r"\b(zu?f|u)\d+\b")
_CHOOSE = (
    "choose between values by torch.where, or decide before the call and pass the decision "
    "as an argument; without a strategy, graph breaks work"
)
_SHAPE = (
    "a shape that follows from values: keep shapes fixed, with torch.where or a mask in the place "
    "of what is picked; without a strategy, graph breaks work"
)
_READ = (
    "keep .item(), .tolist(), .numpy() and prints of values out of forward: return the tensor; "
    "without a strategy, graph breaks work"
)
# By what the reason of a graph break says. By the first, the host waits for a device's values.
_WAIT_HINTS = {
    "data-dependent output shape": _SHAPE,
    "dynamic shape operator": _SHAPE,
    "data-dependent": _CHOOSE,
    "generic_jump": _CHOOSE,
    ".item(": _READ,
    "tolist": _READ,
    ".numpy(": _READ,
}
_HINTS = {
    **_WAIT_HINTS,
    "flexattention": (
        "write it as scaled_dot_product_attention with attn_mask=: what score_mod adds to scores, "
        "a mask adds, too"
    ),
    "(lock)": (
        "a program takes no locks; where a library takes one in a model's first call alone, as "
        "transformers does to capture outputs, call the model once before, without a strategy"
    ),
    "logginglogger": "make loggers outside of forward: LOG = logging.getLogger(__name__)",
    "unsafe side effect": (
        "in a function under torch.utils.checkpoint change a buffer in place (self.count.add_(1), "
        "not self.count += 1), and anything else outside of it"
    ),
}
_ANY_HINT = (
    "move the statement out of forward (prints, .item(), data-dependent ifs, other libraries); "
    "without a strategy, graph breaks work"
)


def graph_break(where: str, why: str) -> str:
    """That a call under a strategy cannot be one graph, where, and what to do."""
    # Symbols such as zuf0 stand for what a tensor holds, and have no name in the user's code.
    why = _SYMBOL.sub("a tensor's value", why.partition(" (unhinted")[0])
    return format_error(
        "graph break: a strategy needs the whole call in one graph",
        {"at": where, "why": why},
        hint=break_remedy(why),
    )


def break_remedy(why: str) -> str:
    """What to do about a graph break, by Dynamo's reason for it."""
    return next((text for words, text in _HINTS.items() if words in why.lower()), _ANY_HINT)


def is_wait(why: str) -> bool:
    """Whether the host waits for a value of the device at a graph break, by Dynamo's reason."""
    return any(words in why.lower() for words in _WAIT_HINTS)


def baked_in(name: str, size: int, at: str) -> str:
    """That the model fixes a batch size, where, and what to do."""
    return format_error(
        f"the batch size {size} of argument {name!r} is baked into the model",
        {"at": at or "unknown line"},
        hint=(
            "take sizes from the inputs (x.shape[0], -1) instead of numbers, "
            'or keep the argument whole with piper.Split(..., inputs={name: "replicate"})'
        ),
    )


def make_batch_symbolic(
    gm: fx.GraphModule, args: tuple[Arg, ...], examples: Sequence[Any], dims: dict[int, int]
) -> None:
    """Trace again with symbols for the batch dims, unless they are symbols already.

    Only then do sizes that the model computes from its inputs follow the microbatch; in a static
    graph they are numbers.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    marked = False
    for arg in args:
        if arg.kind is not ArgKind.DATA or arg.position not in dims:
            continue
        dim = dims[arg.position]
        traced = placeholders[arg.position].meta["example_value"].shape[dim]
        example = examples[arg.position]
        fixed = compat.fixed_size(traced)
        if fixed is None:
            continue
        if compat.is_marked_dynamic(example, dim):
            at = dynamo.specialized_at(placeholders[arg.position])
            raise PiperCaptureError(baked_in(arg.name, fixed, at))
        compat.mark_dynamic(example, dim)
        marked = True
    if marked:
        dynamo.weakly_mark_arguments()
        raise compat.TensorifyScalarRestartAnalysis(restart_reason="piper: symbolic batch")
