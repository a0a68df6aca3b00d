"""The autoencoder of face-swap trainers: one encoder, a decoder for each side, 64 pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

SIDE = 64  # pixels
IMAGE = (SIDE, SIDE, 3)


@dataclass(frozen=True)
class Autoencoder:
    """A shared encoder and the decoders of both sides.

    Attributes:
      encoder: images to codes.
      decoders: codes to images, one for each side.
    """

    encoder: keras.Model
    decoders: tuple[keras.Model, keras.Model]

    def side(self, number: int) -> keras.Model:
        """The autoencoder of one side, layer by layer."""
        inputs = keras.Input(IMAGE)
        x = inputs
        for part in (self.encoder, self.decoders[number]):
            for layer in part.layers[1:]:
                x = layer(x)
        return keras.Model(inputs, x)


def build(width: int = 128) -> Autoencoder:
    """The autoencoder with new weights; the seed's has a width of 128 channels."""
    layers = keras.layers

    def enlarged(x: Any, filters: int) -> Any:
        x = layers.LeakyReLU(0.1)(layers.Conv2D(4 * filters, 3, padding="same")(x))
        return _PixelShuffle()(x)

    x = inputs = keras.Input(IMAGE)
    for level in range(4):
        x = layers.Conv2D(width << level, 5, 2, padding="same")(x)
        x = layers.LeakyReLU(0.1)(x)
    x = layers.Dense(8 * width)(layers.Flatten()(x))
    x = layers.Reshape((4, 4, 8 * width))(layers.Dense(4 * 4 * 8 * width)(x))
    encoder = keras.Model(inputs, enlarged(x, 4 * width))

    def decoder() -> keras.Model:
        x = codes = keras.Input(encoder.output.shape[1:])
        for filters in (2 * width, width, width // 2):
            x = enlarged(x, filters)
        return keras.Model(codes, layers.Conv2D(3, 5, padding="same", activation="sigmoid")(x))

    return Autoencoder(encoder, (decoder(), decoder()))


@keras.saving.register_keras_serializable("experiments")
class _PixelShuffle(keras.layers.Layer):
    """Four channels become a square of two by two pixels."""

    def call(self, x: Any) -> Any:
        return tf.nn.depth_to_space(x, 2)


def mae(targets: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Mean absolute difference."""
    return tf.reduce_mean(tf.abs(targets - images))


def dssim(targets: tf.Tensor, images: tf.Tensor) -> tf.Tensor:
    """Structural dissimilarity, (1 - SSIM) / 2 (Wang et al., 2004)."""
    return tf.reduce_mean((1 - tf.image.ssim(targets, images, max_val=1.0)) / 2)


LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {"mae": mae, "dssim": dssim}


def adam() -> keras.optimizers.Optimizer:
    """The seed's optimizer."""
    return keras.optimizers.Adam(5e-5, beta_1=0.5)


def train_side(
    encoder: keras.Model,
    decoder: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    warped: tf.Tensor,
    targets: tf.Tensor,
) -> tf.Tensor:
    """One update of the encoder and one decoder; returns the loss."""
    weights = [*encoder.trainable_variables, *decoder.trainable_variables]
    with tf.GradientTape() as tape:
        value = loss(targets, decoder(encoder(warped, training=True), training=True))
    optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
    return value
