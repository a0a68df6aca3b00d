"""The best schedule at a few moments: an exact program where few are enough.

A moment is the first run of some node.  Choose moments m1, m2, ..., mK whose
nodes follow each other in every order (each is an ancestor of the next): they
cut every schedule into stages 0..K, stage k from moment k on (the run of mk
included) up to moment k + 1, the last one to the end.  The program asks what
is held at each moment and what runs in each stage, and forgets most of the
memory in between.  So it holds for every order, and its optimum is a lower
bound; and where the schedule that it describes fits the budget in between as
well, that schedule is optimal.  Where it does not, the worst moments are added,
one or two (or, for a run that may come in any of several stages, so that no moment
can stand for it, an inner constraint or a float), and the program is solved again.
The first moment is the worst of the given order.  Training graphs need two to ten
moments.

Variables (binary):
  R[i, k]   node i runs in stage k;
  H[i, k]   value i is held at moment k (k = K + 1 is the end).

Minimise the cost of all R, subject to
  (1) sum of R[i, k] over the stages that some order has for the first run of
      i >= 1, and = 1 for a node that runs once;
  (2) R[j, k] <= R[i, k] + H[i, k]       each run finds its inputs, for i -> j;
  (3) H[i, k + 1] <= R[i, k] + H[i, k]   only what is there can be held;
  (4) H[i, k] = 1 for the inputs of mk, and for the outputs at the end;
  (5) resident + sum of bytes(i) H[i, k] + bytes(mk) O[k] + workspace(mk)
      <= budget, for each moment;
  (6) O[k] = 1, unless mk takes over the buffer of its input u: then
      O[k] >= H[u, k + 1] - R[u, k], and O[k] >= R[j, k] - R[u, k] for each
      other consumer j of u: the buffer is free only if nothing reads it later.
  (7) sum of R[w, 0..k] <= sum of R[r, 0..k] and R[r, k] <= 1 - sum of R[w, 0..k-1]
      for each reader r and its writer w (``Graph.order``); w of stage k counts, too,
      where it runs at its cut.
  (8) for some nodes j and each stage, a run of j in it holds its inputs, output
      and workspace, and all that is held throughout the stage:
      resident + sum over i not read by j of bytes(i) Z[i, k]
        + (sum of bytes(inputs) + bytes(j) + workspace(j)) R[j, k] <= budget,
      Z[i, k] >= H[i, k] + H[i, k + 1] - R[i, k] - 1;
      the output is left out if it may take over the buffer of an input.
  (9) some nodes float: the first stages between two moments that the first run of such
      a node w may be in are cut once more for each of them, and if it is in these, it is
      at a cut; F[w, k] says whether at that of stage k, or in a later stage k:
      resident + sum of bytes(i) H[i, k] + (bytes(w) + workspace(w)) F[w, k] <= budget,
      F[w, k] <= H[i, k] for its inputs i, sum of F[w, k] over the floats <= 1 for each
      cut, sum of F[w, k] over the stages = 1, and F[w, k] <= R[w, k] <= sum of F[w, 0..k];
      F = R where w need not run again: nobody reads it, or it may not.
      A schedule has a cut for each of them, the others just before the next moment.
Nothing is run or held after the last stage in which a run could read it.

The stages are those of Checkmate (Jain et al., MLSys 2020), a few instead of
one for each node, and in no fixed order; that, and the refinement, are this
package's own.

O(K (nodes + edges)) variables and rows, with (8) O(nodes) more for each stage
and O(nodes) coefficients for each inner node and stage.

Options:
  backend: "highs" (default: it proves these programs several times as fast as
    CBC does) or "cbc".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .best import check_minimizes_cost
from .floor import Precedence, first_run_bytes, given_order
from .graph import Graph
from .method import Monitor, Outcome, Problem
from .mip import Builder, Formulation, Solution, check_backend, solve_mip
from .runner import Runner
from .schedule import Schedule, simulate

# Gaps to solve to, relative to the whole cost: coarse until the schedule fits.
_GAPS = (3e-4, 1e-4, 0.0)
_MOST = 40  # moments
_FAR_ABOVE = 1e9  # times the room: more is no more impossible, and solvers refuse 1e15
# Nodes times moments and floats up to which there are any: of nodes that run once; of
# others, where nothing else is left to do.
_FLOATING, _MOST_FLOATING = 1000, 10_000
_PEAKS = 6  # moments, at most, at which the order of a given schedule is looked at first
_ON_NONE = 0.9  # of the nodes that are comparable with one, those that are with another
_HIGH = 0.95  # of the peak, what is one too
_AT_ONCE = 2  # moments and other nodes that one refinement adds, at most
_NEXT = 2  # stages after the first that floats cut
BACKEND = "highs"


@dataclass(frozen=True)
class Cut:
    """What a stage begins with.

    Attributes:
      moment: the node that runs first there, or None where one of several may.
      floats: the nodes that may.
    """

    moment: int | None
    floats: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stages:
    """The program of a graph, a budget and a chain of moments.

    Attributes:
      formulation: costs are percent of running every node once.
      cuts: what the stages from 1 on begin with.
      runs: (n, K + 1), the column of R[i, k], or -1 where it is fixed at 0.
      held: (n, K + 2), the column of H[i, k], or -1 where it is fixed at 0.
    """

    formulation: Formulation
    cuts: tuple[Cut, ...]
    runs: np.ndarray
    held: np.ndarray


def moments(problem: Problem, monitor: Monitor) -> Outcome:
    """Refines until the best schedule is found and proven; see the module."""
    check_backend(problem)
    check_minimizes_cost(problem, "moments")
    refine(problem, monitor, monitor.found)
    return Outcome(None)


def refine(
    problem: Problem,
    monitor: Monitor,
    found: Callable[[Schedule], None],
    seconds: float = math.inf,
    more: Callable[[], float] = lambda: 0.0,
) -> None:
    """Proves bounds and finds schedules until one meets the other.

    Args:
      problem: what is to be solved.
      monitor: told of every bound.
      found: told of every schedule; all but the last may be above the budget.
      seconds: to take, at most what the monitor leaves.
      more: asked when they end before a program is solved; it says how many seconds
        to add.
    """
    until = monitor.elapsed() + seconds
    graph, budget = problem.graph, problem.budget
    order, (_, needed) = problem.order, problem.first_run_bytes
    # Its worst moments are the first: they prove more than those of cheaper schedules.
    schedule: Schedule = tuple(range(len(graph)))
    moments: list[int] = []
    inner: list[int] = []
    floats: list[int] = []
    level = 0
    while monitor.elapsed() < until and not monitor.should_stop() and len(moments) < _MOST:
        new, within = _refinement(
            graph, order, needed, schedule, budget, moments, [*inner, *floats]
        )
        moments = sorted([*moments, *new])
        once = [index for index in within if _runs_once(graph, index)]
        if len(graph) * (len(moments) + len(floats)) < _FLOATING:
            floats += once
        inner += [index for index in within if index not in floats]
        if not new and not within:
            if len(graph) * (len(moments) + len(floats)) < _MOST_FLOATING:
                within = _may_float(graph, schedule, budget, [*moments, *floats])
                floats += within
            if not within:  # only the proof is left
                level += 1
                if level == len(_GAPS):
                    return
        floats = [index for index in floats if index not in moments]  # these have cuts
        program = formulate(graph, order, budget, moments, inner, floats)
        while True:
            solution = _solve(problem, monitor, program, until, _GAPS[level])
            bound = solution.bound
            monitor.bounded(bound if bound == math.inf else graph.cost * bound / 100)
            cut_short = solution.status in ("stopped", "feasible")
            added = more() if cut_short else 0.0
            if not added:
                break
            until += added
        if solution.values is None:
            return
        schedule = decode(graph, program, solution.values)
        found(schedule)


def refine_order(
    problem: Problem,
    monitor: Monitor,
    schedule: Schedule,
    seconds: float,
) -> Schedule | None:
    """The cheapest schedule whose nodes run first in the order of a given one, or nearly.

    Any node may be a moment then, and programs are smaller, so that schedules soon fit.
    The given one's peaks are the first moments.  Nothing is proven for other orders.

    Args:
      problem: what is to be solved.
      monitor: not told of bounds.
      schedule: the given one, within the budget.
      seconds: to take, at most what the monitor leaves.

    Returns:
      A schedule, which may be above the budget if time ran out; None if not even one
      program was solved in that time.
    """
    until = monitor.elapsed() + seconds
    first_runs = tuple(_first_runs(schedule))
    place = {index: position for position, index in enumerate(first_runs)}
    graph = problem.graph.reordered(first_runs)
    order = given_order(graph)
    _, needed = first_run_bytes(graph, order)
    moments = _peaks(graph, tuple(place[index] for index in schedule))
    inner: list[int] = []
    latest: Schedule | None = None
    while monitor.elapsed() < until and not monitor.should_stop() and len(moments) < _MOST:
        program = formulate(graph, order, problem.budget, moments, inner)
        solution = _solve(problem, monitor, program, until, _GAPS[0])
        if solution.values is None or solution.status != "optimal":
            break
        latest = decode(graph, program, solution.values)
        new, within = _refinement(graph, order, needed, latest, problem.budget, moments, inner)
        if not new and not within:
            break
        moments = sorted([*moments, *new])
        inner += within
    return None if latest is None else tuple(first_runs[index] for index in latest)


def _solve(
    problem: Problem, monitor: Monitor, program: Stages, until: float, relative_gap: float
) -> Solution:
    return solve_mip(
        program.formulation,
        time_limit=min(monitor.remaining(), until - monitor.elapsed()),
        backend=problem.options.get("backend", BACKEND),
        relative_gap=relative_gap,
        should_stop=monitor.should_stop,
    )


def _first_runs(schedule: Schedule) -> dict[int, int]:
    """For each node the event of its first run, in the order of these."""
    events: dict[int, int] = {}
    for event, index in enumerate(schedule):
        events.setdefault(index, event)
    return events


def _peaks(graph: Graph, schedule: Schedule) -> list[int]:
    """The first runs that take most memory, some way from each other; in their order."""
    simulation = simulate(graph, schedule)
    memory, first_runs = simulation.memory, _first_runs(schedule)
    apart = len(schedule) / (2 * _PEAKS)
    peaks: list[int] = []
    for index in sorted(first_runs, key=lambda index: -memory[first_runs[index]]):
        event = first_runs[index]
        if len(peaks) == _PEAKS or memory[event] < _HIGH * simulation.peak:
            break
        if all(abs(event - first_runs[peak]) >= apart for peak in peaks):
            peaks.append(index)
    return sorted(peaks)


def formulate(
    graph: Graph,
    order: Precedence,
    budget: int,
    moments: Sequence[int],
    inner: Sequence[int] = (),
    floats: Sequence[int] = (),
) -> Stages:
    """Builds the program.

    Args:
      graph: the graph.
      order: its precedence.
      budget: bytes that the peak may reach.
      moments: nodes, each an ancestor of the next.
      inner: nodes whose runs get constraint (8).
      floats: nodes whose first runs get cuts of their own; none of those that may run
        again in ``graph.order``.
    """
    count = len(graph)
    cuts, first, last = _cut(order, moments, floats, count)
    end = len(cuts)
    # Stages in which a node runs at the beginning, and those in which it may run at all.
    opened = {w: [k for k, cut in enumerate(cuts, 1) if w in cut.floats] for w in floats}
    final = _final_stages(graph, first, last, end)
    outputs = set(graph.outputs)
    scale = 100 / graph.cost if graph.cost > 0 else 0.0
    builder = Builder()
    runs = np.full((count, end + 1), -1)
    starts: dict[int, np.ndarray] = {}  # the columns of F[i, k], where that is not R[i, k]
    held = np.full((count, end + 2), -1)
    for i, node in enumerate(graph.nodes):
        certain = first[i] == last[i]
        stages: Sequence[int] = range(first[i], final[i] + 1)
        floating = bool(opened.get(i))
        if floating and _runs_once(graph, i):
            stages = [*opened[i], *range(max(opened[i]) + 1, final[i] + 1)]
        for k in stages:
            runs[i, k] = builder.variable(node.cost * scale, lower=float(certain and k == first[i]))
        if not certain:  # (1)
            window = [(1.0, runs[i, k]) for k in stages if k <= last[i]]
            builder.constraint(window, 1.0, np.inf if node.recomputable else 1.0)
        if floating and not _runs_once(graph, i):  # (9)
            starting = [*opened[i], *range(max(opened[i]) + 1, last[i] + 1)]
            starts[i] = np.full(end + 1, -1)
            for k in starting:
                starts[i][k] = builder.variable()
                builder.constraint([(-1.0, starts[i][k]), (1.0, runs[i, k])], lower=0.0)
            builder.constraint([(1.0, starts[i][k]) for k in starting], 1.0, 1.0)
            for k in stages:
                earlier = [(1.0, starts[i][before]) for before in starting if before <= k]
                builder.constraint([(-1.0, runs[i, k]), *earlier], lower=0.0)
        read = max((final[j] for j in graph.successors[i]), default=-1)
        for k in range(first[i] + 1, read + 1):
            held[i, k] = builder.variable()
        if i in outputs:
            for k in range(max(first[i], read) + 1, end + 2):
                held[i, k] = builder.variable(lower=float(k == end + 1))  # (4)

    def at_most_present(column: int, i: int, k: int) -> None:
        if not (first[i] == last[i] == k):
            there = [(1.0, c) for c in (runs[i, k], held[i, k]) if c >= 0]
            builder.constraint([(-1.0, column), *there], lower=0.0)

    for j in range(count):
        for k in np.flatnonzero(runs[j] >= 0).tolist():
            at_cut = k in opened.get(j, ())
            for i in graph.predecessors[j]:
                if at_cut:  # (9)
                    there = [(1.0, held[i, k])] if held[i, k] >= 0 else []
                    builder.constraint([(-1.0, starts.get(j, runs[j])[k]), *there], lower=0.0)
                if not at_cut or j in starts:
                    at_most_present(runs[j, k], i, k)  # (2)
    for i in range(count):
        for k in range(end + 2):
            if held[i, k] >= 0:
                at_most_present(held[i, k], i, k - 1)  # (3)

    def by(sign: float, i: int, k: int) -> list[tuple[float, int]]:
        """The runs of i in stage k and before."""
        return [(sign, column) for column in runs[i, : k + 1] if column >= 0]

    def at_most_bytes(terms: Sequence[tuple[float, int]], room: int) -> None:
        size = max(1, room)
        coefficients = [(min(b / size, _FAR_ABOVE), c) for b, c in terms if b]
        builder.constraint(coefficients, upper=room / size)

    for reader, writer in graph.order:  # (7)
        for k in range(first[writer], end + 1):
            last_chance = min(k, last[writer])
            written = by(1.0, writer, last_chance)
            at_once = k in opened.get(writer, ())  # before all else in the stage
            if at_once and runs[reader, k] >= 0:
                builder.constraint([*written, (1.0, runs[reader, k])], upper=1.0)
            if k == last_chance and k <= last[reader]:
                builder.constraint([*written, *by(-1.0, reader, k)], upper=0.0)
            if k < final[reader] and runs[reader, k + 1] >= 0:
                builder.constraint([*written, (1.0, runs[reader, k + 1])], upper=1.0)
    for k, cut in enumerate(cuts, 1):
        moment = cut.moment
        if moment is None:  # (9)
            here = [(w, starts.get(w, runs[w])[k]) for w in cut.floats]
            builder.constraint([(1.0, column) for _, column in here], upper=1.0)
            takes = [(_bytes_beside_inputs(graph, w), column) for w, column in here]
            keeps = [(graph.nodes[i].bytes, held[i, k]) for i in np.flatnonzero(held[:, k] >= 0)]
            at_most_bytes([*takes, *keeps], budget - graph.resident)
            continue
        node, inputs = graph.nodes[moment], graph.predecessors[moment]
        for i in inputs:
            builder.constraint([(1.0, held[i, k])], lower=1.0)  # (4)
        needed = graph.resident + node.workspace + sum(graph.nodes[i].bytes for i in inputs)
        terms = [
            (graph.nodes[i].bytes, held[i, k])
            for i in np.flatnonzero(held[:, k] >= 0).tolist()
            if i not in inputs
        ]
        if node.forward is None:
            needed += node.bytes
        else:
            extra = builder.variable(integer=False)
            terms.append((node.bytes, extra))
            source = node.forward
            later = [runs[j, k] for j in graph.successors[source] if j != moment]
            for column in (held[source, k + 1], *later):  # (6)
                if column >= 0:
                    again = [(1.0, runs[source, k])] if runs[source, k] >= 0 else []
                    builder.constraint([(1.0, extra), (-1.0, column), *again], lower=0.0)
        at_most_bytes(terms, budget - needed)  # (5)
    throughout: dict[int, list[tuple[int, int]]] = {}  # stage -> (node, column of Z)
    for j in inner:
        inputs = graph.predecessors[j]
        needed = _bytes_beside_inputs(graph, j) + sum(graph.nodes[i].bytes for i in inputs)
        for k in np.flatnonzero(runs[j] >= 0).tolist():
            if k not in throughout:
                throughout[k] = _held_throughout(builder, graph, runs, held, k)
            terms = [(graph.nodes[i].bytes, c) for i, c in throughout[k] if i not in inputs]
            at_most_bytes([(needed, runs[j, k]), *terms], budget - graph.resident)  # (8)
    return Stages(builder.build(), cuts, runs, held)


def _runs_once(graph: Graph, index: int) -> bool:
    """Whether some cheapest schedule runs a node once: it must, or only the last run counts."""
    return not graph.nodes[index].recomputable or not graph.successors[index]


def _bytes_beside_inputs(graph: Graph, index: int) -> int:
    """What a run takes for certain, besides its inputs."""
    node = graph.nodes[index]
    return node.workspace + (node.bytes if node.forward is None else 0)


def decode(graph: Graph, program: Stages, values: np.ndarray) -> Schedule:
    """The schedule that the values describe: in each stage what it begins with, then first
    runs in the given order, and other runs as late as they can be; what must not run before
    these comes last.  Where a stage cannot do all that, it is a legal schedule all the same."""
    ran = (program.runs >= 0) & (values[program.runs] > 0.5)
    kept = (program.held >= 0) & (values[program.held] > 0.5)
    stage = ran.argmax(axis=1)
    follows = sorted((*graph.edges, *graph.order))
    runner = Runner(graph)
    for k in range(ran.shape[1]):
        runner.present = set(np.flatnonzero(kept[:, k]).tolist())
        here = np.flatnonzero(stage == k).tolist()
        if k > 0:
            cut = program.cuts[k - 1]
            here.sort(key=lambda index: index != cut.moment and index not in cut.floats)
        again = ran[:, k] & (stage < k)
        late = {writer for reader, writer in graph.order if again[reader]}
        for before, after in follows:  # and what must come after them
            if before in late and stage[after] == k:
                late.add(after)
        for index in here:
            if index not in late:
                runner.run(index)
        for index in (*np.flatnonzero(kept[:, k + 1]).tolist(), *here):
            runner.run(index)
    return tuple(runner.schedule)


def _first_stages(
    order: Precedence, moments: Sequence[int], count: int
) -> tuple[list[int], list[int]]:
    """For each node, the first and last stage that an order may have for its first run."""
    first, last = [0] * count, [len(moments)] * count
    for k, moment in enumerate(moments, 1):
        for i in range(count):
            if i == moment or order.descendants[moment] >> i & 1:
                first[i] = k
            if order.ancestors[moment] >> i & 1:
                last[i] = min(last[i], k - 1)
    for k, moment in enumerate(moments, 1):
        last[moment] = k
    return first, last


def _cut(
    order: Precedence, moments: Sequence[int], floats: Sequence[int], count: int
) -> tuple[tuple[Cut, ...], list[int], list[int]]:
    """The cuts, and for each node the first and last stage for its first run.

    A stage between two moments is cut once for each float that may run in it, if it
    is among the first that the float may run in.
    """
    first, last = _first_stages(order, moments, count)
    cuts: list[Cut] = []
    begin, finish = [], []
    for k in range(len(moments) + 1):
        if k > 0:
            cuts.append(Cut(moments[k - 1]))
        begin.append(len(cuts))
        here = tuple(w for w in floats if first[w] <= k <= min(last[w], first[w] + _NEXT))
        cuts += [Cut(None, here)] * len(here)
        finish.append(len(cuts))
    starts = dict(zip(moments, begin[1:], strict=True))
    return (
        tuple(cuts),
        [begin[k] for k in first],
        [starts.get(i, finish[k]) for i, k in enumerate(last)],
    )


def _final_stages(graph: Graph, first: list[int], last: list[int], end: int) -> list[int]:
    """For each node, the last stage in which it may run to some use."""
    writers: dict[int, int] = {}
    for reader, writer in graph.order:
        writers[reader] = min(writers.get(reader, end), last[writer])
    final = list(last)
    outputs = set(graph.outputs)
    for i in range(len(graph) - 1, -1, -1):
        if graph.nodes[i].recomputable:
            reads = [final[j] for j in graph.successors[i]]
            latest = max(last[i], end if i in outputs else 0, *reads)
            final[i] = min(latest, max(last[i], writers.get(i, end)))
    return final


def _held_throughout(
    builder: Builder, graph: Graph, runs: np.ndarray, held: np.ndarray, k: int
) -> list[tuple[int, int]]:
    """Adds the variables Z of a stage; returns (node, column)."""
    columns = []
    for i, node in enumerate(graph.nodes):
        if node.bytes and held[i, k] >= 0 and held[i, k + 1] >= 0:
            column = builder.variable(integer=False)
            terms = [(-1.0, column), (1.0, held[i, k]), (1.0, held[i, k + 1])]
            if runs[i, k] >= 0:
                terms.append((-1.0, runs[i, k]))
            builder.constraint(terms, upper=1.0)
            columns.append((i, column))
    return columns


def _refinement(
    graph: Graph,
    order: Precedence,
    needed: np.ndarray,
    schedule: Schedule,
    budget: int,
    moments: Sequence[int],
    inner: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Where to look at memory next, given a schedule that is above the budget.

    Goes through the stretches of the schedule that are above the budget, the
    worst first, until there are as many nodes as moments, or two.

    Returns:
      Nodes that may become moments, each of those that first run in such a
      stretch or next, if possible one that needs more than the budget in every
      order; and nodes of stretches without any, which may float or get constraint (8).
    """
    comparable = (1 << len(graph)) - 1
    for moment in moments:
        comparable &= order.ancestors[moment] | order.descendants[moment]
    memory = simulate(graph, schedule).memory
    first_runs = _first_runs(schedule)
    new: list[int] = []
    within: list[int] = []
    for worst, start, stop in _stretches(memory, budget):
        if len(new) + len(within) == min(_AT_ONCE, max(1, len(moments))):
            break
        candidates: list[tuple[bool, int, int]] = []
        left: dict[int, int] = {}  # how many could still be moments beside each
        enough = _ON_NONE * comparable.bit_count()
        for event in range(start, len(schedule)):
            index = schedule[event]
            if event >= stop and (index in moments or max(left.values(), default=0) >= enough):
                break
            if first_runs[index] == event and comparable >> index & 1:
                candidates.append((bool(needed[index] > budget), memory[event], index))
                beside = order.ancestors[index] | order.descendants[index]
                left[index] = (comparable & beside).bit_count()
        if candidates:
            # Nothing on a branch, where there is something that is on none.
            most = max(left.values())
            candidates = [entry for entry in candidates if left[entry[-1]] >= _ON_NONE * most]
            best = max(candidates)
            if moments:  # in the middle, where it splits what is computed again most evenly
                needy = [entry for entry in candidates if entry[0] == best[0]]
                best = needy[len(needy) // 2]
            moment = best[-1]
            comparable &= order.ancestors[moment] | order.descendants[moment]
            new.append(moment)
        elif schedule[worst] not in (*inner, *within):
            within.append(schedule[worst])
    return new, within


def _may_float(graph: Graph, schedule: Schedule, budget: int, known: Sequence[int]) -> list[int]:
    """Nodes whose first runs are above the budget, of each stretch the worst, at most two;
    none that is known already."""
    memory = simulate(graph, schedule).memory
    first_runs = _first_runs(schedule)
    ordered = {index for pair in graph.order for index in pair}
    found: list[int] = []
    for _, start, stop in _stretches(memory, budget):
        here = [
            (memory[event], index)
            for event, index in enumerate(schedule[start:stop], start)
            if first_runs[index] == event
            and index not in known
            and (_runs_once(graph, index) or index not in ordered)
        ]
        if here:
            found.append(max(here)[1])
        if len(found) == _AT_ONCE:
            break
    return found


def _stretches(memory: Sequence[int], budget: int) -> Iterator[tuple[int, int, int]]:
    """The stretches of a schedule that are above the budget, the worst first: the event
    that takes most, the first event and the one after the last."""
    done = [held <= budget for held in memory]
    for worst in sorted(range(len(memory)), key=memory.__getitem__, reverse=True):
        if done[worst]:
            continue
        start = stop = worst
        while start > 0 and memory[start - 1] > budget:
            start -= 1
        while stop < len(memory) and memory[stop] > budget:
            stop += 1
        done[start:stop] = [True] * (stop - start)
        yield worst, start, stop
