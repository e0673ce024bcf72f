"""Cycles in directed graphs of integers, against definitions by brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from piper_dynamo.ir.cycle import find_cycle, topological_order

MANY = settings(max_examples=max(200, settings.default.max_examples))
Graph = list[list[int]]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to nine vertices; self-loops and repeated edges too. Sparse ones often have no cycle."""
    count = draw(st.integers(0, 9))
    vertices = st.integers(0, count - 1)
    edges = draw(st.lists(st.tuples(vertices, vertices), max_size=14)) if count else []
    if draw(st.booleans()):  # downhill only, in a shuffled numbering: no cycle
        number = draw(st.permutations(range(count)))
        edges = [(number[min(a, b)], number[max(a, b)]) for a, b in edges if a != b]
    successors: Graph = [[] for _ in range(count)]
    for a, b in edges:
        successors[a].append(b)
    return successors


def reachable(successors: Graph, start: int) -> dict[int, int]:
    """How many edges away each vertex is that can be reached from `start` by at least one."""
    found: dict[int, int] = {}
    frontier, steps = {start}, 0
    while frontier:
        steps += 1
        frontier = {t for v in frontier for t in successors[v] if t not in found}
        found |= dict.fromkeys(frontier, steps)
    return found


@MANY
@given(graphs())
def test_there_is_a_cycle_iff_there_is_no_order(successors: Graph):
    order = topological_order(successors)
    cycle = find_cycle(successors)
    has_cycle = any(v in reachable(successors, v) for v in range(len(successors)))
    assert (len(order) < len(successors)) == bool(cycle) == has_cycle


@MANY
@given(graphs())
def test_an_order_respects_all_edges(successors: Graph):
    """What is left out comes after a cycle, or is on one: it can be reached from there."""
    order = topological_order(successors)
    place = {vertex: i for i, vertex in enumerate(order)}
    assert len(place) == len(order)
    assert all(place[a] < place[b] for a in place for b in successors[a] if b in place)
    reached = [reachable(successors, v) for v in range(len(successors))]
    cyclic = {v for v in range(len(successors)) if v in reached[v]}
    after = cyclic.union(*(reached[v] for v in cyclic))
    assert set(place) == set(range(len(successors))) - after


@MANY
@given(graphs())
def test_a_cycle_is_real_and_shortest_through_its_first_vertex(successors: Graph):
    cycle = find_cycle(successors)
    if not cycle:
        return
    assert len(set(cycle)) == len(cycle)
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        assert b in successors[a]
    assert len(cycle) == reachable(successors, cycle[0])[cycle[0]]


def test_small_graphs():
    assert find_cycle([]) == []
    assert topological_order([]) == []
    assert find_cycle([[0]]) == [0]
    assert find_cycle([[1], [2], []]) == []
    assert topological_order([[1], [2], []]) == [0, 1, 2]
    # A tail into the cycle and one out of it; neither is on it.
    assert sorted(find_cycle([[1], [2], [3, 4], [1], []])) == [1, 2, 3]
    # A short cut: the cycle through 0 need not take the long way.
    assert len(find_cycle([[1], [2, 0], [3], [0]])) == 2


def test_large_graphs_take_no_recursion():
    count = 100_000
    ring = [[(v + 1) % count] for v in range(count)]
    assert len(find_cycle(ring)) == count
    line = [[v + 1] if v + 1 < count else [] for v in range(count)]
    assert find_cycle(line) == []
    assert topological_order(line) == list(range(count))
