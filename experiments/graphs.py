"""Generated graphs: as large as wanted, and of known shape.

    python -m experiments.graphs training-1000 -o training-1000.json
    python -m experiments.graphs layered-500 --seed 3 -o layered-500.json
    python -m experiments.graphs segnet-8 -o segnet-8.json

A name is a kind and a size: the nodes of ``training`` and ``layered``, the
batch size of the published networks ``vgg19``, ``mobilenet`` and ``segnet``.
The same name and seed give the same graph; the networks are the same for every seed.

Commands that read graphs (``graph_file``) take such names, and those of the
training steps of ``experiments.networks``: ``layers:U-Net:32`` and
``step:VGG16:256`` (see ``experiments.accounting``).
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from remat.solvers.graph import Graph, Node, load_graph, save_graph

_ACTIVATION, _WEIGHT = 16 * 2**20, 2**20  # bytes of a layer's output (on average) and weights
_BLOCK = 3  # layers that a residual connection spans

_FLOPS, _BANDWIDTH = 10e12, 0.5e12  # a second, of the device that the networks are priced for
_NUMBER = 4  # bytes of a float


def training_graph(count: int, seed: int = 0) -> Graph:
    """One training step of a residual network of constant width, updates included.

    A layer takes four nodes: itself, the gradients of its input and of its
    weights, and the update of the weights, which runs once.  Every third layer
    adds a skip connection.  A layer's gradients read its input and output, as
    batch normalization and most activations do.

    Args:
      count: nodes, at least 6; rounded down to a whole number of layers.
      seed: of sizes and costs.
    """
    rng = random.Random(seed)
    layers = (count - 2) // 4
    nodes = [Node("input", 1e-4, _ACTIVATION)]
    edges: list[tuple[int, int]] = []
    for layer in range(1, layers + 1):
        size = int(rng.uniform(0.5, 1.5) * _ACTIVATION)
        nodes.append(Node(f"layer{layer}", rng.uniform(0.2e-3, 2e-3), size))
        edges.append((layer - 1, layer))
        if layer % _BLOCK == 0:
            edges.append((layer - _BLOCK, layer))
    loss = len(nodes)
    nodes.append(Node("loss", 1e-4, 4))
    edges.append((layers, loss))
    gradients = {layers: loss}  # of the output of each layer
    for layer in range(layers, 0, -1):
        of_input, of_weights, update = range(len(nodes), len(nodes) + 3)
        cost = nodes[layer].cost
        nodes += [
            Node(f"layer{layer}/input_gradient", cost, nodes[layer - 1].bytes, backward=True),
            Node(f"layer{layer}/weight_gradient", cost, _WEIGHT, backward=True),
            Node(f"layer{layer}/update", 1e-5, 0, recomputable=False, backward=True),
        ]
        for node in (of_input, of_weights):
            edges += [(gradients[layer], node), (layer - 1, node), (layer, node)]
        if (layer - 1) % _BLOCK == 0 and layer - 1 + _BLOCK in gradients:  # the skip connection
            edges.append((gradients[layer - 1 + _BLOCK], of_input))
        edges.append((of_weights, update))
        gradients[layer - 1] = of_input
    return Graph(
        name=f"training-{count}-s{seed}",
        nodes=tuple(nodes),
        edges=tuple(edges),
        resident=3 * layers * _WEIGHT,  # with the two slots of Adam
    )


def layered_graph(count: int, seed: int = 0) -> Graph:
    """A random layered graph, as in the tests of Moccasin (ICML 2023).

    Layers of random width; a node reads one to six of the layer before it, and
    one value in seven comes from further back.  No node has the backward flag.

    Args:
      count: nodes, at least 1.
      seed: of everything.
    """
    rng = random.Random(seed)
    nodes: list[Node] = []
    edges: set[tuple[int, int]] = set()
    before = range(0)
    while len(nodes) < count:
        width = min(count - len(nodes), rng.randint(1, max(2, count // 12)))
        layer = range(len(nodes), len(nodes) + width)
        for index in layer:
            size = max(10, int(rng.expovariate(1 / 1500)))
            nodes.append(Node(f"v{index}", rng.randint(0, 1000), size))
            for _ in range(rng.randint(1, 6) if before else 0):
                further = before.start > 0 and rng.random() < 1 / 7
                edges.add((rng.choice(range(before.start) if further else before), index))
        before = layer
    return Graph(f"layered-{count}-s{seed}", tuple(nodes), tuple(sorted(edges)))


@dataclass(frozen=True)
class _Layer:
    """A layer: ``shape`` is (height, width, channels) of its output for one image.

    ``multiplications`` are those for one image, ``weights`` are numbers;
    ``remembered`` are the values that its gradient reads beside the output's gradient
    (indices of layers; its own is the next to be added).
    """

    name: str
    shape: tuple[int, int, int]
    inputs: tuple[int, ...]
    multiplications: int
    weights: int
    remembered: tuple[int, ...]


class _Network:
    """Collects the layers of a network, then makes one training step of them."""

    def __init__(self, height: int, width: int) -> None:
        self.layers = [_Layer("input", (height, width, 3), (), 0, 0, ())]

    def convolve(
        self, channels: int, kernel: int = 3, stride: int = 1, depthwise: bool = False
    ) -> None:
        """A convolution with padding, a normalization and a ReLU."""
        height, width, depth = self.layers[-1].shape
        shape = math.ceil(height / stride), math.ceil(width / stride), channels
        weights = kernel * kernel * channels * (1 if depthwise else depth)
        name = "depthwise" if depthwise else "conv"
        before = len(self.layers) - 1
        self._add(name, shape, shape[0] * shape[1] * weights, weights, (before,))
        self._add("norm", shape, math.prod(shape), 4 * channels, (before + 1,))
        self._add("relu", shape, 0, 0, (before + 3,))

    def pool(self, size: int = 2) -> int:
        """Takes the maximum of each square; returns the layer."""
        height, width, channels = self.layers[-1].shape
        here = len(self.layers)
        self._add("pool", (height // size, width // size, channels), 0, 0, (here - 1, here))
        return here

    def unpool(self, pool: int) -> None:
        """Puts values back to where a pooling layer found them."""
        height, width, _ = self.layers[pool - 1].shape
        shape = height, width, self.layers[-1].shape[2]
        self._add("unpool", shape, 0, 0, (pool,), (len(self.layers) - 1, pool))

    def average(self) -> None:
        """The mean of each channel."""
        self._add("average", (1, 1, self.layers[-1].shape[2]), 0, 0, ())

    def dense(self, units: int) -> None:
        """A fully connected layer."""
        weights = math.prod(self.layers[-1].shape) * units
        self._add("dense", (1, 1, units), weights, weights, (len(self.layers) - 1,))

    def _add(
        self,
        kind: str,
        shape: tuple[int, int, int],
        multiplications: int,
        weights: int,
        remembered: tuple[int, ...],
        inputs: tuple[int, ...] | None = None,
    ) -> None:
        here = len(self.layers)
        if inputs is None:
            inputs = (here - 1,)
        name = f"{kind}{here}"
        self.layers.append(_Layer(name, shape, inputs, multiplications, weights, remembered))

    def step(self, name: str, batch: int) -> Graph:
        """The forward pass, the loss and a gradient for each layer.

        A node costs its multiplications or its memory traffic, whichever takes
        longer; a gradient of a layer with weights (those of input and weights
        in one) multiplies twice as often.  Resident are weights, their
        gradients, and Adam's two slots.
        """
        layers, count = self.layers, len(self.layers)
        sizes = [_NUMBER * batch * math.prod(layer.shape) for layer in layers]
        nodes = [Node("input", sizes[0] / _BANDWIDTH, sizes[0])]
        edges: list[tuple[int, int]] = []
        for index in range(1, count):
            layer = layers[index]
            moved = sizes[index] + sum(sizes[i] for i in layer.inputs)
            cost = _seconds(layer.multiplications * batch, moved)
            nodes.append(Node(layer.name, cost, sizes[index]))
            edges += [(i, index) for i in layer.inputs]
        nodes.append(Node("loss", _seconds(0, 2 * sizes[-1]), sizes[-1]))
        edges.append((count - 1, count))
        for index in range(count - 1, 0, -1):
            layer, before = layers[index], layers[index].inputs[0]
            moved = sizes[index] + sizes[before] + sum(sizes[i] for i in layer.remembered)
            cost = _seconds((1 + (layer.weights > 0)) * layer.multiplications * batch, moved)
            here = len(nodes)
            nodes.append(Node(f"{layer.name}_backward", cost, sizes[before], backward=True))
            edges += [(here - 1, here), *((i, here) for i in layer.remembered)]
        resident = 4 * _NUMBER * sum(layer.weights for layer in layers)
        return Graph(f"{name}-{batch}", tuple(nodes), tuple(edges), resident)


def _seconds(multiplications: int, moved: int) -> float:
    return max(2 * multiplications / _FLOPS, moved / _BANDWIDTH)


def vgg19(batch: int, seed: int = 0) -> Graph:
    """VGG19 on 224 x 224 images (Simonyan & Zisserman, ICLR 2015), normalized."""
    network = _Network(224, 224)
    for repeats, channels in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(repeats):
            network.convolve(channels)
        network.pool()
    for units in (4096, 4096, 1000):
        network.dense(units)
    return network.step("vgg19", batch)


def mobilenet(batch: int, seed: int = 0) -> Graph:
    """MobileNet on 224 x 224 images (Howard et al., 2017)."""
    network = _Network(224, 224)
    network.convolve(32, stride=2)
    halving = {128, 256, 512, 1024}
    for channels in (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024):
        depth = network.layers[-1].shape[2]
        stride = 2 if channels in halving and channels != depth else 1
        network.convolve(depth, stride=stride, depthwise=True)
        network.convolve(channels, kernel=1)
    network.average()
    network.dense(1000)
    return network.step("mobilenet", batch)


def segnet(batch: int, seed: int = 0) -> Graph:
    """SegNet on 384 x 480 images of 12 classes (Badrinarayanan et al., PAMI 2017)."""
    network = _Network(384, 480)
    blocks = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    pools = []
    for repeats, channels in blocks:
        for _ in range(repeats):
            network.convolve(channels)
        pools.append(network.pool())
    narrower = (12, 64, 128, 256, 512)  # what each block of the decoder ends with
    for (repeats, channels), pool, last in reversed(
        list(zip(blocks, pools, narrower, strict=True))
    ):
        network.unpool(pool)
        for _ in range(repeats - 1):
            network.convolve(channels)
        network.convolve(last)
    return network.step("segnet", batch)


KINDS: dict[str, Callable[[int, int], Graph]] = {
    "training": training_graph,
    "layered": layered_graph,
    "vgg19": vgg19,
    "mobilenet": mobilenet,
    "segnet": segnet,
}


def generate(name: str, seed: int = 0) -> Graph:
    """The graph of a name such as "layered-500".

    Raises:
      ValueError: if it is not a kind and a size.
    """
    kind, _, size = name.partition("-")
    if kind not in KINDS or not size.isdigit() or int(size) < 1:
        raise ValueError(
            f"there is no graph {name!r}; a name is KIND-SIZE, a kind one of {', '.join(KINDS)}"
        )
    return KINDS[kind](int(size), seed)


def graph_file(name: str, folder: Path) -> Path:
    """The file of a graph: one that is given, or in the folder one that is made by its name.

    Raises:
      ValueError: if the name is not known.
      RuntimeError: if tracing the network broke down.
    """
    if name.endswith(".json"):
        return Path(name)
    path = folder / f"{name.replace(':', '-')}.json"
    if ":" not in name:
        save_graph(generate(name), path)
    elif not path.exists():
        # Another process: TensorFlow cannot share one with OR-tools.
        command = [sys.executable, "-m", "experiments.accounting", name, "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 2:
            raise ValueError(done.stderr.splitlines()[-1])
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return path


def graph_files(parser: argparse.ArgumentParser, names: Sequence[str], folder: Path) -> list[Path]:
    """The files of the graphs that a command names.

    It ends the command if a name is not known, a file is no graph, or two graphs
    have one name, by which tables and pictures tell them apart.
    """
    files: dict[str, Path] = {}
    graphs: dict[str, Graph] = {}
    try:
        for name in names:
            path = graph_file(name, folder)
            graph = load_graph(path)
            if graphs.setdefault(graph.name, graph) != graph:
                parser.error(
                    f"{files[graph.name]} and {path} hold different graphs of the name "
                    f"{graph.name!r}: change it in one of them"
                )
            files.setdefault(graph.name, path)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return list(files.values())


def main() -> None:
    """Writes one graph to a file."""
    parser = argparse.ArgumentParser("python -m experiments.graphs", description=__doc__)
    parser.add_argument("name", metavar="KIND-SIZE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", required=True, metavar="GRAPH.json")
    arguments = parser.parse_args()
    try:
        graph = generate(arguments.name, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    save_graph(graph, arguments.output)


if __name__ == "__main__":
    main()
