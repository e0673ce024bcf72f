"""Strategies as JSON text, and the schedule files of the published system of the same name.

Terms: the *own form* is an object `{"piper": 1, "directives": [...], "mesh":, "loss":, "regions":}`
whose directives carry the names of their arguments; the *published form* is an array of directives
(arXiv 2606.11169). Both are read strictly: what is not known is refused, never skipped.

The published form is read by its meaning, with these differences:

- its numbers of devices are ranks;
- `devices` of replicate and shard must be those the region is placed on, and are not kept;
- `stream` of place has no counterpart: each pair of ranks has a stream per direction;
- gradients are averaged over replicas, once per step, where it sums them after every backward;
- without `shard_grads` and `shard_params` nothing is gathered, and what is said of it is not kept;
- `shard_grads` is `zero=2`, `shard_params` is `zero=3`; `bucket_size` is in MB in both.

Signature: directives, mesh, loss, regions <-> JSON text.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

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
from piper_dynamo.errors import PiperStrategyError, PiperSyntaxError
from piper_dynamo.files import MOST_BYTES, check_size
from piper_dynamo.filters import Filter, TagValue
from piper_dynamo.mesh import Mesh
from piper_dynamo.values import is_whole, shown

VERSION = 1
_MOST_DIGITS = 18  # of a number that is written as a text

_KINDS: Mapping[str, type[Directive]] = {
    "split": Split,
    "place": Place,
    "replicate": Replicate,
    "shard": Shard,
    "recompute": Recompute,
    "precision": Precision,
    "order": Order,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a strategy is made of; see `Strategy`."""

    directives: tuple[Directive, ...]
    mesh: Mesh | None = None
    loss: Any = None
    regions: Mapping[str, Mapping[str, int]] | None = None


def dump(parts: Parts) -> str:
    """The own form: one directive a line, a schedule one group a line.

    Raises:
        PiperStrategyError: A Split's loss is a function.
    """
    rows = [_dump_directive(directive) for directive in parts.directives]
    body = ",\n    ".join(rows)
    lines = [
        f'"piper": {VERSION}',
        f'"directives": [\n    {body}\n  ]' if rows else '"directives": []',
    ]
    if parts.mesh is not None:
        mesh = {"shape": list(parts.mesh.shape), "names": list(parts.mesh.names)}
        if parts.mesh.order != parts.mesh.names:
            mesh["order"] = list(parts.mesh.order)
        lines.append(f'"mesh": {json.dumps(mesh)}')
    if parts.loss is not None:
        lines.append(f'"loss": {json.dumps(_plain(parts.loss))}')
    if parts.regions is not None:
        lines.append(f'"regions": {json.dumps(_plain(parts.regions))}')
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _dump_directive(directive: Directive) -> str:
    row: dict[str, Any] = {"op": _NAMES[type(directive)]}
    for one in fields(directive):
        value = getattr(directive, one.name)
        if not one.init or (one.default is not MISSING and value == one.default):
            continue
        if callable(value):
            raise PiperStrategyError(
                f"{directive.label} cannot be written as JSON: {one.name} is a "
                f'function\n  hint  use loss="mean" or "sum", or keep the strategy as Python'
            )
        row[one.name] = _plain(value)
    if isinstance(directive, Order):
        groups = ",\n      ".join(json.dumps(group) for group in row.pop("groups"))
        head = json.dumps(row)[1:-1]
        return f'{{{head}, "groups": [\n      {groups}\n    ]}}'
    return json.dumps(row)


def _plain(value: Any) -> Any:
    """As JSON has it: tuples as lists, mappings and filters as objects."""
    match value:
        case Filter():
            return {tag: _plain(wanted) for tag, wanted in value.items}
        case tuple():
            return [_plain(one) for one in value]
        case Mapping():
            return {key: _plain(one) for key, one in value.items()}
        case _:
            return value


def load(text: str) -> Parts:
    """The parts of a strategy in either form.

    Raises:
        PiperSyntaxError: The text is not JSON, or in neither form.
        PiperStrategyError: A directive is not allowed, or there is nothing like it here.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise PiperSyntaxError(f"not a strategy: expected its JSON text; got {shown(text)}")
    try:
        check_size(len(text), MOST_BYTES, "the text of a strategy")
        data = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except (ValueError, TypeError, RecursionError) as error:
        is_path = isinstance(text, str) and text.rstrip().endswith(".json")
        hint = "\n  hint  of a file give the text: Path(...).read_text()" if is_path else ""
        raise PiperSyntaxError(f"not a strategy: the text is not JSON: {error}{hint}") from error
    if isinstance(data, list):
        return Parts(_load_published(data))
    if not isinstance(data, dict) or "piper" not in data:
        raise PiperSyntaxError(
            'not a strategy: expected an object with "piper" and "directives", as to_json writes, '
            f"or an array of directives; got {shown(data)}"
        )
    if not is_whole(data["piper"]) or data["piper"] != VERSION:
        raise PiperSyntaxError(
            f"a strategy of version {data['piper']!r}; this Piper reads version {VERSION}"
        )
    _known(data, {"piper", "directives", "mesh", "loss", "regions"}, "the strategy")
    rows = data.get("directives")
    if not isinstance(rows, list):
        raise PiperSyntaxError('not a strategy: "directives" must be an array')
    mesh = data.get("mesh")
    if mesh is not None:
        if not isinstance(mesh, dict) or set(mesh) - {"order"} != {"shape", "names"}:
            raise PiperSyntaxError(
                'mesh must be an object of "shape", "names" and, where it is not that of the '
                f'names, "order": {shown(mesh)}'
            )
        mesh = Mesh(mesh["shape"], mesh["names"], mesh.get("order"))
    directives = tuple(_load_directive(row, i) for i, row in enumerate(rows))
    return Parts(directives, mesh, data.get("loss"), data.get("regions"))


def _load_directive(row: Any, index: int) -> Directive:
    label = f"directives[{index}]"
    kind = _KINDS[_op(row, label, set(_KINDS))]
    arguments = {one.name: one for one in fields(kind) if one.init}
    given = {key: value for key, value in row.items() if key != "op"}
    _known(given, set(arguments), label)
    needed = (
        ("groups",) if kind is Order else ("filter", "devices") if kind is Place else ("filter",)
    )
    _needed(row, needed, label)
    try:
        return kind(**given)
    except PiperStrategyError as error:
        raise PiperStrategyError(f"{label}: {error}") from None


# ---- the published form -------------------------------------------------------------------------

_FIELDS: Mapping[str, tuple[set[str], tuple[str, ...]]] = {  # known, of these needed
    "place": ({"filter", "devices", "device", "stream"}, ("filter",)),
    "replicate": (
        {"filter", "devices", "device", "reduce_stream", "gather_stream", "bucket_size"}
        | {"shard_grads", "shard_params", "prefetch_distance", "regather"},
        ("filter",),
    ),
    "shard": ({"filter", "devices", "device", "stream"}, ("filter",)),
    "split": (
        {"filter", "dim_name", "num_microbatches"},
        ("filter", "dim_name", "num_microbatches"),
    ),
    "order": ({"filters"}, ("filters",)),
}
# Directives of its extensions that nothing here expresses yet.
_ABSENT = ("shard_tensor", "ring_exchange", "fuse_collectives", "mesh", "route", "layout")


def _load_published(rows: list[Any]) -> tuple[Directive, ...]:
    made: list[Directive] = []
    for index, row in enumerate(rows):
        label = f"directive {index}"
        op = _op(row, label, set(_FIELDS) | set(_ABSENT))
        if op in _ABSENT:
            raise PiperStrategyError(
                f"{label} is {op!r}, which this version does not have\n"
                f"  hint  it reads: {', '.join(_FIELDS)}"
            )
        known, needed = _FIELDS[op]
        _known({key: value for key, value in row.items() if key != "op"}, known, label)
        _needed(row, needed, label)
        made.append(_READERS[op](row, label))
    for index, (row, directive) in enumerate(zip(rows, made, strict=True)):
        if isinstance(directive, Replicate | Shard):
            _check_devices(directive, _devices(row, f"directive {index}"), made, index)
    return tuple(made)


def _check_devices(
    directive: Replicate | Shard, devices: list[int], made: list[Directive], index: int
) -> None:
    """Replicate and Shard act on the devices a region is placed on; a file may not say others."""
    for place in made:
        if not isinstance(place, Place) or not _meet(place.filter, directive.filter):
            continue
        if set(place.devices) != set(devices):
            raise PiperStrategyError(
                f"directive {index} names devices {devices}, but the region is placed elsewhere\n"
                f"  place  {place!r}\n  hint   name the same devices in both"
            )


def _meet(one: Filter, other: Filter) -> bool:
    """Whether a region may be meant by both: of tags in both, some index is."""
    mine, others = one.tags, other.tags
    return all(_share(mine[tag], others[tag]) for tag in mine.keys() & others.keys())


def _share(one: TagValue, other: TagValue) -> bool:
    if "*" in (one, other):
        return True
    sides = [set(side) if isinstance(side, tuple) else {side} for side in (one, other)]
    return not sides[0].isdisjoint(sides[1])


def _place(row: dict[str, Any], label: str) -> Place:
    return Place(_filter(row["filter"], label), _devices(row, label))


def _replicate(row: dict[str, Any], label: str) -> Replicate:
    flags = {name: row.get(name, False) for name in ("shard_grads", "shard_params")}
    flags["regather"] = row.get("regather", True)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise PiperSyntaxError(f"{label}: {name} must be true or false: {shown(flag)}")
    zero = 3 if flags["shard_params"] else 2 if flags["shard_grads"] else 0
    gathers = {
        "gather_stream": row.get("gather_stream"),
        "prefetch": row.get("prefetch_distance", 1),
        "keep": "chunk" if flags["regather"] else "step",
    }
    return Replicate(
        _filter(row["filter"], label),
        zero=zero,
        bucket_mb=row.get("bucket_size"),
        reduce_stream=row.get("reduce_stream"),
        **(gathers if zero else {}),
    )


def _shard(row: dict[str, Any], label: str) -> Shard:
    return Shard(_filter(row["filter"], label), stream=row.get("stream"))


def _split(row: dict[str, Any], label: str) -> Split:
    return Split(
        _filter(row["filter"], label),
        dim=row["dim_name"],
        num_microbatches=_whole(row["num_microbatches"]),
    )


def _order(row: dict[str, Any], label: str) -> Order:
    groups = row["filters"]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise PiperSyntaxError(f"{label}: filters must be an array of arrays of filters")
    return Order([[_filter(one, label) for one in group] for group in groups])


_READERS: Mapping[str, Callable[[dict[str, Any], str], Directive]] = {
    "place": _place,
    "replicate": _replicate,
    "shard": _shard,
    "split": _split,
    "order": _order,
}


def _devices(row: dict[str, Any], label: str) -> list[int]:
    if "devices" in row and "device" in row:
        raise PiperSyntaxError(f"{label}: both 'devices' and 'device'; leave out one")
    devices = row.get("devices", row.get("device"))
    if not isinstance(devices, list) or not devices:
        raise PiperSyntaxError(f"{label}: devices must be an array of ranks, not {shown(devices)}")
    return [_whole(device) for device in devices]


def _filter(given: Any, label: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise PiperSyntaxError(f"{label}: a filter is an object, not {shown(given)}")
    for tag, value in given.items():
        if value is None:
            raise PiperSyntaxError(
                f"{label}: {tag!r} is null, which only an annotation without an index matches; "
                'there are none\n  hint  write "*" for any index'
            )
    return {tag: value if tag == "PASS" else _whole(value) for tag, value in given.items()}


def _whole(value: Any) -> Any:
    """Its numbers may be texts; anything else is left for the directive to refuse."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS
    return int(value) if is_number else value


# ---- both forms ---------------------------------------------------------------------------------


def _op(row: Any, label: str, known: set[str]) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("op"), str):
        raise PiperSyntaxError(f'{label}: expected an object with "op", got {shown(row)}')
    op: str = row["op"]
    if op not in known:
        raise PiperSyntaxError(
            f"{label}: no directive {op!r}; there are: {', '.join(sorted(known))}"
        )
    return op


def _known(row: dict[str, Any], known: set[str], label: str) -> None:
    wrong = [key for key in row if key not in known]
    if wrong:
        raise PiperSyntaxError(
            f"{label}: unknown {', '.join(map(repr, wrong))}; known: {', '.join(sorted(known))}"
        )


def _needed(row: dict[str, Any], needed: tuple[str, ...], label: str) -> None:
    missing = [key for key in needed if key not in row]
    if missing:
        raise PiperSyntaxError(f"{label} ({row['op']}): {', '.join(map(repr, missing))} is missing")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise PiperSyntaxError(f"not a strategy: {double!r} comes twice in one object")
    return made


def _no_constant(name: str) -> Any:
    raise PiperSyntaxError(f"not a strategy: {name} is not a number of JSON")
