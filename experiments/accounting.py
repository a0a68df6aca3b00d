"""Two ways to count what a training step of a network takes.

``layer_graph`` is how Checkmate counts (Jain et al., MLSys 2020): a node for
each layer and for its gradient, multiplications as costs, weights twice (for
their gradients) and no optimizer.  ``step_graph`` is what remat really runs:
the whole step with Adam as TensorFlow has optimised it, priced for a device.

    python -m experiments.accounting layers:U-Net:32 -o unet.json
    python -m experiments.accounting step:VGG16:256 --device h200 -o vgg16.json
    python -m experiments.accounting step:ViT:16 -o vit.json

A step may also be that of a network of ``experiments.models``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from remat.solvers import Graph, save_graph
from remat.solvers.graph import Node

from .models import CASES, Case, case_of
from .networks import NETWORKS

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

ACCOUNTINGS = ("layers", "step")
DEVICE = "v100-16gb"
"""What prices a step where nothing else is asked for: the card of Checkmate's experiments."""

_NUMBER = 4  # bytes of a float


def layer_graph(model: keras.Model, name: str, batch: int) -> Graph:
    """One training step, layer by layer.

    The gradient of a layer's output has its size and twice its cost; it reads
    that output, the outputs of the layers that read it, and their gradients.
    Resident are weights and their gradients; the images are not counted.

    Args:
      model: a functional model of one output.
      name: the graph's, for people.
      batch: images.
    """
    layers = model.layers[1:]  # without the input
    number = {id(layer): index for index, layer in enumerate(layers)}
    consumers: list[list[int]] = [[] for _ in layers]
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        (call,) = layer._inbound_nodes[-1:]
        sources = [
            number[id(node.operation)] for node in call.parent_nodes if id(node.operation) in number
        ]
        for source in sources:
            consumers[source].append(index)
            edges.append((source, index))
        cost = float(batch * _multiplications(layer))
        nodes.append(Node(layer.name, cost, _NUMBER * batch * _size(layer.output)))
    loss = len(layers)
    nodes.append(Node("loss", 0.0, _NUMBER * batch, backward=True))
    edges.append((loss - 1, loss))
    for index in reversed(range(loss)):
        forward, here = nodes[index], 2 * loss - index
        nodes.append(
            Node(f"{forward.name}_gradient", 2 * forward.cost, forward.bytes, backward=True)
        )
        edges.append((index, here))
        for consumer in consumers[index]:
            edges += [(consumer, here), (2 * loss - consumer, here)]
        if index == loss - 1:
            edges.append((loss, here))
    weights = sum(math.prod(weight.shape) for weight in model.weights)
    return Graph(f"{name}-{batch}", tuple(nodes), tuple(edges), 2 * _NUMBER * weights)


def forward_share(graph: Graph) -> float:
    """The cost of what runs before the first node of the backward pass, of that of all."""
    first = next(index for index, node in enumerate(graph.nodes) if node.backward)
    return math.fsum(node.cost for node in graph.nodes[:first]) / graph.cost


def _multiplications(layer: Any) -> int:
    """For one image, as Checkmate counts them: pools, padding and dropout are free."""
    kind, output = type(layer).__name__, _size(layer.output)
    inputs = layer.input if isinstance(layer.input, Sequence) else [layer.input]
    if kind in ("Conv2D", "DepthwiseConv2D", "Dense"):
        # Each output sums over the kernel; over all channels, but for the depthwise.
        taps = math.prod(layer.kernel.shape) // layer.kernel.shape[-1]
        return output * (math.prod(layer.kernel_size) if "Depthwise" in kind else taps)
    if kind == "Conv2DTranspose":
        return output * inputs[0].shape[-1]
    times = {
        "BatchNormalization": 4,
        "Activation": 1,
        "ReLU": 1,
        "LeakyReLU": 1,
        "Add": 1,
        "UpSampling2D": 1,
    }
    return times.get(kind, 0) * (output if kind == "UpSampling2D" else sum(map(_size, inputs)))


def _size(tensor: Any) -> int:
    """Numbers of one image."""
    return math.prod(tensor.shape[1:])


def step_graph(model: keras.Model, name: str, batch: int, device: str = DEVICE) -> Graph:
    """The whole training step: loss, gradients, and the update by Adam.

    Args:
      model: gives probabilities of classes.
      name: the graph's, for people.
      batch: images.
      device: what prices operations: see ``remat trace --profile``.
    """
    import tensorflow as tf

    from remat.compile import one_step_of

    specs = [
        tf.TensorSpec((batch, *model.input_shape[1:])),
        tf.TensorSpec((batch, *model.output_shape[1:-1]), tf.int32),
    ]
    function = one_step_of(model, "sparse_categorical_crossentropy", "adam")
    return _traced_graph(function, specs, f"{name}-{batch}", device)


def case_graph(case: Case, name: str, profile: str) -> Graph:
    """The whole training step of a network of ``experiments.models``.

    Args:
      case: the network and its batch.
      name: the graph's, for people.
      profile: what prices operations: see ``remat trace --profile``.
    """
    from remat.compile import one_step_of

    function = one_step_of(case.model(), case.loss(), case.optimizer())
    return _traced_graph(function, case.specs(), name, profile)


def _traced_graph(
    function: Callable[..., Any], specs: Sequence[tf.TensorSpec], name: str, profile: str
) -> Graph:
    """The graph of a step that solvers see; ``specs`` are of its arguments."""
    from remat.planning import prepare, read

    traced, program = read(function, specs)
    return prepare(traced, program, name=name, profile=profile).extraction.graph


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the graph of one network to a file."""
    parser = argparse.ArgumentParser(
        "python -m experiments.accounting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="ACCOUNTING:NETWORK:BATCH")
    parser.add_argument("--device", default=DEVICE, help="default: %(default)s")
    parser.add_argument("-o", "--output", required=True, metavar="GRAPH.json")
    asked = parser.parse_args(arguments)
    accounting, _, rest = asked.name.partition(":")
    network, _, batch = rest.partition(":")
    networks = [*NETWORKS, *(CASES if accounting == "step" else ())]
    if accounting not in ACCOUNTINGS or network not in networks or not batch.isdigit():
        parser.error(
            f"{asked.name!r} is not ACCOUNTING:NETWORK:BATCH, with one of "
            f"{', '.join(ACCOUNTINGS)} and one of {', '.join(dict.fromkeys(networks))}"
        )
    if network not in NETWORKS:
        case = case_of(network, int(batch))
        graph = case_graph(case, f"{network}-{batch}", asked.device)
    else:
        model = NETWORKS[network].model()
        if accounting == "layers":
            graph = layer_graph(model, network, int(batch))
        else:
            graph = step_graph(model, network, int(batch), asked.device)
    save_graph(graph, asked.output)


if __name__ == "__main__":
    main()
