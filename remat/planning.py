"""Stages 1 to 4 strung together: a Python step and a budget become a plan.

The plan's peak is predicted from what will really run: the schedule is
expanded into operations, every large tensor gets a place (``placement``), and
all of it is followed through a model of the allocator (``memory.simulate``).
The solver is given a target below the budget, and the target is lowered until
the prediction fits.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tensorflow.core.framework import node_def_pb2

from .arena import (
    GRAIN,
    LEAST_AREA,
    Layout,
    OutOfMemoryError,
    Pool,
    aligned,
    is_roomy,
    slots_end,
)
from .broadcasts import broadcast_late
from .calibrate import Corrections
from .extract import Extraction, expand, extract, name_for_people
from .generators import Generators
from .memory import (
    Event,
    Fillers,
    Requests,
    Usage,
    creation_events,
    plain_events,
    requests,
    simulate,
)
from .onednn import merge_bias_gradients
from .placement import place
from .price import Prices, Profile, price
from .program import Kind, Op, Program, build
from .solvers import Graph, InfeasibleBudgetError, Plan, PlanError, Result, Status, solve
from .solvers import simulate as simulate_schedule
from .solvers.budget import format_bytes
from .solvers.compiling import ready
from .solvers.floor import memory_floor
from .solvers.method import Method
from .solvers.schedule import ScheduleError
from .solvers.solving import default_time_limit, overhead
from .split import split_updates
from .sums import order_sums
from .trace import Source, Trace, TraceError, trace

# Shares of the budget left free for what the prediction does not see: small
# host-side tensors and scratch memory that changes from run to run ...
_MARGIN = 0.005
_UNPLACED_MARGIN = 0.015  # ... and where the allocator chooses the places, ...
_LEAST_MARGIN = 0.03, 2**19  # ... at least the lower of this share and these bytes
_SHOWN = 4  # kinds of operations that a summary names
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
_OVERFULL = 1.01  # times the budget: what is taken to be needed when memory runs out
_LEAST_STEP, _LARGEST_STEP = 0.003, 0.03  # shares by which the target is lowered
_CLOSE = 0.01  # share that targets differ by: nothing is looked for in between


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be planned for any budget.

    Attributes:
      trace: the traced step.
      program: its operations, with what is repeated written out late, large updates split.
      prices: what they cost.
      extraction: the solver's graph.
      plain: what the plain step is predicted to take.
      pool: the memory that it finds.
    """

    trace: Trace
    program: Program
    prices: Prices
    extraction: Extraction
    plain: Usage
    pool: Pool

    @property
    def fingerprint(self) -> str:
        """A digest of the program: a plan is only for the step it was made for."""
        digest = hashlib.sha256()
        for op in self.program.ops:
            digest.update(repr((op.type, op.kind.value, op.inputs, op.shapes)).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class StepPlan(Plan):
    """A plan that knows its graph, so that it can draw itself."""

    extracted: Graph | None = field(default=None, repr=False, compare=False)

    def summary(self) -> str:
        """The figures, and what is kept because it must not be computed again."""
        once = sorted(self.details.get("once", {}).items(), key=lambda entry: -entry[1][1])
        lines = []
        if "margin" in self.details:
            margin = format_bytes(self.details["margin"])
            lines.append(f"  margin    {margin} kept free for what the prediction does not see")
        lines += [
            f"  run once  {count} x {kind}: {format_bytes(held)} of results cannot be recomputed"
            for kind, (count, held) in once[:_SHOWN]
        ]
        return "\n".join([super().summary(), *lines])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws memory over time: plain and planned, budget, recomputations.

        Args:
          path: file to write (png, svg, pdf), if any.

        Returns:
          A matplotlib figure; a notebook shows it.
        """
        from .plots import plot_plan

        assert self.extracted is not None
        return plot_plan(self, self.extracted, path)

    def _repr_html_(self) -> str:
        picture = io.BytesIO()
        self.plot().savefig(picture, format="png", dpi=80)
        data = base64.b64encode(picture.getvalue()).decode()
        return f"{super()._repr_html_()}<img src='data:image/png;base64,{data}'>"


@dataclass(frozen=True)
class Planned:
    """A plan and what carries it out.

    Attributes:
      plan: the schedule with its figures.  ``plan.peak`` is what the allocator
        is predicted to count; ``plan.budget`` is the user's.
      events: the operations' runs, in order.
      fillers: what is allocated between them so that they lie where they should.
      target: bytes that the solver was given.
      needed: predicted bytes that must be within the budget.
      crowds: nodes that run while a few large tensors are held that do not fit into the
        pieces that memory is in; and the bytes of these.
    """

    plan: StepPlan
    events: tuple[Event, ...]
    fillers: Fillers
    target: int
    needed: int
    crowds: Mapping[int, int] = field(default_factory=dict)


def read(
    function: Callable[..., Any],
    input_signature: Sequence[Any],
    *,
    autograph: bool = False,
    traced_for: Sequence[Any] | None = None,
    taken_from: Source | None = None,
    generators: Generators | None = None,
) -> tuple[Trace, Program]:
    """Traces a step; takes no memory on the device.  The arguments are ``trace``'s."""
    make = functools.partial(
        trace,
        function,
        input_signature,
        autograph=autograph,
        taken_from=taken_from,
        generators=generators,
    )
    if traced_for is not None:
        traced = make(traced_for=traced_for)
        try:
            return traced, _program(traced)
        except TraceError as error:  # a loop, say, has lost a shape
            warnings.warn(
                "the step is planned as traced for its batch alone; plain TensorFlow traces it for "
                f"batches of any size, and may differ in the last digits: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
    traced = make()
    return traced, _program(traced)


def _program(traced: Trace) -> Program:
    """What a step is made of, with the plain step's bits in whatever order it runs."""

    def made(fold: bool) -> Program:
        return merge_bias_gradients(build(traced, fold=fold))

    def plain() -> Program:
        """As TensorFlow runs it, nothing folded."""
        program = made(fold=False)
        return program if traced.taking is None else _taking(program, traced.taking)

    return order_sums(made(fold=True), plain)


def _taking(program: Program, type: str) -> Program:
    """The program with inputs that an operation of some type takes, all at once."""
    inputs = [program.ops[index] for index in program.inputs]
    taking = Op(
        name=type,
        type=type,
        kind=Kind.ONCE,  # its results' buffers may be taken over
        inputs=(),
        controls=(),
        bytes=tuple(op.bytes[0] for op in inputs),
        shapes=tuple(op.shapes[0] for op in inputs),
        dtypes=tuple(op.dtypes[0] for op in inputs),
    )
    taken = {(index, 0): (len(program.ops), n) for n, index in enumerate(program.inputs)}
    ops = [
        replace(op, inputs=tuple(taken.get(tensor, tensor) for tensor in op.inputs))
        for op in program.ops
    ]
    return replace(
        program,
        ops=(*ops, taking),
        nodes=(*program.nodes, node_def_pb2.NodeDef(name=type, op=type)),
        outputs=tuple(taken.get(tensor, tensor) for tensor in program.outputs),
    )


def plain_usage(program: Program, workspace: Mapping[int, int], pool: Pool) -> Usage:
    """What the plain step is predicted to take, whatever the pool's limit.

    The executor leaves the plain step's order to chance.  Of two orders that
    are close to what it does, the one with the lower peak is taken, so that a
    budget that is a share of it is not larger than it seems.
    """
    endless = replace(pool, limit=None, layout=None, quiet=True)
    return min(
        (simulate(asked, endless) for asked in _plain_requests(program, workspace)),
        key=lambda usage: usage.peak,
    )


def _plain_requests(program: Program, workspace: Mapping[int, int]) -> list[Requests]:
    return [
        requests(program, events, workspace)
        for events in (plain_events(program), creation_events(program))
    ]


def pool_of(program: Program) -> Pool:
    """The memory pool that a step finds where nothing else is in it: variables,
    constants, batch, results."""
    plain = _plain_requests(program, {})
    return Pool(
        held=tuple(size for size in program.variable_bytes.values() if size),
        constants=tuple(sum(op.bytes) for op in program.ops if op.kind is Kind.CONSTANT),
        arguments=tuple(sum(program.ops[index].bytes) for index in program.inputs),
        # What holds a result may be another operation's, which the result is a view of.
        results=tuple(plain[0].sizes[number] for number in plain[0].kept),
        small=max(map(_small_peak, plain)),
    )


def _small_peak(asked: Requests) -> int:
    """Most bytes held at once in values too small to be placed."""
    sizes = [aligned(size) if size < GRAIN else 0 for size in asked.sizes]
    return max(replace(asked, sizes=tuple(sizes)).timeline(0), default=0)


def prepare(
    traced: Trace,
    program: Program,
    pool: Pool,
    *,
    name: str = "step",
    profile: Profile = "auto",
    split: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Prices and groups a traced step.

    Args:
      traced, program: from ``read``.
      pool: the memory that it finds.
      name: for people.
      profile: where costs come from; see ``price``.
      split: whether updates of large variables are computed in blocks.
      progress: called with a line for people now and then.
    """
    say = progress or (lambda line: None)

    def priced(program: Program) -> Prices:
        say(f"pricing {len(program.ops)} operations")
        return price(
            program,
            profile,
            progress=lambda done, total, s: say(
                f"measuring operation {done + 1} of {total}: {s.op}"
            ),
        )

    prices = priced(program)
    plain = plain_usage(program, prices.workspace, pool)
    # What is large must not depend on prices or on what else the process holds,
    # or a saved plan would not load.
    resident = pool_of(program).resident
    unpriced = min(max(asked.timeline(resident)) for asked in _plain_requests(program, {}))
    rewritten = broadcast_late(program)
    if split:
        rewritten = split_updates(rewritten, unpriced)
    if rewritten is not program:
        program, prices = rewritten, priced(rewritten)
    extraction = extract(
        program,
        prices.seconds,
        prices.workspace,
        plain_peak=unpriced,
        resident=pool.resident,
        name=name,
    )
    return Prepared(traced, program, prices, extraction, plain, pool)


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
        ceiling = budget - _margin(budget, prepared.pool, prepared.program)
    job = _Job(prepared, budget, ceiling, solver, seconds, progress)
    try:
        return _search(job, max(1, ceiling - _idle(prepared.pool)), seed, start)
    except _NoPlanError as problem:
        failed = problem
    if failed.interrupted:
        raise infeasible(prepared, budget, failed.estimate)
    leanest = find_leanest(prepared, budget, ceiling=ceiling, seed=seed, bound=failed.bound)
    if leanest.result.status is Status.INTERRUPTED:
        if not leanest.fits:
            raise infeasible(prepared, budget, failed.estimate)
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
        return _follow(self.prepared, result, self.budget, self.ceiling, seed, bound)

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
        ceiling = budget - _margin(budget, prepared.pool, prepared.program)
    result = result or _leanest_schedule(prepared.extraction.graph, seed)
    return Leanest(result, _follow(prepared, result, budget, ceiling, seed, bound), ceiling)


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


def _follow(
    prepared: Prepared,
    result: Result,
    budget: int,
    ceiling: int,
    seed: int,
    bound: float | None = None,
) -> Planned:
    """What a schedule takes, whether or not it is within the budget.  ``bound``: the least
    seconds within it, if known."""
    graph = prepared.extraction.graph
    plan = result.to_plan(graph)
    gap = None if bound is None else (plan.cost - bound) / (graph.cost or 1.0)
    plan = replace(plan, budget=budget, lower_bound=bound, gap=gap)
    return _carry_out(prepared, plan, result.budget, ceiling, seed)


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
                left = enough - max(beside, _margin(enough, there, prepared.program))
                at_hand = replace(prepared, pool=there)
                most = max(most, _follow(at_hand, leanest, enough, left, seed).needed - left)
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


def _search(job: _Job, target: int, seed: int, start: Sequence[int] | None = None) -> Planned:
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
            if planned is None:
                interrupted = result.status is Status.INTERRUPTED
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


def _margin(budget: int, pool: Pool, program: Program) -> int:
    """Bytes of the budget to leave free."""
    if pool.quiet:
        # What is smaller than its place leaves a piece, which may be taken for
        # something else and be missed where the place is given again.
        return int(_MARGIN * budget) + program.varying
    share, count = _LEAST_MARGIN
    return int(max(_UNPLACED_MARGIN * budget, min(share * budget, count)))


def _idle(pool: Pool) -> int:
    """Bytes in slots that nothing large can be placed in while a step runs."""
    if pool.layout is None or not pool.quiet:
        return 0
    held = sum(map(aligned, (*pool.constants, *pool.arguments, *pool.results)))
    free = pool.free_slots - Counter(map(aligned, pool.results))
    return max(0, pool.layout.slots_end - held - pool.small - sum(free.elements()))


def load_plan(prepared: Prepared, plan: Plan) -> Planned:
    """Makes a saved plan ready to run, with its tensors where they were.

    It may need more than its budget where other memory is in use than there was.

    Raises:
      PlanError: if it was made for another step.
    """
    stated = plan.details.get("step")
    graph = prepared.extraction.graph
    if stated is not None and stated != prepared.fingerprint:
        raise PlanError(
            f"the plan was made for another step ({plan.graph_name}): model, loss, optimizer, "
            "shapes, TensorFlow version and the names of layers must be those it was made with "
            "(a second model in one process gets other names: keras.backend.clear_session() "
            "before it starts them anew)"
        )
    if stated is None and plan.graph != graph.fingerprint:
        raise PlanError(
            f"the plan was made for another graph ({plan.graph_name or plan.graph[:12]}); "
            "trace this step and solve the graph that it gives"
        )
    try:
        truth = simulate_schedule(graph, plan.schedule)
    except ScheduleError as error:
        raise PlanError(f"steps: {error}") from None
    repriced = replace(
        plan, graph=graph.fingerprint, cost=truth.cost, overhead=overhead(graph, truth.cost)
    )
    seed = plan.details.get("seed", 0)
    if not isinstance(seed, int) or seed < 0:
        raise PlanError(f"details: seed is {seed!r}; it must be a whole number >= 0")
    ceiling = plan.budget - _margin(plan.budget, prepared.pool, prepared.program)
    return _carry_out(prepared, repriced, truth.peak, ceiling, seed)


def corrected(prepared: Prepared, corrections: Corrections) -> Prepared:
    """The step, as a recorded run says that it uses memory."""
    prices = prepared.prices
    workspace = {**prices.workspace, **corrections.workspace}
    program = corrections.apply(prepared.program)
    return replace(
        prepared,
        program=program,
        prices=replace(prices, workspace=workspace),
        extraction=prepared.extraction.anew(program, workspace),
        plain=plain_usage(program, workspace, prepared.pool),
    )


def _carry_out(prepared: Prepared, plan: Plan, target: int, ceiling: int, seed: int = 0) -> Planned:
    """Expands a plan's schedule, finds a place for everything, and predicts the peak."""
    events = expand(prepared.extraction, plan.schedule)
    asked = requests(prepared.program, events, prepared.prices.workspace)
    fillers, usage, needed, crowds = _place(asked, prepared.pool, plan.budget, ceiling, seed)
    details = {
        "step": prepared.fingerprint,
        "requested_peak": usage.requested_peak,
        "pool": usage.footprint,
        "plain_peak": prepared.plain.peak,
        "target": target,
        "seed": seed,
        "margin": plan.budget - ceiling,
        "device": prepared.prices.device,
        "once": _run_once(prepared.program, prepared.extraction.threshold),
    }
    known = {key.name: getattr(plan, key.name) for key in fields(Plan)}
    stated = StepPlan(
        **{**known, "peak": usage.peak, "details": details}, extracted=prepared.extraction.graph
    )
    crowded = _by_node(prepared.extraction, events, crowds)
    return Planned(stated, events, fillers, target, needed, crowded)


def _by_node(
    extraction: Extraction, events: Sequence[Event], crowds: Mapping[int, int]
) -> dict[int, int]:
    """What is known of events, of their nodes; of small operations, of the node before."""
    node_of = {op: node for node, ops in enumerate(extraction.groups) for op in ops}
    found: dict[int, int] = {}
    for event, count in crowds.items():
        before = (node_of[each.op] for each in reversed(events[: event + 1]) if each.op in node_of)
        node = next(before, None)
        if node is not None:
            found[node] = min(count, found.get(node, count))
    return found


def _place(
    asked: Requests, pool: Pool, budget: int, ceiling: int, seed: int
) -> tuple[Fillers, Usage, int, Mapping[int, int]]:
    """Trusts the allocator to find a place for everything, or finds them.

    Returns:
      Fillers, what the events take, how much of that must be below the ceiling, and
      events that are too crowded for it (see ``Placement``).
    """
    usage: Usage | None
    try:
        usage = simulate(asked, pool)
    except OutOfMemoryError:
        usage = None
    if usage is not None and pool.quiet and not usage.settled:
        usage = None  # the next step would not find the same memory
    if usage is not None and usage.peak <= ceiling:
        return {}, usage, usage.peak, {}
    over = 0
    crowds: Mapping[int, int] = {}
    if pool.layout is not None and pool.quiet:
        try:
            placement = place(asked, pool, ceiling, seed=seed)
            over, crowds = placement.height - placement.capacity, placement.crowds
            if over <= 0:
                placed = simulate(asked, pool, placement.fillers)
                # Fillers too are within the budget, if not below the ceiling.
                if placed.peak <= budget:
                    return placement.fillers, placed, ceiling, {}
        except OutOfMemoryError:
            over = 1  # something is astray
    if usage is not None:
        return {}, usage, usage.peak, crowds
    # Neither way there is enough: what lacks is known if the places were counted.
    usage = simulate(asked, replace(pool, limit=None, layout=None, quiet=False))
    lacking = over if over > 0 else max(usage.peak - ceiling, int(ceiling * (_OVERFULL - 1)))
    return {}, usage, ceiling + lacking, crowds


def _run_once(program: Program, threshold: int) -> dict[str, tuple[int, int]]:
    """Operations with effects or bodies of their own that return something large.

    Returns:
      For each type, how many there are, and the bytes that they return.
    """
    found: dict[str, tuple[int, int]] = {}
    for op in program.ops:
        held = sum(size for size in op.bytes if size > threshold)
        if op.kind is Kind.ONCE and held:
            count, total = found.get(op.type, (0, 0))
            found[op.type] = (count + 1, total + held)
    return found


def infeasible(prepared: Prepared, budget: int, least_budget: int) -> InfeasibleBudgetError:
    """The error that says what a budget lacks; ``least_budget`` is known to be enough."""
    graph = prepared.extraction.graph
    floor, nodes = memory_floor(graph)
    groups, workspace = prepared.extraction.groups, prepared.prices.workspace
    names = tuple(name_for_people(prepared.program, groups[node], workspace) for node in nodes)
    return InfeasibleBudgetError(budget, floor, names, least_budget, graph.resident)
