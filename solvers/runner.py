"""Writes a schedule run by run, and computes again what is missing on the way."""

from __future__ import annotations

from .graph import Graph


class Runner:
    """A schedule under construction.

    Attributes:
      schedule: the runs so far.
      present: the values that are taken to be held; the owner takes out what
        is to be dropped.
    """

    def __init__(self, graph: Graph) -> None:
        self.schedule: list[int] = []
        self.present: set[int] = set()
        self._graph = graph
        # Nodes that may not run again: their values are read where they are,
        # whether taken to be held or not.
        self._closed: set[int] = set()
        self._ran: set[int] = set()
        self._readers: dict[int, list[int]] = {}
        for reader, writer in graph.order:
            self._readers.setdefault(writer, []).append(reader)

    def run(self, index: int) -> None:
        """Runs a node unless it is present, after those inputs that are not (and theirs).

        What it overwrites the inputs of runs before it, if it has not yet.
        """
        stack = [(index, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                self._append(node)
            elif node not in self.present and node not in self._closed:
                stack.append((node, True))
                stack += [(source, False) for source in self._graph.predecessors[node]]
                readers = self._readers.get(node, ())
                stack += [(reader, False) for reader in readers if reader not in self._ran]

    def _append(self, node: int) -> None:
        self.schedule.append(node)
        self.present.add(node)
        self._ran.add(node)
        if not self._graph.nodes[node].recomputable:
            self._closed.add(node)
        self._closed.update(self._readers.get(node, ()))
