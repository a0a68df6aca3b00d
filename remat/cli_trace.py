"""``remat trace``: a training step becomes a graph file that can be solved anywhere."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

_DESCRIPTION = """\
Trace one training step of a Keras model, price its operations and write the
graph that solvers see.  Solve it offline, here or on a machine without
TensorFlow, and give the plan back to remat.compile(plan=...).
"""

_EPILOG = """\
examples:
  remat trace keras.applications.ResNet50 --input 16,224,224,3 -o resnet50.json
  remat trace saved.keras --input 32,128 --input-dtype int32 --loss mse \\
      --label 32,1 --label-dtype float32 -o step.json
  remat solve resnet50.json --budget 50% -o resnet50.plan.json
"""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``trace`` to the command line."""
    parser = commands.add_parser(
        "trace",
        help="write the graph of a model's training step",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", help="a saved model (FILE.keras) or a name such as keras.applications.VGG16"
    )
    parser.add_argument(
        "--input", required=True, metavar="N,H,W,C", help="shape of a batch, its size first"
    )
    parser.add_argument("--input-dtype", default="float32", help="default: float32")
    parser.add_argument(
        "--label", metavar="N,...", help="shape of the labels (default: one class per sample)"
    )
    parser.add_argument("--label-dtype", default="int32", help="default: int32")
    parser.add_argument(
        "--loss",
        default="sparse_categorical_crossentropy",
        help="a Keras loss (default: sparse_categorical_crossentropy)",
    )
    parser.add_argument("--optimizer", default="adam", help="a Keras optimizer (default: adam)")
    parser.add_argument(
        "--profile",
        default="auto",
        help="where costs come from: auto (measure here), a device such as h200, or a CSV table",
    )
    parser.add_argument(
        "--ungrouped",
        action="store_true",
        help="a node for each operation, to see what grouping costs; plans for such a graph "
        "can be looked at, but not run",
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="GRAPH.json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs ``remat trace``; returns the exit status."""
    inputs = shape_of(arguments.input, "--input")
    labels = (inputs[0],) if arguments.label is None else shape_of(arguments.label, "--label")
    if not arguments.output.parent.is_dir():
        raise ValueError(f"{arguments.output.parent} is not a folder; make it first")

    import tensorflow as tf

    from .compile import one_step_of
    from .extract import extract
    from .planning import prepare, read
    from .progress import ProgressLine
    from .solvers.budget import format_bytes
    from .solvers.graph import save_graph

    specs = [
        tf.TensorSpec(inputs, _dtype(arguments.input_dtype)),
        tf.TensorSpec(labels, _dtype(arguments.label_dtype)),
    ]
    model = _model(arguments.model, inputs)
    function = one_step_of(model, arguments.loss, arguments.optimizer)
    with ProgressLine(None) as say:
        say.line("tracing the step")
        traced, program = read(function, specs)
        prepared = prepare(
            traced, program, name=model.name, profile=arguments.profile, progress=say.line
        )
    program = prepared.program
    graph = prepared.extraction.graph
    if arguments.ungrouped:
        graph = extract(
            program,
            prepared.prices.seconds,
            prepared.prices.workspace,
            plain_peak=prepared.plain.requested_peak,
            resident=graph.resident,
            name=f"{model.name}, ungrouped",
            grouped=False,
        ).graph
    save_graph(graph, arguments.output)
    print(f"{len(program.ops)} operations became {len(graph)} nodes")
    print(f"plain step: {format_bytes(prepared.plain.peak)} predicted at its peak,")
    print(f"  {format_bytes(graph.resident)} of it variables, inputs and constants")
    print(f"prices on {prepared.prices.device}:\n{prepared.prices.coverage}")
    print(f"wrote {arguments.output}")
    return 0


def shape_of(text: str, option: str) -> tuple[int, ...]:
    """The shape that an option gives.

    Raises:
      ValueError: if it is none.
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError(f"{option} {text!r} is not a shape: whole numbers above 0, with commas")
    return shape


def _dtype(name: str) -> Any:
    import tensorflow as tf

    try:
        return tf.dtypes.as_dtype(name)
    except TypeError:
        raise ValueError(f"{name!r} is not a dtype; write float32 or int32, for instance") from None


def _model(name: str, shape: tuple[int, ...]) -> Any:
    """A saved model, or one of Keras's own architectures with new weights."""
    import keras

    if name.endswith(".keras"):
        if not Path(name).is_file():
            raise ValueError(f"there is no file {name}")
        return keras.models.load_model(name, compile=False, safe_mode=True)
    model = application(name, shape[1:])
    if model is None:
        raise ValueError(
            f"{name!r} is neither a .keras file nor a model of keras.applications "
            "(ResNet50, MobileNetV2, ...)"
        )
    return model


def application(name: str, shape: tuple[int, ...] | None) -> keras.Model | None:
    """One of Keras's own architectures with new weights; None if none goes by that name.

    Raises:
      ValueError: if the shape of its input is given, and is not an image's.
    """
    import keras

    make = getattr(keras.applications, name.removeprefix("keras.applications."), None)
    if not inspect.isfunction(make):
        return None
    if shape is not None and len(shape) != 3:
        raise ValueError(f"{name} takes images, each of ROWS,COLUMNS,CHANNELS, and not of {shape}")
    return make(weights=None, input_shape=shape)
