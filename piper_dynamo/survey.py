"""All graphs that Dynamo makes of one call of a model, graph breaks allowed; nothing is computed.

Signature: model, inputs -> the graphs, why they end, what their arguments are.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.api import stood_for
from piper_dynamo.capture import kind_of
from piper_dynamo.changes import Changes
from piper_dynamo.inlining import inline_regions
from piper_dynamo.ir.alias import call_draws
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import is_library, user_line
from piper_dynamo.naming import Names
from piper_dynamo.restoring import Kept, same_values

# Dynamo's reason to cut a graph at an earlier statement than the one that it cannot resume after.
_EARLIER = "step_unsupported"


@dataclass(slots=True, eq=False)  # Dynamo compares backends
class Survey:
    """What the calls of a model were captured as.

    Attributes:
        inputs: The tensors that the model is given.
        graphs: In the order of the call.
        breaks: Why graphs end, by line.
        is_cut: Whether a graph ends before the call does.
        args: Name and kind of each graph's tensor arguments; the kind is None for what an earlier
            graph, or code between, has made.
        stopped: The user's line that raised, and what; empty where the call came to its end.
        kept: What graphs change of Python's objects, as it was.
    """

    inputs: Sequence[Tensor] = ()
    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False
    args: dict[Node, tuple[str, ArgKind | None]] = field(default_factory=dict)
    stopped: str = ""
    kept: Kept = field(default_factory=Kept)

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: computes nothing."""
        self.graphs.append(gm)
        self.kept.add(dynamo.changes())
        names = Names()
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, inputs, strict=True):
            if isinstance(value, Tensor):  # Dynamo forgets their sources soon
                source = dynamo.source_of(node)
                kind: ArgKind | None = kind_of(value, source)
                if kind is ArgKind.DATA and not any(value is one for one in self.inputs):
                    kind = None
                self.args[node] = names.of(source, node.name, compat.example_of(node)), kind
        found = dynamo.graph_break_of(gm)
        self.is_cut |= found is not None
        if found is not None and found[0] != _EARLIER:
            reason, where = found
            self.breaks.setdefault(where, reason.strip().splitlines()[0])
        inline_regions(gm)
        outputs = compat.output_nodes(gm)
        return lambda *values: [_zeros(node) for node in outputs]


def shown(error: BaseException) -> str:
    """What was raised, in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def is_ours(error: BaseException) -> bool:
    """Whether it was raised by Piper's own code, which is no fault of the model."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return Path(last.f_code.co_filename).is_relative_to(Path(__file__).parent)


def surveyed(model: nn.Module, example_inputs: Any, *, breaks: bool) -> Survey:
    """All graphs of a call; what a break, if there may be some, leaves to Python runs."""
    survey = Survey()
    dynamo.capture_more()
    compat.raise_recompile_limit()  # at which Dynamo would leave code to Python
    held: list[Tensor] = []
    if breaks:  # only then does code run that may change them
        given = [v for v in tree_leaves(example_inputs) if isinstance(v, Tensor)]
        held = [
            v
            for v in (*model.parameters(), *model.buffers(), *given)
            if not compat.is_on_meta(v) and v.layout is torch.strided
        ]
    with (
        ExitStack() as at_last,
        same_values(held),
        torch.random.fork_rng(),
        dynamo.skips_taken_back(),
        stood_for(model, example_inputs) as (args, kwargs),
    ):
        at_last.callback(survey.kept.restore)
        survey.inputs = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        try:
            with dynamo.numbers_are_constants():
                torch.compile(model, backend=survey, dynamic=False)(*args, **kwargs)
        except Exception as error:
            # The user's own code did not like zeros: what came before that is surveyed.
            survey.stopped = f"{_users_line(error)}  {shown(error)}"
    return survey


def _users_line(error: BaseException) -> str:
    """The innermost line that is not a library's."""
    last, at = error.__traceback__, "unknown line"
    while last is not None:
        file = last.tb_frame.f_code.co_filename
        if not is_library(file) and file != __file__:
            at = f"{file}:{last.tb_lineno}"
        last = last.tb_next
    return at


def _zeros(node: Any) -> Any:
    """What a node would give, without its values."""
    value = node.meta.get("example_value") if isinstance(node, Node) else node
    if not isinstance(value, Tensor):
        return compat.hint_of(value) if isinstance(value, torch.SymInt) else value
    shape = [compat.hint_of(size) for size in value.shape]
    made = torch.zeros(shape, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


class Run(Changes):
    """A graph run on fake tensors.

    Attributes:
        drawing: The calls that draw random numbers.
    """

    def __init__(self, gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> None:
        self.drawing: dict[Node, None] = {}
        super().__init__(gm, fakes, mode)

    def run_node(self, n: Node) -> Any:
        """See `fx.Interpreter`."""

        def take(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if call_draws(func, args, kwargs):
                self.drawing[n] = None
            return func(*args, **kwargs)

        with compat.DispatchMode(take, higher_order=True):
            return super().run_node(n)

    def arguments_changed(self) -> dict[Node, str]:
        """Arguments that the graph changes, and the user's line that does it."""
        found: dict[Node, str] = {}
        for node in self.graph.nodes:
            for value in self.changed_by(node):
                if value.op == "placeholder":
                    found.setdefault(value, user_line(node))
        return found


def run_on_nothing(gm: fx.GraphModule) -> Run:
    """Run a graph of a call on fake tensors."""
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        fakes = [_zeros(node) for node in gm.graph.find_nodes(op="placeholder")]
    return Run(gm, fakes, mode)
