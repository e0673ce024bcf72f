"""Replicas that are alike: a job of many replicas proved, and timed, by a few of them.

Terms: the ranks of a device group run the same tasks, each for one replica; a rank's *place* is its
position in its group, and the ranks of one place are one replica of the model. Replicas are *alike*
if all groups have as many places, every collective is over the whole of one group, and every
message stays in its place.

Formal: each permutation of the places, applied to all groups, then maps the job onto itself. So
  registers, sums, messages, orders of collectives: right at every place iff they are at one;
  deadlock: with every rank renamed to that of place 0 in its group, a cycle of the job is a closed
      walk in place 0's happens-before graph, whose cycles in turn lift to the job's;
  values: a register holds a times its own replica's part and b times each other's, where a >= b:
      sums add, messages keep, and reductions over D places make both a + (D-1) b. Every part once,
      a = b = 1, comes of a = 1, b = 0 alone, for D as for two; and so do the blocks of parameters,
      each of which comes from its own place;
  time: what happens at one place happens at all of them at once.
Two places stand for all in the proof, one in the simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest

from piper_dynamo.ir.graph import Dag
from piper_dynamo.ir.program import Instr, RankProgram, where

Groups = Sequence[tuple[int, ...]]


def are_alike(dag: Dag, groups: Groups) -> bool:
    """Whether replicas are alike, as far as the placed DAG says.

    Args:
        dag: With its reductions and transfers.
        groups: The device groups.
    """
    layouts = all(
        layout.shard_groups in ((), (devices,)) and not layout.expert_groups
        for (_, devices), layout in dag.layouts.items()
    )
    whole = all(
        node.meta["ranks"].get("groups", (node.meta["task"].devices,))
        == (node.meta["task"].devices,)
        for node in dag.graph.nodes
        if "ranks" in node.meta
    )
    return layouts and whole and len({len(devices) for devices in groups}) == 1


def check_alike(pairs: Sequence[tuple[RankProgram, RankProgram]], groups: Groups) -> list[str]:
    """Two replicas' programs are the same, renamed, and say nothing that tells replicas apart.

    Args:
        pairs: The programs of two places, by device group.
        groups: All device groups.
    """
    known = set(groups)
    other = {one.rank: two.rank for one, two in pairs}
    faults = []
    for one, two in pairs:
        for index, instr in enumerate(one.instrs):
            if instr.group and (instr.group not in known or one.rank not in instr.group):
                faults.append(f"{where(one, index)}: its ranks are not a device group")
            elif instr.peer >= 0 and instr.peer not in other:
                faults.append(f"{where(one, index)}: rank {instr.peer} is of another replica")
        faults += [
            f"rank {one.rank}: blocks of argument {position} are on a part of a device group"
            for position, ranks in one.shards
            if ranks not in known
        ]
        moved = {ranks: _moved(ranks, other, groups) for _, ranks in one.contributors}
        faults += [
            f"rank {one.rank}: contributions to argument {position} are of some replicas only"
            for position, ranks in one.contributors
            if moved[ranks] is None
        ]
        if not faults:
            renamed = _renamed(one, other, moved)
            if renamed != two:
                at = _parting(one, renamed, two)
                faults.append(f"rank {two.rank} does not do what rank {one.rank} does{at}")
    return faults


def _parting(one: RankProgram, renamed: RankProgram, two: RankProgram) -> str:
    """Lines for the first instruction in which two replicas' programs differ, or what else does.

    Args:
        one: The one's program.
        renamed: What the other's is to be.
        two: What it is.
    """
    for index, (mine, theirs) in enumerate(zip_longest(renamed.instrs, two.instrs)):
        if mine == theirs:
            continue
        odd = [
            f.name
            for f in fields(Instr)
            if mine and theirs and getattr(mine, f.name) != getattr(theirs, f.name)
        ]
        ends = ((mine, one), (theirs, two))
        lines = [
            where(program, index) if instr else f"rank {program.rank} has no instruction #{index}"
            for instr, program in ends
        ]
        differ = [f"they differ in {', '.join(odd)}"] if odd else []
        return "".join(f"\n  {line}" for line in (*lines, *differ))
    odd = [f.name for f in fields(two) if getattr(renamed, f.name) != getattr(two, f.name)]
    return f"\n  all instructions are alike, but not {', '.join(odd)}"


def _moved(
    ranks: tuple[int, ...], other: Mapping[int, int], groups: Groups
) -> tuple[int, ...] | None:
    """What these ranks are for the other replica; None where they are not alike.

    Of each device group they are all, none, or the replica's own.
    """
    found: set[int] = set()
    for group in groups:
        mine = set(ranks).intersection(group)
        if len(mine) == len(group):
            found |= mine
        elif all(rank in other for rank in mine):
            found.update(other[rank] for rank in mine)
        else:
            return None
    return tuple(sorted(found))


def _renamed(
    program: RankProgram,
    other: Mapping[int, int],
    moved: Mapping[tuple[int, ...], tuple[int, ...] | None],
) -> RankProgram:
    instrs = (
        replace(instr, peer=other[instr.peer]) if instr.peer >= 0 else instr
        for instr in program.instrs
    )
    return replace(
        program,
        rank=other[program.rank],
        instrs=tuple(instrs),
        contributors=tuple((p, moved[ranks] or ranks) for p, ranks in program.contributors),
    )


def part_of_job(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """The job of these ranks alone: groups without the others.

    Args:
        programs: Of whole replicas.
    """
    here = {program.rank for program in programs}
    known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def cut(ranks: tuple[int, ...]) -> tuple[int, ...]:
        if ranks not in known:
            known[ranks] = tuple(rank for rank in ranks if rank in here)
        return known[ranks]

    return tuple(
        replace(
            program,
            instrs=tuple(replace(i, group=cut(i.group)) if i.group else i for i in program.instrs),
            contributors=tuple((position, cut(ranks)) for position, ranks in program.contributors),
            shards=tuple((position, cut(ranks)) for position, ranks in program.shards),
        )
        for program in sorted(programs, key=lambda one: one.rank)
    )


def replicas_of(groups: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Which replica each rank belongs to."""
    return {rank: place for devices in groups for place, rank in enumerate(devices)}
