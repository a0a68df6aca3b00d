"""What the experiments' processes do: ``python -m experiments.child TASK RESULT.json``.

``experiments.process`` starts it, with the allocator's settings in the
environment.
"""

from __future__ import annotations

import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import remat
from remat.device import default_device
from remat.plots import of_allocations
from remat.timeline import record

from .accounting import case_graph
from .blocks import Blocks
from .models import Case, case_of
from .process import Task, serve, start

_HOPELESS = 1 << 20  # bytes; a budget that nothing fits
WARM_UP = 3  # steps that are not timed
_LEAST_TURNS, _MOST_TURNS = 9, 41  # of a plain and a lowered step
_SEARCHES, _SEARCH_STEP = 3, 1.05  # budgets tried above an infeasible one, and by what factor
_RECORDED = 3  # steps
_PLAIN_AGAIN = 3  # plain trainings compared with the first

StepFunction = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class Training:
    """A network with its optimizer, as its user has them before the first step."""

    def __init__(
        self, case: Case, wrap: Callable[[keras.Model], keras.Model] = lambda model: model
    ) -> None:
        self.case = case
        self.model = wrap(case.model())
        self.loss = case.loss()
        self.optimizer = case.optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self.model.compile(optimizer=self.optimizer, loss=self.loss, jit_compile=False)

    def plain_step(self) -> StepFunction:
        """The training step that ``Model.fit`` runs, returning what remat's returns."""
        return tf.function(self.eager_step, jit_compile=False)

    def eager_step(self, inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The same, operation by operation."""
        with tf.GradientTape() as tape:
            predictions = self.model(inputs, training=True)
            loss = self.model.compute_loss(x=inputs, y=labels, y_pred=predictions)
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return predictions, loss

    def compiled(self, budget: int | float, plan: str | None = None, **options: Any) -> remat.Step:
        """The same step by remat; the options are those of ``remat.compile``."""
        return remat.compile(
            self.model,
            self.loss,
            self.optimizer,
            *self.case.specs(),
            budget=budget,
            plan=None if plan is None else remat.Plan.load(plan),
            **options,
        )

    def state(self) -> dict[str, np.ndarray]:
        """Everything a step changes: weights, averages, seeds, optimizer slots."""
        variables = [*self.model.variables, *self.optimizer.variables]
        return {f"{i} {variable.path}": variable.numpy() for i, variable in enumerate(variables)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Puts a state back."""
        variables = [*self.model.variables, *self.optimizer.variables]
        for variable, value in zip(variables, state.values(), strict=True):
            variable.assign(value)


def train(step: StepFunction, batches: Iterable[tuple[tf.Tensor, tf.Tensor]]) -> dict[str, Any]:
    """Trains as a user's loop does.

    Returns:
      ``peak`` (bytes that the allocator counted over all steps, the batch
      included), and for each step its ``step_seconds`` and ``losses``.
    """
    peak, seconds, losses = 0, [], []
    tf.config.experimental.reset_memory_stats(default_device())
    for inputs, labels in batches:
        started = time.perf_counter()
        _, loss = step(inputs, labels)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
        # remat's own check resets the counter; the highest reading counts.
        peak = max(peak, _memory()["peak"])
    return {"peak": peak, "step_seconds": seconds, "losses": losses}


def plain(task: Task) -> dict[str, Any]:
    """Peak of the plain step."""
    training = Training(_case(task))
    resident = _memory()["current"]
    result = train(training.plain_step(), training.case.batches(task.steps))
    return {"resident": resident, **result}


def eager(task: Task) -> dict[str, Any]:
    """The plain step, operation by operation."""
    training = Training(_case(task))
    return train(training.eager_step, training.case.batches(task.steps))


def recompute_grad(task: Task) -> dict[str, Any]:
    """With ``tf.recompute_grad`` around about sqrt(n) blocks of layers."""
    training = Training(_case(task), Blocks)
    return train(training.plain_step(), training.case.batches(task.steps))


def eager_recompute_grad(task: Task) -> dict[str, Any]:
    """The same, operation by operation."""
    training = Training(_case(task), Blocks)
    return train(training.eager_step, training.case.batches(task.steps))


def scope_full(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("full")``."""
    return _scoped(task, "full")


def scope_activations(task: Task) -> dict[str, Any]:
    """Under ``keras.RematScope("activations")``."""
    return _scoped(task, "activations")


def _scoped(task: Task, mode: str) -> dict[str, Any]:
    with keras.RematScope(mode=mode):
        training = Training(_case(task))
        return train(training.plain_step(), training.case.batches(task.steps))


def budgeted(task: Task) -> dict[str, Any]:
    """Compiles for a budget and trains inside it; writes the plan."""
    assert task.budget is not None
    assert task.plan is not None
    training = Training(_case(task))
    before = _host_peak()
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        step = training.compiled(task.budget)
        compile_seconds = time.perf_counter() - started
        after = _host_peak()
        result = train(step, training.case.batches(task.steps))
    step.plan.save(task.plan)
    return {
        "predicted": step.plan.peak,
        "plain_predicted": step.plain_peak,
        "overhead": step.plan.overhead,
        "gap": step.plan.gap,
        "solver_status": step.plan.status,
        "priced_seconds": step.compiled.prepared.prices.coverage.seconds,
        "stage_seconds": step.seconds,
        "compile_seconds": compile_seconds + result["step_seconds"][0],
        "host_before": before,
        "host_after_compile": after,
        "host_peak": _host_peak(),
        "solver_host_peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "warnings": [str(warning.message) for warning in caught],
        **result,
    }


def graph(task: Task) -> dict[str, Any]:
    """The graph of the step that solvers see, priced on this device."""
    return {"graph": case_graph(_case(task), task.model, "auto").to_json()}


def floor(task: Task) -> dict[str, Any]:
    """What remat knows about the least budget, asked for a hopeless one."""
    training = Training(_case(task))
    training.compiled(_HOPELESS)
    raise AssertionError(f"{task.model} trains within {_HOPELESS} bytes")


def timed(task: Task) -> dict[str, Any]:
    """Seconds a step, plain and lowered by turns.

    Lowered is the task's plan within its budget, beside a process that makes the plain
    steps: what these allocate would be beside the plan.  Which of the two is the first to
    use its memory matters; see ``process.by_turns``.  Without a plan it is the step
    with no recomputation, for which there must be memory enough; both are run in this
    process then, since one process that has just computed slows another one down.
    """
    assert task.budget is not None
    turns: list[tuple[float, float]] = []
    with ExitStack() as stack:
        if task.plan is not None and task.plain_first:
            plain = stack.enter_context(_plain_beside(task))
            plain()  # uses its memory
        training = Training(_case(task))
        lowered = training.compiled(task.budget, task.plan)
        (batch,) = training.case.batches(1)
        if task.plan is None:
            plain = partial(step_seconds, training.plain_step(), batch)
        elif not task.plain_first:
            plain = stack.enter_context(_plain_beside(task))
        for _ in range(WARM_UP):
            plain()
            step_seconds(lowered, batch)
        while len(turns) < _LEAST_TURNS or (
            len(turns) < _MOST_TURNS and sum(map(sum, turns)) < task.seconds
        ):
            if len(turns) % 2:
                turns.append((plain(), step_seconds(lowered, batch)))
            else:
                turns.append((step_seconds(lowered, batch), plain())[::-1])
    return {
        # Of neighbours: what else the machine does slows down both.
        "ratio": statistics.median(own / other for other, own in turns),
        "plain_seconds": [seconds for seconds, _ in turns],
        "lowered_seconds": [seconds for _, seconds in turns],
        "recomputations": _recomputations(lowered),
    }


@contextmanager
def _plain_beside(task: Task) -> Iterator[Callable[[], float]]:
    """A process that makes a plain step, and says its seconds, whenever it is asked to."""
    task = replace(task, kind="paced", budget=None, limit_mib=None, plan=None)
    with tempfile.TemporaryDirectory() as folder:
        process = start(
            task,
            "experiments.child",
            Path(folder) / "result.json",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def ask() -> float:
            asked.write("\n")
            asked.flush()
            said = answers.readline()
            if not said:
                raise RuntimeError(f"the process of the plain step ended with {process.wait()}")
            return float(said)

        try:
            yield ask
        finally:
            process.kill()
            process.wait()


def paced(task: Task) -> dict[str, Any]:
    """A plain step for each line of standard input; says the seconds of each."""
    for gpu in tf.config.list_physical_devices("GPU"):
        # Beside another process; before anything uses the device.
        tf.config.experimental.set_memory_growth(gpu, True)
    training = Training(_case(task))
    step = training.plain_step()
    (batch,) = training.case.batches(1)
    for _ in sys.stdin:
        print(step_seconds(step, batch), flush=True)
    return {}


def step_seconds(step: Callable[..., object], batch: tuple[tf.Tensor, tf.Tensor]) -> float:
    """Seconds of one step, until the device is done with it."""
    started = time.perf_counter()
    step(*batch)
    if _on_gpu():
        tf.test.experimental.sync_devices()
    return time.perf_counter() - started


def compared(task: Task) -> dict[str, Any]:
    """Largest differences after some steps: remat's to plain, plain's to itself."""
    assert task.budget is not None
    training = Training(_case(task))
    start = training.state()
    plain_step = training.plain_step()

    def trained(step: StepFunction) -> dict[str, np.ndarray]:
        training.restore(start)
        results = {}
        for number, (inputs, labels) in enumerate(training.case.batches(task.steps)):
            predictions, loss = step(inputs, labels)
            results[f"predictions of step {number}"] = np.array(predictions)
            results[f"loss of step {number}"] = np.array(loss)
        return {**training.state(), **results}

    # First, while the memory pool is as a user's: the plain step leaves it in pieces.
    step = _compiled_within(training, task.budget, task.plan)
    results = trained(step)
    reference = trained(plain_step)
    again = [_differences(reference, trained(plain_step)) for _ in range(_PLAIN_AGAIN)]
    ours = _differences(reference, results)
    figures = ("differing", "largest", "loss")
    return {
        "remat": ours,
        "plain": {name: max(one[name] for one in again) for name in figures},
        "compared": len(reference),
        "budget": step.budget,
        "recomputations": _recomputations(step),
    }


def _compiled_within(training: Training, budget: int, plan: str | None) -> remat.Step:
    """The step within a budget, or within more: without oneDNN some kernels need far
    more scratch memory, and how much depends on the threads that are free."""
    for _ in range(_SEARCHES):
        try:
            return training.compiled(budget, plan)
        except remat.InfeasibleBudgetError as error:
            budget = max(error.least_budget, int(budget * _SEARCH_STEP))
    return training.compiled(budget, plan)


def demonstrated(task: Task) -> dict[str, Any]:
    """Trains, inside the budget if there is one (and writes the plan); then records
    a few steps more.

    Returns:
      As ``train``, and ``curve``, memory over time in the fastest recorded step:
      the one that other work on the machine disturbed least.  The weights before
      them are in the file ``task.weights``.
    """
    assert task.weights is not None
    training = Training(_case(task))
    if task.budget is None:
        step, figures = training.plain_step(), {}
    else:
        step = training.compiled(task.budget)
        plan = step.plan
        assert task.plan is not None
        plan.save(task.plan)
        figures = {
            "predicted": plan.peak,
            "plain_predicted": step.plain_peak,
            "overhead": plan.overhead,
            "compile_seconds": sum(step.seconds.values()),
        }
    result = train(step, training.case.batches(task.steps))
    weights = {weight.path: weight.numpy() for weight in training.model.weights}
    np.savez(task.weights, allow_pickle=False, **weights)
    ((inputs, labels),) = training.case.batches(1, seed=1)
    curves = []
    for _ in range(_RECORDED):
        before = _memory()["current"]
        recorded = record(lambda: step(inputs, labels), on_gpu=_on_gpu())
        curves.append(of_allocations("", recorded, before))
    curve = min(curves, key=lambda curve: curve.times[-1])
    return {"curve": asdict(curve), **figures, **result}


def _differences(
    reference: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """How far two trainings are apart.

    Returns:
      ``differing``, how many arrays differ in any bit; ``largest``, the largest
      relative difference of an array (largest absolute difference over largest
      absolute value), and ``where`` it is; ``loss``, the same of losses only.
    """
    differing = [name for name in reference if reference[name].tobytes() != other[name].tobytes()]
    relative = {"": 0.0}  # so that there is a largest
    for name in differing:
        one, two = reference[name].astype(np.float64), other[name].astype(np.float64)
        relative[name] = float(np.max(np.abs(one - two)) / np.max(np.abs(one)))
        if not math.isfinite(relative[name]):
            raise ValueError(f"{name} is not finite, or zero where the other is not")
    where = max(relative, key=relative.__getitem__)
    return {
        "differing": len(differing),
        "largest": relative[where],
        "where": where,
        "loss": max(relative.get(name, 0.0) for name in reference if name.startswith("loss")),
    }


def _recomputations(step: remat.Step) -> int:
    schedule = step.plan.schedule
    return len(schedule) - len(set(schedule))


def _case(task: Task) -> Case:
    return case_of(task.model, task.batch)


def _memory() -> dict[str, int]:
    return tf.config.experimental.get_memory_info(default_device())


def _on_gpu() -> bool:
    return default_device().startswith("GPU")


def _host_peak() -> int:
    """Most bytes of real memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


KINDS: dict[str, Callable[[Task], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        plain,
        eager,
        recompute_grad,
        eager_recompute_grad,
        scope_full,
        scope_activations,
        budgeted,
        graph,
        floor,
        timed,
        paced,
        compared,
        demonstrated,
    )
}


if __name__ == "__main__":
    serve(KINDS, sys.argv[1:])
