"""A Keras model in pieces, each under ``tf.recompute_grad``: what its users write by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import keras
import tensorflow as tf


class Blocks(keras.Model):
    """A functional model cut where a single value passes, each piece recomputed."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name=f"{model.name}_blocks")
        self._input = model.input
        cuts = _cuts(model)
        size = max(1, math.isqrt(len(cuts)))
        ends = [model.layers[i] for i in cuts[size - 1 : -1 : size]]
        # Of the call in this model: a nested model's own output is that of its own inputs.
        outputs = [layer._inbound_nodes[-1].outputs for layer in ends]
        values = [model.input, *(own if len(own) > 1 else own[0] for own in outputs)]
        values.append(model.output)
        self.pieces = [keras.Model(a, b) for a, b in itertools.pairwise(values)]

    @property
    def input(self) -> Any:
        return self._input

    def call(self, x: Any, training: bool | None = None) -> Any:
        for piece in self.pieces:
            x = tf.recompute_grad(lambda x, piece=piece: piece(x, training=training))(x)
        return x


def _cuts(model: keras.Model) -> list[int]:
    """Layers whose output is all that later layers read of this and earlier ones."""
    number = {id(layer): i for i, layer in enumerate(model.layers)}
    last = [i for i, _ in enumerate(model.layers)]  # who reads it last
    for i, layer in enumerate(model.layers):
        for node in layer._inbound_nodes:
            for source in node.parent_nodes:
                if id(source.operation) in number:
                    j = number[id(source.operation)]
                    last[j] = max(last[j], i)
    cuts, reach = [], 0
    for i, _ in enumerate(model.layers):
        if 0 < reach <= i:
            cuts.append(i)
        reach = max(reach, last[i])
    return cuts
