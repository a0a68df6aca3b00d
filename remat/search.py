"""Stage 4: the cheapest schedule whose predicted peak is within a budget.

The solver knows how many bytes a schedule holds, and nothing of where they lie.  So
it is given a target below the budget, and what it finds is carried out in the model
of the allocator (``planning.follow``): where that takes too much,

1. the target is lowered until it fits (``_search``);
2. a plan that is then far from its bound is bettered: if a few large tensors did not
   fit into the pieces that memory is in, less is held where these meet, and not
   everywhere (``_spread``); else targets in between are tried (``_between``);
3. if nothing fits, the schedule of least peak is the last resort (``find_leanest``);
   where that does not fit either, the least budget for it is named (``refusal``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .arena import LEAST_AREA, Layout, OutOfMemoryError, Pool, aligned, is_roomy, slots_end
from .planning import Planned, Prepared, follow, idle, infeasible, margin
from .solvers import Graph, InfeasibleBudgetError, Result, Status, solve
from .solvers import simulate as simulate_schedule
from .solvers.compiling import ready
from .solvers.method import Method
from .solvers.solving import default_time_limit

_ROUNDS = 16  # solves, at most, until the prediction fits ...
_FEW_ROUNDS = 3  # ... between the leanest plan and those too large
_FIRST = 1 / 2  # time limit of the first solve / usual one
_AGAIN, _BETTER = 1 / 4, 1 / 3  # of those with lower targets / first, of those that better a plan
_SHORTEST = 1.2  # seconds of any solve but the first, if nobody says how long they may take
_LONGEST, _LONGEST_A_NODE = 5.0, 0.0035  # seconds of the first solve: the larger of these
_MAX_GAP = 0.002  # points that are not worth more seconds of compiling
_PATIENCE = 8  # of them with small steps
_SPREADS = 6  # solves with lower caps, at most
_WIDE_GAP = 0.01  # overhead above the bound from which on a plan with lowered target is bettered
_STEP_UP = 0.005  # share of a budget that was not enough
# To find the least peak: annealings, changes in each (a node; at most), seconds that it
# never takes.
_LEANEST_STARTS, _LEANEST_SECONDS = 8, 600.0
_LEANEST_MOVES_A_NODE, _LEANEST_MOVES = 250, 1_000_000
_LEAST_STEP, _LARGEST_STEP = 0.003, 0.03  # shares by which the target is lowered
_CLOSE = 0.01  # share that targets differ by: nothing is looked for in between


def make_plan(
    prepared: Prepared,
    budget: int,
    *,
    solver: str | Method = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    ceiling: int | None = None,
    start: Sequence[int] | None = None,
    progress: Callable[[Result], None] | None = None,
) -> Planned:
    """Finds the cheapest schedule whose predicted peak is within a budget.

    Args:
      prepared: the step.
      budget: bytes, everything included.
      solver, time_limit, seed, progress: as ``solvers.solve`` takes them; the
        limit is for the first solve, a quarter of it for each of the others.
      ceiling: bytes that the prediction may reach; the budget less a margin
        if None.
      start: a schedule to start from.

    Raises:
      InfeasibleBudgetError: if no schedule is found.  It names a budget for which
        the schedule of least peak was given a place, in the pool as it would
        then be divided (an estimate, if the search was interrupted).
    """
    if time_limit is not None:
        seconds = _Seconds.of(time_limit)
    else:
        graph = prepared.extraction.graph
        usual = _FIRST * default_time_limit(graph)
        longest = max(_LONGEST, _LONGEST_A_NODE * len(graph))
        seconds = _Seconds.of(min(usual, longest), _SHORTEST)
        ready()  # what is compiled once must not cost this plan its time
    if ceiling is None:
        ceiling = budget - margin(budget, prepared.pool, prepared.program)
    job = _Job(prepared, budget, ceiling, solver, seconds, progress)
    try:
        return _search(job, max(1, ceiling - idle(prepared.pool)), seed, start)
    except _NoPlanError as problem:
        failed = problem
    if failed.interrupted:
        raise infeasible(prepared, budget, failed.estimate, known=False)
    leanest = find_leanest(prepared, budget, ceiling=ceiling, seed=seed, bound=failed.bound)
    if leanest.result.status is Status.INTERRUPTED:
        if not leanest.fits:
            raise infeasible(prepared, budget, failed.estimate, known=False)
        return leanest.planned
    planned = leanest.planned
    assert leanest.result.peak is not None
    # Where it does not fit, a schedule of a higher peak may be easier to find places for.
    if leanest.fits or leanest.result.peak < failed.target:
        planned = _between(job, planned, failed.target, seed, failed.bound)
    if not job.fits(planned):
        raise refusal(prepared, leanest, budget, seed)
    return planned


class _NoPlanError(Exception):
    """No plan was found; a budget of ``estimate`` may be enough.  ``bound`` is for the budget
    that was asked for, ``target`` the lowest with a schedule, whose plan is too large."""

    def __init__(
        self, estimate: int, bound: float | None, target: int, *, interrupted: bool = False
    ) -> None:
        super().__init__(estimate)
        self.estimate = estimate
        self.bound = bound
        self.target = target
        self.interrupted = interrupted


@dataclass(frozen=True)
class _Seconds:
    """Time limits: of the first solve, of those with lower targets, of those that better a
    plan."""

    first: float
    lower: float
    better: float

    @staticmethod
    def of(first: float, shortest: float = 0.0) -> _Seconds:
        """The limits that go with that of the first solve."""
        return _Seconds(first, max(shortest, _AGAIN * first), max(shortest, _BETTER * first))


@dataclass(frozen=True)
class _Job:
    """What is to be planned, and how long solves may take; see ``make_plan``."""

    prepared: Prepared
    budget: int
    ceiling: int
    solver: str | Method
    seconds: _Seconds
    progress: Callable[[Result], None] | None

    def solve(
        self, graph: Graph, target: int, seconds: float, seed: int, start: Sequence[int] | None
    ) -> Result:
        """A schedule of the step's graph, or of that with more workspace."""
        return solve(
            graph,
            target,
            solver=self.solver,
            time_limit=seconds,
            max_gap=_MAX_GAP,
            seed=seed,
            start=start,
            progress=self.progress,
        )

    def follow(self, result: Result, seed: int, bound: float | None) -> Planned:
        """What a schedule takes, whether or not it is within the budget."""
        return follow(self.prepared, result, self.budget, self.ceiling, seed, bound)

    def fits(self, planned: Planned) -> bool:
        """Whether a plan is within the budget."""
        return planned.needed <= self.ceiling


@dataclass(frozen=True)
class Leanest:
    """The schedule of least peak that was found, whether or not it is within a budget.

    Attributes:
      result: the schedule.
      planned: what carries it out.
      ceiling: bytes that ``planned.needed`` may be.
    """

    result: Result
    planned: Planned
    ceiling: int

    @property
    def fits(self) -> bool:
        """Whether it is within the budget."""
        return self.planned.needed <= self.ceiling


def find_leanest(
    prepared: Prepared,
    budget: int,
    *,
    ceiling: int | None = None,
    seed: int = 0,
    bound: float | None = None,
    result: Result | None = None,
) -> Leanest:
    """Anneals in a number of changes instead of some seconds: what it finds is the same
    every time, however busy the machine is, so that a budget named for it is met later.

    The arguments are those of ``make_plan``; ``bound``: the least seconds within the budget,
    if known; ``result``: what was found before, for the same graph.
    """
    if ceiling is None:
        ceiling = budget - margin(budget, prepared.pool, prepared.program)
    result = result or _leanest_schedule(prepared.extraction.graph, seed)
    return Leanest(result, follow(prepared, result, budget, ceiling, seed, bound), ceiling)


def _leanest_schedule(graph: Graph, seed: int) -> Result:
    found = solve(
        graph,
        1.0,
        solver="anneal",
        minimize="peak",
        time_limit=_LEANEST_SECONDS,
        seed=seed,
        workers=_LEANEST_STARTS,
        moves=min(_LEANEST_MOVES, _LEANEST_MOVES_A_NODE * len(graph)),
    )
    assert found.peak is not None  # the given order is within its own peak
    status = Status.INTERRUPTED if found.status is Status.INTERRUPTED else Status.FEASIBLE
    return replace(found, status=status, budget=found.peak)


def refusal(
    prepared: Prepared, leanest: Leanest, budget: int, seed: int = 0
) -> InfeasibleBudgetError:
    """The error for a budget that even the leanest schedule is not within: it names the least
    budget found with a place for everything that this one needs."""
    least = _least_budget(prepared, leanest.result, budget, leanest.ceiling, seed)
    return infeasible(prepared, budget, least)


def _least_budget(prepared: Prepared, leanest: Result, budget: int, ceiling: int, seed: int) -> int:
    """The least budget found, above a refused one, for which everything has a place, in the
    pool at hand and, unless that is far from any, even under a hard limit equal to it."""
    beside = budget - ceiling
    pool = prepared.pool

    def lacking(enough: int) -> int:
        """Bytes that a budget is too small by."""
        most = 0
        try:
            for there in pools(enough):
                left = enough - max(beside, margin(enough, there, prepared.program))
                at_hand = replace(prepared, pool=there)
                most = max(most, follow(at_hand, leanest, enough, left, seed).needed - left)
        except OutOfMemoryError:
            return 1
        return most

    def pools(enough: int) -> Iterator[Pool]:
        # What could not be divided for a budget with room for the schedule will not be
        # for a little more.
        if pool.layout is None and leanest.budget <= budget:
            yield pool
            return
        if pool.layout is not None:
            area = pool.layout.area + aligned(enough - budget)
            yield replace(pool, layout=replace(pool.layout, area=area))
            if pool.shared and is_roomy(area, enough - pool.layout.in_use):
                return  # no limit is near
        yield _limited(pool, enough)

    enough = max(int(budget * (1 + _STEP_UP)), leanest.budget + beside)
    while (more := lacking(enough)) > 0:
        # What is handed out whole changes with what is free: less than that may do.
        enough += max(more // 4, int(enough * _STEP_UP))
    return enough


def _limited(pool: Pool, budget: int) -> Pool:
    """The pool as it would be divided under a hard limit of so many bytes.

    Raises:
      OutOfMemoryError: if not even what is held would fit.
    """
    if not pool.highest:
        return pool  # nobody counts its bytes
    in_use = sum(map(aligned, pool.held))
    unclaimed = replace(pool, limit=budget).unclaimed()
    # What variables leave of the regions that they made the pool grow by.
    hole = max(0, budget - unclaimed - in_use)
    block = max(unclaimed, hole)
    area = block - block // 64 - slots_end(pool.slots)  # something small may be in it
    if area < LEAST_AREA * (budget - in_use):
        return replace(pool, limit=budget, layout=None, quiet=False)
    layout = Layout(in_use, (aligned(min(unclaimed, hole)),), pool.slots, area)
    # A hopeless budget is never divided, one that is enough will be.
    quiet = pool.quiet or (pool.layout is None and not pool.shared)
    return replace(pool, layout=layout, quiet=quiet)


def _between(job: _Job, planned: Planned, high: int, seed: int, bound: float | None) -> Planned:
    """Looks for a cheaper plan than one, or for any where that does not fit: by bisection
    between the peak of its schedule (which may be far below its target) and ``high``, for
    which plans were too large, until it is close to that or to the bound.

    Args:
      job: what is planned.
      planned: the plan.
      high: bytes.
      seed: of every random choice.
      bound: the least seconds within the budget, if known.
    """
    graph = job.prepared.extraction.graph
    best = planned
    low = simulate_schedule(graph, planned.plan.schedule).peak
    for number in range(_FEW_ROUNDS):
        last = number == _FEW_ROUNDS - 1
        target = low if last and best is planned else max(low, (low + high) // 2)
        result = job.solve(graph, target, job.seconds.better, seed + number, best.plan.schedule)
        if result.schedule is None:
            high = target
            continue
        found = best  # its places are known
        if not job.fits(best) or result.schedule != best.plan.schedule:
            found = job.follow(result, seed + number, bound)
        fits = job.fits(found)
        if fits and (not job.fits(best) or found.plan.cost < best.plan.cost):
            best = found
        if result.status is Status.INTERRUPTED:
            break
        if fits:
            low = target
        else:
            high = min(target, result.peak or target)
        gap = best.plan.gap
        close = high - low < _CLOSE * high or (gap is not None and gap <= _WIDE_GAP)
        if job.fits(best) and close:
            break
    return best


def _spread(
    job: _Job,
    planned: Planned,
    target: int,
    caps: Mapping[int, int],
    seed: int,
    bound: float | None,
) -> tuple[Planned, bool]:
    """Looks for a cheaper plan than one, or for any where that does not fit, for a higher
    target: where a few large tensors that memory has no room for at once are what was in
    the way of plans for it.

    Args:
      target: bytes that the solver is given.
      caps: of the nodes that such tensors crowd; see ``_capped``.
      job, planned, seed, bound: as ``_between`` takes them.

    Returns:
      What it found, or else ``planned``; and whether the search is over: it found
      something, or was interrupted.
    """
    graph = job.prepared.extraction.graph
    for number in range(_SPREADS if caps else 0):
        result = job.solve(
            _capped(graph, caps, target),
            target,
            job.seconds.better,
            seed + number,
            planned.plan.schedule,
        )
        interrupted = result.status is Status.INTERRUPTED
        dear = job.fits(planned) and (result.cost or 0.0) >= planned.plan.cost
        if result.schedule is None or dear:
            return planned, interrupted
        found = job.follow(result, seed + number, bound)
        if job.fits(found):
            return found, True
        if interrupted:
            return planned, True
        tighter = _tighter(caps, found.crowds)
        if tighter == caps:
            target = int(target * (1 - _LEAST_STEP))
        caps = tighter
    return planned, False


def _search(job: _Job, target: int, seed: int, start: Sequence[int] | None) -> Planned:
    """Solves for a target, and then for lower and lower ones, at most ``_ROUNDS`` times,
    until the prediction fits; the arguments are those of ``make_plan``.

    A plan that fits, but is far from the bound, is bettered: see ``_spread`` and ``_between``.

    Raises:
      _NoPlanError: if it never does.
    """
    graph, seconds = job.prepared.extraction.graph, job.seconds
    planned = None
    bound: float | None = None  # of the first target
    needed = []  # by the plans that did not fit
    first = used = target  # used by the latest of their schedules
    caps: Mapping[int, int] = {}
    for number in range(_ROUNDS):
        result = job.solve(
            graph, target, seconds.lower if number else seconds.first, seed + number, start
        )
        bound = result.lower_bound if bound is None else bound
        if result.schedule is None:
            interrupted = result.status is Status.INTERRUPTED
            if planned is None or interrupted:  # after which no other solve begins
                estimate = result.least_budget + job.budget - target
                raise _NoPlanError(estimate, bound, target, interrupted=interrupted)
            break
        start = result.schedule
        planned = job.follow(result, seed + number, bound)
        if result.status is Status.INTERRUPTED:
            return planned
        if job.fits(planned):
            gap = planned.plan.gap
            if number == 0 or gap is None or gap <= _WIDE_GAP:
                return planned
            break
        needed.append(planned.needed)
        caps = _tighter(caps, planned.crowds)
        # How well tensors can be packed differs from one schedule to the next,
        # and less memory in use leaves more ways to pack it: aim a little lower.
        step = min(_LARGEST_STEP, max(_LEAST_STEP, planned.needed / job.ceiling - 1))
        step = step if number < _PATIENCE else _LARGEST_STEP
        used = min(target, result.peak or target)
        target = int(used * (1 - step))
    assert planned is not None
    planned, over = _spread(job, planned, first, caps, seed + number + 1, bound)
    if not job.fits(planned):
        estimate = min(needed) + job.budget - job.ceiling
        raise _NoPlanError(estimate, bound, used, interrupted=over)
    return planned if over else _between(job, planned, used, seed + number + 1, bound)


def _tighter(caps: Mapping[int, int], crowds: Mapping[int, int]) -> dict[int, int]:
    """The lower of two caps, where there are two."""
    both = caps.keys() & crowds.keys()
    return {**caps, **crowds, **{node: min(caps[node], crowds[node]) for node in both}}


def _capped(graph: Graph, caps: Mapping[int, int], target: int) -> Graph:
    """The graph, in which less than its cap is held while a node runs that has one.

    Where large tensors do not fit into the pieces that memory is in, a lower target
    would be lower everywhere; more workspace makes it so for the node alone.  A cap
    that the node itself is above is none.

    Args:
      graph: the graph.
      caps: bytes, nothing resident included, by node.
      target: bytes that the peak may reach.
    """
    nodes = list(graph.nodes)
    for index, cap in caps.items():
        node, inputs = nodes[index], graph.predecessors[index]
        alone = node.bytes + node.workspace + sum(nodes[source].bytes for source in inputs)
        more = target + 1 - graph.resident - cap
        if more > 0 and alone < cap:
            nodes[index] = replace(node, workspace=node.workspace + more)
    return replace(graph, nodes=tuple(nodes))
