"""Private names of torch that say what Dynamo knows of the call that it traces (torch 2.11 - 2.14).

The rest is in `_torch_compat.py`.
"""

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo import eval_frame
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame
from torch.utils._pytree import tree_leaves

from piper_dynamo._torch_compat import is_marked_dynamic, source_name, weakly_mark_dynamic
from piper_dynamo.ir.spec import is_library

_LOGGING = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


def capture_more() -> None:
    """Let RNNs and messages to the log be no reason to cut a graph.

    A compiled call does not write such messages, nor those of methods that libraries add, such as
    `warning_once`.
    """
    dynamo_config.allow_rnn = True
    for name in dir(logging.Logger):
        if name in _LOGGING or name.startswith(tuple(f"{known}_" for known in _LOGGING)):
            dynamo_config.ignore_logging_functions.add(getattr(logging.Logger, name))


class _Recorder:
    """Dynamo's tracker of the code that it is asked about, which keeps what it is told."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.codes: dict[int, CodeType] = {}  # by id: code compares by value

    def add(self, code: CodeType) -> None:
        self.codes[id(code)] = code
        self.tracker.add(code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tracker, name)


@contextmanager
def skips_taken_back() -> Iterator[None]:
    """What Dynamo decides inside to leave to Python for good, it is asked about again afterwards.

    Where it cannot resume after a graph break (in a loop, in a function without an operator), it
    marks the code as one to skip, for every later call, also of other models and backends. What is
    compiled of the code already, by whomever, stays: `torch._dynamo.reset` would drop it.
    """
    recorder = _Recorder(convert_frame.input_codes)
    convert_frame.input_codes = recorder  # type: ignore[assignment]
    try:
        yield
    finally:
        convert_frame.input_codes = recorder.tracker
        action = eval_frame._FrameAction.DEFAULT
        # What was skipped before stays so: Dynamo is not asked about it.
        for code in recorder.codes.values():
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action, action))


def guard_shared_parameters() -> None:
    """Let a model whose weights are shared be no match for what was compiled without.

    Dynamo leaves that check out by default, since what it compiles itself adds gradients up where
    parameters are one; here each rank's program says whose gradients are summed. The guards are
    made after the backend has returned, so that the setting cannot be taken back: it holds for all
    that the process compiles from then on, where it costs a comparison of parameters a call.
    """
    dynamo_config.skip_no_tensor_aliasing_guards_on_parameters = False


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOW = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def hooks_of(module: torch.nn.Module) -> list[tuple[Any, str, bool]]:
    """What is called around a module: the hook, which kind it is, and whether it takes kwargs."""
    with_kwargs = {key for table in _HOW for key in getattr(module, table)}
    return [
        (hook, table, key in with_kwargs)
        for table in _HOOKS
        for key, hook in getattr(module, table).items()
    ]


def hook_tables(module: torch.nn.Module) -> list[dict[Any, Any]]:
    """The dicts of what is called around a module."""
    return [getattr(module, table) for table in (*_HOOKS, *_HOW)]


def global_hooks() -> list[Any]:
    """What is called around every module."""
    tables = (getattr(torch.nn.modules.module, f"_global{table}") for table in _HOOKS)
    return [hook for table in tables for hook in table.values()]


def traced_model() -> torch.nn.Module | None:
    """The model whose call is being traced: the first module among the arguments of its code."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    values, *_ = _given(output.root_tx.f_code, output.local_scope)
    return next((v for v in values if isinstance(v, torch.nn.Module)), None)


def _given(code: CodeType, scope: Mapping[str, Any]) -> tuple[list[Any], int, str, str]:
    """What a frame was called with by position.

    Returns:
        The values; how many are named in the code, where the rest are of `*args`; the names of
        `*args` and `**kwargs`, "" where there are none.
    """
    first = code.co_argcount + code.co_kwonlyargcount
    has_args = bool(code.co_flags & inspect.CO_VARARGS)
    many = code.co_varnames[first] if has_args else ""
    named = code.co_varnames[first + has_args] if code.co_flags & inspect.CO_VARKEYWORDS else ""
    before = [scope.get(name) for name in code.co_varnames[: code.co_argcount]]
    rest: Any = scope.get(many, ()) if many else ()
    return [*before, *rest], len(before), many, named


def traced_place() -> tuple[str, int, dict[str, Any]]:
    """Where the forward being traced begins, file and line, and its globals.

    That of the user's where a decorator wraps it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    model = traced_model()
    forward = inspect.unwrap(model.forward) if model is not None else None
    code = getattr(forward, "__code__", output.root_tx.f_code)
    variables: dict[str, Any] = getattr(forward, "__globals__", output.global_scope)
    return code.co_filename, code.co_firstlineno, variables


def argument_names() -> tuple[dict[str, Sequence[str]], str]:
    """What wrappers of a forward hide: names of what its `*args` are, and the name of `**kwargs`.

    A decorated forward is called as `wrapper(*args, **kwargs)`: its own signature, which
    `functools.wraps` keeps, says what these are.

    Returns:
        By the name of `*args`, the parameters of which they are the values, in order, "" where
        that is unknown; the name of `**kwargs`, "" if there are none.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    values, before, many, named = _given(output.root_tx.f_code, output.local_scope)
    if not many:
        return {}, named
    module = traced_model()
    if module is None:
        return {}, named
    names = [
        name
        for name, one in inspect.signature(module.forward).parameters.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    at = next(i for i, v in enumerate(values) if v is module)
    known = [*[""] * (at + 1), *names, *[""] * len(values)]
    return {many: known[before : len(values)]}, named


def numbers_are_constants() -> AbstractContextManager[object]:
    """Dynamo takes floats as they are, whatever they were in another model of the class.

    Otherwise it makes an attribute that was another number before an argument of the graph.
    """
    patched: AbstractContextManager[object] = dynamo_config.patch(specialize_float=True)
    return patched


def weakly_mark_arguments() -> None:
    """Make dim 0 symbolic for every tensor argument of the call being traced.

    An argument whose size alone is used is no input of the graph, and its size would be a number.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    for value in tree_leaves(dict(InstructionTranslator.current_tx().output.local_scope)):
        plain = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
        if plain and value.dim() and value.shape[0] > 1 and not is_marked_dynamic(value, 0):
            weakly_mark_dynamic(value, 0)


def attribute_stores() -> list[tuple[dict[str, Any] | None, str, str]]:
    """Tensors that the call being traced assigns to attributes: module, attribute, graph node.

    A module is given as the dict of its buffers; none where it is not one of these that changes.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects: Any = InstructionTranslator.current_tx().output.side_effects
    found: list[tuple[dict[str, Any] | None, str, str]] = []
    for owner, attributes in effects.store_attr_mutations.items():
        if "NNModule" in type(owner).__name__:
            tensors = [i for i in attributes.items() if "TensorVariable" in type(i[1]).__name__]
            found += [(owner.value._buffers, n, v.as_proxy().node.name) for n, v in tensors]
    held = {id(one): one for one in effects.keepalive}
    for key, variable in effects.id_to_variable.items():
        if "DictVariable" not in type(variable).__name__ or variable.source is None:
            continue
        try:
            name = source_name(variable.source)
        except NotImplementedError:  # made by the call itself, such as a dict of an output's
            continue
        if name.endswith(("._buffers", "._parameters")) and effects.is_modified(variable):
            old, items = variable.original_items, variable.items.items()
            new = [(k.vt.value, v) for k, v in items if variable.is_new_item(old.get(k.vt), v)]
            nodes = [(n, v.as_proxy().node.name) for n, v in new if v.is_tensor()]
            buffers = held.get(key) if name.endswith("._buffers") else None
            found += [(buffers, *one) for one in nodes or [(name.rpartition(".")[2], "")]]
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Something of Python's that the call being traced changes, once its graph has run.

    Attributes:
        owner: The list, dict, object, class, cell, or dict of globals.
        names: Which attributes or globals of it; none: what it contains.
        told: What of it has another value afterwards, as the user writes it.
    """

    owner: Any
    names: tuple[str, ...] = ()
    told: tuple[str, ...] = ()

    def lasting(self) -> "Callable[[], Change | None]":
        """Gives the same later, and lets its owner go: programs outlive models."""
        try:
            owner = weakref.ref(self.owner)
        except TypeError:  # lists, dicts and cells
            return lambda: self
        names, told = self.names, self.told

        def again() -> Change | None:
            one = owner()
            return None if one is None else Change(owner=one, names=names, told=told)

        return again


def changes() -> list[Change]:
    """What the call being traced does to lists, dicts, objects, classes, closures and globals.

    Not to what is an input's, nor to modules' tables of buffers and parameters.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    effects: Any = output.side_effects
    held = {id(one): one for one in effects.keepalive}
    found = []
    for key, one in effects.id_to_variable.items():
        attributes = effects.store_attr_mutations.get(one, {})
        names = tuple(attributes)
        if type(one).__name__ == "NewGlobalVariable":  # of the file that forward is in
            others = _others(output.global_scope.get, attributes, effects)
            found.append(Change(owner=output.global_scope, names=names, told=tuple(others)))
            continue
        if isinstance(cell := held.get(key), CellType):
            if names:
                others = _others(partial(_attribute, cell), attributes, effects)
                told = [one.local_name or _in_words(one.source)] if others else []
                found.append(Change(owner=cell, names=names, told=tuple(told)))
            continue
        where = _changed_at(one, effects, output.local_scope)
        before = one.value if "NNModule" in type(one).__name__ else held.get(key)
        if not where or before is None:
            continue
        others = _others(partial(_attribute, before), attributes, effects)
        if names:
            told = [f"{where}.{name}" for name in others]
            found.append(Change(owner=before, names=names, told=tuple(told)))
        if not names or getattr(one, "items", None) is not None:
            is_same = one.is_python_constant() and _is_equal(one.as_python_constant(), before)
            found.append(Change(owner=before, told=() if is_same else (where,)))
    return found


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except ValueError:  # an empty cell
        return None


def _is_equal(constant: Any, before: Any) -> bool:
    """Whether a constant is what was there, which may be anything."""
    try:
        return bool(constant == before)
    except Exception:  # tensors and arrays say it of each element, a user's class what it likes
        return False


def _others(
    old: Callable[[str], Any],
    now: Mapping[str, Any],
    effects: Any,
    above: tuple[int, ...] = (),
) -> list[str]:
    """Of attributes, by name, those that are given another value than they had.

    One that was None has its value from then on, in every call alike. An object that is made anew
    is told by its own attributes.
    """
    found = []
    for name, value in now.items():
        before = old(name)
        if before is None or isinstance(before, Tensor | torch.nn.Module):
            continue
        inside = effects.store_attr_mutations.get(value, {})
        if value.is_python_constant():
            is_other = not _is_equal(value.as_python_constant(), before)
        elif inside and id(value) not in above:  # it may hold itself
            within = (*above, id(value))
            is_other = bool(_others(partial(_attribute, before), inside, effects, within))
        else:
            is_other = type(value).__name__ == "SymNodeVariable"
        if is_other:
            found.append(name)
    return found


def _changed_at(one: Any, effects: Any, scope: dict[str, Any]) -> str:
    """Where an object is that the call being traced changes; "" if it does not, or made it."""
    if one.source is None or not effects.is_modified(one) or _is_input(one.source, scope):
        return ""
    try:
        where = _in_words(one.source)
    except NotImplementedError:  # made by the call itself
        return ""
    # `attribute_stores` has these tables.
    return "" if "._buffers" in where or "._parameters" in where else where


def kept_tensors() -> list[tuple[str, str]]:
    """Tensors that the call being traced leaves in lists, dicts and other objects of its module.

    Or in globals. What is an input's is not looked at: a dict that is given may be changed.

    Returns:
        Where it is left, such as "self.losses", and the graph node.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    effects: Any = output.side_effects
    found: dict[str, tuple[str, str]] = {}

    def keep(held: Any, where: str) -> None:
        for tensor in _tensors(held, set()):
            if tensor.source is None or _is_input(tensor.source, output.local_scope):
                node = tensor.as_proxy().node.name
                found.setdefault(node, (where, node))

    for one in effects.id_to_variable.values():
        where = _changed_at(one, effects, output.local_scope)
        if not where:
            continue
        keep(one, where)
        for name, value in effects.store_attr_mutations.get(one, {}).items():
            if "NNModule" not in type(one).__name__ or not value.is_tensor():
                keep(value, f"{where}.{name}")
    return list(found.values())


def _tensors(held: Any, met: set[int]) -> list[Any]:
    """The tensors of a container, however deep, as Dynamo's variables, but of those met before."""
    if "Lazy" in type(held).__name__ or id(held) in met:  # not looked at, so not new
        return []
    met.add(id(held))
    if held.is_tensor():
        return [held]
    own: dict[str, Any] = getattr(held, "__dict__", {})  # of constants, `items` is a property
    items: Any = getattr(own.get("_base_vt"), "__dict__", own).get("items", ())
    values = items.values() if isinstance(items, dict) else items
    inside = values if isinstance(items, dict | list | tuple) else ()
    return [tensor for value in inside for tensor in _tensors(value, met)]


def _is_input(source: Any, scope: dict[str, Any]) -> bool:
    """Whether something is reached from an argument that is no module."""
    while hasattr(source, "base"):
        source = source.base
    name = getattr(source, "local_name", None)
    return name is not None and not isinstance(scope.get(name), torch.nn.Module)


def _in_words(source: Any) -> str:
    """Where something is, as a user writes it."""
    path = re.sub(r"^L\['(\w+)'\]", r"\1", source_name(source))
    path = re.sub(r"\._modules\['(\w+)'\]", r".\1", path)
    path = re.sub(r"^G\['(\w+)'\]", r"\1", path)
    # A global of another file than forward's.
    return re.sub(r"^__import_(\w+)", lambda found: found[1].replace("_dot_", "."), path)


def given_to_backend(step: Any) -> dict[str, Any]:
    """The arguments that `torch.compile` keeps for a step's backend, and compares by value.

    It is its own dict, no copy: what is put into it takes effect.
    """
    backend: Any = getattr(getattr(step, "dynamo_ctx", None), "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    found: dict[str, Any] = getattr(backend, "kwargs", {})
    return found


def specialized_at(placeholder: fx.Node) -> str:
    """`file:line` of the code that turned a symbolic size of this graph into a number."""
    value = placeholder.meta.get("example_value")
    shape_env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    stacks = getattr(shape_env, "specialization_stacks", {})
    name = source_name(placeholder.meta["grapharg"].source)
    for source, stack in stacks.items():
        if source_name(source).startswith(name) and len(stack):
            return f"{stack[-1].filename}:{stack[-1].lineno}"
    return ""


_TRACER = re.compile(r"[\\/]torch[\\/]_dynamo[\\/]")


def other_branches(dims: Mapping[fx.Node, int], parts: int) -> list[str]:
    """Branches that were decided by a symbolic size, and otherwise would be by one of equal parts.

    Args:
        dims: Which size of a placeholder is divided.
        parts: Into how many parts.

    Returns:
        The user's line of each, as torch tells it: its text and place.
    """
    sizes: dict[Any, int] = {}
    env: Any = None
    for placeholder, dim in dims.items():
        size = placeholder.meta["example_value"].shape[dim]
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
            sizes[size.node.expr] = size.node.hint // parts
            env = size.node.shape_env
    found = []
    for guard in env.guards if env is not None else ():
        # Decided for an operator, it is looked at where the operator runs on a microbatch.
        is_branch = _TRACER.search(str(guard.sloc.framework_loc)) is not None
        if is_branch and str(env.replace(guard.expr).xreplace(sizes)) == "False":
            found.append(str(guard.sloc.maybe_user_loc))
    return list(dict.fromkeys(found))


def source_of(placeholder: fx.Node) -> Any:
    """Where a graph's argument comes from; None if it is unknown."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def graph_break_of(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Why and where (`file:line`) Dynamo cut this graph, or None where it holds the whole call."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    frames = list(getattr(reason, "user_stack", ()) or ())
    stack = [frame for frame in frames if not is_library(frame.filename)] or frames
    where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "unknown line"
    return str(reason.reason), where
