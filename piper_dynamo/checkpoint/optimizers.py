"""Optimizers and learning-rate schedulers by the user's parameter names.

An optimizer keeps its settings per group and its state per parameter object; which parameters a
rank has, and so which groups, depends on the layout. Here everything is said of a parameter's name,
so that a rank of another layout can put its own groups together again.

Terms: a *setting* is a value of a group (`lr`, `betas`, ...); *state* is what the optimizer keeps
per parameter. A scheduler's lists with one value per group are settings, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piper_dynamo.errors import PiperError, format_error, join_faults

Optimizer = torch.optim.Optimizer
Named = Mapping[int, str]  # the names of the parameters that a rank holds, by identity

# Of a group, and no setting of the user's.
_NOT_SETTINGS = ("params", "param_names")
# A scheduler's lists with one value per group (torch.optim.lr_scheduler).
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
# State of one number that is no tensor of the parameter's shape, where shapes cannot tell.
_COUNTERS = ("step", "mu_product", "eta", "mu")
KIND = "optimizer class"  # beside the settings


def listed(optimizers: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that were given: none, one or several.

    Raises:
        PiperError: Something else was given.
    """
    found = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    for one in found:
        if not isinstance(one, Optimizer):
            raise PiperError(f"expected a torch.optim.Optimizer, got {type(one).__name__}")
    return found


def _groups(optimizers: Sequence[Optimizer], named: Named) -> Iterator[tuple[Any, Any, list[str]]]:
    """(optimizer, group, names of its parameters); an empty anchor has no name."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group, [named[id(p)] for p in group["params"] if id(p) in named]


def check_parameters(optimizers: Sequence[Optimizer], named: Named, anchor: Tensor) -> None:
    """Optimizers step what this rank holds, each parameter once.

    Raises:
        PiperError: They step something else.
    """
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in named and param is not anchor:
                    raise PiperError(
                        format_error(
                            f"{type(optimizer).__name__} steps a tensor of shape "
                            f"{tuple(param.shape)} that is no parameter of this step",
                            hint="make the optimizer over piper.parameters(step), after prepare",
                        )
                    )
                if id(param) in seen:
                    raise PiperError(f"parameter {named.get(id(param))!r} is in two optimizers")
                seen.add(id(param))


def settings_of(optimizers: Sequence[Optimizer], named: Named) -> dict[str, dict[str, Any]]:
    """The settings of each parameter that this rank's optimizers step."""
    found = {}
    for optimizer, group, names in _groups(optimizers, named):
        settings = {k: v for k, v in group.items() if k not in _NOT_SETTINGS}
        for name in names:
            found[name] = {KIND: type(optimizer).__name__, **settings}
    return found


def state_of(optimizers: Sequence[Optimizer], named: Named) -> dict[str, dict[str, Any]]:
    """The state of each parameter that has some, as the optimizer keeps it."""
    found = {}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if id(param) in named:
                found[named[id(param)]] = dict(state)
    return found


def merge(parts: Sequence[Mapping[str, Mapping[str, Any]]], what: str) -> dict[str, dict[str, Any]]:
    """One mapping by name of all ranks' ones.

    Raises:
        PiperError: Ranks disagree about a name they share.
    """
    found: dict[str, dict[str, Any]] = {}
    faults = []
    for rank, part in enumerate(parts):
        for name, values in part.items():
            known = found.setdefault(name, dict(values))
            faults += [
                f"{name}: {key} is {values.get(key)} on rank {rank}, {known.get(key)} on another"
                for key in sorted({*known, *values})
                if not same(known.get(key), values.get(key))
            ]
    if faults:
        raise PiperError(
            join_faults(
                f"ranks have different {what} of one parameter",
                faults,
                hint="make groups by parameter names, alike on every rank",
            )
        )
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two settings are equal; tensors by value."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def check_settings(
    saved: Mapping[str, Mapping[str, Any]], optimizers: Sequence[Optimizer], named: Named
) -> None:
    """The saved settings fit this rank's groups.

    Raises:
        PiperError: They do not; lists every fault.
    """
    faults = []
    stepped: set[str] = set()
    for optimizer, _, names in _groups(optimizers, named):
        stepped.update(names)
        faults += [
            f"{name} is stepped here and was not when it was saved"
            for name in names
            if name not in saved
        ]
        known = [name for name in names if name in saved]
        for name in known:
            kind = type(optimizer).__name__
            if saved[name][KIND] != kind:
                faults.append(f"{name} was stepped by {saved[name][KIND]}, and here by {kind}")
        for name in known[1:]:
            differing = _differing(saved[known[0]], saved[name])
            if differing:
                shown = ", ".join(
                    f"{key} {saved[known[0]].get(key)} and {saved[name].get(key)}"
                    for key in differing
                )
                faults.append(f"{known[0]} and {name} are in one group here, saved with {shown}")
    lost = [name for name in named.values() if name in saved and name not in stepped]
    faults += [
        f"{name} was stepped when it was saved, and no optimizer steps it here" for name in lost
    ]
    if faults:
        raise PiperError(
            join_faults(
                "the optimizer is not the one that was saved",
                faults,
                hint="make the same optimizer with the same groups, by parameter names",
            )
        )


def _differing(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    keys = sorted({*left, *right} - {KIND})
    return [key for key in keys if not same(left.get(key), right.get(key))]


def apply_settings(
    saved: Mapping[str, Mapping[str, Any]], optimizers: Sequence[Optimizer], named: Named
) -> None:
    """Give every group its saved settings; one without parameters on this rank keeps its own."""
    for _, group, names in _groups(optimizers, named):
        for key, value in (saved[names[0]] if names else {}).items():
            old = group.get(key)
            if isinstance(old, Tensor) and isinstance(value, Tensor):
                old.copy_(value)  # somebody may hold it: a captured graph, a scheduler
            elif key != KIND:
                group[key] = value.clone() if isinstance(value, Tensor) else value


def shaped_keys(shapes: Mapping[str, tuple[int, ...]], states: Mapping[str, Any]) -> set[str]:
    """Which entries of the saved state have the parameter's shape, and are laid out like it.

    A parameter without dims cannot tell a moment from a counter: the other parameters do.

    Args:
        shapes: Of parameters, by name.
        states: By parameter name, the shape of each of its entries.
    """
    shaped: set[str] = set()
    counters: set[str] = set()
    for name, entries in states.items():
        for key, shape in entries.items():
            if shapes[name]:
                (shaped if shape == shapes[name] else counters).add(key)
    unclear = {key for entries in states.values() for key in entries} - shaped - counters
    return (shaped - counters) | {key for key in unclear if key not in _COUNTERS}


# Schedulers


def split_scheduler(
    state: Mapping[str, Any], names: Sequence[Sequence[str]], path: str = ""
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A scheduler's state without its lists by group, and these by parameter name.

    Args:
        state: Of its `state_dict()`.
        names: The names of each group's parameters.
        path: Of a scheduler inside of others.
    """
    rest: dict[str, Any] = {}
    lists: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list | tuple) and len(value) == len(names):
            for group, one in zip(names, value, strict=True):
                for name in group:
                    lists.setdefault(name, {})[path + key] = one
        elif key == "_schedulers":
            inner = [
                split_scheduler(one, names, f"{path}{i}.")
                if isinstance(one, Mapping)
                else (one, {})
                for i, one in enumerate(value)
            ]
            rest[key] = [one for one, _ in inner]
            for _, found in inner:
                for name, values in found.items():
                    lists.setdefault(name, {}).update(values)
        else:
            rest[key] = value
    return rest, lists


def join_scheduler(
    rest: Mapping[str, Any],
    lists: Mapping[str, Mapping[str, Any]],
    mine: Mapping[str, Any],
    names: Sequence[Sequence[str]],
    path: str = "",
) -> dict[str, Any]:
    """The saved state with lists for this rank's groups.

    Args:
        rest: What `split_scheduler` gave first.
        lists: What it gave second, of all ranks.
        mine: This rank's own state: it has the values of groups without parameters.
        names: The names of each group's parameters, on this rank.
        path: Of a scheduler inside of others.
    """
    found = dict(rest)
    for key, value in mine.items():
        if key in _PER_GROUP and key not in rest:
            found[key] = [
                lists[group[0]][path + key] if group else own
                for group, own in zip(names, value, strict=True)
            ]
    if "_schedulers" in rest:
        found["_schedulers"] = [
            join_scheduler(one, lists, own, names, f"{path}{i}.")
            if isinstance(one, Mapping)
            else one
            for i, (one, own) in enumerate(
                zip(rest["_schedulers"], mine["_schedulers"], strict=True)
            )
        ]
    return found


def group_names(optimizer: Optimizer, named: Named) -> list[list[str]]:
    """The names of each group's parameters."""
    return [names for _, _, names in _groups([optimizer], named)]
