"""Finding a cycle in a directed graph of integers, in linear time."""

from collections.abc import Sequence


def topological_order(successors: Sequence[Sequence[int]]) -> list[int] | None:
    """The vertices in an order that respects all edges, or None if there is a cycle."""
    count = [0] * len(successors)
    for targets in successors:
        for target in targets:
            count[target] += 1
    ready = [v for v in range(len(successors)) if count[v] == 0]
    order: list[int] = []
    while ready:
        vertex = ready.pop()
        order.append(vertex)
        for target in successors[vertex]:
            count[target] -= 1
            if count[target] == 0:
                ready.append(target)
    return order if len(order) == len(successors) else None


def find_cycle(successors: Sequence[Sequence[int]]) -> list[int]:
    """A shortest cycle through some vertex, in edge order; empty if there is none."""
    count = [0] * len(successors)
    for targets in successors:
        for target in targets:
            count[target] += 1
    ready = [v for v in range(len(successors)) if count[v] == 0]
    alive = [True] * len(successors)
    while ready:
        vertex = ready.pop()
        alive[vertex] = False
        for target in successors[vertex]:
            count[target] -= 1
            if count[target] == 0:
                ready.append(target)
    # What is left can reach a cycle or is on one. Walking backwards stays among vertices with a
    # predecessor left.
    left = [v for v in range(len(successors)) if alive[v]]
    if not left:
        return []
    predecessor: dict[int, int] = {}
    for vertex in left:
        for target in successors[vertex]:
            if alive[target]:
                predecessor.setdefault(target, vertex)
    seen: dict[int, int] = {}
    vertex = left[0]
    while vertex not in seen:
        seen[vertex] = len(seen)
        vertex = predecessor[vertex]
    return _shortest_cycle(successors, alive, vertex)


def _shortest_cycle(
    successors: Sequence[Sequence[int]], alive: list[bool], start: int
) -> list[int]:
    """Breadth-first from `start` back to itself; `start` is known to be on a cycle."""
    parent: dict[int, int] = {}
    frontier = [start]
    while frontier:
        following: list[int] = []
        for vertex in frontier:
            for target in successors[vertex]:
                if target == start:
                    path = [vertex]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    return path[::-1]
                if alive[target] and target not in parent:
                    parent[target] = vertex
                    following.append(target)
        frontier = following
    raise AssertionError("the start vertex is on no cycle")
