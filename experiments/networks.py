"""The networks of the papers, by name, with the images that they were published for.

What ``keras.applications`` has is taken from there; the others are written
here, small.  They are traced, not trained: ``experiments.models`` has those.

TensorFlow is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras

_SCENE = (416, 608)  # pixels, of the segmentation networks
SCENE_CLASSES = 19  # Cityscapes'


@dataclass(frozen=True)
class Network:
    """A network as it was published.

    Attributes:
      name: as its paper writes it.
      image: (height, width, channels) of one input.
      build: makes the model from the shape of an image; its output is
        probabilities of classes, the last dimension.
    """

    name: str
    image: tuple[int, int, int]
    build: Callable[[tuple[int, int, int]], keras.Model]

    def model(self) -> keras.Model:
        """The network, with new weights."""
        return self.build(self.image)


def _application(name: str) -> Callable[[tuple[int, int, int]], keras.Model]:
    def build(image: tuple[int, int, int]) -> keras.Model:
        import keras

        return getattr(keras.applications, name)(weights=None, input_shape=image)

    return build


def _plain_levels(image: tuple[int, int, int]) -> tuple[Any, list[Any]]:
    """The plain encoder of Checkmate's experiments: its input, and what each block gives."""
    import keras

    x = inputs = keras.Input(image)
    levels = []
    for filters in (64, 128, 256, 256, 256):
        x = keras.layers.Activation("relu")(_padded(x, filters))
        x = keras.layers.MaxPooling2D()(x)
        levels.append(x)
    return inputs, levels


def _segmentation(inputs: Any, scores: Any) -> keras.Model:
    """The model that gives each pixel probabilities of its classes."""
    import keras

    pixels = keras.layers.Reshape((-1, scores.shape[-1]))(scores)
    return keras.Model(inputs, keras.layers.Activation("softmax")(pixels))


def _padded(x: Any, filters: int) -> Any:
    """A 3 x 3 convolution with its padding in a layer of its own, normalized."""
    import keras

    x = keras.layers.ZeroPadding2D(1)(x)
    return keras.layers.BatchNormalization()(keras.layers.Conv2D(filters, 3)(x))


def _unet(image: tuple[int, int, int]) -> keras.Model:
    """U-Net (Ronneberger et al., 2015) on VGG16, as Checkmate's experiments have it."""
    import keras

    body = keras.applications.VGG16(weights=None, include_top=False, input_shape=image)
    levels = [body.get_layer(f"block{number}_pool").output for number in (1, 2, 3, 4)]
    x = _padded(levels.pop(), 512)
    for filters in (256, 128, 64):
        x = keras.layers.Concatenate()([keras.layers.UpSampling2D()(x), levels.pop()])
        x = _padded(x, filters)
    scores = keras.layers.Conv2D(SCENE_CLASSES, 3, padding="same")(x)
    return _segmentation(body.input, scores)


def _segnet(image: tuple[int, int, int]) -> keras.Model:
    """SegNet (Badrinarayanan et al., 2017) in the small form of Checkmate's experiments."""
    import keras

    inputs, levels = _plain_levels(image)
    x = _padded(levels[3], 512)
    for filters in (256, 128, 64):
        x = _padded(keras.layers.UpSampling2D()(x), filters)
    scores = keras.layers.Conv2D(SCENE_CLASSES, 3, padding="same")(x)
    return _segmentation(inputs, scores)


def _fcn8(image: tuple[int, int, int]) -> keras.Model:
    """FCN8 (Long et al., CVPR 2015) on the plain encoder, as Checkmate's experiments have it."""
    import keras

    def scores(x: Any) -> Any:
        return keras.layers.Conv2D(SCENE_CLASSES, 1)(x)

    def enlarged(x: Any, times: int) -> Any:
        return keras.layers.Conv2DTranspose(
            SCENE_CLASSES, 2 * times, strides=times, use_bias=False
        )(x)

    def cropped(x: Any, like: Any) -> Any:
        for axis in (2, 1):
            border = [[0, 0], [0, 0]]
            border[axis - 1][1] = x.shape[axis] - like.shape[axis]
            x = keras.layers.Cropping2D(border)(x)
        return x

    inputs, levels = _plain_levels(image)
    x = levels[4]
    for kernel in (7, 1):
        x = keras.layers.Conv2D(4096, kernel, activation="relu", padding="same")(x)
        x = keras.layers.Dropout(0.5)(x)
    x = scores(x)
    for level in (levels[3], levels[2]):
        other = scores(level)
        x = keras.layers.Add()([cropped(enlarged(x, 2), other), other])
    return _segmentation(inputs, enlarged(x, 8))


def _alexnet(image: tuple[int, int, int]) -> keras.Model:
    """AlexNet (Krizhevsky, 2014: one tower)."""
    import keras

    layers = keras.layers
    x = inputs = keras.Input(image)
    x = layers.Conv2D(64, 11, strides=4, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(3, 2)(x)
    x = layers.Conv2D(192, 5, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D(3, 2)(x)
    for filters in (384, 256, 256):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D(3, 2)(x))
    for _ in range(2):
        x = layers.Dense(4096, activation="relu")(layers.Dropout(0.5)(x))
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))


def _vgg(*repeats: int) -> Callable[[tuple[int, int, int]], keras.Model]:
    """VGG with other depths than Keras has (Simonyan & Zisserman, ICLR 2015)."""

    def build(image: tuple[int, int, int]) -> keras.Model:
        import keras

        layers = keras.layers
        x = inputs = keras.Input(image)
        for count, filters in zip(repeats, (64, 128, 256, 512, 512), strict=True):
            for _ in range(count):
                x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(x)
        x = layers.Flatten()(x)
        for _ in range(2):
            x = layers.Dense(4096, activation="relu")(x)
        return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))

    return build


def _resnet(*repeats: int) -> Callable[[tuple[int, int, int]], keras.Model]:
    """ResNet with blocks of two convolutions (He et al., CVPR 2016)."""

    def build(image: tuple[int, int, int]) -> keras.Model:
        import keras

        layers = keras.layers

        def convolved(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
            x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
            return layers.BatchNormalization()(x)

        inputs = keras.Input(image)
        x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(convolved(inputs, 64, 7, 2)))
        for level, count in enumerate(repeats):
            filters = 64 << level
            for number in range(count):
                stride = 2 if level and not number else 1
                y = layers.ReLU()(convolved(x, filters, 3, stride))
                y = convolved(y, filters, 3)
                if stride == 2:
                    x = convolved(x, filters, 1, 2)
                x = layers.ReLU()(layers.Add()([x, y]))
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))

    return build


def _densenet161(image: tuple[int, int, int]) -> keras.Model:
    """DenseNet161 (Huang et al., CVPR 2017): 48 channels a layer, where Keras's have 32."""
    import keras

    layers, growth = keras.layers, 48

    def convolved(x: Any, filters: int, kernel: int, stride: int = 1) -> Any:
        x = layers.ReLU()(layers.BatchNormalization()(x))
        return layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)

    inputs = keras.Input(image)
    x = layers.Conv2D(2 * growth, 7, 2, padding="same", use_bias=False)(inputs)
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(layers.BatchNormalization()(x)))
    for block, count in enumerate((6, 12, 36, 24)):
        if block:
            x = layers.AveragePooling2D(2)(convolved(x, x.shape[-1] // 2, 1))
        for _ in range(count):
            y = convolved(convolved(x, 4 * growth, 1), growth, 3)
            x = layers.Concatenate()([x, y])
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(x))


@dataclass(frozen=True)
class _Genotype:
    """The two kinds of cell of a searched network.

    Attributes:
      normal, reduce: pairs (operation, number of the value it takes); each two
        of them add up to a new value.  Values 0 and 1 are the two cells before.
      normal_ends, reduce_ends: values that are joined to the cell's output.
    """

    normal: tuple[tuple[str, int], ...]
    normal_ends: tuple[int, ...]
    reduce: tuple[tuple[str, int], ...]
    reduce_ends: tuple[int, ...]


def _genes(text: str) -> tuple[tuple[str, int], ...]:
    """ "sep3:0 skip:1" as pairs."""
    return tuple((gene[:-2], int(gene[-1])) for gene in text.split())


_NASNET = _Genotype(  # Zoph et al., CVPR 2018
    _genes("sep5:1 sep3:0 sep5:0 sep3:0 avg:1 skip:0 avg:0 avg:0 sep3:1 skip:1"),
    (2, 3, 4, 5, 6),
    _genes("sep5:1 sep7:0 max:1 sep7:0 avg:1 sep5:0 skip:3 avg:2 sep3:2 max:1"),
    (4, 5, 6),
)
_AMOEBANET = _Genotype(  # Real et al., AAAI 2019
    _genes("avg:0 max:1 sep3:0 sep5:2 sep3:0 avg:3 sep3:1 skip:1 skip:0 avg:1"),
    (4, 5, 6),
    _genes("avg:0 sep3:1 max:0 sep7:2 sep7:0 avg:1 max:0 max:1 cross7:0 sep3:5"),
    (3, 4, 6),
)
_DARTS = _Genotype(  # Liu et al., ICLR 2019, second order
    _genes("sep3:0 sep3:1 sep3:0 sep3:1 sep3:1 skip:0 skip:0 dil3:2"),
    (2, 3, 4, 5),
    _genes("max:0 max:1 skip:2 max:1 max:0 skip:2 skip:2 max:1"),
    (2, 3, 4, 5),
)


def _searched(
    genotype: _Genotype, cells: int = 20, channels: int = 36
) -> Callable[[tuple[int, int, int]], keras.Model]:
    """A searched network for CIFAR-10, stacked as DARTS stacks its cells."""

    def build(image: tuple[int, int, int]) -> keras.Model:
        import keras

        layers = keras.layers

        def normalized(x: Any, filters: int, kernel: Any = 1, stride: Any = 1) -> Any:
            x = layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
            return layers.BatchNormalization()(x)

        def separable(x: Any, filters: int, kernel: int, stride: int, dilation: int = 1) -> Any:
            x = layers.DepthwiseConv2D(
                kernel, stride, padding="same", dilation_rate=dilation, use_bias=False
            )(layers.ReLU()(x))
            return normalized(x, filters)

        def halved(x: Any, filters: int) -> Any:
            x = layers.ReLU()(x)
            parts = [x, layers.Cropping2D(((1, 0), (1, 0)))(x)]
            convolved = [layers.Conv2D(filters // 2, 1, 2, use_bias=False)(part) for part in parts]
            return layers.BatchNormalization()(layers.Concatenate()(convolved))

        def operation(name: str, x: Any, filters: int, stride: int) -> Any:
            if name == "skip":
                return x if stride == 1 else halved(x, filters)
            if name in ("avg", "max"):
                pool = layers.AveragePooling2D if name == "avg" else layers.MaxPooling2D
                return pool(3, stride, padding="same")(x)
            kernel = int(name[-1])
            if name.startswith("cross"):
                x = layers.Conv2D(
                    filters, (1, kernel), (1, stride), padding="same", use_bias=False
                )(layers.ReLU()(x))
                return normalized(x, filters, (kernel, 1), (stride, 1))
            if name.startswith("dil"):
                return separable(x, filters, kernel, stride, dilation=2)
            return separable(separable(x, filters, kernel, stride), filters, kernel, 1)

        inputs = keras.Input(image)
        before = last = normalized(inputs, 3 * channels, 3)
        filters = channels
        for cell in range(cells):
            reduces = cell in (cells // 3, 2 * cells // 3)
            filters *= 2 if reduces else 1
            genes = genotype.reduce if reduces else genotype.normal
            ends = genotype.reduce_ends if reduces else genotype.normal_ends
            if before.shape[1] == last.shape[1]:
                older = normalized(layers.ReLU()(before), filters)
            else:
                older = halved(before, filters)
            values = [older, normalized(layers.ReLU()(last), filters)]
            for pair in zip(genes[::2], genes[1::2], strict=True):
                added = [
                    operation(name, values[source], filters, 2 if reduces and source < 2 else 1)
                    for name, source in pair
                ]
                values.append(layers.Add()(added))  # two operations make a value
            before, last = last, layers.Concatenate()([values[end] for end in ends])
        x = layers.GlobalAveragePooling2D()(last)
        return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))

    return build


_PHOTO, _LARGE_PHOTO, _CIFAR = (224, 224, 3), (299, 299, 3), (32, 32, 3)

NETWORKS = {
    network.name: network
    for network in (
        Network("U-Net", (*_SCENE, 3), _unet),
        Network("FCN8", (*_SCENE, 3), _fcn8),
        Network("SegNet", (*_SCENE, 3), _segnet),
        Network("AlexNet", _PHOTO, _alexnet),
        Network("VGG11", _PHOTO, _vgg(1, 1, 2, 2, 2)),
        Network("VGG13", _PHOTO, _vgg(2, 2, 2, 2, 2)),
        Network("ResNet18", _PHOTO, _resnet(2, 2, 2, 2)),
        Network("ResNet34", _PHOTO, _resnet(3, 4, 6, 3)),
        Network("DenseNet161", _PHOTO, _densenet161),
        Network("NASNet-CIFAR", _CIFAR, _searched(_NASNET)),
        Network("AmoebaNet-CIFAR", _CIFAR, _searched(_AMOEBANET)),
        Network("DARTS-CIFAR", _CIFAR, _searched(_DARTS)),
        Network("InceptionV3", _LARGE_PHOTO, _application("InceptionV3")),
        *(
            Network(name, _PHOTO, _application(name))
            for name in (
                "VGG16 VGG19 ResNet50 ResNet101 ResNet152 MobileNet "
                "DenseNet121 DenseNet169 DenseNet201"
            ).split()
        ),
    )
}
"""Networks by name."""
