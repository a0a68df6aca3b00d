"""Any legal schedule of a step gives the plain step's bits, however odd.

Solvers find sensible schedules; those here run operations in random orders and
again at random, so that who holds which buffer, and when, is never the same.
"""

from __future__ import annotations

import pytest
from child import REPEATABLE, run


@pytest.mark.parametrize("name", ["attention", "other normalization"])
def test_same_bits_as_keras_by_any_schedule(name: str) -> None:
    found = run(
        f"""
import dataclasses, sys
sys.path.insert(0, "tests")
exact()
from layer_cases import CASES, train as fit
from dags import any_schedule
case = CASES[{name!r}]
plain, _ = fit(case, None)

specs = [tf.TensorSpec(value.shape, value.dtype) for value in next(case.batches())]

def follow(schedule=None):
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    model, how = case.build(), case.compiled()
    step = remat.compile(
        model, how["loss"], how["optimizer"], *specs, budget=2**34, profile={{}}, check=False,
        plan=schedule and dataclasses.replace(natural.plan, schedule=schedule),
    )
    keras.utils.set_random_seed(2)
    for batch in case.batches():
        step(*batch)
    moved = [*model.variables, *how["optimizer"].variables]
    differing = [
        value.path
        for value, other in zip(moved, plain[-len(moved):], strict=True)
        if np.array(value).tobytes() != other.tobytes()
    ]
    return step, differing

natural, differing = follow()
found = [([], differing)]
for seed in range(3):
    schedule = any_schedule(natural.plan.extracted, seed)
    step, differing = follow(schedule)
    found.append((step.plan.schedule, differing))
answer(found=found)
""",
        REPEATABLE,
    )["found"]
    assert [differing for _, differing in found] == [[]] * len(found)
    assert all(len(schedule) > len(set(schedule)) for schedule, _ in found[1:])


def test_sums_of_many_terms_have_the_plain_steps_bits() -> None:
    found = run(
        """
exact()
counts = [2, 3, 8, 9, 10, 12, 18, 30]

def step(x):
    # No two sums share a term, or what plain TensorFlow does is left to chance.
    terms = {n: [tf.sin(x + tf.cast(32 * i + k, x.dtype)) for k in range(n)]
             for i, n in enumerate(counts)}
    return [tf.add_n(terms[n]) for n in counts]

def differing(dtype):
    spec = tf.TensorSpec([1000], dtype)
    x = tf.cast(tf.random.stateless_normal([1000], [1, 2]), dtype)
    plain = tf.function(step)(x)
    ours = remat.function(budget=2**30, input_signature=[spec], profile={}, check=False)(step)(x)
    return [n for n, a, b in zip(counts, plain, ours) if not same(a.numpy(), b.numpy())]

answer(float32=differing(tf.float32), bfloat16=differing(tf.bfloat16))
""",
        REPEATABLE,
    )
    assert found == {"float32": [], "bfloat16": []}
