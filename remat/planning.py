"""Stages 1 to 3 strung together, and what a schedule takes: a Python step becomes a
graph that can be solved, and a schedule of it a plan.

The plan's peak is predicted from what will really run: the schedule is
expanded into operations, every large tensor gets a place (``placement``), and
all of it is followed through a model of the allocator (``memory.simulate``).
Schedules are looked for in ``search``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tensorflow.core.framework import node_def_pb2

from .arena import GRAIN, OutOfMemoryError, Pool, aligned
from .bodies import known_turns
from .broadcasts import broadcast_late
from .calibrate import Corrections
from .chains import chained_in_functions
from .copy_on_read import without_copy_on_read
from .extract import Extraction, expand, extract, name_for_people
from .generators import Generators
from .memory import (
    Event,
    Fillers,
    Requests,
    Usage,
    as_run,
    creation_events,
    plain_events,
    requests,
    simulate,
)
from .notices import warn
from .onednn import merge_bias_gradients
from .placement import place
from .price import Prices, Profile, price
from .program import Kind, Op, Program, build
from .solvers import Graph, InfeasibleBudgetError, Plan, PlanError, Result
from .solvers import simulate as simulate_schedule
from .solvers.budget import format_bytes
from .solvers.floor import memory_floor
from .solvers.schedule import ScheduleError
from .solvers.solving import overhead
from .split import split_updates
from .sums import order_sums
from .trace import Source, Trace, TraceError, trace

# Shares of the budget left free for what the prediction does not see: small
# host-side tensors and scratch memory that changes from run to run ...
_MARGIN = 0.005
_UNPLACED_MARGIN = 0.015  # ... and where the allocator chooses the places, ...
_LEAST_MARGIN = 0.03, 2**19  # ... at least the lower of this share and these bytes
# Share of the budget that is left to sizes which only a run knows: not all can be tried, and a
# plan that only just has room for those that were may lack it for others.
_VARYING_MARGIN = 0.02
_SHOWN = 4  # kinds of operations that a summary names
_OVERFULL = 1.01  # times the budget: what is taken to be needed when memory runs out


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
      needed: predicted bytes that must be within the budget less its margin.
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
            warn(
                "the step is planned as traced for its batch alone; plain TensorFlow traces it for "
                f"batches of any size, and may differ in the last digits: {error}",
                RuntimeWarning,
            )
    traced = make()
    return traced, _program(traced)


def _program(traced: Trace) -> Program:
    """What a step is made of, with the plain step's bits in whatever order it runs."""

    rewritten = without_copy_on_read(traced)

    def made(turns: Mapping[str, int] | None = None) -> Program:
        return merge_bias_gradients(build(rewritten, turns=turns))

    def plain() -> Program:
        """As TensorFlow runs it, nothing folded."""
        program = merge_bias_gradients(build(traced, fold=False))
        return program if traced.taking is None else _taking(program, traced.taking)

    program = made()
    turns = known_turns(program)
    return order_sums(made(turns) if turns else program, plain)


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


def plain_requests(
    program: Program, workspace: Mapping[int, int] | None = None
) -> tuple[Requests, ...]:
    """What the plain step asks for, in each of two orders that are close to what it does: the
    executor leaves its order to chance.  Without a workspace, scratch memory is left out."""
    return tuple(
        requests(program, events, workspace or {})
        for events in (plain_events(program), creation_events(program))
    )


def plain_usage(plain: Sequence[Requests], pool: Pool) -> Usage:
    """What the plain step is predicted to take, whatever the pool's limit.

    Of its orders the one with the lower peak is taken, so that a budget that is a share of
    it is not larger than it seems.
    """
    endless = replace(pool, limit=None, layout=None, quiet=True)
    return min((simulate(asked, endless) for asked in plain), key=lambda usage: usage.peak)


def pool_of(program: Program, plain: Sequence[Requests]) -> Pool:
    """The memory pool that a step finds where nothing else is in it: variables,
    constants, batch, results."""
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
    *,
    plain: Sequence[Requests] | None = None,
    pool: Pool | None = None,
    name: str = "step",
    profile: Profile = "auto",
    split: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Prepared:
    """Prices and groups a traced step.

    Args:
      traced, program: from ``read``.
      plain: from ``plain_requests``, scratch memory left out, where it is known.
      pool: the memory that it finds; where nothing else is in it if None.
      name: for people.
      profile: where costs come from; see ``price``.
      split: whether updates of large variables are computed in blocks.
      progress: called with a line for people now and then.
    """
    say = progress or (lambda line: None)
    plain = plain or plain_requests(program)
    alone = pool_of(program, plain)
    pool = pool or alone
    # What is large must not depend on prices or on what else the process holds,
    # or a saved plan would not load.
    unpriced = min(max(asked.timeline(alone.resident)) for asked in plain)
    rewritten = broadcast_late(program)
    if split:
        rewritten = split_updates(rewritten, unpriced)
    say(f"pricing {len(rewritten.ops)} operations")
    priced = price(
        [program] if rewritten is program else [program, rewritten],
        profile,
        progress=lambda done, total, s: say(f"measuring operation {done + 1} of {total}: {s.op}"),
    )
    as_plain, prices = priced[0], priced[-1]
    rewritten = chained_in_functions(rewritten, prices.functions, unpriced)
    usage = plain_usage(plain_requests(program, as_plain.workspace), pool)
    extraction = extract(
        rewritten,
        prices.seconds,
        prices.workspace,
        plain_peak=unpriced,
        resident=pool.resident,
        name=name,
    )
    return Prepared(traced, rewritten, prices, extraction, usage, pool)


def follow(
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
    # The bound is that of another target, so no later solve may begin with it.
    plan = replace(plan, budget=budget, lower_bound=bound, gap=gap, bound_budget=None)
    return _carry_out(prepared, plan, result.budget, ceiling, seed)


def margin(budget: int, pool: Pool, program: Program) -> int:
    """Bytes of the budget to leave free."""
    if pool.quiet:
        # What is smaller than its place leaves a piece, which may be taken for
        # something else and be missed where the place is given again.
        return int(_MARGIN * budget) + program.varying
    share, count = _LEAST_MARGIN
    return int(max(_UNPLACED_MARGIN * budget, min(share * budget, count)))


def idle(pool: Pool) -> int:
    """Bytes in slots that nothing large can be placed in while a step runs."""
    if pool.layout is None or not pool.quiet:
        return 0
    held = sum(map(aligned, (*pool.constants_inside, *pool.arguments, *pool.results)))
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
    repriced = replace(plan, cost=truth.cost, overhead=overhead(graph, truth.cost))
    if plan.graph != graph.fingerprint:  # a bound is for the costs that it was proven for
        repriced = replace(repriced, graph=graph.fingerprint, lower_bound=None, gap=None)
    seed = plan.details.get("seed", 0)
    if not isinstance(seed, int) or seed < 0:
        raise PlanError(f"details: seed is {seed!r}; it must be a whole number >= 0")
    ceiling = plan.budget - margin(plan.budget, prepared.pool, prepared.program)
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
        plain=plain_usage(plain_requests(program, workspace), prepared.pool),
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
    if not crowds:
        return {}
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
    runs: Iterable[Requests] = [asked]
    room = pool
    if asked.varying and not pool.quiet:
        runs, room = as_run(asked, seed), pool.smaller(int(_VARYING_MARGIN * budget))
    try:
        usage = max((simulate(run, room) for run in runs), key=lambda usage: usage.peak)
    except OutOfMemoryError:
        usage = None
    if usage is not None and pool.quiet and not usage.settled:
        usage = None  # the next step would not find the same memory
    if usage is not None and usage.peak <= ceiling:
        return {}, usage, usage.peak, {}
    over = 0
    crowds: Mapping[int, int] = {}
    # Places that are warm lie further apart, and may take more fillers than there is room for.
    for warm in (True, False) if pool.layout is not None and pool.quiet else ():
        try:
            placement = place(asked, pool, ceiling, warm=warm, seed=seed)
            over, crowds = placement.height - placement.capacity, placement.crowds
            if over > 0:
                break
            placed = simulate(asked, pool, placement.fillers)
            # Fillers too are within the budget, if not below the ceiling.
            if placed.peak <= budget:
                return placement.fillers, placed, ceiling, {}
        except OutOfMemoryError:
            over = 1  # something is astray
    if usage is not None:
        return {}, usage, usage.peak, crowds
    # Neither way there is enough: what lacks is known if the places were counted, and
    # one step says what else there is to say of a plan that will not run.
    usage = simulate(asked, replace(pool, limit=None, layout=None, quiet=over > 0))
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


def infeasible(
    prepared: Prepared, budget: int, least_budget: int, *, known: bool = True
) -> InfeasibleBudgetError:
    """The error that says what a budget lacks; ``known``: whether ``least_budget`` is known to
    be enough."""
    graph = prepared.extraction.graph
    floor, nodes = memory_floor(graph)
    groups, workspace = prepared.extraction.groups, prepared.prices.workspace
    names = tuple(
        name_for_people(prepared.program, groups[node], workspace)
        if groups[node]
        else graph.nodes[node].name
        for node in nodes
    )
    varies = any(prepared.program.ops[op].varies for node in nodes for op in groups[node])
    return InfeasibleBudgetError(
        budget,
        floor,
        names,
        least_budget,
        graph.resident,
        known=known,
        remark="its values, whose sizes only a run knows, count as the largest they can be, and "
        "each part of a partition as the whole"
        if varies
        else "",
    )
