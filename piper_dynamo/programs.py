"""The programs of all ranks: lowered at once, or replica by replica where these are alike.

Signature: distributed DAG, task orders -> a program per rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import overload

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.alike import are_alike, check_alike, part_of_job
from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.meaning import Meaning
from piper_dynamo.ir.program import RankProgram
from piper_dynamo.ir.task import Pass
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.apart import keep_apart
from piper_dynamo.lowering.channels import drain_sends, number_messages, post_receives
from piper_dynamo.lowering.lower import finish, lower
from piper_dynamo.lowering.memory import free_dead, peak_bytes
from piper_dynamo.lowering.schedule import schedule
from piper_dynamo.lowering.sums import add_in_chunks
from piper_dynamo.passes.gather import Gather
from piper_dynamo.passes.pipeline import run_passes

Devices = tuple[int, ...]
Order = Mapping[Devices, list[Node]]
NUM_PASSES = 10  # of the table in docs/how-it-works.md; the last one, Gather, is run here
LEAST_ALIKE = 3  # replicas: two are proved


class AlikePrograms(Sequence[RankProgram]):
    """The programs of replicas that are alike, each replica lowered when one of it is asked for."""

    def __init__(
        self, groups: Sequence[Devices], lower_place: Callable[[int], tuple[RankProgram, ...]]
    ) -> None:
        """`lower_place` gives the programs of one replica in rank order."""
        self._groups, self._lower = tuple(groups), lower_place
        self._place = {r: place for devices in groups for place, r in enumerate(devices)}
        self._replicas: dict[int, dict[int, RankProgram]] = {}
        self.stands_for = {r: devices[0] for devices in groups for r in devices}

    def replica(self, place: int) -> tuple[RankProgram, ...]:
        """The programs of the ranks at one place of their device groups, in rank order."""
        if place not in self._replicas:
            self._replicas[place] = {program.rank: program for program in self._lower(place)}
        return tuple(self._replicas[place].values())

    def verify(self, meaning: Meaning) -> None:
        """Prove the whole job by two of its replicas; see `ir/alike.py`.

        Raises:
            PiperPlanError: Lists every fault.
        """
        first, second = ({p.rank: p for p in self.replica(place)} for place in (0, 1))
        pairs = [(first[devices[0]], second[devices[1]]) for devices in self._groups]
        faults = check_alike(pairs, self._groups)
        if faults:
            raise PiperPlanError(join_faults("replicas of the plan are not alike", faults))
        both = part_of_job([program for pair in pairs for program in pair])
        verify(both, meaning, {program.rank: self._place[program.rank] for program in both})

    def __len__(self) -> int:
        return len(self._place)

    @overload
    def __getitem__(self, rank: int) -> RankProgram: ...

    @overload
    def __getitem__(self, rank: slice) -> tuple[RankProgram, ...]: ...

    def __getitem__(self, rank: int | slice) -> RankProgram | tuple[RankProgram, ...]:
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(len(self))[rank])
        found = range(len(self))[rank]
        place = self._place[found]
        self.replica(place)
        return self._replicas[place][found]

    def __iter__(self) -> Iterator[RankProgram]:
        return (self[rank] for rank in range(len(self)))


def programs_of(
    dag: Dag,
    world_size: int,
    order: Order,
    groups: Sequence[Devices],
    *,
    adding: bool,
    alike: bool,
) -> Sequence[RankProgram]:
    """Lower a distributed DAG to every rank's program.

    Args:
        dag: The DAG.
        world_size: How many ranks.
        order: Every device group's tasks in the order they run.
        groups: The device groups.
        adding: Whether chunks may add gradients to their sums.
        alike: Lower one replica at a time, if replicas are alike.
    """
    if not alike or len(groups[0]) < LEAST_ALIKE or not are_alike(dag, groups):
        return lower_all(dag, world_size, order, adding=adding)
    order = _gathered(dag, order)
    return AlikePrograms(groups, lambda place: _lower(dag, world_size, order, adding, place))


def lower_all(
    dag: Dag, world_size: int, order: Order | None = None, *, adding: bool = False
) -> tuple[RankProgram, ...]:
    """Lower a distributed DAG to every rank's program, at once.

    Args:
        dag: The DAG.
        world_size: How many ranks.
        order: Every device group's tasks in the order they run; None: as `schedule` finds it.
        adding: Whether chunks may add gradients to their sums.
    """
    order = _gathered(dag, schedule(dag) if order is None else order)
    return _lower(dag, world_size, order, adding, None)


def _gathered(dag: Dag, order: Order) -> Order:
    """Gather what is sharded where it is used; the order in which tasks run then."""
    if dag.training and dag.loss is None:
        order = {devices: _forward_first(tasks) for devices, tasks in order.items()}
    run_passes(dag, [Gather(order)], done=NUM_PASSES - 1, total=NUM_PASSES)
    return order


def _lower(
    dag: Dag, world_size: int, order: Order, adding: bool, place: int | None
) -> tuple[RankProgram, ...]:
    drafts = lower(dag, order, place)
    for draft in drafts:
        keep_apart(draft)
    number_messages(drafts)
    for draft in drafts:
        post_receives(draft)
    drain_sends(drafts)
    programs = []
    for draft in drafts:
        program = finish(dag, draft, world_size)
        program = free_dead(add_in_chunks(program, dag.chunks) if adding else program)
        programs.append(replace(program, peak_bytes=peak_bytes(program, dag.chunks)))
    return tuple(programs)


def _forward_first(tasks: list[Node]) -> list[Node]:
    names = [(task_of(node).name, node) for node in tasks]
    forward = [node for name, node in names if name is not None and name.which is Pass.F]
    return forward + [node for name, node in names if name is None or name.which is not Pass.F]
