"""``remat profile``: measures what a model's operations cost on the device at hand."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_trace import application, shape_of

if TYPE_CHECKING:
    import keras

    from .profiles.signature import OpSignature

_PROFILE = """\
Measure what the operations of a model's training step cost on the device at
hand (the first GPU, else the CPU), and add them to the user's table of that
device.  remat.compile then finds them there instead of measuring.

MODEL is the name of a model in keras.applications, or MODULE:FUNCTION, where
the function takes nothing and returns a Keras model.  The step trains it with
Adam.  Operations are run one by one, so the step itself need not fit in
memory.  What is in the table already is not measured again; Ctrl-C keeps what
was measured so far.  What was not measured is shown with the reason.
"""

_EXAMPLES = """\
examples:
  remat profile ResNet50 --batch-size 16 --shape 128,128,3
  remat profile VGG16 mymodels:make_unet --batch-size 8 16 32 --validate
  remat profile ResNet50 --profile h200       nothing measured: what an H200 would take

The table lies under $REMAT_CACHE, else $XDG_CACHE_HOME/remat, else ~/.cache/remat.
"""


def register(commands: Any) -> None:
    """Adds the parser of this module's command."""
    parser = commands.add_parser(
        "profile",
        help="measure what a model's operations cost on this device",
        description=_PROFILE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="as described above")
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[8],
        metavar="N",
        help="one or several; costs at other sizes are fitted to those measured (default 8)",
    )
    parser.add_argument(
        "--shape",
        metavar="N,N,...",
        help="of one sample, where the model leaves it open (for keras.applications: its input)",
    )
    parser.add_argument(
        "--profile",
        default="auto",
        metavar="NAME",
        help="where costs come from: auto (measure here), the name of a device, or a CSV table",
    )
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="SECONDS", help="for a step (600)"
    )
    parser.add_argument(
        "--validate",
        action="store_true",
        help="predict measured operations from the others, and show the error",
    )
    parser.add_argument("-o", "--output", metavar="TABLE.csv", help="write the table here too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures the models one after the other; returns the exit status."""
    from .device import default_device, table_path
    from .planning import read
    from .price import price
    from .profiles.price import cross_validate, load_pricer
    from .profiles.table import save_table
    from .solvers.files import check_writable

    here = arguments.profile == "auto"
    rows = here or len(load_pricer(arguments.profile).table)
    for option, given in (("-o", arguments.output), ("--validate", arguments.validate)):
        if given and not rows:
            raise ValueError(
                f"{option} is for what was measured, and --profile {arguments.profile} measures "
                "nothing; leave --profile out, on a machine with that device"
            )
    if arguments.output is not None:
        check_writable(arguments.output)
    if not 0 < arguments.time_limit < float("inf"):
        raise ValueError(f"--time-limit {arguments.time_limit}: seconds above 0")
    if min(arguments.batch_size) < 1:
        raise ValueError(f"the batch size must be 1 or more, not {min(arguments.batch_size)}")
    shape = None if arguments.shape is None else shape_of(arguments.shape, "--shape")
    if here:
        _check_cache(table_path(default_device()))
    for name in arguments.models:
        for batch_size in arguments.batch_size:
            model = _model(name, shape)
            function, specs = _training_step(model, batch_size, shape)
            _, program = read(function, specs)
            started = time.monotonic()
            (prices,) = price(
                [program],
                arguments.profile,
                deadline=arguments.time_limit,
                progress=_show_progress,
            )
            print(
                f"{name}, batch {batch_size}, on {prices.device}: "
                f"{sum(prices.seconds):.4f} s a step, "
                f"priced in {time.monotonic() - started:.1f} s\n{prices.coverage}"
            )
    if not rows:
        print(
            f"nothing was measured: these are figures of the specification of {prices.device}. To "
            "measure, run this on a machine with that device, without --profile; -o TABLE.csv "
            "writes a table that --profile TABLE.csv reads anywhere"
        )
        return 0
    path = table_path(default_device()) if here else arguments.profile
    if here and not Path(path).exists():
        print("table: none, since every operation is too small to be measured")
        return 1 if arguments.output else 0
    pricer = load_pricer(path)
    print(f"table: {path} ({len(pricer.table)} operations)")
    if arguments.validate:
        for found in cross_validate(pricer.table, pricer.device):
            print(
                f"{found.kind:9} predicts {found.rows} operations it has not seen: error "
                f"{100 * found.median_error:.0f} % (median), "
                f"{100 * found.largest_tenth_error:.0f} % (90th percentile), "
                f"sum {found.total_ratio:.2f} x the measured"
            )
    if arguments.output:
        save_table(pricer.table, arguments.output)
    return 0


def _check_cache(table: Path) -> None:
    """Fails early where what is measured could not be recorded."""
    from .solvers.files import check_writable

    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        check_writable(table)
    except OSError as error:
        raise OSError(
            f"what is measured could not be recorded in {table} ({error.strerror or error}); have "
            "REMAT_CACHE name a folder that can be written"
        ) from None


def _show_progress(done: int, total: int, following: OpSignature) -> None:
    if sys.stderr.isatty():
        print(f"\r{done + 1:5} of {total}  {following.op:40.40}", end="", file=sys.stderr)


def _model(name: str, shape: tuple[int, ...] | None) -> keras.Model:
    import keras

    module_name, colon, function_name = name.partition(":")
    if colon:
        try:
            make = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name}: there is no such function ({error})") from None
        if not callable(make):
            raise ValueError(f"{name} is a {type(make).__name__}, not a function")
        parameters = inspect.signature(make).parameters.values()
        if any(one.default is one.empty and one.kind < one.VAR_POSITIONAL for one in parameters):
            raise ValueError(f"{name} takes arguments; give a function that takes none")
        model = make()
    else:
        model = application(name, shape)
        if model is None:
            raise ValueError(
                f"{name!r} is neither a model of keras.applications nor MODULE:FUNCTION"
            )
    if not isinstance(model, keras.Model):
        raise ValueError(f"{name} made a {type(model).__name__}, not a Keras model")
    return model


def _training_step(
    model: keras.Model, batch_size: int, shape: tuple[int, ...] | None
) -> tuple[Any, list[Any]]:
    """A step with Adam, and the specs of its arguments (one: the model's input)."""
    import keras
    import tensorflow as tf

    def spec(tensor: Any) -> tf.TensorSpec:
        sample = tuple(tensor.shape[1:])
        if None in sample:
            if shape is None:
                raise ValueError(f"{model.name} takes any size {sample}; say which with --shape")
            sample = shape
        return tf.TensorSpec((batch_size, *sample), tensor.dtype)

    inputs = tf.nest.map_structure(spec, _inputs(model))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            results = tf.nest.flatten(model(inputs, training=True))
            # The loss hardly costs anything, so a mean square stands for any.
            loss = tf.add_n([tf.reduce_mean(tf.square(result)) for result in results])
        weights = model.trainable_variables
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return step, [inputs]


def _inputs(model: keras.Model) -> Any:
    """The nest of a model's symbolic inputs."""
    import keras

    if isinstance(model, keras.Sequential) and model.inputs:
        return model.inputs[0]
    try:
        return model.input
    except AttributeError:
        raise ValueError(
            f"{model.name} does not say what its input is: make it of keras.Input, as a "
            "functional or Sequential model (remat.compile takes any, and measures it, too)"
        ) from None
