"""Feng and Huang, "Optimal gradient checkpoint search for arbitrary computation graphs", CVPR 2021.

Which values to keep so that the bytes kept plus the bytes of the largest
segment between them are least.  Two ideas:

* For a bound C on a segment, the least bytes to keep on a chain are a shortest
  path: the nodes are vertices, an edge joins two of them if the bytes strictly
  between are at most C, and its length is the bytes of its head.  Solve it for
  each candidate C.
* Any graph is divided into *closed sets*.  A closed set is what lies strictly
  between an entry and an exit, with no edge to anything else.  It is
  - a *line*, if some of its nodes are passed over by no edge: they split it,
    and between each two of them lies a closed set again;
  - *branches*, if it falls into parts that no edge joins: each is a closed set
    with the same entry and exit;
  - otherwise *knotted*: the largest closed sets within it are its parts, and
    every other node of it must be kept, if it does not fit a segment whole.
  With a bound C, a closed set of at most C bytes needs nothing kept inside; a
  line is a shortest path, in which neighbours with more than C bytes between
  are joined by the solution of the closed set between them; the solutions of
  branches, and of the parts of a knot, add up.

The paper wants the least memory; here, of the schedules for all C, the
cheapest within the budget is returned.  The paper also takes C from the sums
over all pairs of nodes, O(n^2) of them; here at most 64 sizes are tried.  A
closed set is looked for among runs of consecutive nodes of the order (within
each branch), which is how a schedule meets it.

Complexity: O(d (n + e)) to divide, for a depth d of the division tree (a knot
of m nodes adds O(m^2) at worst), and O(n + e) for each C: the window of a
shortest path's edges only moves forward, so a monotone queue finds its
minimum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .best import best_schedule, check_options
from .graph import Graph
from .keep import Training, keep_each, segment_sizes, trainings
from .method import Monitor, Outcome, Problem
from .schedule import Schedule


def feng_huang(problem: Problem, monitor: Monitor) -> Outcome:
    """Gradient checkpoints by division tree and shortest paths.  No options."""
    check_options(problem)

    def schedules() -> Iterator[Schedule | None]:
        for training in trainings(problem.graph, monitor.check):
            tree = divide(training)
            choices = (cheapest_to_keep(tree, bound) for bound in segment_sizes(training))
            yield from keep_each(training, choices)

    return best_schedule(problem, monitor, schedules())


@dataclass(frozen=True)
class ClosedSet:
    """One node of the division tree.

    Attributes:
      size: bytes of all nodes in it.
      stops: the nodes that split a line, or must be kept in a knot, in order.
      stop_bytes: their bytes.
      parts: the closed sets within, by number; None for an empty one.  A line
        of k stops has k + 1 parts, before, between and after them.
      is_line: whether it is a line.
    """

    size: int
    stops: tuple[int, ...]
    stop_bytes: tuple[int, ...]
    parts: tuple[int | None, ...]
    is_line: bool


def divide(training: Training) -> tuple[ClosedSet, ...]:
    """The division tree of the forward part; parts come after what they are parts of."""
    graph, is_forward = training.graph, training.is_forward
    place = {node: number for number, node in enumerate(training.order)}

    def when_needed(node: int) -> tuple[int, int]:
        # A source (a weight, say) belongs to its first reader, not to the start.
        if graph.predecessors[node]:
            return place[node], 1
        readers = (place[reader] for reader in graph.successors[node] if is_forward[reader])
        return min(readers, default=place[node]), 0

    pending = [sorted(training.forward, key=when_needed)]
    tree: list[ClosedSet] = []
    while len(tree) < len(pending):
        nodes = pending[len(tree)]
        stops, parts, is_line = _split(training, nodes)
        numbers: list[int | None] = []
        for part in parts:
            numbers.append(len(pending) if part else None)
            if part:
                pending.append(part)
        tree.append(
            ClosedSet(
                size=sum(graph.nodes[node].bytes for node in nodes),
                stops=tuple(stops),
                stop_bytes=tuple(graph.nodes[node].bytes for node in stops),
                parts=tuple(numbers),
                is_line=is_line,
            )
        )
    return tuple(tree)


def cheapest_to_keep(tree: Sequence[ClosedSet], bound: float) -> frozenset[int]:
    """The nodes of least bytes to keep so that no segment is over ``bound`` bytes.

    Args:
      tree: the division tree; the first closed set is the whole forward part.
      bound: bytes.
    """
    least = [0] * len(tree)
    # For a line, the stops on the shortest path and the parts it goes through;
    # else all stops and parts.
    chosen: list[tuple[list[int], list[int]]] = [([], [])] * len(tree)
    for number in reversed(range(len(tree))):
        closed = tree[number]
        if closed.size <= bound:
            continue
        if closed.is_line:
            least[number], stops, parts = _shortest_path(closed, tree, least, bound)
            chosen[number] = stops, parts
            continue
        inner = [part for part in closed.parts if part is not None]
        least[number] = sum(closed.stop_bytes) + sum(least[part] for part in inner)
        chosen[number] = list(closed.stops), inner
    kept: set[int] = set()
    pending = [0]
    while pending:
        stops, parts = chosen[pending.pop()]
        kept.update(stops)
        pending.extend(parts)
    return frozenset(kept)


def _shortest_path(
    line: ClosedSet, tree: Sequence[ClosedSet], least: Sequence[int], bound: float
) -> tuple[int, list[int], list[int]]:
    """(bytes to keep, stops kept, parts with something kept inside) for one line.

    Vertex 0 is the entry, vertex k + 1 the exit, vertex i between them stop i - 1.
    """
    gaps = [tree[part].size if part is not None else 0 for part in line.parts]
    last = len(gaps)
    sizes = (0, *line.stop_bytes, 0)
    # Bytes up to and with a vertex; what lies between i and j is then
    # through[j] - sizes[j] - through[i].
    through = list(accumulate(gap + size for gap, size in zip(gaps, sizes[1:], strict=True)))
    through.insert(0, 0)
    distance = [0] * (last + 1)
    before = [0] * (last + 1)
    window: deque[int] = deque()  # vertices that may be joined to j, distances rising
    for j in range(1, last + 1):
        while window and distance[window[-1]] >= distance[j - 1]:
            window.pop()
        window.append(j - 1)
        while window and through[j] - sizes[j] - through[window[0]] > bound:
            window.popleft()
        if window:
            before[j] = window[0]
            distance[j] = distance[window[0]] + sizes[j]
        else:
            before[j] = j - 1
            part = line.parts[j - 1]
            distance[j] = distance[j - 1] + sizes[j] + (0 if part is None else least[part])
    stops, parts = [], []
    j = last
    while j:
        part = line.parts[j - 1]
        if before[j] == j - 1 and part is not None and tree[part].size > bound:
            parts.append(part)
        j = before[j]
        if j:
            stops.append(line.stops[j - 1])
    return distance[last], stops, parts


def _split(training: Training, nodes: Sequence[int]) -> tuple[list[int], list[list[int]], bool]:
    """One step of the division: (stops, parts, whether it is a line)."""
    graph, is_forward = training.graph, training.is_forward
    # Places are 1 to m; 0 is the entry and m + 1 the exit.
    place = {node: number for number, node in enumerate(nodes, 1)}
    end = len(nodes) + 1
    first, last = list(range(end + 1)), list(range(end + 1))  # least, greatest neighbour
    for node, number in place.items():
        for producer in graph.predecessors[node]:
            if is_forward[producer]:
                first[number] = min(first[number], place.get(producer, 0))
        for reader in graph.successors[node]:
            if is_forward[reader]:
                last[number] = max(last[number], place.get(reader, end))

    # A line?  Count the edges that pass over each place.
    reach = 0  # as far as what lies before goes
    origin = [end] * (end + 1)  # how far back what lies behind goes
    for number in range(end - 1, 0, -1):
        origin[number] = min(origin[number + 1], first[number])
    stops = []
    for number in range(1, end):
        if reach <= number <= origin[number + 1]:
            stops.append(number)
        reach = max(reach, last[number])
    if stops:
        bounds = [0, *stops, end]
        parts = [list(nodes[a : b - 1]) for a, b in pairwise(bounds)]
        return [nodes[number - 1] for number in stops], parts, True

    parts = _components(graph, nodes)
    if len(parts) > 1:
        return [], parts, False

    # A knot: from the left, the longest run of places that no edge leaves.
    stops, parts = [], []
    number = 0
    while number < end:
        training.check()
        closing, lowest, highest = number + 1, end, 0
        for inner in range(number + 1, end):
            lowest, highest = min(lowest, first[inner]), max(highest, last[inner])
            if lowest < number:
                break
            if highest <= inner + 1 and (number, inner + 1) != (0, end):
                closing = inner + 1
        parts.append(list(nodes[number : closing - 1]))
        if closing < end:
            stops.append(nodes[closing - 1])
        number = closing
    return stops, parts, False


def _components(graph: Graph, nodes: Sequence[int]) -> list[list[int]]:
    """The parts that no edge joins, each in the order of ``nodes``."""
    members = frozenset(nodes)
    component: dict[int, int] = {}
    count = 0
    for root in nodes:
        if root in component:
            continue
        pending = [root]
        component[root] = count
        while pending:
            node = pending.pop()
            for other in (*graph.predecessors[node], *graph.successors[node]):
                if other in members and other not in component:
                    component[other] = count
                    pending.append(other)
        count += 1
    parts: list[list[int]] = [[] for _ in range(count)]
    for node in nodes:
        parts[component[node]].append(node)
    return parts
