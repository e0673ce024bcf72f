"""What of a model works under a strategy and what does not, before anything is trained.

Terms: a *finding* is one thing about a model: a *fault* is refused under a strategy, a *warning*
works but may not do what was meant, a *note* is worth knowing. A *survey* calls the model with
graph breaks allowed, and computes nothing of what is captured: results are zeros. What is refused
is what capturing and planning refuse; the survey says where, and what else they would have found.

Signature: model, inputs -> findings with lines and remedies.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor, nn
from torch.fx.node import Node
from torch.utils._pytree import tree_leaves

from piper_dynamo.api import look, refuse_no_model, refuse_no_strategy
from piper_dynamo.backend import break_remedy, is_wait
from piper_dynamo.capture import changed_in_place, instead_of_change
from piper_dynamo.errors import PiperError
from piper_dynamo.ir.alias import called, draws
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.spec import user_line
from piper_dynamo.planning import Plan, Template, split_of
from piper_dynamo.strategy import Place, Split, Strategy
from piper_dynamo.survey import Survey, is_ours, run_on_nothing, shown, surveyed
from piper_dynamo.tagging import tagged
from piper_dynamo.values import is_whole

GRAPH_BREAK = "graph break"  # how the refusal of one begins
MOST = 8  # lines or names that a finding shows
MOST_PARTS = 64  # microbatches that a batch is split into where no strategy says it
_SYNC_CALLS = frozenset(("cpu", "numpy", "tolist", "item", "nonzero"))
_UNSEEN = "could not be looked at"


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
        verdict: What of the model works, where something is refused.
    """

    findings: tuple[Finding, ...]
    graphs: int
    operators: int
    verdict: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether nothing was found that is refused under a strategy."""
        return not self.of(Severity.FAULT)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one severity."""
        return tuple(one for one in self.findings if one.severity is severity)

    def __str__(self) -> str:
        verdict = "the model works under a strategy" if self.is_fine else self.verdict
        counts = f"{self.graphs} graph{'s' * (self.graphs != 1)}, {self.operators} operators"
        return "\n".join([f"{verdict}: {counts}", *map(str, self.findings)])


@dataclass(slots=True)
class _Attempts:
    """How far capturing and planning a model came, under its strategy or a simpler one.

    Attributes:
        errors: Why they stopped.
        template: The captured microbatch.
        plan: The plan, of the strategy that was asked for.
        is_other: Whether the template is that of a simpler strategy.
    """

    errors: list[str] = field(default_factory=list)
    template: Template | None = None
    plan: Plan | None = None
    is_other: bool = False

    @property
    def break_(self) -> str | None:
        """The refusal of a graph break, if there is one."""
        return next((one for one in self.errors if one.startswith(GRAPH_BREAK)), None)


def doctor(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    *,
    strategy: Strategy | None = None,
    num_microbatches: int | None = None,
) -> Report:
    """Say before training what of a model works under a strategy, and what does not.

    Looks for graph breaks, code without a tag, inputs and parameters that are changed, waits of the
    host for the device, parameters that are shared, unused or frozen, buffers that a call changes,
    random numbers, outputs that cannot be the loss, and batch sizes that are baked in; says what a
    fault kept it from looking for. Nothing is trained, and what is captured is not computed. Code
    around graph breaks runs, on zeros: what it changes of parameters, buffers, tensors among the
    inputs, and of modules and the lists and dicts that they hold is put back; what else it does,
    as to a global or a file, is done.

    Args:
        model: The single-device model; meta models are welcome.
        example_inputs: As for `compile`: of one replica, for one step.
        strategy: The strategy that it is meant for; None: all of it on one device.
        num_microbatches: Into how many the batch is split where no strategy says it; None: the
            smallest number from 2 to 64 that divides it, or 1. The batch is the commonest size over
            1 of the inputs' dim 0.

    Returns:
        The findings, with lines and remedies.

    Raises:
        PiperError: `model` or `strategy` is none, or `num_microbatches` means nothing here.
    """
    refuse_no_model(model)
    if strategy is not None:
        refuse_no_strategy(strategy)
        if num_microbatches is not None:
            raise PiperError("doctor: num_microbatches is for models without a strategy; drop one")
    elif num_microbatches is not None and not (is_whole(num_microbatches) and num_microbatches > 0):
        raise PiperError(f"doctor: num_microbatches is {num_microbatches!r}; give a number >= 1")
    wanted = _alone(example_inputs, num_microbatches) if strategy is None else strategy
    looked = _looked(model, wanted, example_inputs)
    survey = surveyed(model, example_inputs, breaks=bool(looked.errors))
    findings, unseen = _about_graphs(survey, looked)
    told = {one.title for one in findings}  # with lines and names of their own
    for error in looked.errors:
        title, *rest = error.splitlines()
        if error == looked.break_:
            findings += _about_breaks(survey, error)
        elif title not in told:
            findings.append(_fault(title, [line.strip() for line in rest]))
    if looked.template is not None:
        findings += _about_template(looked.template, split_of(wanted).num_microbatches)
    used = _used(survey, looked)
    findings += _about_state(model, used)
    unseen += _unseen(survey, looked, used, has_strategy=strategy is not None)
    if unseen:
        findings.append(Finding(severity=Severity.WARNING, title=_UNSEEN, where=tuple(unseen)))
    order = list(Severity)
    findings.sort(key=lambda one: order.index(one.severity))
    calls = [n for gm in survey.graphs for n in gm.graph.nodes if n.op.startswith("call_")]
    return Report(
        findings=tuple(dict.fromkeys(findings)),
        graphs=len(survey.graphs),
        operators=len(calls),
        verdict=_verdict(survey, looked, has_strategy=strategy is not None),
    )


def _verdict(survey: Survey, looked: _Attempts, *, has_strategy: bool) -> str:
    """What works where something is refused."""
    if survey.stopped:  # perhaps for the zeros that it was given
        return "the model is refused under a strategy"
    if has_strategy and looked.template is not None:
        return "this strategy is refused, the model works on one device alone"
    return "the model works on one device alone, without a strategy"


def _alone(example_inputs: Any, num_microbatches: int | None) -> Strategy:
    """Everything on one device, in as few microbatches as show what does not follow their size."""
    tensors = [v for v in tree_leaves(example_inputs) if isinstance(v, Tensor) and v.dim()]
    count = num_microbatches
    if count is None:
        sizes = Counter(v.shape[0] for v in tensors if v.shape[0] > 1)
        rows = sizes.most_common(1)[0][0] if sizes else 1
        count = next((m for m in range(2, min(rows, MOST_PARTS) + 1) if rows % m == 0), 1)
    return Strategy(Split({}, num_microbatches=count), Place({}, devices=[0]))


def _looked(model: nn.Module, strategy: Strategy, example_inputs: Any) -> _Attempts:
    """Capture and plan a model; where it cannot be captured so, on one device, then unsplit.

    What is asked for may be at fault, not the model, and one fault is not to hide others.
    """
    found = _Attempts()
    world = max((rank for place in strategy.of(Place) for rank in place.devices), default=0) + 1
    simpler = [
        Strategy(*split, Place({}, devices=[0]), loss=strategy.loss)
        for split in (strategy.of(Split), (Split({}, num_microbatches=1),))
    ]
    tried: list[Strategy] = []
    for one in (strategy, *simpler):
        if one in tried:
            continue
        tried.append(one)
        found.is_other = one is not strategy
        try:
            now = look(model, one, example_inputs, world, capture=True)
            step, call = now.steps[-1], now.calls[-1]
            with tagged(step.graph, one.regions):
                found.template = step.template(call)
                if not found.is_other:
                    found.plan = step.planned(call, world)
        except PiperError as error:
            found.errors.append(str(error))
        except Exception as error:  # as training would end, too: torch has no way to trace this
            if is_ours(error):
                raise
            found.errors.append(f"the model cannot be captured\n  why  {shown(error)}")
        if found.template is not None or found.break_ is not None:
            break
    found.errors = list(dict.fromkeys(found.errors))
    return found


def _fault(title: str, where: Sequence[str], remedy: str = "") -> Finding:
    return Finding(severity=Severity.FAULT, title=title, where=tuple(where), remedy=remedy)


def _unseen(
    survey: Survey, looked: _Attempts, used: AbstractSet[str] | None, *, has_strategy: bool
) -> list[str]:
    """What a fault kept from being looked for."""
    found = []
    if looked.template is None:
        found.append("batch sizes that are baked in, code without a tag, which output is the loss")
    elif looked.is_other:
        found.append("batch sizes that are baked in, but for those told here")
        found += ["the strategy's stages and placement, code without a tag"] * has_strategy
    if used is None:
        found.append("which parameters are not used")
    if survey.stopped:
        found.append(f"what comes after {survey.stopped}")
    at = _place(looked.break_ or "")
    if at and at not in survey.breaks:
        found.append(f"other graph breaks of the function at {at}, which Python runs as a whole")
    return found


def _details(error: str) -> dict[str, str]:
    """The labelled lines of a refusal."""
    lines = (line.strip() for line in error.splitlines()[1:])
    return dict(line.split("  ", 1) for line in lines if "  " in line)


def _place(error: str) -> str:
    """The user's line in a refusal, if it has one."""
    return _details(error).get("at", "").strip()


def _about_breaks(survey: Survey, error: str) -> list[Finding]:
    """Graph breaks, those by which the host waits for values apart."""
    found = dict(survey.breaks)
    if at := _place(error):  # worded more fully than the survey's
        found[at] = _details(error).get("why", "").strip()
    lines: dict[tuple[str, str], list[str]] = {}
    for at, why in found.items():
        title = f"{GRAPH_BREAK}: the host waits for a value of the device"
        kind = title if is_wait(why) else GRAPH_BREAK, break_remedy(why)
        lines.setdefault(kind, []).append(f"{at}  {why}")
    return [_fault(title, where, remedy) for (title, remedy), where in lines.items()]


def _about_template(template: Template, num_microbatches: int) -> list[Finding]:
    nodes = [n for chunk in template.dag.chunks.values() for n in chunk.graph.nodes]
    findings = _about_random([user_line(n) for n in nodes if draws(n)])
    findings += _about_buffers([template.args[k].name for k in sorted(template.changed)])
    if template.dag.training and template.dag.loss is None:
        findings.append(
            Finding(
                severity=Severity.WARNING,
                title="no output of the model can be the loss, so that one rank alone trains it: "
                "pipelines need a loss inside the step",
                remedy="return a scalar loss from forward, or name it: Strategy(..., loss=)",
            )
        )
    lines = dict.fromkeys(line for line, _ in template.untagged if line)
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
    if num_microbatches == 1:
        findings.append(
            Finding(
                severity=Severity.NOTE,
                title="the batch is not split, so a batch size that is baked in does not show",
                remedy="give example inputs of an even number of rows, and no strategy or one of "
                "two microbatches",
            )
        )
    return findings


def _about_random(lines: Sequence[str]) -> list[Finding]:
    if not lines:
        return []
    title = (
        "random numbers: they follow from the step's seed, the microbatch and the draw's number "
        "in the model, so they are the same under every strategy, and others than eager's"
    )
    where = tuple(dict.fromkeys(lines))
    return [Finding(severity=Severity.NOTE, title=title, where=where)]


def _about_buffers(names: Sequence[str]) -> list[Finding]:
    if not names:
        return []
    title = "buffers that every microbatch changes, in order; replicas keep their own"
    return [Finding(severity=Severity.NOTE, title=title, where=tuple(names))]


def _about_graphs(survey: Survey, looked: _Attempts) -> tuple[list[Finding], list[str]]:
    """What the graphs of the survey show, and what could not be run to see it.

    What they change, and the random numbers that they draw, is known better where a microbatch was
    captured.
    """
    findings: list[Finding] = []
    unseen: list[str] = []
    for gm in survey.graphs:
        waiting = [user_line(node) for node in gm.graph.nodes if _waits(node)]
        if waiting:
            findings.append(
                Finding(
                    severity=Severity.WARNING,
                    title="a value is brought to the host: on an accelerator that waits for it",
                    where=tuple(dict.fromkeys(waiting)),
                    remedy="do it outside of forward, with an output",
                )
            )
    if looked.template is not None:
        return findings, unseen
    lines: list[str] = []
    buffers: list[str] = []
    for gm in survey.graphs:
        try:
            seen = run_on_nothing(gm)
        except Exception as error:
            unseen.append(f"what a graph changes, which cannot be run: {shown(error)}")
            continue
        lines += [user_line(node) for node in seen.drawing]
        for node, line in seen.arguments_changed().items():
            name, kind = survey.args.get(node, (node.name, None))
            if kind is ArgKind.BUFFER:
                buffers.append(name)
            elif kind is not None:
                title = changed_in_place(kind, name)
                findings.append(_fault(title, [line], instead_of_change(kind)))
    findings += [*_about_random(lines), *_about_buffers(list(dict.fromkeys(buffers)))]
    return findings, unseen


def _waits(node: Node) -> bool:
    """Whether a call brings a value to the host, from an accelerator if the model is on one."""
    if node.op not in ("call_function", "call_method"):
        return False
    # `x.to(y.device)` has a torch.device here, which is the CPU where the model is looked at.
    is_named = called(node) == "to" and "cpu" in (*node.args, *node.kwargs.values())
    if called(node) in _SYNC_CALLS or is_named:
        return True
    sources = {_device_type(source) for source in node.all_input_nodes} - {"", "cpu", "meta"}
    return _device_type(node) == "cpu" and bool(sources)


def _device_type(node: Node) -> str:
    value = node.meta.get("example_value")
    return value.device.type if isinstance(value, Tensor) else ""


def _used(survey: Survey, looked: _Attempts) -> set[str] | None:
    """Names of the parameters that ranks hold, or that the one graph of a call reads.

    None where that is not known: some may be read between graphs, or by what Python runs alone.
    """
    if looked.plan is not None:
        return {looked.plan.args[position].name for position in looked.plan.holders()}
    if survey.stopped or survey.is_cut or looked.break_ or len(survey.graphs) != 1:
        return None
    return {name for node, (name, _) in survey.args.items() if node.users}


def _about_state(model: nn.Module, used: AbstractSet[str] | None) -> list[Finding]:
    """Parameters that are shared, unused or frozen.

    Args:
        model: The model.
        used: Names of the parameters that are used; None: it is not known.
    """
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
    params = dict(model.named_parameters())
    unused = [found[0] for found in names.values() if used is not None and not used & set(found)]
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
