"""The strategies that a search looks at.

Terms: a *choice* says how a job is distributed in a few numbers; a *space* is all choices for so
many devices and rows. A choice may turn out to be refused; why is a part of what a search gives.

Signature: devices, rows, what the user fixes -> choices; a choice -> its strategy.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from piper_dynamo.errors import PiperStrategyError
from piper_dynamo.schedules import SCHEDULES, Shape
from piper_dynamo.strategies import pipeline
from piper_dynamo.strategy import LossPath, Strategy
from piper_dynamo.values import is_whole

ALONE = "one_f_one_b"  # of one rank all schedules do the same
LEVELS = (0, 1, 2, 3)
KEEPS_ALL = 1.0  # a budget of Recompute that changes nothing
Regions = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Choice:
    """How a job is distributed.

    Attributes:
        pp: Pipeline ranks.
        dp: Replicas.
        schedule: Of the pipeline.
        stages: Of the pipeline, in all.
        microbatches: Per replica.
        zero: What replicas shard.
        ep: How many replicas share the experts of one copy.
        recompute: What stages keep of their forward, see `Recompute`; 1: all, without one.
    """

    pp: int
    dp: int
    schedule: str
    stages: int
    microbatches: int
    zero: int
    ep: int
    recompute: float = KEEPS_ALL

    def strategy(self, regions: Regions | None, loss: LossPath | None = None) -> Strategy:
        """The strategy, with the regions of its stages.

        Raises:
            PiperStrategyError: The schedule cannot have it so.
        """
        return pipeline(
            self.schedule,
            ranks=self.pp,
            num_microbatches=self.microbatches,
            stages=self.stages,
            replicas=self.dp,
            zero=self.zero,
            expert_ranks=self.ep,
            recompute=None if self.recompute == KEEPS_ALL else self.recompute,
            regions=regions,
            loss=loss,
        )

    def __str__(self) -> str:
        return ", ".join(f"{one.name} {getattr(self, one.name)}" for one in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search may choose.

    Attributes:
        devices: Ranks of the job; all are used.
        rows: Of the job's batch.
        has_experts: Whether the model has experts that replicas could share.
        schedules: Names in `piper.schedules`.
        pp: How many pipeline ranks there may be; None: every divisor of `devices`.
        microbatches: How many there may be; None: every divisor of a replica's rows.
        zero: Levels of ZeRO.
        recompute: What stages keep of their forward: the first, and the next ones in turn where a
            choice does not fit.
        max_stages_per_rank: Of schedules that take any number of them.
    """

    devices: int
    rows: int
    has_experts: bool = False
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    pp: tuple[int, ...] | None = None
    microbatches: tuple[int, ...] | None = None
    zero: tuple[int, ...] = LEVELS
    recompute: tuple[float, ...] = (KEEPS_ALL, 0.5, 0.0)
    max_stages_per_rank: int = 2

    def __post_init__(self) -> None:
        """Refuse what is no space.

        Raises:
            PiperStrategyError: Names what is wrong.
        """
        unknown = [name for name in self.schedules if name not in SCHEDULES]
        if unknown:
            raise PiperStrategyError(
                f"search: there is no schedule {unknown[0]!r}; there are: {', '.join(SCHEDULES)}"
            )
        for name, values, least in (
            ("devices", (self.devices,), 1),
            ("rows of the batch", (self.rows,), 1),
            ("pp", self.pp or (), 1),
            ("microbatches", self.microbatches or (), 1),
            ("max_stages_per_rank", (self.max_stages_per_rank,), 1),
        ):
            wrong = [v for v in values if not is_whole(v) or v < least]
            if wrong:
                raise PiperStrategyError(
                    f"search: {name} has {wrong[0]!r}; give numbers of at least {least}"
                )
        levels = [level for level in self.zero if level not in LEVELS]
        if levels:
            raise PiperStrategyError(f"search: zero has {levels[0]!r}; give some of 0, 1, 2, 3")
        falling = all(a > b for a, b in itertools.pairwise(self.recompute))
        if not self.recompute or not falling or not all(0 <= b <= 1 for b in self.recompute):
            raise PiperStrategyError(
                f"search: recompute is {self.recompute!r}; give falling numbers from 1 (keep all) "
                "to 0 (keep what comes in)"
            )

    def with_less(self, choice: Choice) -> Choice | None:
        """The same, where stages keep less of their forward; None where they keep the least."""
        later = self.recompute[self.recompute.index(choice.recompute) + 1 :]
        return replace(choice, recompute=later[0]) if later else None

    def choices(self) -> Iterator[Choice]:
        """Every choice once, in a fixed order; of what is kept of forwards the most."""
        for pp in self._ranks():
            dp = self.devices // pp
            if self.rows % dp:
                continue
            per_replica = self.rows // dp
            counts = self.microbatches or divisors(per_replica)
            for (schedule, stages), microbatches, zero, ep in itertools.product(
                self._pipelines(pp),
                [m for m in counts if per_replica % m == 0],
                self.zero if dp > 1 else (0,),
                divisors(dp) if self.has_experts else (1,),
            ):
                yield Choice(
                    pp=pp,
                    dp=dp,
                    schedule=schedule,
                    stages=stages,
                    microbatches=microbatches,
                    zero=zero,
                    ep=ep,
                    recompute=self.recompute[0],
                )

    def left_out(self) -> list[str]:
        """What `choices` leaves out of what was asked, and why."""
        found = []
        for pp in self.pp or ():
            if self.devices % pp:
                found.append(f"pp {pp}: does not divide {self.devices} devices")
        for pp in self._ranks():
            dp = self.devices // pp
            if self.rows % dp:
                found.append(f"pp {pp}, dp {dp}: {self.rows} rows do not divide among replicas")
                continue
            found += [
                f"pp {pp}, dp {dp}, microbatches {m}: does not divide a replica's "
                f"{self.rows // dp} rows"
                for m in self.microbatches or ()
                if self.rows // dp % m
            ]
        return found

    def _ranks(self) -> list[int]:
        return [pp for pp in self.pp or divisors(self.devices) if self.devices % pp == 0]

    def _pipelines(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules, and how many stages they have on so many ranks."""
        if pp == 1:
            yield (ALONE if ALONE in self.schedules else self.schedules[0]), 1
            return
        for name in self.schedules:
            match SCHEDULES[name][1]:
                case Shape.VEE:
                    yield name, 2 * pp
                case Shape.LOOP:
                    yield from ((name, v * pp) for v in range(2, self.max_stages_per_rank + 1))
                case Shape.LINE | Shape.TWO_WAY | None:
                    yield name, pp


def divisors(number: int) -> Sequence[int]:
    """All divisors, rising."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
