"""What of a model works under a strategy and what does not, before anything is trained.

Terms: a *finding* is one thing about a model: a *fault* is refused under a strategy, a *warning*
works but may not do what was meant, a *note* is worth knowing. A *survey* calls the model with
graph breaks allowed, and computes nothing of what is captured: results are zeros.

Signature: model, inputs -> findings with lines and remedies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.api import look, stood_for
from piper_dynamo.capture import is_module_state, user_name
from piper_dynamo.changes import Changes
from piper_dynamo.errors import PiperError
from piper_dynamo.ir.alias import called, draws
from piper_dynamo.ir.spec import user_line
from piper_dynamo.planning import Plan
from piper_dynamo.strategy import Place, Split, Strategy

GRAPH_BREAK = "graph break"  # how the refusal of one begins
MOST = 8  # lines or names that a finding shows
# Words in Dynamo's reason for a break by which the host waits for values of the device.
_SYNC_WORDS = (
    "item",
    "tolist",
    "data-dependent",
    "generic_jump",
    "dynamic shape operator",
    "nonzero",
    "numpy",
)
_SYNC_CALLS = frozenset(("cpu", "numpy", "tolist", "item", "nonzero"))


class Severity(StrEnum):
    """How much a finding matters."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about a model.

    Attributes:
        severity: Whether it is refused, may surprise, or is worth knowing.
        title: What it is.
        where: The user's lines, or names of parameters and arguments.
        remedy: What to do.
    """

    severity: Severity
    title: str
    where: tuple[str, ...] = ()
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{self.severity:<7}  {self.title}"]
        lines += [f"         {one}" for one in self.where[:MOST]]
        if len(self.where) > MOST:
            lines.append(f"         and {len(self.where) - MOST} more")
        if self.remedy:
            lines.append(f"         hint  {self.remedy}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found of a model; `str()` is the page that a user reads.

    Attributes:
        findings: Faults first.
        graphs: How many graphs Dynamo makes of one call.
        operators: How many operators they have.
    """

    findings: tuple[Finding, ...]
    graphs: int
    operators: int

    @property
    def is_fine(self) -> bool:
        """Whether nothing was found that is refused under a strategy."""
        return not self.of(Severity.FAULT)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(one for one in self.findings if one.severity is severity)

    def __str__(self) -> str:
        where = "under a strategy" if self.is_fine else "on one device alone, without a strategy"
        counts = f"{self.graphs} graph{'s' * (self.graphs != 1)}, {self.operators} operators"
        return "\n".join([f"the model works {where}: {counts}", *map(str, self.findings)])


@dataclass(slots=True)
class _Survey:
    """What the calls of a model were captured as."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: dict[str, str] = field(default_factory=dict)  # why, by line
    names: dict[Node, tuple[str, bool]] = field(default_factory=dict)  # and: is it the model's own

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend: computes nothing."""
        self.graphs.append(gm)
        wrapped = dynamo.argument_names()
        for node in gm.graph.find_nodes(op="placeholder"):  # Dynamo forgets their sources soon
            source = dynamo.source_of(node)
            self.names[node] = user_name(source, node.name, wrapped), is_module_state(source)
        found = dynamo.graph_break_of(gm)
        if found is not None:
            reason, where = found
            self.breaks.setdefault(where, reason.strip().splitlines()[0])
        outputs = compat.output_nodes(gm)
        return lambda *values: [_zeros(node) for node in outputs]


def doctor(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    strategy: Strategy | None = None,
    num_microbatches: int | None = None,
) -> Report:
    """Say before training what of a model works under a strategy, and what does not.

    Looks for graph breaks, code without a tag, inputs that are changed, waits of the host for the
    device, parameters that are shared, unused or frozen, buffers that a call changes, random
    numbers, outputs that cannot be the loss, and batch sizes that are baked in. Nothing is trained,
    and what is captured is not computed; code around graph breaks runs, on zeros.

    Args:
        model: The single-device model; meta models are welcome.
        example_inputs: As for `compile`: of one replica, for one step.
        strategy: The strategy that it is meant for; None: all of it on one device.
        num_microbatches: Into how many the batch is split where no strategy says it; None: the
            smallest number that divides it.

    Returns:
        The findings, with lines and remedies.
    """
    findings: list[Finding] = []
    wanted = strategy or _alone(example_inputs, num_microbatches)
    plan, error = _planned(model, wanted, example_inputs)
    survey = _surveyed(model, example_inputs)
    if error is not None and " in place\n" in error:
        pass  # found in the graph, with the input's name
    elif error is not None and not error.startswith(GRAPH_BREAK):
        title, *rest = error.splitlines()
        findings.append(_fault(title, [line.strip() for line in rest]))
    elif error is not None:
        findings += _about_breaks(survey, error)
    if plan is not None:
        findings += _about_plan(plan)
    for gm in survey.graphs:
        findings += _about_graph(gm, survey.names)
    findings += _about_state(model, survey)
    order = list(Severity)
    findings.sort(key=lambda one: order.index(one.severity))
    calls = [n for gm in survey.graphs for n in gm.graph.nodes if n.op.startswith("call_")]
    return Report(
        findings=tuple(dict.fromkeys(findings)), graphs=len(survey.graphs), operators=len(calls)
    )


def _alone(example_inputs: Any, num_microbatches: int | None) -> Strategy:
    """Everything on one device, in as few microbatches as show what does not follow their size."""
    tensors = [v for v in tree_leaves(example_inputs) if isinstance(v, Tensor) and v.dim()]
    count = num_microbatches
    if count is None:
        rows = tensors[0].shape[0] if tensors else 1
        count = next((m for m in range(2, rows + 1) if rows % m == 0), 1)
    return Strategy(Split({}, num_microbatches=count), Place({}, devices=[0]))


def _planned(
    model: nn.Module, strategy: Strategy, example_inputs: Any
) -> tuple[Plan | None, str | None]:
    """The plan, or why there is none."""
    ranks = [rank for place in strategy.of(Place) for rank in place.devices]
    try:
        now = look(model, strategy, example_inputs, max(ranks, default=0) + 1)
    except PiperError as error:
        return None, str(error)
    return now.plans[-1], None


def _surveyed(model: nn.Module, example_inputs: Any) -> _Survey:
    """All graphs of a call; what a break leaves to Python runs."""
    survey = _Survey()
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    with torch.random.fork_rng(), stood_for(model, example_inputs) as (args, kwargs):
        try:
            torch.compile(model, backend=survey, dynamic=False)(*args, **kwargs)
        except Exception as error:
            # The user's own code did not like zeros: what came before that is surveyed.
            survey.breaks.setdefault(_last_line(error), f"{type(error).__name__}: {error}")
    with torch.no_grad():
        for buffer, value in kept:  # code between breaks may have changed them
            buffer.copy_(value)
    return survey


def _last_line(error: BaseException) -> str:
    last, at = error.__traceback__, "unknown line"
    while last is not None:
        at = f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
        last = last.tb_next
    return at


def _zeros(node: Any) -> Any:
    """What a node would give, without its values."""
    value = node.meta.get("example_value") if isinstance(node, Node) else node
    if not isinstance(value, Tensor):
        return value
    shape = [compat.hint_of(size) for size in value.shape]
    made = torch.zeros(shape, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _fault(title: str, where: Sequence[str], remedy: str = "") -> Finding:
    return Finding(severity=Severity.FAULT, title=title, where=tuple(where), remedy=remedy)


def _about_breaks(survey: _Survey, error: str) -> list[Finding]:
    """Graph breaks, those by which the host waits for values apart."""
    found = dict(survey.breaks)
    details = dict(
        line.strip().split("  ", 1) for line in error.splitlines()[1:] if "  " in line.strip()
    )
    if details.get("at"):
        found.setdefault(details["at"].strip(), details.get("why", "").strip())
    waits = {at: why for at, why in found.items() if any(w in why.lower() for w in _SYNC_WORDS)}
    others = {at: why for at, why in found.items() if at not in waits}
    findings = []
    if waits:
        findings.append(
            _fault(
                "graph break: the host waits for a value of the device",
                [f"{at}  {why}" for at, why in waits.items()],
                "choose by torch.where, or decide outside of forward and pass the decision in; "
                "keep .item() and prints of values out of forward",
            )
        )
    if others:
        findings.append(
            _fault(
                GRAPH_BREAK,
                [f"{at}  {why}" for at, why in others.items()],
                "move the statement out of forward; without a strategy, graph breaks work",
            )
        )
    return findings


def _about_plan(plan: Plan) -> list[Finding]:
    findings = []
    random = [n for chunk in plan.chunks.values() for n in chunk.graph.nodes if draws(n)]
    if random:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title="random numbers: they follow from the step's seed, the microbatch and the "
                "stage, so they are the same for every schedule, and others than eager's",
                where=tuple(dict.fromkeys(user_line(n) for n in random)),
            )
        )
    if plan.changed:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title="buffers that every microbatch changes, in order; replicas keep their own",
                where=tuple(plan.args[position].name for position in sorted(plan.changed)),
            )
        )
    lines = dict.fromkeys(line for line, _ in plan.untagged if line)
    if lines:  # none where nothing has one
        findings.append(
            Finding(
                severity=Severity.WARNING,
                title="code without a tag, which joins the stage of what it reads",
                where=tuple(lines),
                remedy='tag it by a pattern of its module, "" is the model itself, or by '
                "piper.annotate",
            )
        )
    if plan.dag.num_microbatches == 1:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title="the batch is not split, so a batch size that is baked in does not show",
                remedy="give example inputs of two rows or more",
            )
        )
    return findings


def _about_graph(gm: fx.GraphModule, names: Mapping[Node, tuple[str, bool]]) -> list[Finding]:
    """Inputs that are changed, and waits for the device."""
    findings = []
    for node, line in _changed(gm).items():
        name, is_state = names[node]
        if not is_state:
            findings.append(
                _fault(
                    f"the model changes its input {name!r} in place",
                    [line],
                    "work on a copy: x = x.clone()",
                )
            )
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    waiting = [n for n in calls if called(n) in _SYNC_CALLS]
    if waiting:
        findings.append(
            Finding(
                severity=Severity.WARNING,
                title="a value is brought to the host: on an accelerator that waits for it",
                where=tuple(dict.fromkeys(user_line(n) for n in waiting)),
                remedy="do it outside of forward, with an output",
            )
        )
    return findings


def _changed(gm: fx.GraphModule) -> dict[Node, str]:
    """Arguments that a graph changes, and the user's line that does it."""
    mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        fakes = [_zeros(node) for node in gm.graph.find_nodes(op="placeholder")]
    changes = Changes(gm, fakes, mode)
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        for value in changes.changed_by(node):
            if value.op == "placeholder":
                found.setdefault(value, user_line(node))
    return found


def _about_state(model: nn.Module, survey: _Survey) -> list[Finding]:
    """Parameters that are shared, unused or frozen."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    findings = []
    tied = [" = ".join(found) for found in names.values() if len(found) > 1]
    if tied:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title="shared parameters: every stage that uses one holds a copy, and their "
                "gradients are summed once per step",
                where=tuple(tied),
            )
        )
    used = {name for node, (name, is_state) in survey.names.items() if is_state and node.users}
    params = dict(model.named_parameters())
    unused = [found[0] for found in names.values() if not used & set(found)]
    if unused:
        findings.append(
            Finding(
                severity=Severity.WARNING,
                title="parameters that the call does not use: no rank holds them, and none steps "
                "them",
                where=tuple(unused),
                remedy="leave them out of the model, or check whether forward should use them",
            )
        )
    frozen = [name for name, param in params.items() if not param.requires_grad]
    if frozen:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title=f"{len(frozen)} of {len(params)} parameters are frozen: no gradient of "
                "theirs is computed",
                where=tuple(frozen[:2]) + (("...",) if len(frozen) > 2 else ()),
            )
        )
    return findings
