"""The programs of all ranks: lowered at once, or replica by replica where these are alike.

Signature: distributed DAG, task orders -> a program per rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from torch.fx.node import Node

from piper_dynamo.errors import PiperPlanError, join_faults
from piper_dynamo.ir.alike import are_alike, check_alike, part_of_job
from piper_dynamo.ir.chunk import Chunk
from piper_dynamo.ir.graph import Dag, task_of
from piper_dynamo.ir.joint import Arg
from piper_dynamo.ir.meaning import Meaning
from piper_dynamo.ir.program import Group, Instr, Op, RankProgram
from piper_dynamo.ir.streams import StreamProgram
from piper_dynamo.ir.task import Pass
from piper_dynamo.ir.verify import verify
from piper_dynamo.lowering.apart import keep_apart
from piper_dynamo.lowering.channels import drain_sends, number_messages, post_receives
from piper_dynamo.lowering.emit import emit
from piper_dynamo.lowering.emit_streams import emit_on_streams
from piper_dynamo.lowering.happens_before import verify_streams
from piper_dynamo.lowering.launches import in_launch_order
from piper_dynamo.lowering.lower import finish, lower
from piper_dynamo.lowering.memory import free_dead, peak_bytes
from piper_dynamo.lowering.schedule import schedule
from piper_dynamo.lowering.streams import on_streams
from piper_dynamo.lowering.sums import add_in_chunks
from piper_dynamo.passes.gather import Gather
from piper_dynamo.passes.pipeline import run_passes
from piper_dynamo.runtime.nccl import PAIR

Devices = tuple[int, ...]
Order = Mapping[Devices, list[Node]]
NUM_PASSES = 10  # of the table in docs/how-it-works.md; the last one, Gather, is run here
LEAST_ALIKE = 3  # replicas: two are proved


@dataclass(slots=True, kw_only=True)
class Program:
    """One rank's program, printed as the Python that runs.

    Attributes:
        rank_program: The program.
        on_streams: The same with its streams, where it is asked for as CUDA runs it.
    """

    rank_program: RankProgram
    on_streams: StreamProgram | None = None

    @property
    def instrs(self) -> tuple[Instr, ...]:
        """The instructions, in host order."""
        return self.rank_program.instrs

    def __str__(self) -> str:
        if self.on_streams is not None:
            return emit_on_streams(self.on_streams).source
        return emit(self.rank_program).source


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

    def launched(self, chunks: Mapping[str, Chunk]) -> "AlikePrograms":
        """The same in launch order: replicas that are alike have it alike."""

        def replica(place: int) -> tuple[RankProgram, ...]:
            found = {program.rank: program for program in self.replica(place)}
            # In the order of groups: the numbers of ranks must not say which of two comes first.
            by_group = [found[devices[place]] for devices in self._groups]
            return tuple(sorted(launched(by_group, chunks), key=lambda program: program.rank))

        return AlikePrograms(self._groups, replica)

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


def launched(programs: Sequence[RankProgram], chunks: Mapping[str, Chunk]) -> Sequence[RankProgram]:
    """The programs of all ranks in launch order (`lowering/launches.py`), with its peaks."""
    if isinstance(programs, AlikePrograms):
        return programs.launched(chunks)
    ordered = in_launch_order(programs)
    return tuple(replace(one, peak_bytes=peak_bytes(one, chunks)) for one in ordered)


def on_cuda(args: Sequence[Arg]) -> bool:
    """Whether a call's arguments are on CUDA, where programs run on streams."""
    return any(arg.spec is not None and arg.spec.device.startswith("cuda") for arg in args)


def prove_on_streams(programs: Sequence[RankProgram], chunks: Mapping[str, Chunk]) -> None:
    """Prove programs in launch order free of races on the streams they get.

    Raises:
        PiperPlanError: Lists every fault.
    """
    verify_streams([on_streams(program, chunks) for program in programs], chunks)


def pairs_of(programs: Sequence[RankProgram], groups: Sequence[Devices]) -> set[Group]:
    """A communicator for each direction in which any replica's ranks send.

    Args:
        programs: Those of all ranks, or of a replica that the others are like.
        groups: The device groups.
    """
    group = {rank: devices for devices in groups for rank in devices}
    known = {program.rank for program in programs}
    found: set[Group] = set()
    for program in programs:
        for peer in {i.peer for i in program.instrs if i.op is Op.SEND}:
            pairs = [(program.rank, peer)]
            if len(known) < len(group):  # messages of replicas that are alike stay in their places
                pairs = list(zip(group[program.rank], group[peer], strict=True))
            found.update((PAIR, pair) for pair in pairs)
    return found


def programs_of(
    dag: Dag,
    world_size: int,
    order: Order,
    groups: Sequence[Devices],
    *,
    adding: bool,
    alike: bool,
    starts_alike: bool = False,
) -> Sequence[RankProgram]:
    """Lower a distributed DAG to every rank's program.

    Args:
        dag: The DAG.
        world_size: How many ranks.
        order: Every device group's tasks in the order they run.
        groups: The device groups.
        adding: Whether chunks may add gradients to their sums.
        alike: Lower one replica at a time, if replicas are alike.
        starts_alike: In launch order, as devices with streams need it.
    """
    if not alike or len(groups[0]) < LEAST_ALIKE or not are_alike(dag, groups):
        found: Sequence[RankProgram] = lower_all(dag, world_size, order, adding=adding)
        return launched(found, dag.chunks) if starts_alike else found
    order = _gathered(dag, order)
    made = AlikePrograms(groups, lambda place: _lower(dag, world_size, order, adding, place))
    return launched(made, dag.chunks) if starts_alike else made


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
