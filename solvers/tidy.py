"""A schedule's runs in the order that the graph came in, as far as memory allows.

Searches leave nodes wherever nothing speaks against it: the gradient of a weight long
after what it reads was written, when that is in no cache any more.  The given order
is the one in which a program was written, and plain TensorFlow runs it.  So a
schedule that was found is put back in order: each node where it was given, and what
runs again just before what reads it.  Which copy each run reads stays the same, and so
does the cost; the peak does not rise.

Runs are moved by halves: all that are left at once, or else the first half of them, and
what cannot be moved stays where it is, with all that comes before it.

Complexity: O((n + e) log n) for each run that stays, for n runs that read e copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .graph import Graph
from .schedule import Schedule

_WORK = 5_000_000  # runs and reads that are looked at: a tenth of a second


def in_given_order(graph: Graph, schedule: Sequence[int]) -> Schedule:
    """The runs of a legal schedule, nearer to the given order; see the module."""
    runs = _Runs(graph, schedule)
    order = np.arange(len(schedule))
    most = runs.peak(order)
    assert most is not None
    trials = _WORK // (len(schedule) + len(runs.readers))
    done = 0  # runs at the start of ``order`` that stay there
    tries = [runs.wanted]  # runs to be moved, the first ones last
    while tries and trials > 0:
        placed = np.zeros(len(order), bool)
        placed[order[:done]] = True
        here = tries.pop()
        here = here[~placed[here]]
        if not len(here):
            continue
        moved = placed.copy()
        moved[here] = True
        changed = np.concatenate((order[:done], here, order[~moved[order]]))
        trials -= 1
        peak = runs.peak(changed)
        if peak is not None and peak <= most:
            order, done = changed, done + len(here)
        elif len(here) > 1:
            tries += [here[len(here) // 2 :], here[: len(here) // 2]]
        else:
            done = int(np.flatnonzero(order == here[0])[0]) + 1
    return tuple(schedule[run] for run in order.tolist())


class _Runs:
    """The runs of a schedule, numbered as they come in it, and the copies that each reads.

    Attributes:
      wanted: the runs in the order that they would have if memory were no matter.
    """

    def __init__(self, graph: Graph, schedule: Sequence[int]) -> None:
        runs: list[list[int]] = [[] for _ in graph.nodes]  # of each node
        read: list[list[int]] = []  # copies, by run
        over: list[int] = []  # the copy whose buffer each may take over; -1 if none
        for run, index in enumerate(schedule):
            read.append([runs[source][-1] for source in graph.predecessors[index]])
            forward = graph.nodes[index].forward
            over.append(-1 if forward is None else runs[forward][-1])
            runs[index].append(run)
        nodes = [graph.nodes[index] for index in schedule]
        # A node's first run is wanted where it was given, others before the first that reads them.
        first = {each[0] for each in runs}
        place = [index if run in first else len(graph) for run, index in enumerate(schedule)]
        for run in reversed(range(len(schedule))):
            for copy in read[run]:
                if copy not in first:
                    place[copy] = min(place[copy], place[run])
        self.wanted = np.argsort(place, kind="stable")
        total = sum(node.bytes + node.workspace for node in nodes)
        exact = np.int64 if total < 1 << 62 else object  # Python's integers have no end
        self.bytes = np.array([node.bytes for node in nodes], exact)
        self.workspace = np.array([node.workspace for node in nodes], exact)
        self.over = np.array(over, np.int64)
        self.readers = np.repeat(np.arange(len(nodes)), [len(copies) for copies in read])
        self.read = np.array([copy for copies in read for copy in copies], np.int64)
        # Copies of a node, and the next of them.
        self.followed = np.array(
            [pair for each in runs for pair in pairwise(each)], np.int64
        ).reshape(-1, 2)
        # A run that must come before another one: what that overwrites is read by it.
        self.before = np.array(
            [(run, runs[writer][0]) for reader, writer in graph.order for run in runs[reader]],
            np.int64,
        ).reshape(-1, 2)
        self.kept = np.array([runs[index][-1] for index in graph.outputs], np.int64)

    def peak(self, order: np.ndarray) -> int | None:
        """The most bytes held at once, nothing resident included, in some order of the runs;
        None if one of them would read another copy, or what is overwritten."""
        count = len(order)
        at = np.empty(count, np.int64)
        at[order] = np.arange(count)
        if (at[self.read] >= at[self.readers]).any():
            return None
        if (at[self.before[:, 0]] >= at[self.before[:, 1]]).any():
            return None
        last = at.copy()
        np.maximum.at(last, self.read, at[self.readers])
        if (last[self.followed[:, 0]] >= at[self.followed[:, 1]]).any():
            return None
        taken_over = self.over[order[last]] == np.arange(count)
        freed = last + np.where(taken_over, 0, 1)
        freed[self.kept] = count
        change = np.zeros(count + 1, self.bytes.dtype)
        change[at] = self.bytes
        np.subtract.at(change, freed, self.bytes)
        return int((np.cumsum(change[:count]) + self.workspace[order]).max())
