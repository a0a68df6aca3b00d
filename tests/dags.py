"""Small graphs for tests, and the exact optimum of one by search over all schedules."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

from hypothesis import strategies as st

from remat.solvers.graph import Graph, Node
from remat.solvers.schedule import simulate

_DEPTH = 6  # of what is run again for what is run again


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> Graph:
    """Random DAGs with everything that a graph may have."""
    count = draw(st.integers(1, most))
    edges = [
        (source, target)
        for target in range(1, count)
        for source in draw(st.sets(st.integers(0, target - 1), max_size=3))
    ]
    flagged = draw(st.booleans())
    turn = draw(st.integers(0, count)) if flagged else count
    nodes: list[Node] = []
    for index in range(count):
        inputs = [source for source, target in edges if target == index]
        in_place = draw(st.booleans())
        forward = draw(st.sampled_from(inputs)) if inputs and in_place else None
        nodes.append(
            Node(
                name=f"node{index}",
                cost=draw(st.integers(0, 9)),
                bytes=draw(st.integers(0, 20)) if forward is None else nodes[forward].bytes,
                workspace=draw(st.sampled_from([0, 0, 0, 5])),
                recomputable=draw(st.sampled_from([True, True, True, False])),
                backward=index >= turn,
                forward=forward,
            )
        )
    writers = [index for index, node in enumerate(nodes) if not node.recomputable and index]
    order = [
        (draw(st.integers(0, writer - 1)), writer) for writer in writers if draw(st.booleans())
    ]
    outputs = draw(st.sets(st.integers(0, count - 1), max_size=2))
    return Graph(
        name="random",
        nodes=tuple(nodes),
        edges=tuple(edges),
        resident=draw(st.sampled_from([0, 7])),
        outputs=tuple(sorted(outputs)),
        order=tuple(order),
    )


def any_schedule(graph: Graph, seed: int) -> tuple[int, ...]:
    """A legal schedule that runs a random share of what it reads again."""
    rng = random.Random(seed)
    share = rng.choice([0.1, 0.3])
    written_by: dict[int, set[int]] = {}
    before = [set(group) for group in graph.predecessors]
    for reader, writer in graph.order:
        written_by.setdefault(reader, set()).add(writer)
        before[writer].add(reader)
    schedule: list[int] = []
    left = set(range(len(graph)))

    def read(node: int, depth: int) -> None:
        for source in graph.predecessors[node]:
            overwritten = not written_by.get(source, set()) <= left
            if graph.nodes[source].recomputable and not overwritten and rng.random() < share:
                if depth < _DEPTH:
                    read(source, depth + 1)
                schedule.append(source)

    while left:
        ready = sorted(node for node in left if not before[node] & left)
        node = rng.choice(ready)
        read(node, 0)
        schedule.append(node)
        left.remove(node)
    return tuple(schedule)


def unit_chain(length: int, reads: int = 1, **changes: Any) -> Graph:
    """x0 .. x(l-1) and gradients b(l-1) .. b0; b(i) reads x(i), and x(i-1) if reads is 2."""
    nodes = [Node(f"x{i}", 1, 1) for i in range(length)]
    nodes += [Node(f"b{i}", 1, 1, backward=True) for i in reversed(range(length))]
    edges = list(itertools.pairwise(range(2 * length)))
    for i in range(length):
        gradient = 2 * length - 1 - i
        edges += [(i, gradient), (i - 1, gradient)] if reads == 2 and i else [(i, gradient)]
    return Graph("chain", tuple(nodes), tuple(edges), **changes)


def skip_training(depth: int) -> Graph:
    """One training step of a U-Net of so many levels, with the gradients of its weights."""
    nodes = [Node("input", 0.0, 64)]
    edges: list[tuple[int, int]] = []
    layers: list[tuple[int, tuple[int, ...]]] = []
    levels = range(depth)

    def add(name: str, cost: float, size: int, *inputs: int, backward: bool = False) -> int:
        nodes.append(Node(name, cost, size, backward=backward))
        edges.extend((source, len(nodes) - 1) for source in inputs)
        return len(nodes) - 1

    def layer(name: str, cost: float, size: int, *inputs: int) -> int:
        layers.append((add(name, cost, size, *inputs), inputs))
        return layers[-1][0]

    last, skips = 0, []
    for level in levels:
        last = layer(f"down{level}", 4.0 - level, 64 >> level, last)
        skips.append(last)
        last = layer(f"pool{level}", 0.5, 32 >> level, last)
    last = layer("bottom", 2.0, 64 >> depth, last)
    for level in reversed(levels):
        last = layer(f"up{level}", 4.0 - level, 64 >> level, last, skips[level])
        last = layer(f"norm{level}", 0.3, 64 >> level, last)
    loss = add("loss", 0.1, 1, last)
    gradients, outputs = {last: [loss]}, [loss]
    for index, inputs in reversed(layers):
        name, cost = nodes[index].name, nodes[index].cost
        (gradient, *others) = gradients[index]
        if others:
            size = nodes[index].bytes
            gradient = add(f"{name}/sum", 0.05, size, gradient, *others, backward=True)
        for source in filter(None, inputs):
            size = nodes[source].bytes
            of_input = add(f"{name}/{source}", cost, size, gradient, index, backward=True)
            gradients.setdefault(source, []).append(of_input)
        outputs.append(add(f"{name}/weights", cost, 2, gradient, *inputs, backward=True))
    return Graph("u-net", tuple(nodes), tuple(sorted(set(edges))), outputs=tuple(outputs))


def plain_peak(graph: Graph) -> int:
    """Peak in bytes of the given order."""
    return simulate(graph, range(len(graph))).peak


def optimum(graph: Graph, budget: int, *, in_stages: bool = False) -> float:
    """Least cost of any schedule within the budget, by Dijkstra's search; inf if there is none.

    A state is what is live, what has run, and (for ``in_stages``) the node that
    ran last in the current stage.

    Args:
      graph: of 9 nodes or so at most.
      budget: bytes.
      in_stages: only schedules as Checkmate's program has them: first runs in
        the given order, and between two of them runs in the given order too.
    """
    count, nodes = len(graph), graph.nodes
    inputs = [sum(1 << source for source in group) for group in graph.predecessors]
    outputs = sum(1 << index for index in graph.outputs)
    writers, readers = [0] * count, [0] * count
    for reader, writer in graph.order:
        writers[reader] |= 1 << writer
        readers[writer] |= 1 << reader
    best = {(0, 0, -1): 0.0}
    queue = [(0.0, 0, 0, -1)]
    while queue:
        cost, live, done, last = heapq.heappop(queue)
        if cost > best[live, done, last]:
            continue
        if done == (1 << count) - 1 and live & outputs == outputs:
            return cost
        held = graph.resident + sum(node.bytes for i, node in enumerate(nodes) if live >> i & 1)
        stage = done.bit_count()
        steps = []
        for i, node in enumerate(nodes):
            bit = 1 << i
            if live & bit:
                steps.append((cost, live & ~bit, done, last))
                continue
            if in_stages and (i > stage or i <= last):
                continue
            if not node.recomputable and done & bit:
                continue
            if live & inputs[i] != inputs[i] or done & writers[i] or readers[i] & ~done:
                continue
            now = -1 if not in_stages or i == stage else i
            after = (cost + node.cost, live | bit, done | bit, now)
            if held + node.bytes + node.workspace <= budget:
                steps.append(after)
            elif node.forward is not None and held + node.workspace <= budget:
                steps.append((after[0], after[1] & ~(1 << node.forward), *after[2:]))
        for step in steps:
            if step[0] < best.get(step[1:], math.inf):
                best[step[1:]] = step[0]
                heapq.heappush(queue, step)
    return math.inf
