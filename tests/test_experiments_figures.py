"""The papers' figures: what they count, and that they go on where they stopped."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from experiments import (
    accounting,
    budget_sweep,
    eager_recompute,
    largest_batch,
    largest_batch_measured,
    optimal_gradient_search,
    schedule_pictures,
)
from experiments.accounting import layer_graph, step_graph
from experiments.networks import NETWORKS, Network
from experiments.process import Runner, Task
from remat.solvers import Graph, Node, save_graph, simulate

PNG = b"\x89PNG"
MIB = 2**20


def small(image: tuple[int, int, int]) -> keras.Model:
    """A residual network of a few layers."""
    x = inputs = keras.Input(image)
    for _ in range(3):
        y = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
        x = keras.layers.Concatenate()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def times(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.iterdir()}


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The file of a generated training step."""
    from experiments.graphs import generate

    path = tmp_path / "training.json"
    save_graph(generate("training-60"), path)
    return path


def test_layers_are_counted_as_checkmate_counts() -> None:
    inputs = keras.Input((4, 4, 3))
    a = keras.layers.Conv2D(2, 3, padding="same")(inputs)
    b = keras.layers.ReLU()(a)
    outputs = keras.layers.Flatten()(keras.layers.Add()([a, b]))
    graph = layer_graph(keras.Model(inputs, outputs), "net", 10)
    values = 10 * 4 * 4 * 2
    conv, relu, add, flatten, loss = range(5)
    assert [node.bytes for node in graph.nodes] == [4 * values] * 4 + [40] + [4 * values] * 4
    forward = [values * 3 * 3 * 3, values, 2 * values, 0]
    assert [node.cost for node in graph.nodes] == [*forward, 0, *(2 * c for c in forward[::-1])]
    assert [node.backward for node in graph.nodes] == [False] * 4 + [True] * 5
    # A gradient reads its layer's output, what reads that, and their gradients.
    of_flatten, of_add, of_relu, of_conv = range(5, 9)
    assert graph.predecessors[of_flatten] == (flatten, loss)
    assert graph.predecessors[of_add] == (add, flatten, of_flatten)
    assert graph.predecessors[of_relu] == (relu, add, of_add)
    assert graph.predecessors[of_conv] == (conv, relu, add, of_add, of_relu)
    assert graph.resident == 2 * 4 * (3 * 3 * 3 * 2 + 2)


def test_a_step_holds_weights_slots_and_images() -> None:
    model = small((16, 16, 3))
    one, two = (step_graph(model, "small", batch) for batch in (4, 8))
    weights = 4 * model.count_params()
    images = 4 * 4 * 16 * 16 * 3
    assert 3 * weights + images <= one.resident < 3 * weights + 2 * images
    assert two.resident - one.resident >= images
    assert simulate(two, range(len(two))).peak > simulate(one, range(len(one))).peak
    assert any(node.backward for node in one.nodes)


@pytest.mark.parametrize(
    ("name", "weights"), [("ResNet18", 11_689_512), ("AlexNet", 61_100_840), ("SegNet", 3_704_083)]
)
def test_networks_have_the_published_weights(name: str, weights: int) -> None:
    trainable = NETWORKS[name].model().trainable_weights
    assert sum(math.prod(weight.shape) for weight in trainable) == weights


def test_an_unknown_network_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        accounting.main(["layers:Net:8", "-o", "net.json"])
    assert exit_.value.code == 2
    assert "'layers:Net:8' is not ACCOUNTING:NETWORK:BATCH" in capsys.readouterr().err


def test_the_largest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = Network("SegNet", (32, 32, 3), small)
    monkeypatch.setattr(largest_batch, "NETWORKS", {"SegNet": network})
    arguments = ["--networks", "SegNet", "--accountings", "layers", "--memory", str(20 * MIB)]
    arguments += ["--time-limit", "1", "--out", str(tmp_path)]
    largest_batch.main(arguments)
    (row,) = rows(tmp_path / "table.csv")
    model = network.model()

    def plain_peak(batch: int) -> int:
        graph = layer_graph(model, "", batch)
        return simulate(graph, range(len(graph))).peak

    keep, fits = int(row["keep"]), int(row["fits"])
    assert plain_peak(keep) <= 20 * MIB < plain_peak(keep + 1)
    assert keep < fits < int(row["ruled_out"])
    assert float(row["overhead_percent"]) <= float(row["allowed_percent"])
    assert row["cpu"]
    assert (tmp_path / "largest_batch.png").read_bytes().startswith(PNG)
    assert "SegNet" in capsys.readouterr().out

    before = times(tmp_path / "verdicts")
    largest_batch.main(arguments)
    assert times(tmp_path / "verdicts") == before


def test_eighteen_networks(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_gradient_search, "graph_file", lambda name, folder: training)
    arguments = ["--networks", "AlexNet", "--time-limit", "0.5", "--out", str(tmp_path)]
    optimal_gradient_search.main(arguments)
    (row,) = rows(tmp_path / "layers.csv")
    assert float(row["bound"]) <= float(row["at_their_memory"]) + 1e-9
    assert 0 < float(row["at_their_time"]) <= float(row["most_saved"])
    assert float(row["best_saved"]) - float(row["best_overhead"]) >= 34 - float(
        row["at_their_memory"]
    )
    before = times(tmp_path / "points")
    optimal_gradient_search.main(arguments)
    assert times(tmp_path / "points") == before


def test_a_budget_sweep(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solvers = ["feng_huang", "gap_cover"]
    arguments = [str(training), "--solvers", *solvers, "--time-limit", "5"]
    budget_sweep.main([*arguments, "--out", str(tmp_path)])
    table = rows(tmp_path / "table.csv")
    assert [row["solver"] for row in table] == [s for s in solvers for _ in range(8)]
    for row in table:
        found = row["overhead_percent"]
        assert not found or float(found) >= float(row["bound_percent"]) - 1e-9
    bounds = [float(row["bound_percent"]) for row in table[:8]]
    assert bounds == sorted(bounds, reverse=True)
    assert (tmp_path / "budget_sweep.png").read_bytes().startswith(PNG)
    assert "(proven bound)" in capsys.readouterr().out


@pytest.mark.long
def test_a_budget_sweep_that_measures(tmp_path: Path) -> None:
    arguments = ["--measure", "SmallUNet", "--shares", "0.6", "--budgets", "60%"]
    budget_sweep.main([*arguments, "--solvers", "chen_greedy", "--out", str(tmp_path)])
    (within,) = rows(tmp_path / "measured.csv")
    assert 0 < int(within["peak"]) <= int(within["budget"])
    assert float(within["predicted_percent"]) >= 0
    assert float(within["overhead_percent"]) > -90  # seconds were taken, and compared
    (row,) = rows(tmp_path / "table.csv")
    assert row["graph"] == within["graph"] == "SmallUNet"
    assert (tmp_path / "budget_sweep.png").read_bytes().startswith(PNG)


def test_the_matrix_of_a_schedule() -> None:
    nodes = tuple(Node(name, 1.0, MIB) for name in "abcd")
    chain = Graph("chain", nodes, ((0, 1), (1, 2), (2, 3), (0, 3)))
    none, held, first, again = range(4)
    np.testing.assert_array_equal(
        schedule_pictures.matrix(chain, (0, 1, 2, 0, 3)),
        [
            [first, none, none, none],
            [held, first, none, none],
            [none, held, first, none],
            [again, none, held, first],
        ],
    )


def test_pictures_of_schedules(training: Path, tmp_path: Path) -> None:
    solvers = ["checkpoint_all", "feng_huang"]
    out = tmp_path / "out"
    schedule_pictures.main([str(training), "--solvers", *solvers, "--out", str(out)])
    assert {file.name for file in out.iterdir()} == {
        f"training-{picture}.png" for picture in ("matrix", "memory", "kept")
    }
    for file in out.iterdir():
        assert file.read_bytes().startswith(PNG)


def test_a_search_keeps_the_limit_at_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []

    def result(runner: Runner, task: Task) -> dict[str, Any]:
        asked.append(task)
        done = task.budget is not None and task.budget >= 60 * MIB
        return {"status": "done"} if done else {"status": "infeasible", "least_budget": 60 * MIB}

    monkeypatch.setattr(Runner, "result", result)
    task = Task("budgeted", "SmallUNet", budget=50 * MIB, limit_mib=50)
    task, found = Runner(tmp_path, "experiments.child", 1.0).within(task, 100 * MIB)
    assert (task.budget, found["status"]) == (60 * MIB, "done")
    assert [(task.budget, task.limit_mib) for task in asked] == [(50 * MIB, 50), (60 * MIB, 60)]


def test_the_largest_batch_is_halved_in_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(runner: Runner, task: Task) -> dict[str, Any]:
        assert task.limit_mib == 64
        assert task.batch is not None
        assert task.budget == (64 * MIB if task.kind == "budgeted" else None)
        if task.batch > (37 if task.kind == "budgeted" else 21):
            return {"status": "failed", "message": "out of memory"}
        return {"status": "done", "peak": 60 * MIB, "step_seconds": [9.0, 1.0, 1.0]}

    monkeypatch.setattr(Runner, "result", result)
    arguments = ["--models", "SmallUNet", "--ways", "plain", "budgeted", "--limit", "64"]
    largest_batch_measured.main([*arguments, "--out", str(tmp_path)])
    plain, ours = rows(tmp_path / "table.csv")
    assert (plain["batch"], plain["failed"]) == ("21", "22")
    assert (ours["batch"], ours["failed"]) == ("37", "38")
    assert float(ours["gain"]) == 37 / 21
    assert "| SmallUNet | remat | 37 | 38 | 1.76 | 60 of 64 |" in capsys.readouterr().out


def test_eager_recomputation_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "SmallUNet", "--ways", "plain", "eager_recompute_grad", "--shares"]
    arguments += ["--steps", "2", "--out", str(tmp_path)]
    assert eager_recompute.main(arguments) == 0
    plain, recomputed = capsys.readouterr().out.splitlines()[-4:-2]
    assert plain.startswith("| tf.function |")
    assert recomputed.startswith("| eager, tf.recompute_grad |")
