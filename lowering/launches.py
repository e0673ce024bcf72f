"""Launches: one order in which all ranks start messages and collectives, for devices that need it.

On CUDA, communication is kernels that wait for each other on the devices. Where two ranks start
those of several communicators in different orders, each may hold the place that the other's needs.
So a message, or a collective, is one vertex of one graph over all ranks, whose edges are

    what runs before it on each of its ranks -> it -> what waits for it on each

and every rank takes the order of one topological sort of it.

Formal: that graph is a part of the happens-before graph that the proof has found acyclic, in which
    a message or collective goes on once all its ends are issued; so there is a sort, and each
    instruction still comes after all that it came after on its own rank, but for receives and
    starts of other communicators. All of a rank's later waits point backwards in the sort: no
    device waits for another in a circle, even if sends wait for their receives.

Signature: rank programs -> the same, each in the order of the sort.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

from piper_dynamo.ir.program import COLLECTIVES, Instr, Op, RankProgram
from piper_dynamo.lowering.memory import free_dead

_Key = tuple[object, ...]


def meeting_key(instr: Instr, rank: int, started: dict[_Key, int]) -> _Key | None:
    """What ranks meet for: a message or the n-th collective of a communicator; else None.

    Args:
        instr: An instruction; a rank's are asked for in its order.
        rank: Whose.
        started: How many collectives of each communicator it has started.
    """
    if instr.op is Op.SEND:
        return "message", rank, instr.peer, instr.message
    if instr.op is Op.POST:
        return "message", instr.peer, rank, instr.message
    if instr.op not in COLLECTIVES:
        return None
    group = instr.communicator
    number = started.get(group, 0)
    started[group] = number + 1
    return "collective", *group, number


def in_launch_order(programs: Sequence[RankProgram]) -> tuple[RankProgram, ...]:
    """The programs with one order of what their ranks do together.

    Args:
        programs: Those of all ranks, proved free of deadlocks, or of whole replicas that are like
            the others.
    """
    graph = _Graph()
    for place, program in enumerate(programs):
        graph.add(place, program)
    orders: list[list[Instr]] = [[] for _ in programs]
    for vertex in graph.sorted():
        for place, instr in graph.members[vertex]:
            orders[place].append(instr)
    return tuple(
        free_dead(replace(program, instrs=tuple(order)))
        for program, order in zip(programs, orders, strict=True)
    )


class _Graph:
    """A vertex per instruction, or per meeting of several."""

    def __init__(self) -> None:
        self.members: list[list[tuple[int, Instr]]] = []
        self.after: list[list[int]] = []
        self.meetings: dict[_Key, int] = {}

    def _vertex(self) -> int:
        self.members.append([])
        self.after.append([])
        return len(self.after) - 1

    def add(self, place: int, program: RankProgram) -> None:
        """A rank's instructions: a chain of what it does alone, with meetings beside it."""
        last = -1
        handles: dict[str, int] = {}
        sent: dict[tuple[int, int], int] = {}
        earlier: dict[_Key, int] = {}  # the meeting before, of a channel or a communicator
        started: dict[_Key, int] = {}
        for instr in program.instrs:
            if instr.op is Op.FREE:
                continue
            key = meeting_key(instr, program.rank, started)
            if key is None:
                vertex = self._vertex()
                origin = handles.get(instr.inputs[0]) if instr.op is Op.WAIT else None
                if instr.op is Op.DRAIN:
                    origin = sent[instr.peer, instr.message]
                if origin is not None:
                    self.after[origin].append(vertex)
            else:
                if key not in self.meetings:
                    self.meetings[key] = self._vertex()
                vertex = self.meetings[key]
                if key[:-1] in earlier:
                    self.after[earlier[key[:-1]]].append(vertex)
                earlier[key[:-1]] = vertex
                if instr.op is Op.SEND:
                    sent[instr.peer, instr.message] = vertex
                else:
                    handles[instr.outputs[0]] = vertex
            self.members[vertex].append((place, instr))
            if last >= 0:
                self.after[last].append(vertex)
            if key is None:
                last = vertex

    def sorted(self) -> list[int]:
        """By the time at which they would start if each task took 1; meetings before tasks."""
        waiting = [0] * len(self.after)
        for targets in self.after:
            for target in targets:
                waiting[target] += 1
        start = [0] * len(self.after)
        ready = [self._rank(v, 0) for v, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            *_, vertex = heapq.heappop(ready)
            found.append(vertex)
            end = start[vertex] + self._takes(vertex)
            for target in self.after[vertex]:
                start[target] = max(start[target], end)
                waiting[target] -= 1
                if not waiting[target]:
                    heapq.heappush(ready, self._rank(target, start[target]))
        assert len(found) == len(self.after), "the programs were proved free of deadlocks"
        return found

    def _takes(self, vertex: int) -> int:
        return int(self.members[vertex][0][1].op is Op.RUN)

    def _rank(self, vertex: int, start: int) -> tuple[int, int, int]:
        return start, self._takes(vertex), vertex
