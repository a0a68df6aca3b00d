"""Generated graphs: as large as wanted, and of known shape.

    python -m experiments.graphs training 1000 -o training-1000.json
    python -m experiments.graphs layered 500 --seed 3 -o layered-500.json

The same kind, size and seed give the same graph.
"""

from __future__ import annotations

import argparse
import random

from remat.solvers.graph import Graph, Node, save_graph

_ACTIVATION, _WEIGHT = 16 * 2**20, 2**20  # bytes of a layer's output (on average) and weights
_BLOCK = 3  # layers that a residual connection spans


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


def main() -> None:
    """Writes one graph to a file."""
    parser = argparse.ArgumentParser("python -m experiments.graphs", description=__doc__)
    parser.add_argument("kind", choices=("training", "layered"))
    parser.add_argument("nodes", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", required=True, metavar="GRAPH.json")
    arguments = parser.parse_args()
    make = training_graph if arguments.kind == "training" else layered_graph
    save_graph(make(arguments.nodes, arguments.seed), arguments.output)


if __name__ == "__main__":
    main()
