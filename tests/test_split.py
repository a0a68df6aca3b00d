"""Updates in blocks of rows: the same bits in less memory."""

from __future__ import annotations

from child import EXACT, run

KERNEL = 1024 * 1088 * 4  # bytes


def test_updates_in_blocks_have_the_same_bits_and_a_lower_floor() -> None:
    found = run(
        """
exact()
from remat.compile import one_step_of
from remat.planning import prepare, read
from remat.solvers.floor import memory_floor

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(clipnorm=1.0, use_ema=True),
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.5),
}
specs = tf.TensorSpec((32, 64)), tf.TensorSpec((32,), tf.int32)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = batches(specs, 3)

def network():
    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dense(1088, activation="gelu"), keras.layers.Dense(10),
    ])

results = {}
for name, make in OPTIMIZERS.items():
    model, optimizer = network(), make()
    step = remat.compile(model, loss, optimizer, *specs, budget=0.95, profile="h200")
    train(step, data)
    ours = state(model, optimizer)
    ops = step.compiled.prepared.program.ops
    model, optimizer = network(), make()
    plain = tf.function(one_step_of(model, loss, optimizer), jit_compile=False)
    train(plain, [tf.nest.map_structure(tf.constant, batch) for batch in data])
    results[name] = dict(
        blocks=sum(op.type == "ResourceScatterUpdate" for op in ops),
        same=same(ours, state(model, optimizer)),
        filled=step.measured_peak / step.budget,
    )

traced, program = read(one_step_of(network(), loss, OPTIMIZERS["Adam"]()), specs)
floors = [
    memory_floor(prepare(traced, program, profile="h200", split=split)
                 .extraction.graph)[0]
    for split in (False, True)
]
answer(results=results, floors=floors)
""",
        EXACT,
    )
    assert len(found["results"]) == 4
    for result in found["results"].values():
        assert result["blocks"] > 10
        assert result["same"]
        assert result["filled"] <= 1
    whole, blocks = found["floors"]
    assert blocks < whole - 0.8 * KERNEL


def test_variables_stay_where_they_are() -> None:
    """A new value's buffer would take their place, and break up the pool step by step."""
    found = run(
        """
from remat.allocator import address
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(use_ema=True),
    "accumulated": lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=2),
}
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
specs = tf.TensorSpec((4096, 64)), tf.TensorSpec((4096,), tf.int32)
results = {}
for name, make in OPTIMIZERS.items():
    model = keras.Sequential([
        keras.Input((64,)), *(keras.layers.Dense(256, activation="tanh") for _ in range(8)),
        keras.layers.Dense(10),
    ])
    optimizer = make()
    step = remat.compile(model, loss, optimizer, *specs, budget=0.7, profile="h200")
    variables = [
        v.value for v in [*model.variables, *optimizer.variables] if len(v.shape) > 0
    ]
    before, values = [address(v.read_value()) for v in variables], [np.array(v) for v in variables]
    train(step, batches(specs, 3))
    results[name] = dict(
        same_places=before == [address(v.read_value()) for v in variables],
        moved=not any(np.array_equal(v, value) for v, value in zip(variables, values)),
        count=len(variables),
        measured=step.measured_peak, budget=step.budget,
    )
answer(results=results)
""",
        EXACT,
    )
    assert [result["count"] for result in found["results"].values()] == [36, 54, 36]
    for result in found["results"].values():
        assert result["same_places"]
        assert result["moved"]
        assert result["measured"] <= result["budget"]


def test_a_value_read_before_an_update_is_not_read_again_after_it() -> None:
    """Extragradient: the weights move, and then once more from where they were."""
    found = run(
        """
exact()

def trained(wrapped):
    rng = np.random.default_rng(0)
    w = tf.Variable(rng.normal(size=(512, 1024)) / 30, dtype=tf.float32)

    def step(x, y):
        def gradient():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ w) - y))
            return tape.gradient(loss, w)
        old = w.read_value()
        w.assign_sub(0.5 * gradient())
        w.assign(old - 0.5 * gradient())
        return w[:2]

    run = wrapped(step)
    data = batches((tf.TensorSpec((64, 512)), tf.TensorSpec((64, 1024))), 3)
    return [np.array(run(*map(tf.constant, batch))) for batch in data] + [w.numpy()]

ours = trained(remat.function(budget="64MiB", profile={}))
plain = trained(tf.function)
answer(same=same(plain, ours), moved=not np.array_equal(plain[0], plain[1]))
""",
        EXACT,
    )
    assert found["same"]
    assert found["moved"]
