"""A planned step that runs: called like the plain one, measured, kept in budget."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as tape

from . import allocator
from .arena import GRAIN, Pool, slots_end
from .calibrate import Corrections, compare
from .generators import Generators, apart, kernel_handles
from .inplace import stays
from .lower import held_constants, lower
from .measure import measure
from .measured import Measured
from .memory import requests
from .notices import warn
from .options import Options, bytes_of
from .planning import (
    Planned,
    Prepared,
    StepPlan,
    corrected,
    infeasible,
    load_plan,
    plain_requests,
    plain_usage,
    pool_of,
    prepare,
    read,
)
from .program import Program
from .progress import ProgressLine
from .search import find_leanest, make_plan, refusal
from .solvers import InfeasibleBudgetError, Result, Status
from .solvers.budget import format_bytes, is_share
from .trace import Source, Trace
from .trial import SETTLING, Trial, draws, is_reversible, run_on_zeros, why_not, zeros
from .unfed import Unfed, unfed
from .variables import move_what_moves, own_buffers, variables_of, variables_put_back

log = logging.getLogger("remat")

_TRIALS = 6  # measured runs, at most, until the peak is within the budget ...
_PLACED_TRIALS = 4  # ... of them with places for tensors
_UNPLACED_SLACK = 0.01  # of the budget, which a trial run without addresses must not take
_SHARE = "share of the plain step's predicted peak"  # where a budget comes from
_NOTICED = 1.02  # times a budget: less does not make a share of a corrected peak another one
_SCRATCH = 64 << 20  # bytes of scratch memory that small kernels may take
_AHEAD, _AHEAD_SHARE = 8, 1 / 32  # batches that a pipeline holds, at most; share of the peak
_LARGE_VARIABLE = 1 << 20  # bytes, of which a copy would be noticed
_ROOMY = 2  # times the budget: a limit that leaves a choice of places
# Steps until, where the allocator chooses the places, all lies where it does for every other.
_UNPLACED_SETTLING = 5
# Times that memory may be found otherwise; steps in between that find it as planned make up
# for some.
_DRIFTS, _MADE_UP = 8.0, 0.25
_ATTEMPTS = 3  # at a plan for what one step finds
_LEARNING = 4  # runs, at most, of a step that is refused, for the budget that is named
_STEPS: weakref.WeakSet[CompiledStep] = weakref.WeakSet()  # which may take turns
_MEASURING = threading.RLock()  # the allocator's counters are the whole process's


class CompiledStep:
    """One training step for one set of shapes, inside a budget.

    Attributes:
      prepared: the traced, priced and grouped step.
      planned: what runs.
      budget: bytes; budget_source: where the figure comes from.
      measured_peak: peak bytes that the allocator counted in the latest
        measured run, or None.
      seconds: how long each stage of compilation took.
      interrupted: whether a signal (Ctrl-C) ended a solve of it, and the best so far was kept.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        input_signature: Sequence[Any],
        options: Options,
        name: str = "step",
        *,
        autograph: bool = False,
        traced_for: Sequence[Any] | None = None,
        taken_from: Source | None = None,
        generators: Generators,
        at_least: int = 0,
    ) -> None:
        """Plans a step.

        Args:
          function: the step.
          input_signature: nests of ``tf.TensorSpec``, one for each argument.
          options: how.
          name: for people.
          autograph: whether to convert Python's control flow over tensors.
          traced_for: what the plain step is traced for, where that leaves
            dimensions open; taken_from: what its arguments come from; generators:
            what those shapes share; see ``trace``.
          at_least: bytes below which a budget given as a share is not taken:
            what other steps of the same training may reach anyway.
        """
        self.options = options
        self.signature = tuple(input_signature)
        self._generators = generators  # a handle alone keeps no variable alive
        self._at_least = at_least
        self.device = allocator.device_at_hand()
        self.measured_peak: int | None = None
        self.seconds: dict[str, float] = {}
        self._calls = 0
        self._ran = False  # a step of the training
        self._batch: list[weakref.ref[tf.Tensor]] = []  # its arguments
        self._warned = False  # of a later step above the budget
        self._laid: allocator.Laid | None = None
        self._settled_bytes: int | None = None  # in use when memory was last found as laid
        self._drifts = 0.0  # see _DRIFTS
        self._warned_often = False
        self._corrected = Corrections({}, {})  # by runs until now
        self._constants: dict[int, tf.Tensor] = {}
        self._unplaced: tuple[Prepared, Planned, Callable[..., list[tf.Tensor]]] | None = None
        self._kept: list[Any] = []  # generators of calls inside other functions
        self._unfed: Unfed | None = None
        say = ProgressLine(options.verbose)
        with say, _garbage_kept():
            with self._timed("trace"):
                say.line("tracing the step")
                traced, program = read(
                    function,
                    input_signature,
                    autograph=autograph,
                    traced_for=traced_for,
                    taken_from=taken_from,
                    generators=generators,
                )
            try:
                with allocator.undone_if_refused(self.device):
                    self._make(traced, program, name, say)
            except BaseException:
                self._laid = None  # a notebook keeps the error, and so this step
                raise
        self.interrupted = say.interrupted
        log.info(
            "budget %s (%s)\n%s", format_bytes(self.budget), self.budget_source, self.plan.summary()
        )

    def _make(self, traced: Trace, program: Program, name: str, say: ProgressLine) -> None:
        """Divides memory, prices, solves, lowers and checks what was traced."""
        options = self.options
        self._large = [
            handle
            for handle, spec in variables_of(program)
            if stays(spec) and spec.shape.num_elements() * spec.dtype.size >= _LARGE_VARIABLE
        ]
        plain = plain_requests(program)
        pool, block, found = pool_of(program, plain), None, None
        if self.device.counted:
            own_buffers(program)
            gc.collect()  # what an earlier training left, and Python has not freed yet
            pool = self._with_others(pool, 0)
            highest = allocator.peak_before_claims(self.device)
            pool = replace(pool, highest=highest, growth=self.device.growth)
            peak = plain_usage(plain, pool).peak
            budget, source = self._resolve_budget(peak)
            # Replicas run side by side.
            alone = tf.distribute.get_strategy().num_replicas_in_sync == 1
            shared = not alone or options.quiet is False or _varies(program)
            # Where the allocator chooses the places, what it has no room for is to be foreseen.
            pool = replace(pool, shared=shared, limit=self.device.limit)
            pool = self._with_batches_ahead(pool, min(budget, peak))
            # A share is of a peak that is higher once scratch memory is known.
            spare = budget + _SCRATCH if source == _SHARE else 0
            found = self._in_common(pool, budget)
            if found is None:
                block = self._claim(pool, budget, spare)
        with self._timed("price"):
            self.prepared = prepare(
                traced,
                program,
                plain=plain,
                pool=pool,
                name=name,
                profile=options.profile,
                progress=say.line,
            )
        self.budget, self.budget_source = self._resolve_budget(self.prepared.plain.peak)
        if block is not None and self.budget > budget + spare:  # else there is no more to claim
            block = self._claim(pool, self.budget) or block
        gc.collect()  # what measuring operations left, which would be freed once memory is divided
        with self._timed("solve"):
            planned = None
            if found is not None:
                planned = self._plan_in_common(found, say)
                if planned is None:
                    block = self._claim(self.prepared.pool, self.budget)
            self.planned = planned or self._first_plan(block, say)
        with self._timed("lower"):
            self._run = self._lower()
        if options.check and self.device.counted:
            with self._timed("check"):
                self._check(say)
        _STEPS.add(self)

    @property
    def _settling(self) -> int:
        """First runs whose peaks are measured: later ones take as much."""
        return SETTLING if self.prepared.pool.quiet else _UNPLACED_SETTLING

    @property
    def plan(self) -> StepPlan:
        """The plan that runs now."""
        return self.planned.plan

    def __call__(self, *arguments: Any) -> Any:
        """Runs one step; arguments and results are nests as the function's own."""
        flat = self._flatten(arguments)
        if not tape.could_possibly_record():
            return self._pack(self._watched(flat))
        with tape.stop_recording():
            results = self._watched(flat)
        captured = [tensor for _, tensor in self.prepared.program.captures]
        tape.record_operation("remat", results, [*flat, *captured], self._no_gradient)
        return self._pack(results)

    def _watched(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Runs the step, and sees to it that it stays within the budget."""
        if tf.inside_function() or not self.device.counted:
            return self._execute(flat)
        if self._calls >= self._settling:
            # The counter is left to others; what raises it is seen all the same.
            before = allocator.peak_bytes(self.device)
            results = self._execute(flat)
            self._warn_above_budget(before, allocator.peak_bytes(self.device))
            return results
        with _MEASURING:
            self._calls += 1
            # The first batch was there when memory was divided, and may be gone.
            self._settled_bytes = None
            allocator.reset_peak(self.device)
            results = self._execute(flat)
            self.measured_peak = allocator.peak_bytes(self.device)
            if self.measured_peak > self.budget:
                self._over_budget()
        return results

    def _no_gradient(self, *_: Any) -> None:
        raise LookupError(
            f"the planned step {self.prepared.extraction.graph.name} has no gradient: a plan is "
            "for a whole training step; put the tape and the update into the planned function, "
            "and call the model itself where you need a gradient"
        )

    def run_unfed(self) -> None:
        """Has the effects that the plain step has where its arguments never come."""
        traced = self.prepared.trace
        if self._unfed is None:
            self._unfed = unfed(traced.pieces, traced.sources)
        self._unfed.run(dict(traced.captures))

    def measure(self, *batch: Any, steps: int = 5) -> Measured:
        """Runs the step, and compares what it takes with what was predicted.

        Every variable is put back afterwards, bit for bit, and random
        generators go on from where they were.

        Args:
          batch: the step's arguments.  If there are none, the last step's, where its
            caller still holds them, so that what is measured has the memory that a
            step has; or else zeros.
          steps: runs that are timed.

        Raises:
          ValueError: if the step has effects that cannot be undone, or the
            batch is not what the step is planned for.
        """
        program = self.prepared.program
        if steps < 1:
            raise ValueError(f"steps is {steps}; at least one step is timed")
        if not is_reversible(program, self._generators):
            raise ValueError(
                "the step has effects beside its variables (a table, an iterator, Python code), "
                "which a measurement could not undo; measure its real steps"
            )
        inputs = self._flatten(batch) if batch else self._last_batch() or zeros(program)
        self._keep_layout()
        with self._ready():
            pass  # planned again if need be: each run of it settles memory by itself
        with _MEASURING, variables_put_back(program):
            lowered, _own = self._apart(program, self.planned)
            timed, _other = self._apart(program, self.planned, timed=True)
            return measure(
                lambda: lowered(*inputs),
                lambda: timed(*inputs),
                self._settled,
                self.prepared,
                self.planned,
                self.device,
                steps=steps,
            )

    def _last_batch(self) -> list[tf.Tensor]:
        """The arguments of the last step, if all of them are still there."""
        held = [reference() for reference in self._batch]
        return [] if any(tensor is None for tensor in held) else held

    def _execute(self, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        try:
            if tf.inside_function():
                return self._inside()(*flat)
            self._batch = [weakref.ref(tensor) for tensor in flat]
            for handle in self._large:  # rows of it may have been gathered since
                allocator.share(handle)
            self._keep_layout()
            with self._ready():
                self._ran = True
                self._drifts = max(0.0, self._drifts - _MADE_UP)
                return self._run(*flat)
        except tf.errors.ResourceExhaustedError as error:
            raise tf.errors.ResourceExhaustedError(
                error.node_def,
                error.op,
                f"{error.message}\n\nremat's plan when this happened:\n{self.plan.summary()}",
            ) from error

    @tf.autograph.experimental.do_not_convert  # nothing here depends on a tensor's value
    def _inside(self) -> Callable[..., list[tf.Tensor]]:
        """What runs inside another ``tf.function``, which may allocate anything
        beside the step: planned again, without places for tensors.

        TensorFlow puts a step that is called there in place of the call, which so has
        generators of its own.  What replicas call there once for each shape has not.
        """
        prepared, planned, lowered = self.prepared, self.planned, self._run
        with tf.init_scope():
            if prepared.pool.quiet:
                if self._unplaced is None:
                    with ProgressLine(self.options.verbose) as say:
                        prepared = replace(prepared, pool=replace(prepared.pool, quiet=False))
                        planned = self._solve(None, say, self.plan.schedule, prepared)
                        program = prepared.program
                        lowered = lower(program, planned.events, constants=self._constants)
                        self._unplaced = prepared, planned, lowered
                prepared, planned, lowered = self._unplaced
            if not self._generators or tf.distribute.get_strategy().num_replicas_in_sync > 1:
                return lowered
            lowered, own = self._apart(prepared.program, planned)
            self._kept += own
            return lowered

    def _warn_above_budget(self, before: int, peak: int) -> None:
        """Says, once, that a later step raised the peak above the budget."""
        if self._warned or peak <= max(before, self.budget):
            return
        self._warned = True
        warn(
            f"the step took {format_bytes(peak)}, above its budget of "
            f"{format_bytes(self.budget)}: something was allocated since it was planned (data, "
            "results that are kept); compile again to have it planned beside that",
            RuntimeWarning,
        )

    def _over_budget(self) -> None:
        """A real step took more than the budget: says so, and tightens the plan."""
        assert self.measured_peak is not None
        warn(
            f"the step took {format_bytes(self.measured_peak)}, above its budget of "
            f"{format_bytes(self.budget)}; planning again with a lower target",
            RuntimeWarning,
        )
        ceiling = self.plan.peak - (self.measured_peak - self.budget) - self.budget // 200
        ceiling = max(ceiling, 1)
        try:
            with ProgressLine(False) as say:
                self.planned = self._solve(ceiling, say, self.plan.schedule)
        except InfeasibleBudgetError as error:
            warn(
                f"the plan stays as it is, and a larger budget is what helps: {error}",
                RuntimeWarning,
            )
            self._calls, self._warned = self._settling, True  # it would be the same again
            return
        self._lower_again()
        self._calls = 0

    def _in_common(self, pool: Pool, budget: int) -> allocator.Laid | None:
        """How memory is divided for another step, if that is as good for this one: under a
        hard limit, what another layout would leave between the two is lost to both."""
        laid = allocator.latest(self.device)
        if laid is None or pool.shared or not allocator.is_tight(self.device, budget):
            return None
        pool = replace(pool.with_constants_outside(), layout=laid.layout)
        return laid if allocator.is_as_good(self.device, laid, pool, budget) else None

    def _plan_in_common(self, laid: allocator.Laid, say: ProgressLine) -> Planned | None:
        """A plan for memory as it is divided for another step; None if there is none."""
        self._constants = held_constants(self.prepared.program, self.device)
        move_what_moves(self.prepared.program)
        found = allocator.renewed(self.device, laid, self.budget)
        if found is not None:
            self._adopt(found)
            with suppress(InfeasibleBudgetError):
                return self._solve(None, say)
        return None

    def _plan_by_turns(
        self, block: allocator.Block | None, say: ProgressLine, start: Sequence[int] | None = None
    ) -> Planned:
        """A plan for memory divided anew: for this step, and for those that take turns with
        it, so that it need not be divided for each of them again; if that leaves too little,
        for this one alone.

        Raises:
          InfeasibleBudgetError: if there is none.
        """
        if block is not None and (common := self._others_slots()):
            self._divide(block, common)
            with suppress(InfeasibleBudgetError):
                return self._solve(None, say, start)
            block = self._claim(self.prepared.pool, self.budget)
        self._divide(block)
        return self._solve(None, say, start)

    def _others_slots(self) -> tuple[int, ...]:
        """Sizes of the slots that other steps need for their batches and results; none where
        there is room for a layout for each."""
        if not allocator.is_tight(self.device, self.budget):
            return ()
        slots: Counter[int] = Counter()
        for step in _STEPS:
            pool = step.prepared.pool
            if step is not self and step.device == self.device and pool.quiet:
                slots |= Counter(pool.with_constants_outside().own_slots)
        return tuple(slots.elements())

    def _first_plan(self, block: allocator.Block | None, say: ProgressLine) -> Planned:
        """The plan, or an error that names a budget within which a step has been run.

        Raises:
          InfeasibleBudgetError: if there is none; where no run is possible, what it names
            is by the prediction.
        """
        try:
            return self._plan_by_turns(block, say)
        except InfeasibleBudgetError as error:
            limit = self.device.limit
            # Places for large results may take what the step itself would.
            if self._laid is not None and self._has_choice(self.budget) and not say.interrupted:
                self._laid.walls.clear()
                self._divide(None)
                with suppress(InfeasibleBudgetError):
                    return self._solve(None, say)
            roomy = self.device.counted and (limit is None or limit >= error.least_budget)
            checked = self.options.check and roomy and self._testable(say)
            if say.interrupted or not checked:
                raise
            refused = error
        asked, seed = self.budget, self.options.seed
        schedule: Result | None = None
        for _ in range(_LEARNING):
            say.line("measuring the step of least peak, to name a budget that is enough")
            self.budget = refused.least_budget
            if self._laid is not None:
                self._laid.walls.clear()  # what they divide is one again
            pool = self._with_batches_ahead(
                self.prepared.pool, min(self.budget, self.prepared.plain.peak)
            )
            self.prepared = replace(self.prepared, pool=pool)
            self._divide(self._claim(pool, self.budget))
            leanest = find_leanest(self.prepared, self.budget, seed=seed, result=schedule)
            if leanest.result.status is Status.INTERRUPTED:
                break
            taken = self.budget  # or more, that nobody knows the cause of
            within = False
            if leanest.fits:
                self.planned = leanest.planned
                self._run = self._lower()
                try:
                    trial = self._trial()
                except tf.errors.OpError as error:
                    say.line(f"not measured: it fails on zeros ({type(error).__name__})")
                    break
                finally:
                    self._give_up_lowered()
                measured = trial.peak
                within = measured is not None and measured <= self.budget
                if corrections := self._compare(trial):
                    self.prepared = corrected(self.prepared, corrections)
                    leanest = find_leanest(self.prepared, self.budget, seed=seed)
                elif measured is not None:
                    taken = max(taken, measured)
            if leanest.fits and within:
                break
            schedule = leanest.result
            refused = refusal(self.prepared, leanest, taken, seed)
        raise infeasible(self.prepared, asked, refused.least_budget)

    def _divide(self, block: allocator.Block | None, common: tuple[int, ...] = ()) -> None:
        """Divides a block, if there is one, for the budget: what is planned is for that.

        ``common``: sizes of slots for other steps.
        """
        self._constants.clear()  # there are slots for them, and for one set of them
        pool = replace(self.prepared.pool, outside=(), common=common)
        self.prepared = replace(self.prepared, pool=pool)
        self._adopt(None if block is None else self._lay_out(block, pool))
        self._constants = held_constants(self.prepared.program, self.device)

    def _adopt(self, laid: allocator.Laid | None) -> None:
        """Plans from now on are for memory that is divided so, or not at all."""
        pool = replace(self.prepared.pool, layout=None, quiet=False)
        if laid is not None:
            pool = replace(self._in(laid), quiet=not pool.shared)
        elif self.device.counted:  # another step's weights, say, may have come meanwhile
            pool = self._with_others(pool, pool.resident - sum(pool.held))
        self._laid = laid
        self.prepared = replace(self.prepared, pool=pool)

    def _in(self, laid: allocator.Laid) -> Pool:
        """The pool, divided so."""
        sizes = {index: sum(self.prepared.program.ops[index].bytes) for index in self._constants}
        outside = tuple(
            sizes[index]
            for index, constant in self._constants.items()
            if sizes[index] >= GRAIN and allocator.address(constant) not in laid.slots
        )
        return replace(self.prepared.pool, layout=laid.layout, outside=outside)

    def _has_choice(self, budget: int) -> bool:
        """Whether the device's limit leaves its allocator a choice of places."""
        return self.device.limit is None or self.device.limit >= _ROOMY * budget

    def _with_batches_ahead(self, pool: Pool, budget: int) -> Pool:
        """The pool with as many batches of an input pipeline as a budget has room for."""
        if self.options.quiet is not False:
            return pool
        ahead = _AHEAD_SHARE * budget // max(1, sum(pool.arguments))
        return replace(pool, ahead=min(_AHEAD, int(ahead)))

    def _with_others(self, pool: Pool, own: int) -> Pool:
        """The pool with what is in use now and it does not count, nor ``own`` bytes beside."""
        others = allocator.bytes_in_use(self.device) - sum(pool.held) - own
        return replace(pool, held=(*pool.held, others)) if others > 0 else pool

    def _solve(
        self,
        ceiling: int | None,
        say: ProgressLine,
        start: Sequence[int] | None = None,
        prepared: Prepared | None = None,
    ) -> Planned:
        prepared = prepared or self.prepared
        if self.options.plan is not None and ceiling is None:
            given = load_plan(prepared, replace(self.options.plan, budget=self.budget))
            if given.needed <= self.budget - given.plan.details["margin"]:
                return given
            say.line("the given plan does not fit the memory at hand: solving again, from it")
            start = start or given.plan.schedule
        return make_plan(
            prepared,
            self.budget,
            solver=self.options.solver,
            time_limit=self.options.time_limit,
            seed=self.options.seed,
            ceiling=ceiling,
            start=start,
            progress=say.result,
        )

    def _check(self, say: ProgressLine) -> None:
        """Runs the step on zeros, and plans again if it takes too much.

        Every variable is put back afterwards, bit for bit.
        """
        if not self._testable(say):
            return
        for number in range(_TRIALS):
            # What a run takes varies where the allocator chooses the places.
            slack = 0 if self.prepared.pool.quiet else int(_UNPLACED_SLACK * self.budget)
            say.line("measuring one step")
            try:
                trial = self._trial()
            except tf.errors.OpError as error:  # a division by zero, a singular matrix
                reason = type(error).__name__
                say.line(f"not measured before the first step: it fails on zeros ({reason})")
                break
            measured = trial.peak
            if measured is not None:
                self.measured_peak = measured
            corrections = self._compare(trial)
            # Out of memory does not say by how much: try 5 %.
            excess = self.budget // 20 if measured is None else measured - self.budget
            if not corrections and excess <= -slack:
                break
            if number == _TRIALS - 1:
                if excess > 0:
                    least, known = self.budget + excess, measured is not None
                    raise infeasible(self.prepared, self.budget, least, known=known)
                break
            if corrections:
                say.line("the run asked for other memory than predicted: planning again")
                self.prepared = corrected(self.prepared, corrections)
                ceiling = None
                budget, source = self._resolve_budget(self.prepared.plain.peak)
                if source == _SHARE and budget > _NOTICED * self.budget:
                    self.budget = budget
                    if self._laid is not None:
                        self._lay_again(lambda: None)
                        continue
            elif self._laid is not None and number == _PLACED_TRIALS - 1:
                # The divided piece is a small one among holes, which others take.
                say.line("what has no place takes too much: planning again without places")
                self._divide(None)
                ceiling = None
            else:
                say.line(
                    f"measured {format_bytes(measured) if measured else 'out of memory'} for a "
                    f"budget of {format_bytes(self.budget)}: planning again with a lower target"
                )
                ceiling = self.plan.peak - excess - slack - self.budget // 200
            try:
                self.planned = self._solve(ceiling, say, self.plan.schedule)
            except InfeasibleBudgetError:
                if not corrections and excess <= 0:
                    break  # it is within the budget, if only just
                if self._laid is None or not self._has_choice(self.budget):
                    raise
                self._divide(None)
                self.planned = self._solve(None, say, self.plan.schedule)
            self._run = self._lower()

    def _testable(self, say: ProgressLine) -> bool:
        """Whether the step may be run on zeros; says why not."""
        why = why_not(self.prepared.program, self._generators)
        if why is not None:
            say.line(f"not measured before the first step: {why}")
        return why is None

    def _trial(self) -> Trial:
        """Runs the step on zeros, as it is planned now."""
        program = self.prepared.program
        # Almost no step draws so that running it moves more than its variables.
        moves = kernel_handles(self._generators) or draws(program)
        step, _own = self._apart(program, self.planned) if moves else (self._run, [])
        return run_on_zeros(
            step, self._settled, program, self.device, self.budget, runs=self._settling
        )

    def _compare(self, trial: Trial) -> Corrections:
        """What a recorded run says about the model of the step's memory."""
        program, events = self.prepared.program, self.planned.events
        workspace = self.prepared.prices.workspace
        asked = requests(program, events, workspace)
        found = compare(
            program, events, asked, workspace, trial.recorded, self._corrected, trial.lacking
        )
        self._corrected = self._corrected.followed_by(found)
        return found

    def _lower(self) -> Callable[..., list[tf.Tensor]]:
        self._give_up_lowered()
        program, planned = self.prepared.program, self.planned
        return lower(program, planned.events, planned.fillers, self._constants)

    def _give_up_lowered(self) -> None:
        """Frees what an earlier lowering holds: the constants of its graph, and of the
        branches and turns that it calls."""
        if hasattr(self, "_run"):
            del self._run
            gc.collect()

    def _apart(
        self, program: Program, planned: Planned, *, timed: bool = False
    ) -> tuple[Callable[..., list[tf.Tensor]], list[Any]]:
        """A plan of the step, to be run without moving the generators of the training.

        Returns:
          The function, and what is to be kept for as long as it is run.
        """
        captures, own = apart(program.captures, self._generators)
        program = replace(program, captures=captures)
        return lower(program, planned.events, planned.fillers, self._constants, timed=timed), own

    def _lower_again(self) -> None:
        """Has the step run by a new plan from now on."""
        self._run = self._lower()
        if self._ran and draws(self.prepared.program):
            warn(
                "the step is planned anew, and what it draws in a function that is called as it "
                "is, or on a GPU in another way than uniform or normal, comes from generators "
                "that start anew with the plan: from here on these numbers are not the plain "
                "step's; keras.random with a SeedGenerator is exact",
                RuntimeWarning,
            )

    @contextmanager
    def _settled(self) -> Iterator[allocator.Found]:
        """Puts the pool into the state that the plan is for; yields what is otherwise."""
        pool = self.prepared.pool
        if self._laid is None or not pool.quiet:
            yield allocator.Found()
            return
        free = pool.free_slots
        with allocator.settled(self.device, self._laid, free) as found:
            in_use = allocator.bytes_in_use(self.device)
            if found == allocator.Found() and self._ran and in_use != self._settled_bytes:
                most = self.plan.peak
                found = allocator.differences(self.device, self._laid, found.free, most)
            if not found.drifted:
                self._settled_bytes = in_use
            yield found

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Puts the pool into the state that the plan is for, planning again for what is found
        there if need be."""
        for _ in range(_ATTEMPTS):
            with self._settled() as found:
                if found == allocator.Found():
                    yield
                    return
            self._drifted(found)
        with self._settled():
            yield

    def _keep_layout(self) -> None:
        """Divides memory again if another step has divided it anew."""
        laid, quiet = self._laid, self.prepared.pool.quiet
        if laid is not None and quiet and not allocator.is_in_force(self.device, laid):
            self._lay_again(self._served)

    def _served(self) -> allocator.Laid | None:
        """The latest layout, if there are slots for this step in it."""
        laid = allocator.latest(self.device)
        if laid is not None and laid.layout.serves(self._in(laid).own_slots):
            return laid
        return None

    def _drifted(self, found: allocator.Found) -> None:
        """Something else has been allocated, or freed, since the step was planned: plans
        for what is left, and after some times of that without places for tensors, where
        there is room for what is free in pieces then."""
        laid = self._laid
        assert laid is not None
        self._drifts += 1
        often, tight = self._drifts > _DRIFTS, allocator.is_tight(self.device, self.budget)
        if often and not (tight and self._warned_often):
            self._warned_often = True
            how = "each time" if tight else "without places for tensors"
            warn(
                "memory is allocated beside the step again and again (an input pipeline that "
                f"prefetches, results that are kept): planning {how}",
                RuntimeWarning,
            )
        try:
            if tight or not often:
                anew = found.slots_taken
                self._lay_again(
                    lambda: None if anew else allocator.renewed(self.device, laid, self.budget)
                )
                return
            self._unplace()
            try:
                with ProgressLine(self.options.verbose) as say:
                    self.planned = self._solve(None, say, self.plan.schedule)
            finally:
                self._lower_again()
        except InfeasibleBudgetError as error:
            warn(
                f"beside what was allocated since the step was planned there is no plan within "
                f"its budget, so the old one stays: {error}",
                RuntimeWarning,
            )

    def _unplace(self) -> None:
        """Goes on without places for tensors."""
        self.prepared = replace(self.prepared, pool=replace(self.prepared.pool, quiet=False))
        self.planned = replace(self.planned, fillers={})

    def _claim(self, pool: Pool, budget: int, spare: int = 0) -> allocator.Block | None:
        """Claims what the step will use beside what is there already.

        Where there is more, it claims more: what lies beyond the budget is then
        never the best fit for anything, and where the allocator chooses the places there is
        always something to cut.  ``spare``: bytes that the budget may turn out to be larger
        by.
        """
        in_use = allocator.bytes_in_use(self.device)
        count = 2 * (budget + spare) + (slots_end(pool.slots) if pool.shared else 0)
        least, unclaimed = budget - in_use, None
        if pool.limit is not None:
            count = min(count, pool.limit - in_use)
            if pool.growth:
                unclaimed = pool.unclaimed()
        elif pool.shared:
            least = count
        return allocator.claim(self.device, count, least, unclaimed)

    def _lay_out(self, block: allocator.Block, pool: Pool) -> allocator.Laid | None:
        """Divides memory, unless that leaves too little of it in one piece."""
        move = partial(move_what_moves, self.prepared.program)
        return allocator.lay_out(self.device, block, pool, self.budget, move)

    def _lay_again(self, find: Callable[[], allocator.Laid | None]) -> None:
        """Plans for the memory as it is now: another step, or something else, has taken
        some of it.

        Args:
          find: finds how it is divided; where it is not, or too little of it is free in
            one piece, it is divided anew.

        Raises:
          InfeasibleBudgetError: if no plan is found; the old one goes on, without places.
        """
        assert self._laid is not None
        pool = self.prepared.pool
        self._settled_bytes = None
        self._give_up_lowered()  # later would be after memory is divided
        try:
            with ProgressLine(self.options.verbose) as say:
                say.line("memory is not divided as it was: planning again")
                found = find()
                if found is None:
                    block = self._claim(pool, self.budget) or self._laid.block
                    self.planned = self._plan_by_turns(block, say, self.plan.schedule)
                else:
                    self._adopt(found)
                    self.planned = self._solve(None, say, self.plan.schedule)
        except BaseException:
            self._unplace()
            raise
        finally:
            self._lower_again()
        # Dividing memory took all that was free for a moment; the step does not.
        allocator.reset_peak(self.device)

    def _resolve_budget(self, plain_peak: int) -> tuple[int, str]:
        """The budget in bytes, and where the figure comes from."""
        budget, plan = self.options.budget, self.options.plan
        if isinstance(budget, str) and budget == "auto":
            if plan is not None:
                return plan.budget, "the given plan's"
            return allocator.memory_for_budget(self.device)
        count = bytes_of(budget, plain_peak)
        if is_share(budget):
            return max(count, self._at_least), _SHARE
        return count, "given"

    def _flatten(self, arguments: Sequence[Any]) -> list[tf.Tensor]:
        try:
            tf.nest.assert_same_structure(list(self.signature), list(arguments))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"the step takes {self.signature}; the arguments have another structure: {error}"
            ) from None
        flat = []
        for spec, value in zip(
            tf.nest.flatten(list(self.signature)), tf.nest.flatten(list(arguments)), strict=True
        ):
            tensor = value if tf.is_tensor(value) else _as_tensor(value, spec)
            if tensor.dtype != spec.dtype:
                cut = tensor.dtype.is_floating and not (
                    spec.dtype.is_floating or spec.dtype.is_complex
                )
                if cut or (tensor.dtype.is_complex and not spec.dtype.is_complex):
                    raise TypeError(
                        f"the step is planned for {spec.name or 'an input'} of {spec.dtype.name}; "
                        f"{tensor.dtype.name} would lose something: cast it"
                    )
                tensor = tf.cast(tensor, spec.dtype)
            if not spec.shape.is_compatible_with(tensor.shape):
                raise ValueError(
                    f"the step is planned for {spec.name or 'an input'} of shape {spec.shape}, "
                    f"not {tensor.shape}; compile another step for that shape"
                )
            flat.append(tensor)
        return flat

    def _pack(self, flat: Sequence[tf.Tensor]) -> Any:
        structure = self.prepared.trace.structured_outputs
        tensors = iter(flat)
        leaves = [
            None if leaf is None else next(tensors)
            for leaf in tf.nest.flatten(structure, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(structure, leaves, expand_composites=True)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


def _as_tensor(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value, spec.dtype)
    except (ValueError, TypeError) as error:
        raise type(error)(
            f"the step is planned for {spec.name or 'an input'} of {spec.dtype.name} and shape "
            f"{spec.shape}, which {value!r:.60} is not: {error}"
        ) from None


def _varies(program: Program) -> bool:
    """Whether places would be missed: what is smaller than foreseen leaves a piece, which
    something else takes that is then missed elsewhere."""
    return any(op.varies and max(op.bytes, default=0) >= GRAIN for op in program.ops)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Graphs are millions of objects: looking for garbage among them again and
    again takes a tenth of the time that compiling takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
