"""The networks that are trained in the experiments: small enough for two cores,
large enough that activations fill memory.

Everything is drawn from a seed.  The data are synthetic, but each network can
learn from them: images are a pattern of their class under noise, sequences
draw their tokens around one that stands for their class, masks are discs.

TensorFlow is imported when a model is built, so that the process that starts
the others does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .networks import NETWORKS, SCENE_CLASSES

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Batch = tuple[np.ndarray, np.ndarray]

_SCENE = (224, 320, 3)  # multiples of 32 pixels


@dataclass(frozen=True)
class Case:
    """A network and its training data.

    Attributes:
      name: of the network.
      build: makes the network, with weights drawn from Keras's global seed.
      draw: makes one batch from a generator and the case.
      inputs: shape of a batch of inputs.
      labels: shape of a batch of labels (class numbers).
      classes: how many classes, or tokens' groups, there are.
      dtype: of the inputs.
    """

    name: str
    build: Callable[[Case], keras.Model]
    draw: Callable[[Case, np.random.Generator], Batch]
    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int = 10
    dtype: str = "float32"

    @property
    def size(self) -> str:
        """The inputs' shape for people: "32 x 128 x 128 x 3"."""
        return " x ".join(map(str, self.inputs))

    def with_batch(self, batch: int) -> Case:
        """The same network and data in batches of another size."""
        return replace(self, inputs=(batch, *self.inputs[1:]), labels=(batch, *self.labels[1:]))

    def model(self, seed: int = 0) -> keras.Model:
        """The network; the same seed gives the same weights and dropout masks."""
        import keras

        keras.utils.set_random_seed(seed)
        return self.build(self)

    def loss(self) -> keras.losses.Loss:
        """Cross-entropy of logits."""
        import keras

        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Adam with its defaults."""
        import keras

        return keras.optimizers.Adam()

    def specs(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        """What ``remat.compile`` is told about inputs and labels."""
        import tensorflow as tf

        return tf.TensorSpec(self.inputs, self.dtype), tf.TensorSpec(self.labels, tf.int32)

    def batches(self, count: int, seed: int = 0) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """``count`` batches of inputs and labels, each made when asked for."""
        import tensorflow as tf

        generator = np.random.default_rng(seed)
        for _ in range(count):
            inputs, labels = self.draw(self, generator)
            yield tf.constant(inputs, self.dtype), tf.constant(labels, tf.int32)


def _application(name: str) -> Callable[[Case], keras.Model]:
    def build(case: Case) -> keras.Model:
        import keras

        return getattr(keras.applications, name)(
            weights=None,
            input_shape=case.inputs[1:],
            classes=case.classes,
            classifier_activation=None,
        )

    return build


def _published(name: str) -> Callable[[Case], keras.Model]:
    """A network of the papers, with a last layer for the case's classes."""

    def build(case: Case) -> keras.Model:
        import keras

        whole = NETWORKS[name].model()
        logits = keras.layers.Dense(case.classes)(whole.layers[-1].input)
        return keras.Model(whole.input, logits, name=whole.name)

    return build


def _scores(name: str) -> Callable[[Case], keras.Model]:
    """A segmentation network of the papers, up to the scores of its classes."""

    def build(case: Case) -> keras.Model:
        import keras

        _, height, width, channels = case.inputs
        whole = NETWORKS[name].build((height, width, channels))
        return keras.Model(whole.input, whole.layers[-1].input, name=whole.name)

    return build


def _vgg16(case: Case) -> keras.Model:
    """VGG16 with its two layers of 4,096 replaced by an average over the image.

    Those hold 120 of its 138 million weights; with Adam's slots they would
    outweigh the activations of any batch that two cores can compute.
    """
    import keras

    body = keras.applications.VGG16(
        weights=None, include_top=False, pooling="avg", input_shape=case.inputs[1:]
    )
    return keras.Model(body.input, keras.layers.Dense(case.classes)(body.output), name="vgg16")


def _unet(case: Case, width: int = 24, depth: int = 4) -> keras.Model:
    """U-Net (Ronneberger et al., 2015) with BatchNormalization; one logit a class and pixel."""
    import keras

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.BatchNormalization()(x)
            x = keras.layers.ReLU()(x)
        return x

    x = inputs = keras.Input(case.inputs[1:])
    skips = []
    for level in range(depth):
        x = block(x, width << level)
        skips.append(x)
        x = keras.layers.MaxPooling2D()(x)
    x = block(x, width << depth)
    for level in reversed(range(depth)):
        x = keras.layers.Conv2DTranspose(width << level, 2, strides=2)(x)
        x = keras.layers.Concatenate()([skips[level], x])
        x = block(x, width << level)
    return keras.Model(inputs, keras.layers.Conv2D(case.classes, 1)(x), name="u_net")


def _sample_cnn(case: Case, layers: int = 12, width: int = 16) -> keras.Model:
    """Convolutions at full resolution, one after the other."""
    import keras

    x = inputs = keras.Input(case.inputs[1:])
    for _ in range(layers):
        x = keras.layers.ReLU()(keras.layers.Conv2D(width, 3, padding="same")(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(case.classes)(x), name="sample_cnn")


def _small_unet(case: Case) -> keras.Model:
    return _unet(case, width=16, depth=2)


def _blocks(x: Any, layers: int, width: int, heads: int, causal: bool = False) -> Any:
    """Layers of a Transformer (Vaswani et al., 2017), normalised after each part."""
    import keras

    for _ in range(layers):
        attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        attended = attention(x, x, use_causal_mask=causal)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(attended))
        hidden = keras.layers.Dense(4 * width, activation="gelu")(x)
        hidden = keras.layers.Dropout(0.1)(keras.layers.Dense(width)(hidden))
        x = keras.layers.LayerNormalization()(x + hidden)
    return x


def _embedded(case: Case, inputs: Any, width: int, vocabulary: int) -> Any:
    import keras

    length = case.inputs[1]
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    return x + keras.layers.Embedding(length, width)(np.arange(length))


def _transformer(case: Case, layers: int = 4) -> keras.Model:
    """A Transformer encoder that classifies sequences of tokens."""
    import keras

    inputs = keras.Input(case.inputs[1:], dtype=case.dtype)
    x = _blocks(_embedded(case, inputs, 256, 1000), layers, width=256, heads=8)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(case.classes)(x), name="transformer")


def _deep_transformer(case: Case) -> keras.Model:
    return _transformer(case, layers=12)


def _decoder(case: Case, layers: int = 4) -> keras.Model:
    """A Transformer decoder that says for every token which one comes next."""
    import keras

    inputs = keras.Input(case.inputs[1:], dtype=case.dtype)
    x = _embedded(case, inputs, 128, case.classes)
    x = _blocks(x, layers, width=128, heads=4, causal=True)
    return keras.Model(inputs, keras.layers.Dense(case.classes)(x), name="decoder")


def _deep_decoder(case: Case) -> keras.Model:
    return _decoder(case, layers=12)


def _vision_transformer(case: Case, patch: int = 8, width: int = 192) -> keras.Model:
    """A Vision Transformer (Dosovitskiy et al., 2021) without a class token."""
    import keras

    inputs = keras.Input(case.inputs[1:])
    x = keras.layers.Conv2D(width, patch, strides=patch)(inputs)
    x = keras.layers.Reshape((-1, width))(x)
    x = x + keras.layers.Embedding(x.shape[1], width)(np.arange(x.shape[1]))
    x = keras.layers.GlobalAveragePooling1D()(_blocks(x, layers=6, width=width, heads=6))
    return keras.Model(inputs, keras.layers.Dense(case.classes)(x), name="vision_transformer")


def _resnet20(case: Case) -> keras.Model:
    """The 20-layer ResNet for small images (He et al., 2016)."""
    import keras

    def convolution(x: Any, filters: int, size: int, strides: int) -> Any:
        x = keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return keras.layers.BatchNormalization()(x)

    inputs = keras.Input(case.inputs[1:])
    x = keras.layers.ReLU()(convolution(inputs, 16, 3, 1))
    for filters in (16, 32, 64):
        for block in range(3):
            strides = 2 if filters > 16 and block == 0 else 1
            inner = keras.layers.ReLU()(convolution(x, filters, 3, strides))
            shortcut = convolution(x, filters, 1, 2) if strides == 2 else x
            x = keras.layers.ReLU()(shortcut + convolution(inner, filters, 3, 1))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(case.classes)(x), name="resnet20")


def _images(case: Case, generator: np.random.Generator) -> Batch:
    """Each class is a pattern of stripes, under noise."""
    labels = generator.integers(case.classes, size=case.labels)
    rows, columns = np.indices(case.inputs[1:3]) / case.inputs[1]
    angles = np.pi * labels / case.classes
    across = np.cos(angles)[:, None, None] * rows + np.sin(angles)[:, None, None] * columns
    images = np.sin(40 * across)[..., None] + generator.normal(size=case.inputs)
    return images, labels


def _discs(case: Case, generator: np.random.Generator) -> Batch:
    """Noisy images with one brighter disc; the label says which pixels it covers."""
    count, height, width, _ = case.inputs
    rows, columns = np.indices((height, width))
    centre = generator.uniform(0.25, 0.75, size=(2, count, 1, 1)) * height
    radius = generator.uniform(0.1, 0.25, size=(count, 1, 1)) * height
    labels = np.hypot(rows - centre[0], columns - centre[1]) < radius
    images = labels[..., None] + generator.normal(size=case.inputs)
    return images, labels.astype(np.int32)


def _scenes(case: Case, generator: np.random.Generator) -> Batch:
    """Stripes as of ``_images``, which every pixel is to be labelled with."""
    images, labels = _images(replace(case, labels=case.labels[:1]), generator)
    return images, np.repeat(labels[:, None], case.labels[1], axis=1)


def _sequences(case: Case, generator: np.random.Generator) -> Batch:
    """Tokens scattered around one that stands for the class."""
    labels = generator.integers(case.classes, size=case.labels)
    scatter = generator.normal(scale=100, size=case.inputs)
    tokens = np.clip((labels[:, None] + 0.5) * 1000 / case.classes + scatter, 0, 999)
    return tokens.astype(np.int32), labels


def _image_case(
    name: str, batch: int, side: int, build: Callable[[Case], keras.Model] | None = None
) -> Case:
    return Case(name, build or _application(name), _images, (batch, side, side, 3), (batch,))


def _scene_case(network: str, pixels: int) -> Case:
    """At half of the width and height that the network was published for, nearly."""
    name = f"{network}-{_SCENE[0]}"
    return Case(name, _scores(network), _scenes, (4, *_SCENE), (4, pixels), SCENE_CLASSES)


def _walks(case: Case, generator: np.random.Generator) -> Batch:
    """Tokens that go up by one or two; the label of each is the next one."""
    count, length = case.inputs
    walk = np.cumsum(generator.integers(1, 3, size=(count, length + 1)), axis=1)
    tokens = (walk % case.classes).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def published_case(network: str) -> str:
    """The name of the case that is a network of the papers at its published size."""
    return f"{network}-{NETWORKS[network].image[0]}"


CASES = {
    case.name: case
    for case in (
        _image_case("VGG16", 24, 128, _vgg16),
        _image_case("ResNet50", 32, 128),
        _image_case("MobileNetV2", 32, 160),
        _image_case("DenseNet121", 24, 128),
        Case("UNet", _unet, _discs, (8, 160, 160, 3), (8, 160, 160), classes=2),
        Case("Transformer", _transformer, _sequences, (16, 256), (16,), dtype="int32"),
        # For eager recomputation.
        Case("SampleCNN", _sample_cnn, _images, (16, 256, 256, 1), (16,)),
        _image_case("ResNet20", 64, 64, _resnet20),
        _image_case("ViT", 16, 96, _vision_transformer),
        Case("Decoder", _decoder, _walks, (8, 256), (8, 256), classes=2000, dtype="int32"),
        _image_case("MobileNetV3Small", 32, 160),
        _image_case("EfficientNetB0", 16, 128),
        _image_case("InceptionV3", 16, 139),
        # As deep as BERT and GPT-2, for the solvers.
        Case("DeepTransformer", _deep_transformer, _sequences, (16, 128), (16,), dtype="int32"),
        Case("DeepDecoder", _deep_decoder, _walks, (8, 128), (8, 128), classes=2000, dtype="int32"),
        # To try an experiment out, in a minute.
        Case("SmallUNet", _small_unet, _discs, (8, 96, 96, 3), (8, 96, 96), classes=2),
        # For its floor: one kernel of 25,088 x 4,096.
        _image_case("VGG16Full", 8, 224, _application("VGG16")),
        # For the time that compiling takes.
        _image_case("ResNet152", 32, 128),
        _image_case("NASNetMobile", 8, 224),
        # With the images that they were published for.
        *(
            _image_case(published_case(network.name), 8, network.image[0], _published(network.name))
            for network in NETWORKS.values()
            if network.image[0] == network.image[1]
        ),
        # Their scores are at half of the image's resolution, FCN8's beyond its edge.
        _scene_case("U-Net", 112 * 160),
        _scene_case("FCN8", 232 * 328),
        _scene_case("SegNet", 112 * 160),
    )
}
"""Networks by name."""


def case_of(name: str, batch: int | None = None) -> Case:
    """A network by name, in batches of another size if one is given."""
    case = CASES[name]
    return case if batch is None else case.with_batch(batch)


TRAINED = ("VGG16", "ResNet50", "MobileNetV2", "DenseNet121", "UNet", "Transformer")
FURTHER = ("ResNet20", "ViT", "Decoder", "MobileNetV3Small", "EfficientNetB0", "InceptionV3")
LARGE = ("ResNet152", "NASNetMobile")
