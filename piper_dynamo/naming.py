"""Users' own names: of a graph's arguments, and of the modules in which its calls were made.

Dynamo names things by how forward reaches them. A module that is registered by one name and called
through a plain list, `self.blocks[0]`, has the name in `model.named_modules()`.

Signature: Dynamo's graph, the source of an argument -> names as users write them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from piper_dynamo import _torch_compat as compat
from piper_dynamo import _torch_dynamo as dynamo
from piper_dynamo.ir.spec import ROOT, paths_in
from piper_dynamo.ir.tags import nodes_of


class Names:
    """What things are called in the call that is being traced.

    Attributes:
        _wrapped: What `*args` and `**kwargs` of a decorated forward are.
        _state: All names of the model's parameters and buffers, by identity.
    """

    def __init__(self) -> None:
        self._wrapped = dynamo.argument_names()
        model = dynamo.traced_model()
        self._state: dict[int, list[str]] = {}
        for named in (nn.Module.named_parameters, nn.Module.named_buffers):
            held = named(model, remove_duplicate=False) if model is not None else ()
            for name, tensor in held:
                self._state.setdefault(id(tensor), []).append(name)

    def of(self, source: Any, default: str, value: Any = None) -> str:
        """The name of what has a source in Dynamo.

        Args:
            source: Where it comes from.
            default: The name of what has no source.
            value: The tensor at the traced call.
        """
        found = user_name(source, default, self._wrapped)
        names = self._state.get(id(value), [found])
        return found if found in names else names[0]


def name_modules(gm: fx.GraphModule) -> None:
    """Let the modules that calls were made in have names of `model.named_modules()`."""
    model = dynamo.traced_model()
    if model is None:
        return
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(str(id(module)), []).append(name)
    for node in nodes_of(gm):
        stack = node.meta.get("nn_module_stack") or {}
        for (key, (_, kind)), path in zip(stack.items(), paths_in(stack), strict=True):
            known = names.get(key.partition("@")[0], [path])  # "@1": of a second call
            if path not in known:
                node.meta["nn_module_stack"] = stack = {
                    **stack,
                    key: (f"{ROOT}.{known[0]}", kind),
                }


# Where modules keep what they hold: no part of a user's name.
_TABLES = ("__dict__", "_modules", "_parameters", "_buffers", "_orig_mod")


def user_name(
    source: Any, default: str, wrapped: tuple[Mapping[str, Sequence[str]], str] = ({}, "")
) -> str:
    """The user's own name for a source: `layers.0.weight` for state, `batch['tokens']` for data.

    Args:
        source: Dynamo's source.
        default: The name of what has no source.
        wrapped: What `*args` and `**kwargs` of a decorated forward are; see `argument_names`.
    """
    if source is None:
        return default
    parts: list[str] = []
    is_inside = False
    for link in reversed(compat.source_chain(source)):
        if not is_inside and "NNModuleSource" in type(link).__name__:
            is_inside, parts = True, parts[:1]  # whatever leads to the root: `args[0]`
        local = getattr(link, "local_name", None) or getattr(link, "global_name", None)
        if local is not None:
            parts = [str(local)]
            continue
        index = getattr(link, "index", None)
        member = getattr(link, "member", None)
        if member in _TABLES or index in _TABLES:
            continue
        if member is not None:
            parts.append(f".{member}")
        elif index is not None and type(link).__name__ != "ConstDictKeySource":
            parts.append(f".{index}" if is_module_state(link) else f"[{index!r}]")
    if not parts:
        return default
    if is_module_state(source) and len(parts) > 1:
        return "".join(parts[1:]).lstrip(".")
    many, named = wrapped
    if len(parts) > 1 and parts[0] == named:
        return parts[1][2:-2] + "".join(parts[2:])  # kwargs['tokens']
    if len(parts) > 1 and parts[0] in many:
        known = many[parts[0]][int(parts[1][1:-1])]  # args[1]
        return known + "".join(parts[2:]) if known else "".join(parts)
    return "".join(parts)


def is_module_state(source: Any) -> bool:
    """Whether a source hangs off a module (parameter, buffer, attribute) or is a global."""
    if source is None:
        return False
    for link in compat.source_chain(source):
        kind = type(link).__name__
        if "NNModuleSource" in kind or "ParamBuffer" in kind or kind == "GlobalSource":
            return True
        if getattr(link, "local_name", None) == "self":
            return True
    return False
