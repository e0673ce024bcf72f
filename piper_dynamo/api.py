"""Compile, prepare and plan: calls that look at a model without training it."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.access import module_of
from piper_dynamo.backend import graph_break, piper
from piper_dynamo.errors import PiperCaptureError, PiperError, PiperPlanError, format_error
from piper_dynamo.garbage import collect, resting_collector
from piper_dynamo.ir.spec import is_library
from piper_dynamo.looking import NotSymbolicError, to_look_at
from piper_dynamo.options import Options, OptionsByLine
from piper_dynamo.pending import settle, settle_bare
from piper_dynamo.plan_checks import refuse_unsupported
from piper_dynamo.planning import Plan, split_of
from piper_dynamo.restoring import unchanged
from piper_dynamo.runtime.world import communicator
from piper_dynamo.state import stand_in
from piper_dynamo.step import Session, StandIn, session
from piper_dynamo.strategy import Place, Strategy


def compile(
    model: nn.Module,
    strategy: Strategy | Mapping[int, Strategy],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    **options: Any,
) -> Any:
    """Compile a model under a strategy and prepare it for this rank.

    Args:
        model: The single-device model.
        strategy: How the step is distributed; or a strategy for each number of ranks that the job
            may have, such as {4: ..., 2: ...}, of which this one's is taken.
        example_inputs: Positional inputs as a tuple, or keyword inputs as a dict; what this
            rank would be given, at the whole batch's sizes. Values are not looked at.
        options: `compile=`, `costs=`, `timeout_s=`, `outputs=`, `init_fn=`; see
            `piper_dynamo.options.Options`.

    Returns:
        What `torch.compile` returns; call it like the model.

    Raises:
        PiperError: The model, the strategy or the inputs are refused.
    """
    refuse_no_model(model)
    if isinstance(strategy, Mapping):
        strategy = _of_world(strategy, communicator(options.get("timeout_s", 300.0)).world_size)
    chosen = _options(strategy, options)
    step = torch.compile(model, backend=piper, fullgraph=True, options=chosen)
    args, kwargs = _arguments(example_inputs)
    prepare(step, *args, **kwargs)
    return step


def prepare(step: Any, *args: Any, **kwargs: Any) -> None:
    """Capture, plan and compile a step for inputs like these; runs nothing.

    What this rank does not hold is released, and what it holds of a model that was built under
    `deferred_init` gets its values.

    Raises:
        PiperError: The model, the strategy or the inputs are refused.
    """
    settle([module_of(step)])
    asked = dynamo.given_to_backend(step)
    options = asked.get("options") or {}
    if options.get("strategy") is None:
        raise PiperError(
            "the step is not compiled with the piper backend and a strategy: "
            "torch.compile(model, backend='piper', options={'strategy': ...})"
        )
    asked["options"] = OptionsByLine(options)  # by reference: Dynamo compares these from now on
    given = [v.device for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    settle_bare(module_of(step), given[0] if given else torch.device("cpu"))
    with session(None) as now:
        _call(step, now, args, kwargs)
        # Releasing parameters changes what Dynamo guards on: trace again now rather than in the
        # first step.
        _call(step, now, args, kwargs)


def plan(
    model: nn.Module,
    strategy: Strategy,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    world_size: int | None = None,
    **options: Any,
) -> Plan:
    """The plan of a step, without devices, weights or processes; meta models are welcome.

    A model that is planned again, under this or another strategy, is not captured again, unless it
    or what forward reads has changed. Classes whose functions were replaced are seen to have, where
    they are those of modules or of objects that a module holds, also in lists, tuples and dicts,
    but not of what such objects hold: after changing these, call `torch._dynamo.reset()`.

    Args:
        model: The single-device model.
        strategy: How the step is distributed.
        example_inputs: As for `compile`.
        world_size: How many ranks; default: as many as the strategy places something on.
        options: As for `compile`.

    Raises:
        PiperError: The model, the strategy or the inputs are refused, or the plan is unsafe.
    """
    refuse_no_strategy(strategy)
    ranks = [d for p in strategy.of(Place) for d in p.devices]
    world = world_size if world_size is not None else max(ranks, default=0) + 1
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise PiperPlanError(f"world_size is {world!r}; give a number of ranks >= 1")
    now = look(model, strategy, example_inputs, world, **options)
    return now.plans[-1]


def look(
    model: nn.Module,
    strategy: Strategy,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    world_size: int,
    *,
    capture: bool = False,
    **options: Any,
) -> Session:
    """Call a model without devices, weights or processes: its captured steps, calls and plans.

    Args:
        model: The single-device model; meta models are welcome.
        strategy: How the step is distributed.
        example_inputs: As for `compile`.
        world_size: How many ranks.
        capture: Only capture it, without a plan.
        options: As for `compile`.

    Raises:
        PiperError: The model, the strategy or the inputs are refused, or a plan is unsafe.
    """
    refuse_no_model(model)
    chosen = _options(strategy, options)
    split = split_of(strategy)
    refuse_unsupported(strategy, split)
    with (
        stood_for(model, example_inputs) as (args, kwargs),
        session(world_size, capture=capture, options=Options.of(chosen)) as now,
    ):
        try:
            _call(to_look_at(model, None), now, args, kwargs)
        except NotSymbolicError:
            _call(to_look_at(model, split), now, args, kwargs)
    if not now.steps:
        raise PiperCaptureError("the model computes nothing on tensors: there is nothing to plan")
    return now


def refuse_no_model(model: Any) -> None:
    """Refuse what is no module.

    Raises:
        PiperError: Says what it is.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise PiperError("model is TorchScript, which has no Python to capture; give its module")
    if isinstance(model, nn.Module):
        if "_modules" not in vars(model):
            raise PiperError(f"model is a {type(model).__name__} without super().__init__()")
        if "_orig_mod" in model._modules:
            raise PiperError("model is compiled already; give the module itself, model._orig_mod")
        return
    is_class = isinstance(model, type) and issubclass(model, nn.Module)
    what = f"the class {model.__name__}" if is_class else f"a {type(model).__name__}"
    give = "an instance of it" if is_class else "an nn.Module"
    raise PiperError(f"model is {what}; give {give}")


def refuse_no_strategy(strategy: Any) -> None:
    """Refuse what is no strategy.

    Raises:
        PiperError: Says what it is.
    """
    if not isinstance(strategy, Strategy):
        raise PiperError(f"strategy is a {type(strategy).__name__}; give a piper.Strategy")


def _refuse_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that forward does not take, before Dynamo calls it."""
    is_called = type(module).__call__ is nn.Module.__call__
    if module._forward_pre_hooks or dynamo.global_hooks() or not is_called:
        return  # it may be given others
    try:
        taken = inspect.signature(module.forward, follow_wrapped=False)
    except ValueError:  # there is none to be read
        return
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        raise PiperCaptureError(
            format_error(
                "forward cannot be called with these inputs",
                {"forward": f"{type(module).__name__}.forward{taken}", "why": str(error)},
                hint="give example_inputs as a tuple in the order of forward's arguments, or as a "
                "dict by their names",
            )
        ) from None


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        other = [name for name in example_inputs if not isinstance(name, str)]
        if other:
            raise PiperError(f"example_inputs is a dict with {other[0]!r}; give it by name")
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    raise PiperError(
        f"example_inputs is a {type(example_inputs).__name__}; give a tuple of positional "
        "inputs, e.g. (x, y), or a dict of keyword inputs"
    )


@contextmanager
def stood_for(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """While a model is looked at, tensors stand for its own, and for inputs, on the meta device.

    Args:
        model: Any model.
        example_inputs: As for `compile`.

    Yields:
        Positional and keyword arguments to call it with.
    """
    args, kwargs = _arguments(example_inputs)
    given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    device = next((v.device for v in given if not v.is_meta), torch.device("cpu"))
    args, kwargs = tree_map(
        lambda v: stand_in(v, device) if isinstance(v, torch.Tensor) and v.is_meta else v,
        (args, kwargs),
    )
    with _stood_for(model, device), unchanged(model):
        yield args, kwargs


@contextmanager
def _stood_for(module: nn.Module, device: torch.device) -> Iterator[None]:
    """While a model is planned, tensors of another device stand for its own on the meta device.

    On the meta device itself torch lacks the derivatives of some operators, and a tensor that
    forward makes on the CPU does not go with the model's.
    """
    made: dict[int, torch.Tensor] = {}
    swapped: list[tuple[Any, str, torch.Tensor]] = []
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                swapped.append((held, name, tensor))
                if id(tensor) not in made:  # one that is tied stays so
                    made[id(tensor)] = stand_in(tensor, device)
    for held, name, tensor in swapped:
        held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


def _of_world(strategies: Mapping[int, Strategy], world_size: int) -> Strategy:
    if world_size not in strategies:
        raise PiperError(
            f"there is no strategy for {world_size} ranks: those given are for "
            f"{', '.join(map(str, strategies)) or 'none'}"
        )
    return strategies[world_size]


def _options(strategy: Strategy, options: Mapping[str, Any]) -> OptionsByLine:
    """What the backend is given."""
    refuse_no_strategy(strategy)
    chosen = OptionsByLine({**options, "strategy": strategy})
    Options.of(chosen)
    return chosen


@resting_collector()
def _call(step: Any, now: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call the step in a session, first to see the output's structure, then to plan."""
    _refuse_arguments(module_of(step), args, kwargs)
    dynamo.capture_more()
    for value in tree_leaves((args, kwargs)):
        # Also of arguments that are used only for their size, which no graph input shows.
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] > 1:
            compat.weakly_mark_dynamic(value, 0)
    now.probe = True
    output = _visited(step, now, args, kwargs)
    now.probe = False
    strategy = now.steps[-1].strategy if now.steps else None
    wanted = strategy.loss if strategy is not None else None
    now.paths = dict(output_paths(output))
    if wanted is not None:
        now.loss = loss_index(output, wanted)
    _visited(step, now, args, kwargs)


def _visited(step: Any, now: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the step; nothing of what the call does to the model's and others' objects is left."""
    with unchanged(module_of(step)):
        try:
            return _guarded(step, args, kwargs)
        finally:
            now.kept.restore()


def _guarded(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with dynamo.numbers_are_constants():
            return step(*args, **kwargs)
    except compat.BackendCompilerFailed as error:
        inner = error.inner_exception
        if isinstance(inner, PiperError):
            raise inner.with_traceback(inner.__traceback__) from None
        raise
    except compat.TorchDynamoException as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, PiperError):
                raise cause from None
            cause = cause.__cause__
        raise PiperCaptureError(_model_fault(error) or _dynamo_text(error)) from error
    finally:
        compat.unmark_dynamic()  # also of what was refused: the next call's inputs may be the same
        collect()


_SIZE = re.compile(r"\bs\d+\b")  # how torch calls a size that is not fixed


def _model_fault(error: Exception) -> str:
    """That an operator of the model fails by itself, as it would without Piper; "" if none does."""
    if not isinstance(error, compat.TorchRuntimeError):
        return ""
    root: BaseException | None = error
    while isinstance(root, compat.TorchDynamoException):
        root = root.__cause__ or root.__context__
    if root is None:
        return ""
    why = _SIZE.sub("the batch size", str(root).strip() or type(root).__name__)
    return format_error(
        "an operator of the model fails",
        {"at": _own_line(error), "why": why},
        hint="call the model once as it is, model(*inputs): it should fail there alike",
    )


def _own_line(error: Exception) -> str:
    """The user's line in Dynamo's text."""
    lines = str(error).splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    own = [place for place in places if not is_library(place)] or places
    if not own:
        return "unknown line"
    place = own[-1].removeprefix("File ").replace('"', "").replace(", line ", ":")
    return place.split(", in ")[0]


def _dynamo_text(error: Exception) -> str:
    """Dynamo's reason and the user's line, without its own stack."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    why = lines[0] if lines else type(error).__name__
    context = [line.split(":", 1)[1] for line in lines if "Developer debug context:" in line]
    if context and context[0].strip():
        why = f"{why}: {context[0].strip()}"
    return graph_break(_own_line(error), why)


def loss_index(output: Any, wanted: Any) -> int:
    """Which graph output stands at the place of the model's output that the user named.

    Args:
        output: The model's output made of stand-ins.
        wanted: A key, an index, or a path such as `"losses.total"` or `("losses", 0)`.

    Raises:
        PiperCaptureError: There is no tensor at that place; what there is, is listed.
    """
    path = wanted if isinstance(wanted, tuple | list) else [wanted]
    if isinstance(wanted, str) and not (isinstance(output, Mapping) and wanted in output):
        path = wanted.split(".")
    found = output
    for part in path:
        try:
            if isinstance(found, Mapping):
                found = found[part]
            elif isinstance(found, tuple | list):
                found = found[int(part)]
            else:
                found = getattr(found, str(part))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise PiperCaptureError(
                format_error(
                    f"the model's output has no {wanted!r} to be the loss",
                    {"outputs": _paths_text(output)},
                    hint=_name_one(wanted),
                )
            ) from error
    if not isinstance(found, StandIn):
        raise PiperCaptureError(
            format_error(
                f"the output {wanted!r} is not a tensor",
                {"outputs": _paths_text(output)},
                hint=_name_one(wanted),
            )
        )
    return found.place


def _name_one(wanted: Any) -> str:
    hint = "name one of these by loss="
    if wanted in ("mean", "sum"):
        hint += (
            "; how those of microbatches combine is Split(loss=), or combine= of "
            "piper.strategies.pipeline"
        )
    return hint


def _paths_text(output: Any) -> str:
    return ", ".join(path for _, path in output_paths(output)) or "no tensors"


def output_paths(output: Any, prefix: str = "") -> list[tuple[int, str]]:
    """Each graph output's path in a model's output."""
    if isinstance(output, StandIn):
        return [(output.place, prefix or "(the output itself)")]
    items: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        items = list(output.items())
    elif isinstance(output, tuple | list):
        items = list(enumerate(output))
    elif is_dataclass(output):
        items = list(vars(output).items())
    paths = []
    for key, value in items:
        paths += output_paths(value, f"{prefix}.{key}" if prefix else str(key))
    return paths
