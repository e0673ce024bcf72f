"""Pipeline schedules: in which order each rank runs the tasks of its stages.

Terms: a *stage* is a region `PP=s`; a *placement* says on which devices each stage is; its *shape*
is a line (every stage has devices of its own), a loop (stage s is on the s mod p-th of p groups of
devices), a V (2p stages; s and 2p-1-s share devices) or a two-way line: the second half of the
microbatches goes through a line's devices from the last to the first, so that they hold stages s
and p-1-s, and the placement says where each stage is for the first half. Below, p is the number of
device groups, here called ranks, r one of them, m the number of microbatches, v the number of
stages on a rank.

Each schedule is `(placement, num_microbatches) -> list[Order]`: of the devices of each stage, such
as `{0: [0], 1: [1]}` of a line, `{0: [0], 1: [1], 2: [0], 3: [1]}` of a loop and `{0: [0], 1: [1],
2: [1], 3: [0]}` of a V, and of how many microbatches the batch is split into, one Order per rank.
What it does not take is refused with a PiperStrategyError (`stages_by_rank`). It runs every task
once, and on each stage of a rank in the order of microbatches. *Idle* is the makespan less a
rank's own work, with F, I, W the times of a rank's whole share of one microbatch (forward, input
gradient, weight gradient) and free communication; *memory* counts a rank's share of one
microbatch's activations.

Signature: placement, number of microbatches -> orders.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, assert_never

from piper_dynamo.action_tables import from_csv as from_csv
from piper_dynamo.action_tables import to_csv as to_csv
from piper_dynamo.directives import Order
from piper_dynamo.ir.task import Pass
from piper_dynamo.values import Faults, is_whole, user_line

Placement = Mapping[int, Sequence[int]]
Schedule = Callable[[Placement, int], list[Order]]

_F, _B, _BI, _BW = Pass.F.value, Pass.B.value, Pass.BI.value, Pass.BW.value
_Task = dict[str, int | str]
_Group = _Task | list[_Task]


class Shape(StrEnum):
    """How stages lie on device groups; see the module's terms."""

    LINE = "line"
    LOOP = "loop"
    VEE = "vee"
    TWO_WAY = "two-way"


def gpipe(placement: Placement, num_microbatches: int) -> list[Order]:
    """All forwards, then all backwards.

    Idle: (p-1)(F+I+W) on a line, 1/v of that on a loop if m >= p. Memory: m microbatches.
    Least number of microbatches: 1. Any placement.
    Source: Huang et al., GPipe, arXiv 1811.06965; on a loop it is breadth-first, arXiv 2211.05953.
    """
    ranks = stages_by_rank("gpipe", placement, num_microbatches)
    micro = range(num_microbatches)
    return [
        Order(
            [_task(_F, s, k) for s in stages for k in micro]
            + [_task(_B, s, k) for s in reversed(stages) for k in micro]
        )
        for stages in ranks
    ]


def one_f_one_b(placement: Placement, num_microbatches: int) -> list[Order]:
    """Fill the pipeline, then a backward for every forward (1F1B).

    Idle: (p-1)(F+I+W). Memory: min(m, p-r) microbatches.
    Least number of microbatches: 1. Placement: a line.
    Source: Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    ranks = stages_by_rank("one_f_one_b", placement, num_microbatches)

    def tasks(r: int) -> Iterator[_Group]:
        run = _Stages([r], num_microbatches)
        yield from run.repeat(len(ranks) - r, "F0")
        yield from run.repeat(num_microbatches, "B0 F0")

    return [Order(list(tasks(r))) for r in range(len(ranks))]


def interleaved_1f1b(placement: Placement, num_microbatches: int) -> list[Order]:
    """1F1B with v stages a rank, run in rounds of about p microbatches.

    Idle: (p-1)(F+I+W)/v if p divides m. Memory: p + (p-1)/v microbatches on the first rank.
    Least number of microbatches: 1; the number of rounds, max(1, m // p), must divide it, which it
    does for any m below 2p and any multiple of p. Placement: a loop, v at least 2.
    Source: Narayanan et al., Megatron-LM, arXiv 2104.04473; rounds as torch's pipelining has them.
    """
    ranks = stages_by_rank("interleaved_1f1b", placement, num_microbatches)
    p, v, m = len(ranks), len(ranks[0]), num_microbatches
    per_round = m // max(1, m // p)
    chunk = [(step // per_round) % v for step in range(m * v)]  # of the step-th forward

    def tasks(r: int) -> Iterator[_Group]:
        run = _Stages(ranks[r], m)
        warmup = min(m * v, (v - 1) * per_round + 2 * (p - 1 - r))
        for step in range(m * v + warmup):
            if step < m * v:
                yield from run.now(_F, chunk[step])
            if step >= warmup:
                yield from run.now(_B, v - 1 - chunk[step - warmup])

    return [Order(list(tasks(r))) for r in range(p)]


def zb_h1(placement: Placement, num_microbatches: int) -> list[Order]:
    """1F1B with split backwards: weight gradients wait, and fill the gaps. Memory of 1F1B.

    Idle: (p-1) max(F, I, F+I-W) if m >= p (the paper's (p-1)(F+I-W) is the case W <= F, I).
    Memory: min(m, p-r) microbatches, and what the weight gradients of r more need.
    Least number of microbatches: 1. Placement: a line.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (ZB-H1).
    """
    ranks = stages_by_rank("zb_h1", placement, num_microbatches)

    def tasks(r: int) -> Iterator[_Group]:
        run = _Stages([r], num_microbatches)
        yield from run.repeat(len(ranks) - r, "F0")
        # Each rank delays BW by its number.
        yield from run.repeat(min(r, num_microbatches), "I0 F0")
        yield from run.repeat(num_microbatches - r, "I0 W0 F0")
        yield from run.repeat(r, "W0")

    return [Order(list(tasks(r))) for r in range(len(ranks))]


def zbv(placement: Placement, num_microbatches: int) -> list[Order]:
    """Split backwards on a V: the rank of the first stage also has the last.

    Idle: (p-1)F/2 at F=I=W if m >= 2p-1, and no closed form otherwise. Memory: p microbatches.
    Least number of microbatches: 1 (below 2p-1, the schedule of 2p-1 without the missing ones).
    Placement: a V.
    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362; ZB-V in
    arXiv 2401.10241.
    """
    ranks = stages_by_rank("zbv", placement, num_microbatches)
    p = len(ranks)
    n = max(2 * p - 1, num_microbatches)

    def tasks(r: int) -> Iterator[_Group]:
        run = _Stages(ranks[r], num_microbatches)
        yield from run.repeat(2 * (p - r) - 1, "F0")
        yield from run.repeat(r, "F1 F0")
        yield from run.repeat(p - r, "F1 I1 W1")
        yield from run.repeat(n - p, "F0 I0 W0 F1 I1 W1")
        yield from run.repeat(r, "I0 I1")
        yield from run.repeat(p - r, "I0 W0")
        yield from run.repeat(n, "W1")
        yield from run.repeat(n, "W0")

    return [Order(list(tasks(r))) for r in range(p)]


def dualpipev(placement: Placement, num_microbatches: int) -> list[Order]:
    """A V whose forwards and backwards come in pairs, one hiding the other's communication.

    A pair is one group of an Order: where regions exchange rows (experts), chunks of one run while
    the other's rows travel. At the end, input gradients are paired with weight gradients that wait.

    Idle: without interleaving, (p-1)F/2 at F=I=W. Memory: p + 1/2 microbatches.
    Least number of microbatches: 2p. Placement: a V.
    Source: DeepSeek-AI, DualPipe (the 8 steps of DualPipeV); V by Sea AI Lab, arXiv 2405.15362.
    """
    ranks = stages_by_rank("dualpipev", placement, num_microbatches)
    p, m = len(ranks), num_microbatches
    return [Order(list(_eight_steps(_Stages(ranks[r], m), r, p, m))) for r in range(p)]


def dualpipe(placement: Placement, num_microbatches: int) -> list[Order]:
    """Two pipelines through the same ranks, one from each end, whose tasks come in pairs.

    Rank r has stage r for the first half of the microbatches and stage p-1-r for the second half,
    so every stage is on two ranks, which both keep its parameters: place it as
    `piper.strategies.places` does. A pair is as in dualpipev.

    Idle: without interleaving, (p/2-1)F at F=I=W. Memory: p + 1 microbatches, and parameters and
    gradients of two stages.
    Least number of microbatches: 2p, an even number. Placement: a two-way line, p even.
    Source: DeepSeek-AI, DualPipe (its 8 steps), in DeepSeek-V3, arXiv 2412.19437.
    """
    ranks = stages_by_rank("dualpipe", placement, num_microbatches)
    p, m = len(ranks), num_microbatches

    def tasks(r: int) -> Iterator[_Group]:
        # The ranks of the second half are the first half's mirror image, directions and all.
        ways = [(r, 0), (p - 1 - r, m // 2)]  # stage and first microbatch of each direction
        stages, starts = zip(*(ways if r < p // 2 else ways[::-1]), strict=True)
        run = _Stages(stages, m // 2, starts)
        return _eight_steps(run, min(r, p - 1 - r), p // 2, m // 2)

    return [Order(list(tasks(r))) for r in range(p)]


def _eight_steps(run: "_Stages", r: int, p: int, m: int) -> Iterator[_Group]:
    """The groups of the r-th rank of p on a V, or from an end to the middle of a two-way line.

    Args:
        run: Its two stages: that of what comes in from the end, that of what comes back.
        r: How many ranks it is from the end.
        p: How many there are from the end to the turn, or to the middle.
        m: Microbatches of each stage.
    """
    yield from run.repeat(2 * (p - r - 1), "F0")
    yield from run.repeat(r + 1, "F0 F1")
    yield from run.repeat(p - r - 1, "I1 W1 F1")
    # The main part. The last rank has both sides of the turn, where a pair would only wait.
    yield from run.repeat(1, "F0 B1 F1+B0" if r == p - 1 else "F0+B1 F1+B0")
    yield from run.repeat(m - 2 * p + r, "F0+B1 F1+B0")
    yield from run.repeat(p - r - 1, "B1 F1+B0")
    # From the middle of the next r+1 backwards of each stage on, backwards are split.
    yield from run.repeat((r + 1) // 2, "B1 B0")
    yield from run.repeat(1, "I1 I0" if r % 2 else "B1 I0")
    yield from run.repeat(r // 2, "I1 I0")
    yield from run.repeat(p - r - 1, "W+I0")
    yield from run.repeat(r + 1, "W")


SCHEDULES: Mapping[str, tuple[Schedule, Shape | None]] = {
    "gpipe": (gpipe, None),
    "one_f_one_b": (one_f_one_b, Shape.LINE),
    "interleaved_1f1b": (interleaved_1f1b, Shape.LOOP),
    "zb_h1": (zb_h1, Shape.LINE),
    "zbv": (zbv, Shape.VEE),
    "dualpipev": (dualpipev, Shape.VEE),
    "dualpipe": (dualpipe, Shape.TWO_WAY),
}
"""Every schedule by name, with the shape of placement that it needs; None: any."""

# Other names that people use for a schedule.
ALIASES = {"1f1b": "one_f_one_b"}


def schedule_name(given: str) -> str:
    """The name in `SCHEDULES` that is meant: `1f1b` and `zb-h1` are understood."""
    plain = given.lower().replace("-", "_")
    return ALIASES.get(plain, plain)


def name_of(schedule: object, faults: Faults) -> str:
    """The name of a schedule, which is given by it or as the function.

    Where it is neither, that is added to `faults`, and the name is empty.
    """
    for name, (build, _) in SCHEDULES.items():
        if schedule == name or schedule is build:
            return name
    if callable(schedule):
        hint = "piper.strategies.from_orders makes a strategy of orders of your own"
        faults.add("schedule", schedule, f"is none of piper.schedules; {hint}")
        return ""
    near = get_close_matches(schedule_name(str(schedule)), SCHEDULES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    faults.add("schedule", schedule, f"{hint}there are: {', '.join(SCHEDULES)}")
    return ""


_PASSES = {"F": _F, "B": _B, "I": _BI, "W": _BW}


def _task(which: str, stage: int, micro: int) -> _Task:
    return {"PP": stage, "MB": micro, "PASS": which}


class _Stages:
    """One rank's stages and how far each has come; patterns say which pass of which comes next.

    A pattern is words: `F0` is the next forward of the rank's first stage, `I0` its BI, `W0` its
    BW, `W` the oldest BW that waits, `F0+B1` one group of two. What is past the last microbatch is
    left out, so a pattern may ask for more than there is.
    """

    def __init__(
        self, stages: Sequence[int], num_microbatches: int, starts: Sequence[int] | None = None
    ) -> None:
        """Each stage takes so many microbatches, from 0 or from its own of `starts` on."""
        self._stages = stages
        self._count = num_microbatches
        self._starts = starts if starts is not None else [0] * len(stages)
        self._next: dict[tuple[str, int], int] = {}
        self._waiting: deque[int] = deque()

    def now(self, which: str, chunk: int) -> Iterator[_Task]:
        """The next task of one pass of one stage, unless all are done."""
        # B and BI share a count: a microbatch has one or the other.
        key = (_BI if which == _B else which, chunk)
        micro = self._next.get(key, 0)
        if micro == self._count:
            return
        self._next[key] = micro + 1
        if which == _B:
            self._next[_BW, chunk] = micro + 1
        elif which == _BI:
            self._waiting.append(chunk)
        elif which == _BW:
            self._waiting.remove(chunk)
        yield _task(which, self._stages[chunk], self._starts[chunk] + micro)

    def repeat(self, times: int, pattern: str) -> Iterator[_Group]:
        """The groups of `times` repetitions of `pattern`."""
        for _ in range(times):
            for word in pattern.split():
                group = [task for one in word.split("+") for task in self._word(one)]
                if group:
                    yield group

    def _word(self, word: str) -> Iterator[_Task]:
        chunk = self._waiting[0] if word == "W" else int(word[1:])
        return self.now(_PASSES[word[0]], chunk)


def stages_by_rank(name: str, placement: Any, num_microbatches: Any) -> list[list[int]]:
    """The stages of each rank, ranks in the order of their first stage, if a schedule takes these.

    Args:
        name: The schedule's, in `SCHEDULES`.
        placement: Devices of each stage.
        num_microbatches: How many microbatches the batch is split into.

    Raises:
        PiperStrategyError: Lists what is wrong with the arguments.
    """
    faults = Faults(f"piper.schedules.{name}", user_line())
    faults.whole("num_microbatches", num_microbatches, 1)
    count = len(placement) if isinstance(placement, Mapping) else 0
    if not count:
        faults.add("placement", placement, f"must be a dict; {_KEYS}")
    elif not all(is_whole(s) for s in placement) or set(placement) != set(range(count)):
        must = f"has {count} stages; they must be 0 to {count - 1}; {_KEYS}"
        faults.add("placement", placement, must)
    else:
        for s, devices in placement.items():
            if not _are_devices(devices):
                must = f"must be a list of different ranks: [{s}], those of stage {s}"
                faults.add(f"placement[{s}]", devices, must)
    faults.check()
    groups: dict[tuple[int, ...], list[int]] = {}
    for s in range(count):
        groups.setdefault(tuple(placement[s]), []).append(s)
    if sum(map(len, groups)) > len(set().union(*groups)):
        shares = "two stages share some devices; let them share all, in one order, or none"
        faults.add("placement", placement, f"{shares}; {_KEYS}")
        faults.check()
    ranks, shape = list(groups.values()), SCHEDULES[name][1]
    if shape is not None and ranks != _expected(shape, count, len(ranks)):
        faults.add("placement", placement, f"{_NEEDS[shape]}; {_KEYS}")
        faults.check()
    _check_microbatches(name, len(ranks), num_microbatches, faults)
    faults.check()
    return ranks


def _check_microbatches(name: str, p: int, m: int, faults: Faults) -> None:
    """How many microbatches some schedules need on p ranks."""
    if name in ("dualpipev", "dualpipe") and m < 2 * p:
        other = "zbv" if name == "dualpipev" else "zb_h1"
        faults.whole(
            "num_microbatches", m, 2 * p, f"{p} ranks need that many; {other} needs only one"
        )
    if name == "dualpipe" and m % 2:
        faults.add("num_microbatches", m, "must be even: each direction takes half of them")
    rounds = max(1, m // p)
    if name == "interleaved_1f1b" and m % rounds:
        near = [n for n in range(1, 2 * m) if n % max(1, n // p) == 0]
        below, above = max(n for n in near if n < m), min(n for n in near if n > m)
        faults.add(
            "num_microbatches",
            m,
            f"{rounds} rounds of {p} ranks do not divide it; {below} or {above} do",
        )


_KEYS = "its keys are stages, its values their ranks, such as {0: [0], 1: [1]}"
_NEEDS = {
    Shape.LINE: "must be a line, a stage per rank: {0: [0], 1: [1]}; where ranks have several, "
    "use interleaved_1f1b (loop), zbv or dualpipev (V), or gpipe (any)",
    Shape.LOOP: "must be a loop, two or more stages per rank: {0: [0], 1: [1], 2: [0], 3: [1]}; "
    "use one_f_one_b or zb_h1 for a line, zbv or dualpipev for a V, gpipe for any",
    Shape.VEE: "must be a V, with stages s and 2p-1-s on rank s: {0: [0], 1: [1], 2: [1], 3: [0]}; "
    "use one_f_one_b or zb_h1 for a line, interleaved_1f1b for a loop, gpipe for any",
    Shape.TWO_WAY: "must be a line of an even number of stages, a stage per rank: {0: [0], 1: [1]} "
    "(the second half of the microbatches goes the other way); use one_f_one_b or zb_h1 for an odd "
    "number, interleaved_1f1b for a loop, zbv or dualpipev for a V, gpipe for any",
}


def _expected(shape: Shape, count: int, p: int) -> list[list[int]]:
    """The stages of each rank in that shape; nothing if so many stages on p ranks have no such."""
    match shape:
        case Shape.LINE:
            return [[s] for s in range(count)]
        case Shape.TWO_WAY:
            return [[s] for s in range(count)] if count % 2 == 0 else []
        case Shape.LOOP:
            fits = count % p == 0 and count >= 2 * p
            return [list(range(r, count, p)) for r in range(p)] if fits else []
        case Shape.VEE:
            return [[r, count - 1 - r] for r in range(p)] if count == 2 * p else []
        case _:
            assert_never(shape)


def _are_devices(devices: Any) -> bool:
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        return False
    return all(is_whole(d) and d >= 0 for d in devices) and len(set(devices)) == len(devices)
