"""What the processes of ``experiments.predictions`` and ``experiments.device`` do,
beside those of ``experiments.child``.

``python -m experiments.predictions_child TASK RESULT.json``
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import asdict
from typing import Any

import tensorflow as tf

import remat
from remat import allocator
from remat.compile import one_step_of
from remat.device import default_device, device_provenance, table_path
from remat.planning import read
from remat.price import Profile, price
from remat.profiles.price import cross_validate, load_pricer

from .child import KINDS, Training, train
from .models import CASES, Case
from .process import Task, serve

_OUT_OF_MEMORY = "out of memory"
_DEADLINE = 600.0  # seconds for measuring one step's operations


def again(task: Task) -> dict[str, Any]:
    """Trains inside the budget by a plan that is there."""
    return _trained(task, check=True)


def squeezed(task: Task) -> dict[str, Any]:
    """Trains by a plan under a limit below its budget, without measuring first.

    Where the plan is foreseen not to fit, remat makes another one: no slack.
    """
    result = _trained(task, check=False)
    assert task.plan is not None
    if result["status"] == "done" and result["schedule"] != list(
        remat.Plan.load(task.plan).schedule
    ):
        result["status"] = "planned again"
    return result


def _trained(task: Task, *, check: bool) -> dict[str, Any]:
    assert task.budget is not None
    training = Training(CASES[task.model])
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            step = training.compiled(task.budget, task.plan, check=check)
            result = train(step, training.case.batches(task.steps))
    except tf.errors.ResourceExhaustedError as error:
        return {"status": _OUT_OF_MEMORY, "message": str(error).split("\n", 1)[0]}
    messages = [str(warning.message) for warning in caught]
    found = {"predicted": step.plan.peak, "schedule": list(step.plan.schedule)}
    return {"status": "done", **found, "warnings": messages, **result}


def profiled(task: Task) -> dict[str, Any]:
    """Overhead by a plan that is there, operation by operation under the profiler."""
    assert task.budget is not None
    training = Training(CASES[task.model])
    step = training.compiled(task.budget, task.plan)
    (batch,) = training.case.batches(1)
    train(step, [batch] * task.steps)
    found = step.measure()
    return {"overhead_predicted": found.overhead_predicted, "overhead": found.overhead_measured}


def elsewhere(task: Task) -> dict[str, Any]:
    """Prices the step at twice the batch from what is recorded, measuring nothing."""
    case = CASES[task.model]
    return _priced(case.with_batch(2 * case.inputs[0]), table_path(default_device()))


def priced(task: Task) -> dict[str, Any]:
    """Prices the step; what has no recorded cost is measured and recorded."""
    return _priced(CASES[task.model], "auto")


def _priced(case: Case, profile: Profile) -> dict[str, Any]:
    function = one_step_of(case.model(), case.loss(), case.optimizer())
    _, program = read(function, case.specs())
    started = time.perf_counter()
    (prices,) = price([program], profile, deadline=_DEADLINE)
    return {
        "pricing_seconds": time.perf_counter() - started,
        "step_seconds": sum(prices.seconds),
        "priced_seconds": prices.coverage.seconds,
        "operations": sum(prices.coverage.operations.values()),
    }


def provenance(task: Task) -> dict[str, Any]:
    """What the device is, and where its costs are recorded."""
    device = allocator.device_at_hand()
    memory, source = allocator.memory_for_budget(device)
    return {
        **device_provenance(device.name),
        "memory": memory,
        "memory_source": source,
        "table": str(table_path(device.name)),
    }


def validated(task: Task) -> dict[str, Any]:
    """What each kind of price makes of recorded operations that it has not seen."""
    pricer = load_pricer(table_path(default_device()))
    found = cross_validate(pricer.table, pricer.device)
    return {"rows": len(pricer.table), "errors": [asdict(one) for one in found]}


if __name__ == "__main__":
    own = (again, squeezed, profiled, elsewhere, validated, priced, provenance)
    serve({**KINDS, **{function.__name__: function for function in own}}, sys.argv[1:])
