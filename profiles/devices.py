"""What devices can do at best, with the source of every figure.

Peaks are dense (no structured sparsity).  Memory is the datasheet's gigabytes
taken as 10^9 bytes; what a driver leaves of them differs a little.
The CPU at hand has no entry: ``remat.profile.measure_device`` measures it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_GPU_LAUNCH_SECONDS = 5e-6
_LAUNCH_SOURCE = "launch overhead assumed: 5 microseconds a kernel, not measured"


class UnknownDeviceError(ValueError):
    """No specification goes by that name; the message lists those that exist."""


@dataclass(frozen=True)
class DeviceSpec:
    """The best that a device can do.

    Attributes:
      name: as a user types it, for instance "h200".
      matrix_flops: peak FLOP/s of matrix products and convolutions by dtype
        (on GPUs float32 means TensorFloat-32 where there is such a thing,
        since TensorFlow uses it by default).
      vector_flops: peak FLOP/s of everything else by dtype.
      bandwidth: bytes per second between the device and its memory.
      memory: bytes of its memory; None if unknown.
      launch_seconds: least seconds that any operation takes.
      source: where the figures come from.
    """

    name: str
    matrix_flops: Mapping[str, float] = field(hash=False)
    vector_flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int | None
    launch_seconds: float
    source: str

    def peak_flops(self, dtype: str, matrix: bool) -> float:
        """FLOP/s for ``dtype``; one that is not listed counts as float32 vectors."""
        vector = self.vector_flops.get(dtype, self.vector_flops["float32"])
        return self.matrix_flops.get(dtype, vector) if matrix else vector


def find_device(name: str) -> DeviceSpec:
    """The specification of a device, by our name or by the driver's.

    A product that only shares the name (a laptop's card, a slice of a card) has none.

    >>> find_device("Tesla V100-SXM2-16GB").name, find_device("H200").name
    ('v100-16gb', 'h200')

    Raises:
      UnknownDeviceError: listing the known names.
    """
    words = set(_words(name))
    for spec in DEVICES:
        own = _words(spec.name)
        more = words - {*own, *_SAME_FIGURES.get(spec.name, ())}
        if words.issuperset(own) and all(map(_SAYS_NOTHING.fullmatch, more)):
            return spec
    known = ", ".join(spec.name for spec in DEVICES)
    raise UnknownDeviceError(f"no specification of a device {name!r}; known are {known}")


_SAYS_NOTHING = re.compile(r"nvidia|tesla|geforce|gpu|sxm\d*|hbm\d*e?")
"""Words beside a product's own; any other may make a name another product's, or a slice's."""
_SAME_FIGURES: Mapping[str, tuple[str, ...]] = {
    "a100-40gb": ("pcie",),
    "h100": ("80gb",),
    "h200": ("141gb",),
}
"""Words that drivers add for what has the figures that are listed."""


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _gpu(
    name: str,
    *,
    float64: float,
    float32: float,
    tensor32: float,
    tensor16: float,
    tensor64: float | None = None,
    bfloat16: bool = True,
    bandwidth: float,
    gigabytes: int,
    source: str,
) -> DeviceSpec:
    """A GPU from the figures of a datasheet: teraFLOP/s, GB/s and GB."""
    tera = 1e12
    matrix = {
        "float32": tensor32 * tera,
        "float16": tensor16 * tera,
        "float64": (tensor64 or float64) * tera,
    }
    if bfloat16:
        matrix["bfloat16"] = tensor16 * tera
    return DeviceSpec(
        name=name,
        matrix_flops=matrix,
        vector_flops={"float32": float32 * tera, "float64": float64 * tera},
        bandwidth=bandwidth * 1e9,
        memory=gigabytes * 10**9,
        launch_seconds=_GPU_LAUNCH_SECONDS,
        source=f"{source}; {_LAUNCH_SOURCE}",
    )


_V100 = "NVIDIA V100 datasheet (January 2020), SXM2"
_A100 = "NVIDIA A100 datasheet (2021), SXM4"
_T4 = "NVIDIA T4 datasheet (2019); float64 is 1/32 of float32 (Turing white paper)"
_L4 = "NVIDIA L4 datasheet (2023), half of the figures with sparsity; float64 is 1/64 of float32"
_4090 = "NVIDIA Ada GPU architecture white paper (2022), 16-bit with float32 accumulation"

_a100 = functools.partial(
    _gpu, float64=9.7, float32=19.5, tensor32=156, tensor16=312, tensor64=19.5
)

DEVICES: tuple[DeviceSpec, ...] = (
    _gpu(
        "v100-16gb",
        float64=7.8,
        float32=15.7,
        tensor32=15.7,
        tensor16=125,
        bfloat16=False,
        bandwidth=900,
        gigabytes=16,
        source=_V100,
    ),
    _gpu(
        "v100-32gb",
        float64=7.8,
        float32=15.7,
        tensor32=15.7,
        tensor16=125,
        bfloat16=False,
        bandwidth=900,
        gigabytes=32,
        source=_V100,
    ),
    _gpu(
        "t4",
        float64=0.25,
        float32=8.1,
        tensor32=8.1,
        tensor16=65,
        bfloat16=False,
        bandwidth=320,
        gigabytes=16,
        source=_T4,
    ),
    _a100("a100-40gb", bandwidth=1555, gigabytes=40, source=_A100),
    _a100("a100-80gb", bandwidth=2039, gigabytes=80, source=_A100),
    _a100(
        "a100-80gb-pcie",
        bandwidth=1935,
        gigabytes=80,
        source="NVIDIA A100 datasheet (2021), PCIe",
    ),
    _gpu(
        "l4",
        float64=0.47,
        float32=30.3,
        tensor32=60,
        tensor16=121,
        bandwidth=300,
        gigabytes=24,
        source=_L4,
    ),
    _gpu(
        "rtx-4090",
        float64=1.3,
        float32=82.6,
        tensor32=82.6,
        tensor16=165.2,
        bandwidth=1008,
        gigabytes=24,
        source=_4090,
    ),
    _gpu(
        "h100",
        float64=34,
        float32=67,
        tensor32=494.7,
        tensor16=989.4,
        tensor64=67,
        bandwidth=3350,
        gigabytes=80,
        source="NVIDIA H100 datasheet (2023), SXM5, half of the figures with sparsity",
    ),
    _gpu(
        "h200",
        float64=34,
        float32=67,
        tensor32=494.7,
        tensor16=989.4,
        tensor64=67,
        bandwidth=4800,
        gigabytes=141,
        source="NVIDIA H200 datasheet (2024), SXM5, half of the figures with sparsity",
    ),
    _gpu(
        "b200",
        float64=40,
        float32=80,
        tensor32=1100,
        tensor16=2250,
        bandwidth=8000,
        gigabytes=180,
        source="NVIDIA Blackwell architecture brief (2024), HGX B200; memory of DGX B200 datasheet",
    ),
)
