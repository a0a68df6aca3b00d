"""Several replicas: two logical devices, and two processes that talk over loopback."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from child import EXACT, run

from experiments.replicas import Row, table

_UNCOUNTED = {name: value for name, value in EXACT.items() if "ALLOCATOR" not in name}

_PRELUDE = """
exact()
CHEAP = dict(profile={}, check=False, time_limit=0.3)

class Noise(keras.layers.Layer):
    # Of other numbers for each replica; gamma has a kernel of its own.
    def call(self, x, training=False):
        if not training:
            return x
        return (x + 0.1 * tf.random.normal(tf.shape(x))) * tf.random.gamma(tf.shape(x), 2.0)

def network(dropout=0.1, noise=False, **normalization):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16, 16, 3))])
    if noise:
        model.add(Noise())
    for _ in range(3):
        model.add(keras.layers.Conv2D(8, 3, padding="same"))
        model.add(keras.layers.BatchNormalization(**normalization))
        model.add(keras.layers.Activation("tanh"))
        model.add(keras.layers.Dropout(dropout))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(3))
    return model

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 16, 16, 3)).astype("float32")
y = rng.integers(0, 3, 96)
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def variables(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]

def repeats(plan):
    return len(plan.schedule) - len(set(plan.schedule))
"""

_TWO_DEVICES = (
    _PRELUDE
    + """
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
"""
)

_CUSTOM_LOOP = """
def train(ours):
    with strategy.scope():
        model = network(synchronized=synchronized)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
    keras.utils.set_random_seed(2)

    def gradients(x, y):
        with tf.GradientTape() as tape:
            losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), True)
            loss = tf.reduce_mean(losses) / 2
        return loss, tape.gradient(loss, model.trainable_variables)

    if ours:
        gradients = remat.function(gradients, budget=0.93, **CHEAP)
    elif not synchronized:
        gradients = tf.function(gradients)  # TensorFlow lets no replicas meet in there

    def plan(x, y):
        gradients.compiled(x, y)

    def step(x, y):
        loss, found = gradients(x, y)
        optimizer.apply_gradients(zip(found, model.trainable_variables))
        return loss

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32, drop_remainder=True)
    losses = []
    run = tf.function(strategy.run, autograph=False) if synchronized else strategy.run
    for batch in strategy.experimental_distribute_dataset(data):
        if ours:
            strategy.run(plan, batch)
        losses += strategy.experimental_local_results(run(step, batch))
    states = [v.numpy() for v in [*losses, *model.variables, *optimizer.variables]]
    return states, [repeats(step.plan) for step in gradients.steps] if ours else None

theirs, ours = train(False), train(True)
answer(same=same(theirs[0], ours[0]), count=len(ours[0]), recomputed=ours[1],
       losses=[float(v) for v in ours[0][:3]])
"""


@pytest.mark.parametrize("synchronized", [False, True])
def test_mirrored_custom_loop(synchronized: bool) -> None:
    """Forward and backward are planned for each replica; the update stays outside."""
    found = run(_TWO_DEVICES + f"synchronized = {synchronized}" + _CUSTOM_LOOP, _UNCOUNTED)
    assert found["same"]
    assert found["count"] > 30
    assert len(found["recomputed"]) == 2
    assert min(found["recomputed"]) > 0


@pytest.mark.long
def test_two_workers_custom_loop() -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in sockets:
            each.bind(("localhost", 0))
        workers = [f"localhost:{each.getsockname()[1]}" for each in sockets]

    def worker(number: int) -> dict[str, object]:
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": number}}
        return run(
            _PRELUDE
            + "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
            + """
def refused():
    with strategy.scope():
        try:
            remat.wrap(network())
        except ValueError as error:
            return str(error)
message = refused()
synchronized = True
"""
            + _CUSTOM_LOOP.replace("answer(", "answer(message=message, "),
            {**_UNCOUNTED, "TF_CONFIG": json.dumps(task), "CUDA_VISIBLE_DEVICES": "-1"},
        )

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(worker, range(2)))
    for each in found:
        assert each["same"]
        assert each["count"] > 30
        assert each["recomputed"][0] > 0
        assert "remat.function" in each["message"]
    assert found[0]["losses"] != found[1]["losses"]  # each has its own part of the batch


def test_replica_without_a_sample() -> None:
    """What plain Keras makes of it, moments of no samples included."""
    found = run(
        _TWO_DEVICES
        + """
def train(ours):
    with strategy.scope():
        model = network(synchronized=True)
        if ours:
            model = remat.wrap(model, budget=0.8, **CHEAP)
        model.compile(keras.optimizers.Adam(1e-2), crossentropy, metrics=["accuracy"])
    keras.utils.set_random_seed(2)
    history = model.fit(x[:81], y[:81], batch_size=40, epochs=2, verbose=0)
    return history.history, variables(model), model

theirs, ours = train(False), train(True)
answer(history=ours[0] == theirs[0], same=same(ours[1], theirs[1]),
       shapes=[step.signature[0].shape[0] for step in ours[2].remat.steps])
""",
        _UNCOUNTED,
    )
    assert found["history"]
    assert found["same"]
    assert found["shapes"] == [20, 20]


def test_replicas_meet_in_steps_of_other_shapes() -> None:
    """Parts of a batch may differ in size; a mean has a gradient."""
    found = run(
        _TWO_DEVICES
        + """
with strategy.scope():
    weight = tf.Variable(tf.random.stateless_normal((4, 3), (1, 2)))

def gradients(x):
    with tf.GradientTape() as tape:
        y = tf.tanh(x @ weight)
        replica = tf.distribute.get_replica_context()
        mean, total = replica.all_reduce("MEAN", [tf.reduce_mean(y, axis=0), tf.reduce_sum(y)])
        loss = tf.reduce_sum((y - mean) ** 2) * total
    return loss, tape.gradient(loss, weight)

planned = remat.function(gradients, budget="1MiB", **CHEAP)

def plan(x):
    planned.compiled(x)

def all_of(step):
    run = tf.function(lambda x: strategy.run(step, (x,)), autograph=False)
    found = [strategy.experimental_local_results(part) for x in parts for part in run(x)]
    return [[float(tf.reduce_sum(one)) for one in part] for part in found]

def part(sizes):
    def of(context):
        size = sizes[context.replica_id_in_sync_group]
        return tf.random.stateless_normal((size, 4), (size, 5))
    return strategy.experimental_distribute_values_from_function(of)

parts = [part(sizes) for sizes in ([8, 8], [8, 7], [7, 8], [8, 8])]
try:
    strategy.run(planned, (parts[0],))
    refused = ""
except ValueError as error:
    refused = str(error)
for x in parts:
    strategy.run(plan, (x,))
answer(refused=refused, ours=all_of(planned), theirs=all_of(gradients), plans=len(planned.steps))
""",
        _UNCOUNTED,
    )
    assert "would wait forever" in found["refused"]
    assert found["plans"] == 4
    assert found["ours"] == found["theirs"]
    assert len({tuple(values) for values in found["ours"]}) == 6


@pytest.mark.long
@pytest.mark.parametrize("synchronized", [False, True])
def test_mirrored_fit(synchronized: bool) -> None:
    found = run(
        _TWO_DEVICES
        + f"synchronized = {synchronized}"
        + """
def train(ours):
    with strategy.scope():
        model = network(noise=True, synchronized=synchronized)
        if ours:
            model = remat.wrap(model, budget=0.8, **CHEAP)
        model.compile(keras.optimizers.AdamW(1e-2, global_clipnorm=0.1), crossentropy,
                      metrics=["accuracy"])
    keras.utils.set_random_seed(2)
    history = model.fit(x, y, batch_size=40, epochs=2, verbose=0, class_weight={0: 1, 1: 2, 2: 3},
                        validation_data=(x[:32], y[:32]))
    logs = model.train_on_batch(x[:8], y[:8], return_dict=True)
    return history.history, variables(model), logs, model

theirs, ours = train(False), train(True)
steps = ours[3].remat.steps
answer(history=ours[0] == theirs[0], keys=sorted(ours[0]), logs=ours[2] == theirs[2],
       same=same(ours[1], theirs[1]), count=len(ours[1]), recomputed=repeats(steps[0].plan),
       shapes=[step.signature[0].shape[0] for step in steps])
""",
        _UNCOUNTED,
    )
    assert found["history"]
    assert "val_accuracy" in found["keys"]
    assert found["logs"]
    assert found["same"]
    assert found["count"] > 40
    assert found["recomputed"] > 0
    # The last batch has 16 samples; train_on_batch is of a known size, without weights.
    assert found["shapes"] == [20, 20, 8, 8, 8, 8]


def test_mirrored_fit_refuses_what_it_cannot_plan() -> None:
    found = run(
        _TWO_DEVICES
        + """
class Own(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)

def attempt(make, budget="1GiB"):
    with strategy.scope():
        model = remat.wrap(make(), budget=budget, **CHEAP)
        model.compile("sgd", crossentropy)
    try:
        model.fit(x, y, verbose=0)
    except ValueError as error:
        return type(error).__name__, str(error)

answer(
    own=attempt(lambda: Own(network().layers)),
    infeasible=attempt(network, "20KB"),
)
""",
        _UNCOUNTED,
    )
    assert "remat.function" in found["own"][1]
    assert found["infeasible"][0] == "InfeasibleBudgetError"


def test_the_table_of_replicas_hides_nothing() -> None:
    shown = table(
        [
            Row("plain", "done", 2**30, 1.0, 0.0, 0.0, None, True, True),
            Row("remat", "done", 2**29, 1.1, -0.5, 0.1, 0.08, False, False),
            Row("broken", "failed", message="killed by SIGSEGV"),
        ]
    )
    for word in ("-43 %", "-50 %", "+10 %", "NOT those of plain", "DIFFERS", "killed by SIGSEGV"):
        assert word in shown
