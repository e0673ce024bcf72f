"""Strategies: everything a user asks for about one step.

Terms: a *strategy* is directives in any order, with the mesh whose axes they name, which output is
the loss, and which module paths make regions. It compares by value, hashes, copies, pickles, prints
as the code that builds it, and round-trips through JSON.

Signature: directives -> one record, checked for what can be known without a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, get_args

from piper_dynamo import strategy_json
from piper_dynamo.directives import (
    Directive,
    Order,
    Place,
    Precision,
    Recompute,
    Replicate,
    Shard,
    Split,
)
from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.filters import Filter
from piper_dynamo.ir.task import is_tag_name
from piper_dynamo.mesh import Mesh
from piper_dynamo.user_kernels import Kernel, checked
from piper_dynamo.values import Faults, FrozenMap, code, is_whole, user_line

__all__ = [
    "Directive",
    "Filter",
    "Kernel",
    "Mesh",
    "Order",
    "Place",
    "Precision",
    "Recompute",
    "Replicate",
    "Shard",
    "Split",
    "Strategy",
]

LossPath: TypeAlias = str | int | tuple[str | int, ...]
RegionTags: TypeAlias = FrozenMap[str, int]

_D = TypeVar("_D", Split, Place, Replicate, Shard, Recompute, Precision, Order)
_KINDS = get_args(Directive)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Strategy:
    """How one step is distributed: `Strategy(Split(...), Place(...), *orders, mesh=mesh)`.

    Attributes:
        directives: In the order given, which never changes the result.
        mesh: The mesh whose axes Replicate and Shard name; None where none is named.
        loss: Which output is the loss: key, path ("losses.total" or ("losses", 0)) or index; None:
            the only differentiable scalar.
        regions: Tags by module path, as fnmatch patterns: {"layers.[0-3]": {"PP": 0}}.
        kernels: Functions in the place of operators that compute the same, wherever these are.
    """

    directives: tuple[Directive, ...]
    mesh: Mesh | None
    loss: "LossPath | None"
    regions: FrozenMap[str, RegionTags] | None
    kernels: tuple[Kernel, ...]

    def __init__(
        self,
        *directives: Directive,
        mesh: Mesh | None = None,
        loss: LossPath | list[str | int] | None = None,
        regions: Mapping[str, Mapping[str, int]] | None = None,
        kernels: Sequence[Kernel] | None = None,
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed, and every contradiction.
        """
        faults = Faults("piper.Strategy", user_line())
        if not _check_types(directives, faults):
            faults.check()
        splits = [d for d in directives if isinstance(d, Split)]
        if len(splits) > 1:
            both = "\n    ".join(split.label for split in splits)
            faults.say(f"one Split at most, for now; leave one of these out:\n    {both}")
        if mesh is not None and not isinstance(mesh, Mesh):
            faults.add("mesh", mesh, "must be a piper.Mesh, or None")
        else:
            _check_mesh(directives, mesh, faults)
        path = tuple(loss) if isinstance(loss, list | tuple) else loss
        if path is not None and not _is_path(path):
            faults.add(
                "loss", loss, "must be a key, an index of at least 0, a path of these, or None"
            )
        tagged = _regions(regions, faults)
        substitutes = checked(kernels, faults)
        faults.check()
        object.__setattr__(self, "directives", directives)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "loss", path)
        object.__setattr__(self, "regions", tagged)
        object.__setattr__(self, "kernels", substitutes)

    def __repr__(self) -> str:
        parts = [repr(directive) for directive in self.directives]
        for name in ("mesh", "loss", "regions"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name}={code(value)}")
        if self.kernels:
            parts.append(f"kernels={list(self.kernels)!r}")
        if not parts:
            return "piper.Strategy()"
        body = ",\n".join(parts).replace("\n", "\n    ")
        return f"piper.Strategy(\n    {body},\n)"

    def of(self, kind: type[_D]) -> tuple[_D, ...]:
        """The directives of one kind, in the order given."""
        return tuple(d for d in self.directives if isinstance(d, kind))

    def to_json(self) -> str:
        """The strategy as JSON text; `from_json` gives an equal one. Without the user's lines.

        Raises:
            PiperStrategyError: The strategy holds a function.
        """
        if self.kernels:
            raise PiperStrategyError(
                f"{self.kernels[0]!r} at {self.kernels[0].where} cannot be written as JSON: it is "
                "functions\n  hint  keep the strategy as Python"
            )
        return strategy_json.dump(
            strategy_json.Parts(self.directives, self.mesh, self.loss, self.regions)
        )

    @classmethod
    def from_json(cls, text: str) -> "Strategy":
        """The strategy in a JSON text: of `to_json`, or a schedule file of the published system.

        Raises:
            PiperSyntaxError: The text is neither.
            PiperStrategyError: It is, but asks for what is not allowed.
        """
        parts = strategy_json.load(text)
        return cls(*parts.directives, mesh=parts.mesh, loss=parts.loss, regions=parts.regions)


def _check_types(directives: Sequence[object], faults: Faults) -> bool:
    """Whether all are directives; a list among them is mostly a schedule that was not unpacked."""
    for position, one in enumerate(directives):
        if isinstance(one, _KINDS):
            continue
        if isinstance(one, Sequence | Iterator) and not isinstance(one, str):
            kind = type(one).__name__
            faults.say(f"argument {position} is a {kind}; unpack it: Strategy(..., *schedule, ...)")
        elif one is None or isinstance(one, Mapping | Mesh | str):
            faults.add(
                f"argument {position}", one, "is no directive; mesh, loss and regions go by keyword"
            )
        else:
            names = ", ".join(kind.__name__ for kind in _KINDS)
            faults.add(f"argument {position}", one, f"must be a directive: {names}")
    return not faults


def _check_mesh(directives: Sequence[Directive], mesh: Mesh | None, faults: Faults) -> None:
    for one in directives:
        label = one.label if not isinstance(one, Order) else ""
        if isinstance(one, Place) and mesh is not None:
            outside = [rank for rank in one.devices if rank >= mesh.size]
            if outside:
                faults.say(f"{label}: ranks {outside} are not in the mesh (0-{mesh.size - 1})")
        named = one.axes or () if isinstance(one, Replicate | Shard) else ()
        if isinstance(one, Replicate):
            named = tuple(dict.fromkeys((*named, *(one.shard_axes or ()))))
        if named and mesh is None:
            faults.say(
                f"{label} names axes, but there is no mesh; add mesh=piper.Mesh(shape, names)"
            )
        unknown = [axis for axis in named if mesh is not None and axis not in mesh.names]
        if unknown and mesh is not None:
            faults.say(
                f"{label}: the mesh has no axis {unknown}; there are: {', '.join(mesh.names)}"
            )


def _is_path(path: object) -> bool:
    if isinstance(path, tuple):
        return bool(path) and all(not isinstance(part, tuple) and _is_path(part) for part in path)
    return (isinstance(path, str) and path != "") or (is_whole(path) and path >= 0)


def _regions(given: Any, faults: Faults) -> FrozenMap[str, RegionTags] | None:
    """Checked and frozen; an empty dict is none."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        faults.add("regions", given, 'must be a dict such as {"layers.[0-3]": {"PP": 0}}, or None')
        return None
    made: dict[str, RegionTags] = {}
    for pattern, tags in given.items():
        label = f"regions[{pattern!r}]"
        if not isinstance(pattern, str):
            faults.add("regions", pattern, "a pattern is a string over module paths")
        elif not isinstance(tags, Mapping) or not tags:
            faults.add(label, tags, 'must be a dict of tags such as {"PP": 0}')
        else:
            for tag, index in tags.items():
                if not isinstance(tag, str) or not is_tag_name(tag):
                    faults.say(
                        f"{label}: {tag!r} is no tag; write a name such as 'PP', no digit last"
                    )
                faults.whole(f"{label}[{tag!r}]", index, 0)
            made[pattern] = FrozenMap(tags)
    return FrozenMap(made) if made else None
