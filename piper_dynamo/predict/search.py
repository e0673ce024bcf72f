"""Searching for the best strategy: by predicted time, among those that fit.

Terms: see `space.py`. A choice is *planned* like any strategy, so that what is found has been
proved, and its step simulated; it is *dropped* if it is refused, does not fit, or cannot be among
the best, since no step of it is faster than its bound (`bounds.py`).

Signature: model, inputs, devices, costs -> the best choices, and why the others were dropped.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn
from tqdm import tqdm

from piper_dynamo.api import look
from piper_dynamo.captured import Call
from piper_dynamo.costs import Costs
from piper_dynamo.errors import PiperError, PiperStrategyError, format_error
from piper_dynamo.footprint import held_before
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.joint import ArgKind
from piper_dynamo.ir.tags import indices_of
from piper_dynamo.ir.task import Pass
from piper_dynamo.passes.split import data_dims
from piper_dynamo.planning import Plan, Template, split_of
from piper_dynamo.predict.bounds import EXPERTS, STAGE, chunks_of, lower_bound
from piper_dynamo.predict.found import Dropped, Found, Search
from piper_dynamo.predict.nominal import Nominal, nominal
from piper_dynamo.predict.operators import operators_of
from piper_dynamo.predict.profile import Profile
from piper_dynamo.predict.space import Choice, Regions, Space
from piper_dynamo.predict.stages import regions_of
from piper_dynamo.schedules import SCHEDULES, Schedule, Shape, name_of
from piper_dynamo.strategies import placement
from piper_dynamo.strategy import LossPath, Order, Split, Strategy
from piper_dynamo.tagging import tagged
from piper_dynamo.values import Faults, is_number, is_whole, user_line

SMALL = 48  # so many choices are all planned
SHOW_AFTER_S = 2.0
ADAMW = 2.0  # bytes of optimizer state per byte of parameter

CostsOf: TypeAlias = Costs | Profile | Callable[[Mapping[str, Chunk]], Costs]


def search(  # noqa: PLR0913  (each narrows the space in its own way)
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    devices: int,
    *,
    memory: float | None = None,
    costs: CostsOf | None = None,
    optimizer: float = ADAMW,
    schedules: Sequence[str | Schedule] = tuple(SCHEDULES),
    pp: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    zero: Sequence[int] = (0, 1, 2, 3),
    recompute: Sequence[float] = (1.0, 0.5, 0.0),
    top: int = 10,
    exhaustive: bool | None = None,
    loss: LossPath | None = None,
    compile: str | None = None,
) -> Search:
    """The strategies for which a step of a model is predicted to be fastest.

    The model is captured once. Where it does not annotate stages, it is cut into stages of about
    equal work (`auto_stages`). The same arguments give the same result.

    Args:
        model: The single-device model; meta models are welcome.
        inputs: The inputs of the whole job, all replicas together, as for `compile`.
        devices: Ranks; all are used.
        memory: Bytes that a rank may hold: parameters, gradients, optimizer state, buffers and
            what a step needs beside them; None: any number.
        costs: What chunks and messages take: a profile of the machine, costs of regions, or a
            function of chunks, as `lambda chunks: piper.Costs.roofline(chunks, ...)`. None: a
            roofline of usual hardware of the arguments' device, in round numbers
            (`predict/nominal.py`), which the result tells.
        optimizer: Bytes of optimizer state per byte of parameters that a rank steps (frozen ones
            have none); AdamW has 2.
        schedules: The pipeline schedules to choose from: names in `piper.schedules`, or functions.
        pp: The numbers of pipeline ranks to choose from; None: all divisors of `devices`.
        microbatches: Per replica, to choose from; None: all divisors of its rows.
        zero: The levels of ZeRO to choose from, where there are replicas.
        recompute: What stages may keep of their forward, falling (see `Recompute`; 1 is all): each
            is tried where a choice does not fit with those before.
        top: How many strategies to return.
        exhaustive: Plan every choice, or only those that their bound lets be among the best; None:
            all where they are few.
        loss: Which output is the loss, see `Strategy`.
        compile: How chunks will run; None: the default of the inputs' device.

    Returns:
        The best, fastest first, and why each other choice was dropped.

    Raises:
        PiperStrategyError: There is nothing to choose from.
        PiperError: The model or the inputs are refused.
    """
    if not is_whole(top) or top < 1:
        raise PiperStrategyError(f"search: top is {top!r}; give a number of at least 1")
    if memory is not None and not (is_number(memory) and memory > 0):
        raise PiperStrategyError(f"search: memory is {memory!r}; give a number of bytes")
    many = {"pp": pp, "microbatches": microbatches, "zero": zero, "recompute": recompute}
    for name, values in {"schedules": schedules, **many}.items():
        if values is not None and not (
            isinstance(values, Sequence) and not isinstance(values, str)
        ):
            raise PiperStrategyError(f"search: {name} is {values!r}; give a list")
    job = _Job(model, inputs, costs, optimizer=optimizer, loss=loss, compile=compile)
    faults = Faults("piper.search", user_line())
    names = tuple(name_of(schedule, faults) for schedule in schedules)
    faults.check()
    space = Space(
        devices=devices,
        rows=job.rows,
        has_experts=job.has_experts,
        schedules=names,
        pp=None if pp is None else tuple(pp),
        microbatches=None if microbatches is None else tuple(microbatches),
        zero=tuple(zero),
        recompute=tuple(recompute),
    )
    choices = list(space.choices())
    if not choices:
        raise PiperStrategyError(
            format_error("search: there is nothing to choose from", {"why": space.left_out()})
        )
    if exhaustive is None:
        exhaustive = len(choices) <= SMALL
    found, dropped = _walk(job, space, choices, memory, top, exhaustive=exhaustive)
    return Search(
        best=tuple(found),
        dropped=tuple(dropped),
        left_out=tuple(space.left_out()),
        devices=devices,
        memory=memory,
        costs=_said(job.costs),
    )


def _said(costs: CostsOf) -> str:
    """What a search says of its costs."""
    if isinstance(costs, Nominal):
        return str(costs)
    if isinstance(costs, Profile):
        return f"a profile of {costs.machine.get('processor', 'a machine')}"
    return "as given"


def _walk(
    job: "_Job",
    space: Space,
    choices: list[Choice],
    memory: float | None,
    top: int,
    *,
    exhaustive: bool,
) -> tuple[list[Found], list[Dropped]]:
    """Plan choices, those with the lowest bounds first, until no other can be among the best."""
    dropped: list[Dropped] = []
    bounded: list[tuple[float, Choice]] = []  # a heap

    def drop(choice: Choice, why: str, detail: object) -> None:
        dropped.append(Dropped(choice=choice, why=why, detail=str(detail)))

    def consider(choice: Choice) -> None:
        try:
            heapq.heappush(bounded, (job.bound(choice), choice))
        except PiperError as error:
            drop(choice, "refused", error)

    for choice in tqdm(choices, "bounds", leave=False, delay=SHOW_AFTER_S, disable=None):
        consider(choice)
    best: list[Found] = []
    with tqdm(
        total=len(bounded), desc="plans", leave=False, delay=SHOW_AFTER_S, disable=None
    ) as bar:
        while bounded:
            bar.update()
            bound, choice = heapq.heappop(bounded)
            if not exhaustive and len(best) == top and bound > best[-1].seconds:
                last = best[-1].seconds
                drop(
                    choice, "slower", f"takes at least {bound:.4g}, the last of the best {last:.4g}"
                )
                continue
            try:
                one = job.found(choice, bound)
            except PiperError as error:
                drop(choice, "refused", error)
                continue
            if memory is not None and one.memory > memory:
                drop(
                    choice,
                    "does not fit",
                    f"needs {one.memory:.4g} bytes on a rank, of {memory:.4g}",
                )
                if (less := space.with_less(choice)) is not None:
                    bar.total += 1
                    consider(less)
                continue
            best = sorted([*best, one], key=lambda f: (f.seconds, f.memory, f.choice))
            if len(best) > top:
                gone = best.pop()
                text = f"takes {gone.seconds:.4g}, the last of the best {best[-1].seconds:.4g}"
                drop(gone.choice, "slower", text)
    return best, sorted(dropped, key=lambda d: d.choice)


class _Job:
    """A model captured once, and planned under many strategies."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any] | Mapping[str, Any],
        costs: CostsOf | None,
        *,
        optimizer: float,
        loss: LossPath | None,
        compile: str | None,
    ) -> None:
        # Two microbatches, so that sizes follow them; of which inputs are split, as the default.
        wanted = Strategy(Split({}, num_microbatches=2), loss=loss)
        now = look(model, wanted, inputs, 1, capture=True, compile=compile)
        self._step, self._call = now.steps[-1], now.calls[-1]
        devices = {a.spec.device for a in self._call.args if a.spec is not None}
        self.costs = nominal(devices) if costs is None else costs
        self._optimizer, self._loss = optimizer, loss
        self._own = len(indices_of(self._step.graph, STAGE))
        self._operators = operators_of(self._step.graph, self._call)
        self._dims = data_dims(self._call.args, split_of(wanted))
        self._known: dict[int, tuple[Template, Costs]] = {}
        specs = {arg.position: arg.spec for arg in self._call.args}
        sizes = [s.shape[d] for p, d in self._dims.items() if (s := specs[p]) is not None]
        self.rows = sizes[0] if sizes else 1
        self.has_experts = bool(indices_of(self._step.graph, EXPERTS))

    def regions(self, stages: int) -> Regions | None:
        """The regions of so many stages; None where the model's annotations say them.

        Raises:
            PiperStrategyError: The model says other stages, or cannot be cut into so many.
        """
        if not self._own:
            return regions_of(self._operators, stages)
        if stages != self._own:
            raise PiperStrategyError(f"the model's own annotations name {self._own} stages")
        return None

    def _sized(self, choice: Choice) -> Call:
        """The call of one replica."""
        args = tuple(
            replace(arg, spec=arg.spec.divided(self._dims[arg.position], choice.dp))
            if arg.kind is ArgKind.DATA and arg.position in self._dims and arg.spec is not None
            else arg
            for arg in self._call.args
        )
        return replace(self._call, args=args)

    def _costs_of(self, chunks: Mapping[str, Chunk]) -> Costs:
        if isinstance(self.costs, Costs):
            return self.costs
        if isinstance(self.costs, Profile):
            return self.costs.costs(chunks)
        return self.costs(chunks)

    def bound(self, choice: Choice) -> float:
        """What no step of a choice takes less than."""
        strategy = choice.strategy(self.regions(choice.stages), self._loss)
        with tagged(self._step.graph, strategy.regions):
            template = self._step.under(strategy).template(self._sized(choice))
        if id(template) not in self._known:
            self._known[id(template)] = template, self._costs_of(chunks_of(template))
        places = placement(choice.schedule, choice.pp, choice.stages)
        ranks: list[list[int]] = [[] for _ in range(choice.pp)]
        for stage, devices in places.items():
            ranks[devices[0]].append(stage)
        is_two_way = SCHEDULES[choice.schedule][1] is Shape.TWO_WAY
        if is_two_way:  # half of the microbatches go the other way
            ranks = [[*own, *back] for own, back in zip(ranks, ranks[::-1], strict=True)]
        return lower_bound(
            template,
            self._known[id(template)][1],
            ranks,
            choice.microbatches // 2 if is_two_way else choice.microbatches,
            splits=_splits(strategy),
            shares_experts=choice.ep > 1,
        )

    def found(self, choice: Choice, bound: float) -> Found:
        """A choice planned and simulated."""
        strategy = choice.strategy(self.regions(choice.stages), self._loss)
        with tagged(self._step.graph, strategy.regions):
            plan = self._step.under(strategy).planned(self._sized(choice), choice.pp * choice.dp)
        simulated = plan.simulate(self._costs_of(plan.chunks))
        return Found(
            choice=choice,
            strategy=strategy,
            seconds=simulated.makespan,
            bound=bound,
            memory=max(memory_by_rank(plan, self._optimizer).values()),
        )


def memory_by_rank(plan: Plan, optimizer: float = ADAMW) -> dict[int, int]:
    """The most bytes that each rank holds: state of the model and optimizer, and a step's peak.

    Args:
        plan: The plan; of replicas that are alike one is looked at.
        optimizer: Bytes of optimizer state per byte of parameters that are trained.
    """
    found = {}
    for program, one in zip(plan.distinct, plan.memory(), strict=True):
        _, _, trained = held_before(program, plan.args, optimizer=1)
        found[one.rank] = one.total + round(trained * optimizer)
    return found


def _splits(strategy: Strategy) -> bool:
    """Whether orders name halves of backwards."""
    tasks = itertools.chain.from_iterable(g for o in strategy.of(Order) for g in o.groups)
    return any(task.tags.get("PASS") in (Pass.BI.value, Pass.BW.value) for task in tasks)
