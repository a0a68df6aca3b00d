"""Signatures, tables of costs, device specifications, the roofline and prices (no TensorFlow)."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gzip
import itertools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from remat.profiles import price, roofline
from remat.profiles.devices import DEVICES, UnknownDeviceError, find_device
from remat.profiles.signature import OpSignature, SignatureError, TensorType
from remat.profiles.table import Row, Table, TableError, append_rows, load_table, save_table

F32 = "float32"


def signature(op: str, inputs: list[tuple], outputs: list[tuple], **attrs: str) -> OpSignature:
    return OpSignature(
        op,
        tuple(TensorType(*tensor) for tensor in inputs),
        tuple(TensorType(*tensor) for tensor in outputs),
        tuple(sorted(attrs.items())),
    )


def matmul(m: int, k: int, n: int, **attrs: str) -> OpSignature:
    return signature("MatMul", [(F32, (m, k)), (F32, (k, n))], [(F32, (m, n))], T=F32, **attrs)


def relu(*shape: int) -> OpSignature:
    return signature("Relu", [(F32, shape)], [(F32, shape)], T=F32)


def row(of: OpSignature, seconds: float = 1e-3, **changes: object) -> Row:
    fields: dict = {
        "signature": of,
        "seconds": seconds,
        "spread": 0.01,
        "repeats": 10,
        "output_bytes": of.output_bytes,
        "workspace_bytes": None,
        "device": "Test CPU",
        "driver": "none",
        "tensorflow": "2.21.0",
        "date": "2026-01-01",
        "clock": "test",
    }
    return Row(**{**fields, **changes})


def test_importing_profiles_loads_neither_tensorflow_nor_pandas():
    code = (
        "import sys, remat.profiles.price; "
        "assert not {'tensorflow', 'pandas', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestSignature:
    def test_text_is_read_back(self):
        original = signature(
            "Sum",
            [(F32, (2, 3)), ("int32", (2,), (0, -1)), ("int32", (), (3,)), ("int32", (0,), ())],
            [(F32, ())],
            T=F32,
            equation="a;b={c}%,de->f",
            list="",
        )
        assert OpSignature.from_text(original.text) == original

    def test_a_constant_that_decides_the_computation_is_part_of_the_key(self):
        rows = signature("Sum", [(F32, (8, 8)), ("int32", (1,), (0,))], [(F32, (8,))])
        columns = signature("Sum", [(F32, (8, 8)), ("int32", (1,), (1,))], [(F32, (8,))])
        assert rows.text != columns.text

    @pytest.mark.parametrize(
        "text", ["", "Relu", "Relu(float32[2]) -> float32[2]", "Relu(float32[2x]x) -> ()", "a() b"]
    )
    def test_other_text_is_refused(self, text: str):
        with pytest.raises(SignatureError, match="not "):
            OpSignature.from_text(text)

    def test_bytes_count_variables_behind_handles(self):
        update = signature(
            "AssignAddVariableOp",
            [("resource", (10, 10)), ("float16", (10, 10))],
            [],
            dtype="float16",
        )
        assert update.input_bytes == 2 * 10 * 10 * 2


COUNTED = {
    # op, inputs, outputs, attributes -> FLOPs
    "a square and a sum for each of up to 5 channels, and four an element": (
        signature("LRN", [(F32, (2, 4, 4, 8))], [(F32, (2, 4, 4, 8))], depth_radius="2"),
        32 * (2 * (3 + 4 + 4 * 5 + 4 + 3) + 4 * 8),
    ),
    "six a pair and five an element, of fewer channels than are in reach": (
        signature("LRNGrad", [(F32, (2, 4, 4, 3))] * 3, [(F32, (2, 4, 4, 3))]),
        32 * (6 * 9 + 5 * 3),
    ),
    "twice as high: 1 row at the ends, else 2; as wide: 2 columns there, else 3": (
        signature(
            "ScaleAndTranslate", [(F32, (3, 4, 6, 2)), ("int32", (2,)), (F32, (2,)), (F32, (2,))],
            [(F32, (3, 8, 6, 2))], kernel_type="triangle",
        ),
        2 * 6 * ((1 + 6 * 2 + 1) * 6 + (2 + 4 * 3 + 2) * 8),
    ),
    "the same pairs backwards, rows first": (
        signature(
            "ScaleAndTranslateGrad",
            [(F32, (3, 8, 6, 2)), (F32, (3, 4, 6, 2)), (F32, (2,)), (F32, (2,))],
            [(F32, (3, 4, 6, 2))], kernel_type="triangle",
        ),
        2 * 6 * ((1 + 6 * 2 + 1) * 6 + (2 + 4 * 3 + 2) * 4),
    ),
    "ten for the image's gradient": (
        signature(
            "CropAndResizeGradImage",
            [(F32, (5, 4, 4, 3)), (F32, (5, 4)), ("int32", (5,)), ("int32", (4,))],
            [(F32, (1, 9, 9, 3))], method="bilinear",
        ),
        10 * 240,
    ),
    "twenty for the boxes'": (
        signature(
            "CropAndResizeGradBoxes",
            [(F32, (5, 4, 4, 3)), (F32, (1, 9, 9, 3)), (F32, (5, 4)), ("int32", (5,))],
            [(F32, (5, 4))], method="bilinear",
        ),
        20 * 240,
    ),
    "5 n log2 n": (
        signature("FFT", [("complex64", (3, 1024))], [("complex64", (3, 1024))]),
        3 * 5 * 1024 * 10,
    ),
    "half of that": (
        signature("RFFT", [(F32, (3, 1024)), ("int32", (1,))], [("complex64", (3, 513))]),
        3 * 5 * 1024 * 10 // 2,
    ),
    "as many as fft_length says": (
        signature("RFFT", [(F32, (4, 256)), ("int32", (1,), (64,))], [("complex64", (4, 33))]),
        4 * 5 * 64 * 6 // 2,
    ),
    "a label that one operand alone has is summed before": (
        signature(
            "Einsum", [(F32, (11, 50, 7)), (F32, (7, 13))], [(F32, (11, 13))],
            equation="abc,cd->ad",
        ),
        11 * 49 * 7 + 2 * 11 * 7 * 13,
    ),
    "a product an element where nothing is added up": (
        signature("Einsum", [(F32, (5,)), (F32, (6,))], [(F32, (5, 6))], equation="i,j->ij"), 30,
    ),
    "a window as long as a second of sound, at once": (
        signature(
            "Conv2D", [(F32, (4, 1, 160000, 1)), (F32, (1, 1024, 1, 16))],
            [(F32, (4, 1, 160000, 16))], strides="1,1,1,1", padding="SAME",
        ),
        2 * 4 * 16 * (160000 * 1024 - 511 * 512 // 2 - 512 * 513 // 2),
    ),
    "a product and a function an element": (
        signature("_MklSwish", [(F32, (8,))], [(F32, (8,))]), 16,
    ),
    "n^3 / 3": (
        signature("Cholesky", [(F32, (2, 30, 30))], [(F32, (2, 30, 30))]), 2 * 9000,
    ),
    "a sum and a maximum a tap": (
        signature(
            "Dilation2D", [(F32, (1, 6, 6, 2)), (F32, (3, 3, 2))], [(F32, (1, 4, 4, 2))],
            strides="1,1,1,1", rates="1,1,1,1", padding="VALID",
        ),
        2 * 16 * 9 * 2,
    ),
    "bilinear": (
        signature(
            "CropAndResize",
            [(F32, (1, 9, 9, 3)), (F32, (5, 4)), ("int32", (5,)), ("int32", (2,))],
            [(F32, (5, 4, 4, 3))], method="bilinear",
        ),
        9 * 240,
    ),
    "one sum an element": (
        signature("Cumsum", [(F32, (7, 9)), ("int32", ())], [(F32, (7, 9))]), 63,
    ),
    "both of two in a row": (
        signature("_UnaryOpsComposition", [(F32, (8,))], [(F32, (8,))], op_names="Neg,Exp"), 16,
    ),
    "four products and four sums, at the rate of their parts": (
        signature(
            "MatMul", [("complex128", (2, 3)), ("complex128", (3, 4))],
            [("complex128", (2, 4))],
        ),
        8 * 24,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("each", "flops"), COUNTED.values(), ids=COUNTED)
def test_operations_counted(each: OpSignature, flops: int):
    assert roofline.work(each).flops == flops


@pytest.mark.parametrize(
    ("boxes", "method", "moved"),
    [
        (1, "bilinear", 4 * (48 + 192)),  # four pixels of the image for each of the crop
        (1, "nearest", 4 * (48 + 48)),
        (5, "bilinear", 4 * (240 + 243)),  # all of the image
    ],
)
def test_crops_read_no_more_than_the_image(boxes: int, method: str, moved: int):
    crop = signature(
        "CropAndResize",
        [(F32, (1, 9, 9, 3)), (F32, (boxes, 4)), ("int32", (boxes,)), ("int32", (2,))],
        [(F32, (boxes, 4, 4, 3))],
        method=method,
    )
    assert roofline.work(crop).bytes == moved


def test_what_nobody_has_counted_is_said_to_be_unknown():
    svd = signature("Svd", [(F32, (512, 512))], [(F32, (512,))])
    assert roofline.work(svd) == roofline.Work(roofline.UNKNOWN, 0, 4 * (512 * 512 + 512))
    assert price.load_pricer("h200").price(svd).kind == "unknown"


def test_complex_numbers_are_as_fast_as_their_parts():
    def seconds(dtype: str) -> float:
        square = (dtype, (4096, 4096))
        product = signature("MatMul", [square, square], [square])
        return price.load_pricer("h200").price(product).seconds

    assert seconds("complex128") == pytest.approx(4 * seconds("float64"), rel=0.01)


class TestTable:
    def test_a_saved_table_is_read_back(self, tmp_path: Path):
        table = Table((row(relu(4, 4)), row(matmul(2, 3, 4), workspace_bytes=77)))
        save_table(table, tmp_path / "t.csv")
        assert load_table(tmp_path / "t.csv") == table

    def test_appending_replaces_what_was_measured_before(self, tmp_path: Path):
        path = tmp_path / "deep" / "t.csv"
        append_rows(path, [row(relu(4), 1.0), row(relu(5), 2.0)])
        append_rows(path, [row(relu(5), 3.0)])
        table = load_table(path)
        assert {text: r.seconds for text, r in table.items()} == {
            relu(4).text: 1.0,
            relu(5).text: 3.0,
        }
        assert {p.name for p in path.parent.iterdir()} == {"t.csv", ".t.csv.lock"}

    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("seconds", "-1.0", "seconds is -1.0"),
            ("seconds", "nan", "seconds is nan"),
            ("seconds", "inf", "seconds is inf"),
            ("seconds", "", "seconds is ''"),
            ("seconds", "1_0", "seconds is '1_0'"),
            ("seconds", "\uff11", "seconds is '\uff11'"),
            ("tensorflow", "", "tensorflow is empty"),
            ("spread", "fast", "spread is 'fast'"),
            ("repeats", "0", "repeats is 0"),
            ("workspace_bytes", "-4", "workspace_bytes is -4"),
            ("output_bytes", "1", "output_bytes is 1"),
            ("op", "Tanh", "'Tanh'"),
            ("signature", "Relu", "not the signature"),
            ("signature", "Relu(float32[2xx3]) -> (float32[6])", "not a tensor"),
            ("signature", "Relu(float32[-5]) -> (float32[5])", "not a tensor"),
            ("signature", "Relu(float33[5]) -> (float33[5])", "has no type 'float33'"),
        ],
    )
    def test_a_damaged_figure_is_refused_with_its_row(
        self, tmp_path: Path, column: str, value: str, message: str
    ):
        import pandas as pd

        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)), row(relu(5)))), path)
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        frame.loc[1, column] = value
        frame.to_csv(path, index=False)
        with pytest.raises(TableError, match=message) as error:
            load_table(path)
        assert f"{path}, row 3" in str(error.value)

    @pytest.mark.parametrize(
        "of",
        [
            signature("Sum", [], []),
            signature("Conv2D", [(F32, (8,))], [(F32, (8,))]),
            signature("MaxPool", [(F32, (1, 4, 4, 1))], [(F32, (1, 2, 2, 1))]),
            signature("MatMul", [(F32, ()), (F32, ())], [(F32, ())]),
        ],
        ids=lambda of: of.op,
    )
    def test_an_operation_that_cannot_be_is_refused_with_its_row(
        self, tmp_path: Path, of: OpSignature
    ):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)), row(of))), path)
        with pytest.raises(TableError, match=f"row 3: not what {of.op} takes"):
            load_table(path)

    @pytest.mark.parametrize("seconds", [0.0, 1e-12])
    def test_what_no_device_can_do_is_refused_with_its_row(self, tmp_path: Path, seconds: float):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)), row(matmul(1024, 1024, 1024), seconds))), path)
        with pytest.raises(TableError, match=r"row 3: .*no device is so fast"):
            load_table(path)

    def test_rows_are_numbered_as_the_file_s_lines_are(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)), row(relu(5)))), path)
        header, first, second = path.read_text().splitlines()
        path.write_text("\n".join([header, first, "", "", second, ""]))
        assert len(load_table(path)) == 2
        path.write_text("\n".join([header, first, "", "", second.replace("0.01", "much")]))
        with pytest.raises(TableError, match="row 5: spread is 'much'"):
            load_table(path)

    def test_a_column_that_is_there_twice_is_refused(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)),)), path)
        header, values = path.read_text().splitlines()
        path.write_text(f"{header},seconds\n{values},1.0\n")
        with pytest.raises(TableError, match="more than one column 'seconds'"):
            load_table(path)

    @pytest.mark.parametrize(
        "content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00\x01", b'signature,op\n"Relu(,\n', b"{}"]
    )
    def test_a_foreign_file_is_refused(self, tmp_path: Path, content: bytes):
        path = tmp_path / "t.csv"
        path.write_bytes(content)
        with pytest.raises(TableError, match=r"t\.csv"):
            load_table(path)

    def test_a_truncated_table_is_refused(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4)), row(relu(5)))), path)
        path.write_bytes(path.read_bytes()[:-20])
        # What is cut off is the clock's description; cut further, a figure is lost.
        path.write_bytes(path.read_bytes()[:-45])
        with pytest.raises(TableError, match="row 3"):
            load_table(path)

    def test_rows_of_two_devices_do_not_mix(self, tmp_path: Path):
        save_table(Table((row(relu(4)),)), tmp_path / "t.csv")
        with pytest.raises(TableError, match="one table a device"):
            append_rows(tmp_path / "t.csv", [row(relu(5), device="Other")])

    def test_two_processes_may_append_at_once(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        program = (
            "import sys; from pathlib import Path; sys.path.insert(0, 'tests')\n"
            "from test_profiles import append_rows, relu, row\n"
            "for size in range(40): append_rows(sys.argv[1], [row(relu(size + int(sys.argv[2])))])"
        )
        both = [
            subprocess.Popen([sys.executable, "-c", program, path, first]) for first in ("1", "101")
        ]
        assert [each.wait(60) for each in both] == [0, 0]
        assert len(load_table(path)) == 80

    def test_a_process_that_was_killed_locks_nobody_out(self, tmp_path: Path):
        program = (
            "import os, sys; sys.path.insert(0, 'tests')\n"
            "from test_profiles import append_rows, relu, row\n"
            "from remat.profiles import table\n"
            "table.save_table = lambda *_: os.kill(os.getpid(), 9)\n"
            "append_rows(sys.argv[1], [row(relu(4))])"
        )
        path = tmp_path / "t.csv"
        killed = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=60)
        assert killed.returncode == -9
        assert len(append_rows(path, [row(relu(5))])) == 1

    def test_without_locks_rows_are_added_and_the_risk_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def flock(*_: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.warns(UserWarning, match=r"t\.csv: cannot be locked \(No locks available\)"):
            append_rows(tmp_path / "t.csv", [row(relu(4))])
        assert len(load_table(tmp_path / "t.csv")) == 1

    def test_rows_that_contradict_each_other_are_told(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        noisy = row(relu(6), 1e-3, spread=1.0)
        first = [row(relu(4), 1e-3), row(relu(5), 1e-3), noisy, row(relu(7), 1e-6)]
        second = [row(relu(4), 1.0), row(relu(5), 1.5e-3), row(relu(6), 2.5e-3, spread=0.5)]
        second.append(row(relu(7), 9e-6))  # noise of a launch
        save_table(Table(tuple(first)), path)
        text = path.read_text()
        save_table(Table(tuple(second)), path)
        path.write_text(text + "".join(path.read_text().splitlines(keepends=True)[1:]))
        with pytest.warns(UserWarning, match=r"contradictory rows") as told:
            table = load_table(path)
        assert table[relu(4).text].seconds == 1.0
        (warning,) = told
        assert f"{path}: " in str(warning.message)
        assert "1 s in row 6 and 0.001 s in row 2 for Relu(float32[4])" in str(warning.message)
        assert "float32[5]" not in str(warning.message)
        with pytest.warns(UserWarning, match=r"0\.001 s in the new row and 1 s in the table"):
            append_rows(path, first[:1])

    def test_rows_of_two_drivers_are_told(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        append_rows(path, [row(relu(4), driver="1")])
        with pytest.warns(UserWarning, match=r"rows of 2 drivers \(1; 2\)"):
            append_rows(path, [row(relu(5), driver="2")])
        for _ in range(2):  # from the file, and from what was kept of it
            with pytest.warns(UserWarning, match=r"rows of 2 drivers \(1; 2\)"):
                load_table(path)

    @pytest.mark.parametrize("name", ["t.csv.gz", "t.csv.zip", "t.csv.xz"])
    def test_a_table_is_text_whatever_its_name(self, tmp_path: Path, name: str):
        save_table(Table((row(relu(4)),)), tmp_path / name)
        assert len(load_table(tmp_path / name)) == 1
        (tmp_path / name).write_bytes(gzip.compress(b"signature"))
        with pytest.raises(TableError, match="not a CSV table"):
            load_table(tmp_path / name)

    def test_another_tensorflow_is_warned_of(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4), tensorflow="1.0.0"), row(relu(5)))), path)
        monkeypatch.setattr(metadata, "version", lambda _: "2.21.0")
        with pytest.warns(UserWarning, match=r"1 of 2 rows .* with TensorFlow 1\.0\.0, and 2\.21"):
            load_table(path)

        def missing(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(metadata, "version", missing)
        path.write_text(path.read_text() + "\n")
        with pytest.warns(UserWarning, match=r"rows of 2 versions of TensorFlow \(1\.0\.0, 2\.21"):
            load_table(path)

    def test_a_file_that_changed_is_read_again(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        save_table(Table((row(relu(4), 1e-3),)), path)
        before = load_table(path)
        assert load_table(path) is before
        save_table(Table((row(relu(4), 2e-3),)), path)
        assert load_table(path)[relu(4).text].seconds == 2e-3

    def test_the_cache_follows_the_environment(self, monkeypatch: pytest.MonkeyPatch):
        from remat.profiles.table import cache_path

        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        monkeypatch.delenv("REMAT_CACHE", raising=False)
        assert cache_path("A B", "d 1", "2.21").as_posix() == "/x/remat/a-b-d-1-tf-2.21.csv"
        monkeypatch.setenv("REMAT_CACHE", "/y")
        assert cache_path("A B", "d 1", "2.21").parent.as_posix() == "/y"


class TestDevices:
    @pytest.mark.parametrize(
        ("driver_name", "name"),
        [
            ("Tesla V100-SXM2-32GB", "v100-32gb"),
            ("Tesla T4", "t4"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
            ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
            ("NVIDIA L4", "l4"),
            ("NVIDIA GeForce RTX 4090", "rtx-4090"),
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA B200", "b200"),
        ],
    )
    def test_the_drivers_name_is_understood(self, driver_name: str, name: str):
        assert find_device(driver_name).name == name

    @pytest.mark.parametrize(
        "name",
        [
            "NVIDIA L40S",
            "v100",
            "cpu",
            "",
            # These share a name with what is listed, and little else.
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
            "Tesla V100-PCIE-16GB",
            "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            "GRID T4-16Q",
            "NVIDIA L4-2Q",
            "NVIDIA H100-1-10C",
            "Tesla V100-FHHL-16GB",
            "not-t4",
            "h100 h200",
            "h200.json",
        ],
    )
    def test_an_unknown_device_lists_the_known(self, name: str):
        with pytest.raises(UnknownDeviceError, match="h200"):
            find_device(name)

    def test_every_specification_has_a_source_and_sane_figures(self):
        for spec in DEVICES:
            assert "launch overhead" in spec.source
            assert spec.peak_flops("float16", matrix=True) > spec.peak_flops(F32, matrix=False)
            assert spec.peak_flops("float64", matrix=False) < spec.peak_flops(F32, matrix=False)
            assert spec.memory is not None
            assert 10e9 < spec.memory < spec.bandwidth


def naive_convolution_products(
    image: tuple[int, ...],
    kernel: tuple[int, ...],
    result: tuple[int, ...],
    stride: int,
    dilation: int,
    before: int,
) -> int:
    """Multiplications of a 2D convolution, counted one by one over positions and taps."""
    count = 0
    for y, x, i, j in itertools.product(
        range(result[1]), range(result[2]), range(kernel[0]), range(kernel[1])
    ):
        row_index = y * stride - before + i * dilation
        column = x * stride - before + j * dilation
        if 0 <= row_index < image[1] and 0 <= column < image[2]:
            count += image[0] * kernel[2] * kernel[3]
    return count


class TestFlops:
    @pytest.mark.parametrize(
        ("size", "window", "stride", "dilation", "padding", "out", "before"),
        [
            (8, 3, 1, 1, "SAME", 8, 1),
            (9, 3, 2, 1, "SAME", 5, 1),
            (8, 3, 2, 1, "SAME", 4, 0),
            (8, 3, 1, 1, "VALID", 6, 0),
            (9, 3, 1, 2, "SAME", 9, 2),
            (7, 1, 2, 1, "VALID", 4, 0),
        ],
    )
    def test_convolutions_and_their_gradients_count_what_a_loop_counts(
        self,
        size: int,
        window: int,
        stride: int,
        dilation: int,
        padding: str,
        out: int,
        before: int,
    ):
        image, kernel, result = (2, size, size, 3), (window, window, 3, 5), (2, out, out, 5)
        attrs = {
            "padding": padding,
            "data_format": "NHWC",
            "strides": f"1,{stride},{stride},1",
            "dilations": f"1,{dilation},{dilation},1",
        }
        products = naive_convolution_products(image, kernel, result, stride, dilation, before)
        kernel_size = ("int32", (4,), kernel)
        image_size = ("int32", (4,), image)
        for each in (
            signature("Conv2D", [(F32, image), (F32, kernel)], [(F32, result)], **attrs),
            signature(
                "Conv2DBackpropInput",
                [image_size, (F32, kernel), (F32, result)],
                [(F32, image)],
                **attrs,
            ),
            signature(
                "Conv2DBackpropFilter",
                [(F32, image), kernel_size, (F32, result)],
                [(F32, kernel)],
                **attrs,
            ),
        ):
            assert roofline.work(each).flops == 2 * products
            assert roofline.work(each).matrix

    def test_convolution_by_hand(self):
        # 4 x 4 outputs, 3 x 3 window, no padding: 2 * 16 * 9 * 3 * 8.
        conv = signature(
            "Conv2D",
            [(F32, (1, 6, 6, 3)), (F32, (3, 3, 3, 8))],
            [(F32, (1, 4, 4, 8))],
            padding="VALID",
            strides="1,1,1,1",
        )
        assert roofline.work(conv).flops == 2 * 16 * 9 * 3 * 8
        assert roofline.work(conv).bytes == 4 * (108 + 216 + 128)
        fused = signature(
            "_FusedConv2D",
            [(F32, (1, 6, 6, 3)), (F32, (3, 3, 3, 8)), (F32, (8,))],
            [(F32, (1, 4, 4, 8))],
            padding="VALID",
            strides="1,1,1,1",
            fused_ops="BiasAdd,Relu",
        )
        assert roofline.work(fused).flops == 2 * 16 * 9 * 3 * 8 + 2 * 128

    def test_channels_first_is_the_same_work(self):
        last = signature(
            "Conv2D",
            [(F32, (2, 9, 9, 3)), (F32, (3, 3, 3, 8))],
            [(F32, (2, 5, 5, 8))],
            padding="SAME",
            strides="1,2,2,1",
            data_format="NHWC",
        )
        first = signature(
            "Conv2D",
            [(F32, (2, 3, 9, 9)), (F32, (3, 3, 3, 8))],
            [(F32, (2, 8, 5, 5))],
            padding="SAME",
            strides="1,1,2,2",
            data_format="NCHW",
        )
        assert roofline.work(last).flops == roofline.work(first).flops

    def test_grouped_depthwise_and_3d_convolutions_by_hand(self):
        attrs = {"padding": "VALID", "strides": "1,1,1,1"}
        grouped = signature(
            "Conv2D", [(F32, (1, 4, 4, 8)), (F32, (1, 1, 2, 8))], [(F32, (1, 4, 4, 8))], **attrs
        )
        assert roofline.work(grouped).flops == 2 * 16 * 2 * 8
        depthwise = signature(
            "DepthwiseConv2dNative",
            [(F32, (1, 4, 4, 8)), (F32, (3, 3, 8, 2))],
            [(F32, (1, 2, 2, 16))],
            **attrs,
        )
        assert roofline.work(depthwise).flops == 2 * 4 * 9 * 8 * 2
        assert not roofline.work(depthwise).matrix
        volume = signature(
            "Conv3D",
            [(F32, (1, 4, 4, 4, 2)), (F32, (2, 2, 2, 2, 3))],
            [(F32, (1, 3, 3, 3, 3))],
            padding="VALID",
            strides="1,1,1,1,1",
            data_format="NDHWC",
        )
        assert roofline.work(volume).flops == 2 * 27 * 8 * 2 * 3

    def test_products_by_hand(self):
        assert roofline.work(matmul(2, 3, 4)).flops == 2 * 2 * 3 * 4
        transposed = signature(
            "MatMul", [(F32, (3, 2)), (F32, (3, 4))], [(F32, (2, 4))], transpose_a="true"
        )
        assert roofline.work(transposed).flops == 2 * 2 * 3 * 4
        batched = signature(
            "BatchMatMulV2",
            [(F32, (5, 6, 2, 3)), (F32, (5, 6, 3, 4))],
            [(F32, (5, 6, 2, 4))],
            adj_x="false",
        )
        assert roofline.work(batched).flops == 2 * 30 * 2 * 3 * 4
        einsum = signature(
            "Einsum",
            [(F32, (2, 3, 4)), (F32, (2, 5, 4))],
            [(F32, (2, 3, 5))],
            equation="bqd,bkd->bqk",
        )
        assert roofline.work(einsum).flops == 2 * 2 * 3 * 4 * 5
        ellipsis = signature(
            "Einsum",
            [(F32, (7, 2, 3)), (F32, (3, 5))],
            [(F32, (7, 2, 5))],
            equation="...c,cd->...d",
        )
        assert roofline.work(ellipsis).flops == 2 * 7 * 2 * 3 * 5
        broadcast = signature(
            "Einsum",
            [(F32, (7, 1, 2, 3)), (F32, (5, 3, 4))],
            [(F32, (7, 5, 2, 4))],
            equation="...ij,...jk->...ik",
        )
        assert roofline.work(broadcast).flops == 2 * 35 * 2 * 3 * 4
        complex_product = signature(
            "MatMul", [("complex64", (2, 3)), ("complex64", (3, 4))], [("complex64", (2, 4))]
        )
        assert roofline.work(complex_product).flops == 8 * 2 * 3 * 4
        lstm = signature(
            "CudnnRNNV3",
            [(F32, (10, 4, 8)), (F32, (1, 4, 8)), (F32, (1, 4, 8)), (F32, (576,)), ("int32", (4,))],
            [(F32, (10, 4, 8))],
        )
        assert roofline.work(lstm).flops == 2 * 10 * 4 * 576

    def test_the_rest_by_hand(self):
        assert roofline.work(relu(4, 5)).flops == 20
        pool = signature(
            "MaxPool",
            [(F32, (2, 4, 4, 3))],
            [(F32, (2, 2, 2, 3))],
            ksize="1,2,2,1",
            strides="1,2,2,1",
            padding="VALID",
        )
        assert roofline.work(pool).flops == 2 * 16 * 3
        total = signature("Sum", [(F32, (4, 5)), ("int32", (1,), (0,))], [(F32, (5,))])
        assert roofline.work(total).flops == 15
        mean = signature("Mean", [(F32, (4, 5)), ("int32", (1,), (0,))], [(F32, (5,))])
        assert roofline.work(mean).flops == 20
        norm = signature("FusedBatchNormV3", [(F32, (2, 4, 4, 3))], [(F32, (2, 4, 4, 3))])
        assert roofline.work(norm).flops == 7 * 96
        bilinear = signature("ResizeBilinear", [(F32, (1, 2, 2, 3))], [(F32, (1, 4, 4, 3))])
        assert roofline.work(bilinear).flops == 9 * 48
        embedding = signature(
            "GatherV2",
            [(F32, (10000, 64)), ("int64", (8,)), ("int32", (), (0,))],
            [(F32, (8, 64))],
        )
        assert roofline.work(embedding).bytes == 2 * 8 * 64 * 4 + 8 * 8
        small = signature(
            "GatherV2",
            [(F32, (10, 32)), ("int32", (100000,)), ("int32", (), (0,))],
            [(F32, (100000, 32))],
        )
        assert roofline.work(small).bytes == 4 * (10 * 32 + 100000 * 32 + 100000)
        written = signature(
            "ResourceScatterUpdate",
            [("resource", (900, 32)), ("int32", (160,)), (F32, (160, 32))],
            [],
        )
        assert roofline.work(written).flops == 0
        assert roofline.work(written).bytes == 4 * (2 * 160 * 32 + 160)
        pooled = signature(
            "SparseSegmentMean",
            [(F32, (10000, 64)), ("int32", (8,)), ("int32", (8,))],
            [(F32, (2, 64))],
        )
        assert roofline.work(pooled).bytes == 8 * 64 * 4 + 2 * 8 * 4 + 2 * 64 * 4
        adam = signature(
            "ResourceApplyAdam",
            [("resource", (100,))] * 3 + [(F32, ())] * 6 + [(F32, (100,))],
            [],
            T=F32,
        )
        # Reads variable, two moments, gradient and six scalars; writes the first three.
        assert roofline.work(adam).bytes == 4 * (3 * 100 + 100 + 6 + 3 * 100)
        reshape = signature("Reshape", [(F32, (4, 5)), ("int32", (1,), (20,))], [(F32, (20,))])
        assert roofline.work(reshape).bytes == 0

    def test_seconds_are_the_larger_of_both_roofs_plus_the_launch(self):
        h200 = find_device("h200")
        big = matmul(4096, 4096, 4096)
        assert roofline.seconds(big, h200) == pytest.approx(5e-6 + 2 * 4096**3 / 494.7e12)
        wide = relu(1024, 1024, 64)
        assert roofline.seconds(wide, h200) == pytest.approx(5e-6 + 2 * 4 * 2**26 / 4.8e12)


class TestPricer:
    spec = find_device("t4")

    def measured(self, of: OpSignature, slower: float = 3.0) -> Row:
        net = roofline.seconds(of, self.spec) - self.spec.launch_seconds
        return row(of, self.spec.launch_seconds + slower * net)

    def test_each_source_in_its_turn(self):
        table = Table(tuple(self.measured(matmul(size, 64, 64)) for size in (256, 512, 1024)))
        pricer = price.Pricer(self.spec, table, given={"Tanh": 0.5, matmul(512, 64, 64).text: 2.0})
        assert pricer.price(matmul(512, 64, 64)) == price.Price(2.0, 0, "given")
        tanh = signature("Tanh", [(F32, (4,))], [(F32, (4,))])
        assert pricer.price(tanh).seconds == 0.5
        assert pricer.price(matmul(256, 64, 64)).kind == "measured"
        fitted = pricer.price(matmul(2048, 64, 64))
        assert fitted.kind == "fitted"
        expected = self.measured(matmul(2048, 64, 64)).seconds
        assert fitted.seconds == pytest.approx(expected, rel=0.05)
        other = pricer.price(matmul(300, 70, 90))
        assert other.kind == "roofline"
        expected = self.measured(matmul(300, 70, 90)).seconds
        assert other.seconds == pytest.approx(expected, rel=0.05)

    def test_noise_of_small_or_similar_sizes_does_not_scale(self):
        def seconds(rows: dict[int, float], size: int) -> float:
            table = Table(tuple(row(relu(n, 1024), took) for n, took in rows.items()))
            return price.Pricer(self.spec, table).price(relu(size, 1024)).seconds

        # A row that took nothing has no weight beside those that took something.
        steady = {128: 1e-4, 256: 2e-4}
        assert seconds({64: 0.0, **steady}, 512) == pytest.approx(4e-4, rel=0.05)
        # Larger and yet faster: a mean between the two, and beyond them the slope.
        falling = {800: 1.00e-3, 1000: 0.99e-3}
        assert seconds(falling, 900) == pytest.approx(0.995e-3, rel=0.01)
        assert seconds(falling, 80_000) == pytest.approx(90e-3, rel=0.2)

    def test_a_reduction_over_another_axis_is_not_another_size(self):
        def total(batch: int, axis: int) -> OpSignature:
            return signature(
                "Sum", [(F32, (batch, 1024)), ("int32", (1,), (axis,))], [(F32, (1024,))]
            )

        pricer = price.Pricer(self.spec, Table((row(total(512, 0)),)))
        assert pricer.price(total(1024, 0)).kind == "fitted"
        assert pricer.price(total(1024, 1)).kind == "roofline"

    def test_workspace_follows_the_size(self):
        table = Table((row(matmul(256, 64, 64), workspace_bytes=14_000),))
        pricer = price.Pricer(self.spec, table)
        small = pricer.price(matmul(256, 64, 64)).workspace
        large = pricer.price(matmul(1024, 64, 64)).workspace
        assert small == 14_000
        assert 2 * small < large < 4 * small

    def test_a_bad_row_hardly_moves_the_correction(self):
        sizes = [matmul(size, 64, 96) for size in range(256, 2816, 256)]
        rows = [self.measured(each) for each in sizes]
        rows[3] = dataclasses.replace(rows[3], seconds=10.0)
        correction = roofline.fit_correction(rows, self.spec)
        predicted = roofline.seconds(matmul(700, 64, 96), self.spec, correction)
        assert predicted == pytest.approx(self.measured(matmul(700, 64, 96)).seconds, rel=0.05)

    def test_the_correction_follows_caches(self):
        """Small operations in a cache, large ones beyond it: the speed changes with size."""
        sizes = [relu(2**power) for power in range(16, 28)]
        net = [roofline.seconds(each, self.spec) - self.spec.launch_seconds for each in sizes]
        rows = [
            row(each, self.spec.launch_seconds + 1e-3 * (seconds / 1e-3) ** 1.2)
            for each, seconds in zip(sizes, net, strict=True)
        ]
        correction = roofline.fit_correction(rows[::2] + rows[1::2], self.spec)
        for measured in rows:
            predicted = roofline.seconds(measured.signature, self.spec, correction)
            assert predicted == pytest.approx(measured.seconds, rel=0.05)

    def test_cross_validation_finds_a_consistent_device_predictable(self):
        rows = [self.measured(matmul(size, 64, 96)) for size in range(256, 4096, 256)]
        for validation in price.cross_validate(Table(tuple(rows)), self.spec):
            assert validation.rows == len(rows)
            assert validation.median_error < 0.05
            assert validation.total_ratio == pytest.approx(1.0, rel=0.05)

    def test_coverage_adds_up(self):
        steps = [
            (relu(1), price.Price(1.0, 0, "measured")),
            (matmul(1, 1, 1), price.Price(3.0, 0, "roofline")),
        ]
        found = price.coverage(steps * 2)
        assert found.seconds["measured"] == 2.0
        assert found.operations["roofline"] == 2
        assert "75.0 %  MatMul" in str(found)
        assert "not measured" not in str(found)

    def test_coverage_names_what_is_unknown_and_why_it_was_not_measured(self):
        unknown = [signature(f"Op{n}", [(F32, (n,))], [(F32, (n,))]) for n in range(9)]
        steps = [(each, price.Price(float(n), 0, "unknown")) for n, each in enumerate(unknown)]
        steps.append((relu(4), price.Price(4.0, 0, "measured")))
        reasons = {each.text: "its shape" for each in unknown[:8]} | {relu(4).text: "no more"}
        lines = str(price.coverage(steps, reasons)).splitlines()
        assert lines[1].endswith("90.0 %  Op8, Op7, Op6, Op5 and 5 more")
        assert lines[2] == (
            "not measured: 8 operations, 70.0 % (Op7, Op6, Op5, Op4 and 4 more): its shape"
        )
        assert len(lines) == 3
        alone = {each.text: f"reason {n}" for n, each in enumerate(unknown)}
        lines = str(price.coverage(steps, alone)).splitlines()
        assert lines[2] == "not measured: 1 operation, 20.0 % (Op8): reason 8"
        assert lines[-1] == "not measured: 3 operations, 7.5 % (Op2, Op1, Op0): other reasons"


class TestProfileArgument:
    def test_a_device_by_name(self):
        pricer = price.load_pricer("h200")
        assert pricer.device.name == "h200"
        assert pricer.price(relu(1024, 1024)).seconds > 0

    def test_a_table_of_an_unlisted_device_describes_it(self, tmp_path: Path):
        path = tmp_path / "t.csv"
        save_table(Table((row(matmul(512, 512, 512), 1e-2), row(relu(4096, 4096), 2e-2))), path)
        pricer = price.load_pricer(path)
        assert pricer.device.bandwidth == pytest.approx(2 * 4 * 4096**2 / 2e-2)
        assert pricer.price(matmul(512, 512, 512)) == price.Price(1e-2, 0, "measured")

    def test_a_recorded_table_goes_by_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(price, "_RECORDED", tmp_path)
        save_table(Table((row(relu(4096, 4096), 2e-2),)), tmp_path / "my-cpu.csv")
        save_table(Table((row(relu(8, 8), 3e-6),)), tmp_path / "t4.csv")
        assert price.load_pricer("my-cpu").price(relu(4096, 4096)).kind == "measured"
        assert price.load_pricer("Tesla T4").price(relu(8, 8)).seconds == 3e-6
        with pytest.raises(UnknownDeviceError, match=r"known are .*; recorded: my-cpu, t4"):
            price.load_pricer("another")

    @pytest.mark.parametrize("path", sorted(Path(price.__file__).parent.glob("*.csv")), ids=str)
    @pytest.mark.filterwarnings("ignore:.*measured with TensorFlow")
    def test_what_is_recorded_here_is_usable(self, path: Path):
        pricer = price.load_pricer(path.stem)
        assert len(pricer.table) > 100
        assert pricer.device.launch_seconds < 1e-3
        row = pricer.table.rows[0]
        assert pricer.price(row.signature) == price.Price(
            row.seconds, row.workspace_bytes or 0, "measured"
        )
        for found in price.cross_validate(pricer.table, pricer.device):
            assert 0.5 < found.total_ratio < 2

    def test_a_table_of_few_kinds_prices_the_others(self):
        product, copy = row(matmul(1024, 1024, 1024), 0.02), row(relu(4096, 4096), 0.01)
        half = signature("MatMul", [("bfloat16", (1024, 1024))] * 2, [("bfloat16", (1024, 1024))])
        spec = price.spec_of_rows("card", [product, copy])
        assert price.Pricer(spec).price(half).seconds == pytest.approx(0.03, rel=0.01)
        joined = signature("ConcatV2", [(F32, (4, 4))] * 2, [(F32, (8, 4))])
        spec = price.spec_of_rows("card", [product, row(joined)])
        assert price.Pricer(spec).price(relu(4)).seconds > 0
        with pytest.raises(TableError, match="card"):
            price.spec_of_rows("card", [row(joined)])

    def test_a_mapping(self):
        table = Table((row(matmul(4, 4, 4), 0.125),))
        others = price.Pricer(find_device("t4"), table)
        pricer = price.load_pricer({"Relu": 0.25, matmul(8, 4, 4).text: 0.5}, others)
        assert pricer.price(relu(4)).seconds == 0.25
        assert pricer.price(matmul(8, 4, 4)).seconds == 0.5
        assert pricer.price(matmul(4, 4, 4)).seconds == 0.125  # as it was recorded
        assert pricer.price(matmul(2, 3, 4)).kind == "roofline"

    @pytest.mark.parametrize("key", [3, "", "Relu(", "a relu"])
    def test_a_price_of_nothing_is_refused(self, key: object):
        with pytest.raises(TableError, match="neither an operation type nor a signature"):
            price.load_pricer({key: 1.0}, price.Pricer(find_device("t4")))  # type: ignore[dict-item]

    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1", None, True])
    def test_a_price_that_is_none_is_refused(self, seconds: object):
        with pytest.raises(TableError, match="Relu"):
            price.load_pricer({"Relu": seconds}, price.Pricer(find_device("t4")))  # type: ignore[dict-item]

    def test_neither_file_nor_device(self, tmp_path: Path):
        with pytest.raises(UnknownDeviceError, match="rtx-5090"):
            price.load_pricer("rtx-5090")
        with pytest.raises(TableError, match="no such table"):
            price.load_pricer(tmp_path / "none.csv")
        with pytest.raises(TableError, match="is a folder"):
            price.load_pricer(tmp_path)
        for path in ("tables/h200", "/data/V100-16GB/costs.parquet"):
            with pytest.raises(TableError, match="no such table"):
                price.load_pricer(path)
        with pytest.raises(UnknownDeviceError, match="h200"):
            price.load_pricer("")
        (tmp_path / "folder.csv").mkdir()
        with pytest.raises(TableError, match="is a folder"):
            price.load_pricer(tmp_path / "folder.csv")
        with pytest.raises(TypeError, match="not 3"):
            price.load_pricer(3)  # type: ignore[arg-type]
        save_table(Table(), tmp_path / "empty.csv")
        with pytest.raises(TableError, match="no rows"):
            price.load_pricer(tmp_path / "empty.csv")
