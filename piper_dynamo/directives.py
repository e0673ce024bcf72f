"""Directives: single requests of the user, as frozen records.

Terms: a *directive* is one request about the tasks its filter matches. Directives compare by value,
hash, copy, pickle and print as the code that builds them (functions print by name). Each checks
what can be known from its own arguments; `Strategy` checks them together, the passes check them
against the model.

Signature: what the user writes -> records that `piper_dynamo.passes` reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from piper_dynamo.filters import Filter, FilterLike
from piper_dynamo.ir.task import is_tag_name
from piper_dynamo.values import Faults, FrozenMap, code, is_number, is_whole, maker, user_line

Rule: TypeAlias = int | Literal["replicate"]
Loss: TypeAlias = Literal["mean", "sum"] | Callable[..., Any]
Keep: TypeAlias = Literal["chunk", "step"] | int
DType: TypeAlias = Literal["bf16", "fp16", "fp32", "fp64"]
GroupLike: TypeAlias = FilterLike | Filter | Sequence[FilterLike | Filter]


_MOST = 2.0**53  # of a number: those above are not all floats
# Fields that are printed even where they have their default.
_ALWAYS = {"Split": ("dim", "num_microbatches")}


def _where() -> Any:
    """A field every directive has about where it is from, which is no part of its value."""
    return field(default="", init=False, compare=False, repr=False)


class _Record:
    """What the directives share: storing checked values, and printing as code."""

    __slots__ = ()
    where: str
    maker: str

    def _store(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "maker", maker())

    @property
    def label(self) -> str:
        """For messages: the code that builds it, the user's line, and what was called there."""
        return f"{self!r} at {self.where}" + (f", made by {self.maker}" if self.maker else "")

    def __repr__(self) -> str:
        parts = []
        name = type(self).__name__
        for position, one in enumerate(fields(self)):  # type: ignore[arg-type]  # every subclass is one
            value = getattr(self, one.name)
            if position == 0:
                parts.append(code(value))
            elif one.repr and (value != one.default or one.name in _ALWAYS.get(name, ())):
                value = list(value) if one.name == "devices" else value
                parts.append(f"{one.name}={code(value)}")
        return f"piper.{name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Split(_Record):
    """Run the matched part once per microbatch.

    rewrite:   the matched tasks -> a copy per microbatch; their gradients and losses combined
    requires:  every sliced input's size divides by `num_microbatches`
    keeps:     values up to summation order, of the model run on each microbatch in turn

    Attributes:
        filter: What is copied; `{}` is the whole model.
        dim: The tag that numbers the copies.
        num_microbatches: How many copies.
        inputs: By argument name, the dim it is sliced along, or "replicate"; the others along
            dim 0.
        loss: How the copies' losses combine: "mean", "sum", or a function that is called with a
            microbatch's forward arguments and returns its weight, a scalar, in the mean.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    dim: str = "MB"
    num_microbatches: int = 1
    inputs: FrozenMap[str, Rule] | None = None
    loss: Loss = "mean"
    where: str = _where()
    maker: str = _where()

    def __init__(
        self,
        filter: FilterLike | Filter,
        *,
        dim: str = "MB",
        num_microbatches: int = 1,
        inputs: Mapping[str, Rule] | None = None,
        loss: Loss = "mean",
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Split", where)
        wanted = _region_filter(filter, faults)
        if not isinstance(dim, str) or not (dim == "MB" or is_tag_name(dim)):
            faults.add(
                "dim", dim, 'must be a tag name that ends in a letter or "_"; the usual one is "MB"'
            )
        elif dim in wanted.tags:
            faults.say(f"filter asks for {dim!r}, the tag that this Split makes; leave it out")
        faults.whole("num_microbatches", num_microbatches, 1, "1 leaves the batch whole")
        rules: dict[str, Rule] | None = None
        if isinstance(inputs, Mapping):
            rules = dict(inputs)
            for name, rule in rules.items():
                faults.name("inputs: the argument's name", name)
                if not is_whole(rule) and rule != "replicate":
                    faults.add(
                        f"inputs[{name!r}]", rule, 'must be the dim to slice, or "replicate"'
                    )
        elif inputs is not None:
            faults.add("inputs", inputs, 'must be a dict {argument: dim or "replicate"}, or None')
        if loss not in ("mean", "sum") and not callable(loss):
            faults.add("loss", loss, 'must be "mean", "sum", or a function that gives a weight')
        faults.check()
        self._store(
            filter=wanted, dim=dim, num_microbatches=num_microbatches, loss=loss, where=where
        )
        self._store(inputs=FrozenMap(rules) if rules else None)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Place(_Record):
    """Run the matched tasks on these ranks.

    rewrite:   F.PP0 -> F.PP0 on `devices`; values that change group are sent
    requires:  each task is placed once, on ranks of the world; several if replicated or sharded
    keeps:     values bitwise; gradients of what is placed by microbatch up to summation order

    Attributes:
        filter: Which regions; with `MB`, for which microbatches. A backward runs where its
            forward ran. A region with several Places has its parameters on the ranks of each, and
            their gradients are summed over these.
        devices: Ranks, in replica order.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    devices: tuple[int, ...] = ()
    where: str = _where()
    maker: str = _where()

    def __init__(self, filter: FilterLike | Filter, devices: Sequence[int]) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Place", where)
        wanted = _region_filter(filter, faults)
        if isinstance(devices, str) or not isinstance(devices, Sequence):
            hint = f"write devices=[{devices}]" if is_whole(devices) else "such as [0, 1]"
            faults.add("devices", devices, f"must be a list of ranks; {hint}")
        elif not devices:
            faults.add("devices", devices, "is empty; name at least one rank")
        elif not all(is_whole(rank) and rank >= 0 for rank in devices):
            faults.add("devices", devices, "each rank must be a whole number of at least 0")
        elif len(set(devices)) < len(devices):
            faults.add("devices", devices, "names a rank twice; name each once")
        faults.check()
        self._store(filter=wanted, devices=tuple(devices), where=where)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Replicate(_Record):
    """Reduce the matched regions' gradients over replicas; ZeRO levels shard what a rank keeps.

    rewrite:   a parameter's gradient -> its mean over the replicas; sharded parameters gathered
    requires:  a parameter is reduced by one Replicate only; all regions have equally many replicas
    keeps:     values up to summation order, of one process on all replicas' data

    What only sharding uses (`shard_axes`, `gather_stream`, `prefetch`, `keep`) has no effect where
    `zero` shards nothing.

    Attributes:
        filter: Which regions.
        axes: Mesh axes that number the replicas; None: all devices of the region.
        shard_axes: Those of `axes` that shards lie on, whole along the others; None: all of `axes`.
        zero: 0 keeps all whole; 1 shards optimizer state; 2 also gradients; 3 also parameters.
        bucket_mb: Parameters are gathered and reduced in pieces of at most about this many MiB;
            None: a region at once.
        reduce_stream: Logical stream of the reductions.
        gather_stream: Logical stream of the gathers.
        prefetch: How many uses ahead a gather is issued.
        keep: How long gathered parameters stay: until the end of the "chunk", of the "step", or
            that many buckets.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    axes: tuple[str, ...] | None = None
    shard_axes: tuple[str, ...] | None = None
    zero: int = 0
    bucket_mb: float | None = None
    reduce_stream: str | None = None
    gather_stream: str | None = None
    prefetch: int = 1
    keep: Keep = "chunk"
    where: str = _where()
    maker: str = _where()

    def __init__(  # noqa: PLR0913  (the design's arguments)
        self,
        filter: FilterLike | Filter,
        *,
        axes: Sequence[str] | None = None,
        shard_axes: Sequence[str] | None = None,
        zero: int = 0,
        bucket_mb: float | None = None,
        reduce_stream: str | None = None,
        gather_stream: str | None = None,
        prefetch: int = 1,
        keep: Keep = "chunk",
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Replicate", where)
        wanted = _region_filter(filter, faults)
        replica_axes = _axes("axes", axes, faults)
        shards = _axes("shard_axes", shard_axes, faults)
        if replica_axes and shards and not set(shards) <= set(replica_axes):
            faults.add("shard_axes", shards, f"must be a part of axes={replica_axes}")
        if not is_whole(zero) or not 0 <= zero <= 3:
            faults.add("zero", zero, "must be 0, 1, 2 or 3")
        if bucket_mb is not None and not _is_positive(bucket_mb):
            faults.add("bucket_mb", bucket_mb, "must be a number of MiB above 0, or None")
        for argument, stream in (
            ("reduce_stream", reduce_stream),
            ("gather_stream", gather_stream),
        ):
            if stream is not None:
                faults.name(argument, stream, "None leaves the stream to Piper")
        faults.whole("prefetch", prefetch, 0, "0 gathers at the use itself")
        if zero == 0:
            for argument, value, default in (
                ("prefetch", prefetch, 1),
                ("keep", keep, "chunk"),
                ("gather_stream", gather_stream, None),
            ):
                if value != default:
                    faults.add(argument, value, "is about gathers, of which zero=0 has none")
        if keep not in ("chunk", "step") and not (is_whole(keep) and keep >= 1):
            faults.add(
                "keep", keep, 'must be "chunk", "step", or how many buckets stay (at least 1)'
            )
        faults.check()
        self._store(filter=wanted, axes=replica_axes, shard_axes=shards, zero=zero, where=where)
        self._store(bucket_mb=bucket_mb, reduce_stream=reduce_stream, gather_stream=gather_stream)
        self._store(prefetch=prefetch, keep=keep)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(_Record):
    """Split the matched expert regions' parameters over ranks; rows travel to them and back.

    rewrite:   dispatch ; experts ; combine  ->  exchange ; this rank's experts ; exchange back
    requires:  the region lies between `piper.moe.dispatch` and `combine`; num_experts divides
    keeps:     values up to summation order; an expert's gradient is the same for every layout.
        With a capacity: of a model whose experts drop the rows beyond their first ones, in the
        order of the tokens; such rows give zeros, and get none of the gradient

    Attributes:
        filter: Which regions.
        axes: Mesh axes to split over; None: all devices of the region.
        stream: Logical stream of the exchanges.
        capacity: Most rows an expert takes of one rank's microbatch (int), or that as a factor of
            the even share (float), rounded up; None: as many as there are. With one all sizes are
            known beforehand, and it holds on one rank, too.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    axes: tuple[str, ...] | None = None
    stream: str | None = None
    capacity: int | float | None = None
    where: str = _where()
    maker: str = _where()

    def __init__(
        self,
        filter: FilterLike | Filter,
        *,
        axes: Sequence[str] | None = None,
        stream: str | None = None,
        capacity: int | float | None = None,
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Shard", where)
        wanted = _region_filter(filter, faults)
        over = _axes("axes", axes, faults)
        if stream is not None:
            faults.name("stream", stream, "None leaves the stream to Piper")
        if capacity is not None and not _is_positive(capacity):
            faults.add(
                "capacity",
                capacity,
                "must be a number of rows (int) or a factor (float) above 0, or None",
            )
        faults.check()
        self._store(filter=wanted, axes=over, stream=stream, capacity=capacity, where=where)

    def __eq__(self, other: object) -> bool:
        # 2 tokens and 2.0 times the even share are different requests, but equal numbers.
        return isinstance(other, Shard) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.filter, self.axes, self.stream, type(self.capacity), self.capacity


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Recompute(_Record):
    """Keep less of the matched regions' forwards, and compute it again in their backwards.

    rewrite:   F keeps a, b, c ; B uses them  ->  F keeps a ; B computes b and c from it, uses them
    requires:  a region has one budget
    keeps:     values bitwise, dropout's masks too; experts' choices and exchanged rows are kept

    Attributes:
        filter: Which regions.
        budget: 0 keeps of a region only what comes into it; 1 keeps what is kept without a
            Recompute; between the two, that part of the difference in bytes, chosen so that the
            least work is done again.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    budget: float = 0.0
    where: str = _where()
    maker: str = _where()

    def __init__(self, filter: FilterLike | Filter, *, budget: float = 0.0) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Recompute", where)
        wanted = _region_filter(filter, faults)
        if "MB" in wanted.tags:
            faults.say("filter asks for MB, but a region keeps as much of each microbatch")
        if not is_number(budget) or not 0 <= budget <= 1:
            faults.add("budget", budget, "must be a number from 0 (inputs alone) to 1 (all)")
        faults.check()
        self._store(filter=wanted, budget=float(budget), where=where)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Precision(_Record):
    """Compute the matched regions in another dtype than their parameters are held in.

    rewrite:   w ; F(w, x) ; B(w)      ->  c = w.to(param), once per step, of what a rank holds ;
               F(c, x.to(param)) ; B(c)
               all_gather([w])         ->  all_gather([c])
               g = accumulate(B.MB0, B.MB1)  ->  the same in dtype `grad`
               all_reduce([g])         ->  all_reduce([g.to(reduce)])
               the step's gradients    ->  in the parameter's own dtype
    requires:  a region is matched by one Precision at most; regions that share a parameter agree
    keeps:     values up to rounding to these dtypes

    The model and the optimizer keep the parameters as they are, for instance in float32: the
    *master* of what the chunks see. Floating-point values that come into the matched regions from
    data or from other regions are cast to `param`, those that leave for other regions back to what
    these had without Precision; buffers stay as they are, and norms compute in the dtype of their
    running statistics.

    Attributes:
        filter: Which regions.
        param: What parameters are cast to for the chunks; None leaves them.
        grad: What gradients of microbatches are summed in; None: the parameter's own dtype.
        reduce: What gradients are reduced in; None: as they are summed.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    filter: Filter
    param: DType | None = None
    grad: DType | None = None
    reduce: DType | None = None
    where: str = _where()
    maker: str = _where()

    def __init__(
        self,
        filter: FilterLike | Filter,
        *,
        param: DType | None = None,
        grad: DType | None = None,
        reduce: DType | None = None,
    ) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Precision", where)
        wanted = _region_filter(filter, faults)
        if "MB" in wanted.tags:
            faults.say("filter asks for MB, but a region has one precision for all microbatches")
        for argument, name in (("param", param), ("grad", grad), ("reduce", reduce)):
            if name is not None and name not in get_args(DType):
                known = ", ".join(map(repr, get_args(DType)))
                faults.add(argument, name, f"must be one of {known}, or None")
        if param is grad is reduce is None:
            faults.say("asks for nothing; name param=, grad= or reduce=")
        faults.check()
        self._store(filter=wanted, param=param, grad=grad, reduce=reduce, where=where)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Order(_Record):
    """Fix when compute tasks of one device group run: a group's tasks before the next group's.

    rewrite:   Order([a, b, [c, d]])  ->  a before b, b before c and d; c and d may interleave
    requires:  one order's tasks share devices; no contradiction with dataflow or another order
    keeps:     values bitwise

    Naming BI or BW splits that backward into the two.

    Attributes:
        groups: Each a tuple of filters; a filter alone is a group of one.
        stream: Logical stream the tasks run on. Anything but None is refused when a plan is made:
            not built yet.
        where: The user's line.
        maker: The function of piper.strategies or piper.schedules called there; "" for none.
    """

    groups: tuple[tuple[Filter, ...], ...]
    stream: str | None = None
    where: str = _where()
    maker: str = _where()

    def __init__(self, groups: Sequence[GroupLike], *, stream: str | None = None) -> None:
        """Check and store.

        Raises:
            PiperStrategyError: Lists every argument that is not allowed.
        """
        where = user_line()
        faults = Faults("piper.Order", where)
        if isinstance(groups, str | Mapping | Filter) or not isinstance(groups, Sequence):
            faults.add(
                "groups",
                groups,
                "must be a list of groups; a group is a filter or a list of filters",
            )
            groups = ()
        elif not groups:
            faults.add("groups", groups, "is empty; leave the Order out, or name what it orders")
        made = tuple(_group(group, f"groups[{i}]", faults) for i, group in enumerate(groups))
        if stream is not None:
            faults.name("stream", stream, "None leaves the stream to Piper")
        faults.check()
        self._store(groups=made, stream=stream, where=where)

    def __repr__(self) -> str:
        rows = [code(group[0] if len(group) == 1 else list(group)) for group in self.groups]
        tail = "" if self.stream is None else f", stream={code(self.stream)}"
        flat = f"piper.Order([{', '.join(rows)}]{tail})"
        if len(flat) <= 100:
            return flat
        return "piper.Order([\n" + "".join(f"    {row},\n" for row in rows) + f"]{tail})"


def _group(group: GroupLike, argument: str, faults: Faults) -> tuple[Filter, ...]:
    if isinstance(group, Mapping | Filter):
        return (Filter.checked(group, argument, faults),)
    if isinstance(group, str) or not isinstance(group, Sequence):
        faults.add(argument, group, "must be a filter or a list of filters")
        return ()
    if not group:
        faults.add(argument, group, "is an empty group; leave it out")
    return tuple(Filter.checked(one, f"{argument}[{i}]", faults) for i, one in enumerate(group))


def _region_filter(given: FilterLike | Filter, faults: Faults) -> Filter:
    """The filter of a directive about regions, which has all their passes with it."""
    wanted = Filter.checked(given, "filter", faults)
    if "PASS" in wanted.tags:
        faults.say(
            "filter asks for PASS, which only Order can; a region's passes belong together here"
        )
    return wanted


def _axes(argument: str, given: Sequence[str] | None, faults: Faults) -> tuple[str, ...] | None:
    if given is None:
        return None
    return tuple(given) if faults.names(argument, given) else None


def _is_positive(value: object) -> bool:
    return is_number(value) and 0 < value < _MOST


Directive: TypeAlias = Split | Place | Replicate | Shard | Recompute | Precision | Order
