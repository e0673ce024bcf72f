"""Order and cycles of a directed graph of integers, in linear time."""

from collections.abc import Sequence


def topological_order(successors: Sequence[Sequence[int]]) -> list[int]:
    """The vertices in an order that respects all edges, by Kahn's algorithm (CACM 5(11), 1962).

    Those on a cycle, or after one, are left out.
    """
    count = [0] * len(successors)
    for targets in successors:
        for target in targets:
            count[target] += 1
    order = [v for v, before in enumerate(count) if before == 0]
    for vertex in order:  # grows while it is read
        for target in successors[vertex]:
            count[target] -= 1
            if count[target] == 0:
                order.append(target)
    return order


def find_cycle(successors: Sequence[Sequence[int]]) -> list[int]:
    """A shortest cycle through some vertex, in edge order; empty if there is none."""
    alive = [True] * len(successors)
    for vertex in topological_order(successors):
        alive[vertex] = False
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
