"""The server's model on the data set's own test part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import actors.federation.evaluation
import actors.hosting.host
import rayfl
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.images.vision import MnistSource
from rayfl.data.sources.natural import NaturalHeader
from rayfl.data.sources.official import open_official_test
from rayfl.errors import ConfigError, DataError
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.runs.finding import load_run
from rayfl.runs.further import all_further, further_tables
from rayfl.runs.summary import summary_table
from tests.data.sources.images.test_vision import MNIST_ROOT, needs_mnist
from tests.data.sources.test_natural import samples, write

TRAIN_ROWS, TEST_ROWS, CLASSES = 90, 40, 3


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))


def own_file(folder: Path, clients: bool = False) -> Path:
    """Images 1 x 4 x 4 with a column split, whose test rows lie between the others."""
    generator = np.random.default_rng(0)
    rows = TRAIN_ROWS + TEST_ROWS
    y = generator.integers(0, CLASSES, rows)
    x = (generator.integers(0, 100, (rows, 16)) + 70 * y[:, None]).astype(np.uint8)
    split = generator.permutation(["train"] * TRAIN_ROWS + ["test"] * TEST_ROWS)
    columns: dict[str, Any] = {"x": pa.array(x.tolist(), pa.list_(pa.uint8())), "y": y, "split": split}
    if clients:
        columns["client"] = [f"c{row % 5}" for row in range(rows)]
    path = folder / "own.table"
    pq.write_table(pa.table(columns), path)
    return path


def settings(folder: Path, clients: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "storage_path": str(folder / "runs"),
        "dataset": {"name": "parquet", "path": str(own_file(folder, clients)), "part": "both" if clients else "train"},
        "partition": {"name": "natural"} if clients else {"name": "iid", "num_clients": 4},
        "transform": {"normalize": "dataset"},
        "model": {"name": "two_nn", "hidden": [6]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 3, "clients_per_round": 2, "local_epochs": 1, "lr": 0.1},
        "evaluation": {"every": 2, "official_test": True},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
        **changes,
    }


def official_rows(result: Result) -> list[dict[str, Any]]:
    return [row for row in result.rounds.to_pylist() if row["split"] == "official"]


def parts_of(content: dict[str, Any]) -> Parts:
    return Parts(load_config(Experiment, content, []))


def test_a_row_a_model_and_evaluation_of_all_test_samples(tmp_path: Path) -> None:
    content = settings(tmp_path)
    result = rayfl.run(content)
    rows = official_rows(result)
    assert [(row["round"], row["cohort"], row["phase"], row["model"]) for row in rows] == [
        (2, "server", "received", "global"),
        (3, "server", "received", "global"),
    ]
    row = rows[-1]
    assert (row["n"], row["clients"]) == (TEST_ROWS, 0)
    assert row["top1"] == row["pooled_top1"] and row["loss"] == row["pooled_loss"]
    assert row["top1_std"] is None and row["top1_worst5"] is None and row["top1_jain"] is None
    assert row["bytes_up"] == result.rounds.to_pylist()[-2]["bytes_up"]
    assert "official" not in set(result.clients["split"].to_pylist())


def test_the_numbers_are_those_of_the_committed_model(tmp_path: Path) -> None:
    from rayfl.storage.commits import CommitStore
    from rayfl.storage.files import Storage

    content = settings(tmp_path, name="run")
    row = official_rows(rayfl.run(content))[-1]
    store = CommitStore(Storage(str(tmp_path / "runs" / "run")))
    manifest = store.latest()
    assert manifest is not None
    parts = parts_of(content)
    table = pq.read_table(tmp_path / "own.table").to_pydict()
    test = [i for i, split in enumerate(table["split"]) if split == "test"]
    everything = parts.official_test.load(0, TEST_ROWS)
    assert everything.y.tolist() == [table["y"][i] for i in test]
    assert parts.dataset.preprocess is not None
    stored = np.array([table["x"][i] for i in test], dtype=np.uint8)
    np.testing.assert_array_equal(everything.x.numpy(), parts.dataset.preprocess(stored))
    logits = parts.task.network.logits(store.read_server(manifest)["model"], everything.x)
    accuracy = (logits.argmax(1) == everything.y).double().mean().item()
    assert row["top1"] == pytest.approx(accuracy)
    assert row["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, everything.y).item(), rel=1e-5)


@pytest.mark.slow
def test_nothing_else_changes(tmp_path: Path) -> None:
    content = settings(tmp_path)
    on = rayfl.run(content)
    off = rayfl.run({**content, "evaluation": {"every": 2}})
    kept = on.rounds.filter(pa.compute.not_equal(on.rounds["split"], "official"))
    assert kept.equals(off.rounds) and on.clients.equals(off.clients)


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = official_rows(rayfl.run(settings(tmp_path, name="whole")))
    for module in (actors.federation.evaluation, actors.hosting.host):
        monkeypatch.setattr(module, "OFFICIAL_PIECE", 7)
    pieces = official_rows(rayfl.run(settings(tmp_path, name="pieces")))
    for one, other in zip(whole, pieces, strict=True):
        assert one["n"] == other["n"] and one["top1"] == other["top1"]
        assert one["ece"] == pytest.approx(other["ece"]) and one["loss"] == pytest.approx(other["loss"])


METHODS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "feddyn": ({"alpha": 0.1}, {"global", "mean"}),
    "floco": ({"simplex_dimension": 2, "assignment_round": 2}, {"global"}),
    "fedbabu": ({}, {"global"}),
    "fedetf": ({"alternations": 1}, {"global"}),
    "fednh": ({}, {"global"}),
    "fedfusion": ({}, {"global"}),
    "fedpac": ({}, {"global"}),
    "superfed": ({"mode": "mm", "start": 0.0}, {"global"}),
    "ditto": ({}, {"global"}),
    "pfedsim": ({"warmup": 0.4}, {"global"}),
    "centralized": ({}, {"global"}),
}


_QUICK = {"feddyn", "fedpac", "superfed", "centralized"}


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in METHODS]
)
def test_models_of_the_server_s_own(method: str, tmp_path: Path) -> None:
    options, models = METHODS[method]
    rows = official_rows(rayfl.run(settings(tmp_path, algorithm={"name": method, **options})))
    assert {row["model"] for row in rows} == models
    assert all(row["n"] == TEST_ROWS and 0 <= row["top1"] <= 1 for row in rows)


@pytest.mark.parametrize("method", ["fedper", "local", "hypcluster", "lg_fedavg"])
def test_a_method_without_a_global_model_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"official_test: {method} has no model of the server's own"):
        parts_of(settings(tmp_path, algorithm={"name": method})).check()


def test_the_test_rows_of_clients_that_keep_their_division(tmp_path: Path) -> None:
    content = settings(tmp_path, clients=True)
    rows = official_rows(rayfl.run(content))
    assert {row["n"] for row in rows} == {TEST_ROWS}
    everybody = [
        row
        for row in rayfl.run(content).rounds.to_pylist()
        if (row["split"], row["cohort"], row["model"]) == ("test", "all", "global")
    ]
    assert rows[-1]["pooled_top1"] == everybody[-1]["pooled_top1"]
    drawn = {**content, "partition": {"name": "natural", "num_clients": 2}}
    assert official_rows(rayfl.run(drawn))[-1]["n"] == TEST_ROWS


def test_clients_that_are_divided_again_leave_the_test_rows(tmp_path: Path) -> None:
    content = settings(tmp_path, clients=True)
    content["dataset"]["part"] = "train"
    parts = parts_of(content)
    assert len(parts.official_test) == TEST_ROWS and parts.dataset.sizes().sum() == TRAIN_ROWS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dataset": {"name": "digits"}},
            "no official test part: leave out evaluation.official_test and evaluation.official_personalized",
        ),
        ({"dataset": "tests.support.own_data:from_seed"}, "dataset 'custom' has no official test part"),
    ],
)
def test_sources_without_one_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parts_of(settings(tmp_path, transform={}, **changes)).check()


@pytest.mark.parametrize("part", ["test", "both"])
def test_clients_must_not_have_its_samples(part: str, tmp_path: Path) -> None:
    content = settings(tmp_path)
    content["dataset"]["part"] = part
    with pytest.raises(ConfigError, match=f"dataset.part is {part}, so the clients have the test samples themselves"):
        parts_of(content).check()


def test_an_imported_file_without_test_rows(tmp_path: Path) -> None:
    header = NaturalHeader(kind="toy", input="image", shape=(2, 2), num_classes=9)
    write(tmp_path / "with.parquet", samples("ann", 3, 2), samples("bob", 0, 2), header=header)
    write(tmp_path / "none.parquet", samples("ann", 3, 0), header=header)
    alone = header.model_copy(update={"own_test": False})
    write(tmp_path / "alone.parquet", samples("ann", 9, 0), header=alone)

    def parts(name: str) -> Parts:
        dataset = {"name": "leaf", "path": str(tmp_path / name)}
        train = {"clients_per_round": 1}
        return parts_of(settings(tmp_path, dataset=dataset, partition={"name": "natural"}, transform={}, train=train))

    # bob has nothing to train on, so he is no client, but his test rows count
    assert parts("with.parquet").official_test.load(0, 9).y.tolist() == [3, 4, 0, 1]
    with pytest.raises(ConfigError, match="has no official test samples"):
        parts("none.parquet").check()
    with pytest.raises(ConfigError, match=r"alone\.parquet has no test part of its own"):
        parts("alone.parquet").check()


def test_labels_that_the_clients_do_not_know(tmp_path: Path) -> None:
    rows = {"x": [[0.0, 1.0]] * 8, "y": [0, 1] * 3 + [0, 5], "split": ["train"] * 6 + ["test"] * 2}
    path = tmp_path / "few.table"
    pq.write_table(pa.table(rows), path)
    dataset = {"name": "parquet", "path": str(path), "part": "train"}
    content = settings(tmp_path, dataset=dataset, partition={"name": "iid", "num_clients": 2}, transform={})
    unknown = r"label 5 in the split test, but .* make 2 classes: set dataset.num_classes=6, or leave the option out"
    with pytest.raises(DataError, match=unknown):
        parts_of(content).check()
    dataset["num_classes"] = 6
    parts_of(content).check()
    dataset["num_classes"] = 5
    with pytest.raises(DataError, match=r"dataset.num_classes is 5, but there is a label 5"):
        parts_of(content).check()


def test_tensorboard_takes_the_row(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rayfl.run(settings(tmp_path, name="run", tracking={"tensorboard": True}))
    events = EventAccumulator(str(tmp_path / "runs" / "run")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if "official" in tag]
    assert "top1/official, server, received/global" in tags
    assert not any(tag.startswith(("top1_std", "top1_jain")) for tag in tags)


@needs_mnist
def test_mnist_s_10000_test_images() -> None:
    dataset = {"name": "mnist", "root": str(MNIST_ROOT)}
    content = {
        "dataset": dataset,
        "partition": {"name": "iid", "num_clients": 100},
        "transform": {"resize": 14, "normalize": {"mean": [0.5], "std": [0.5]}},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fedavg",
    }
    parts = parts_of(content)
    official = open_official_test(MnistSource(root=MNIST_ROOT), parts.dataset, parts.streams)
    assert len(official) == 10_000
    assert torch.bincount(torch.from_numpy(official.samples.y)).tolist() == [
        *(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    ]
    some = official.load(9_990, 12_000)
    assert some.x.shape == (10, 1, 14, 14) and some.x.min() == -1


def test_it_may_be_the_only_evaluation(tmp_path: Path) -> None:
    """Central evaluation, as benchmarks of speed have it: all of a client's samples are trained on."""
    content = settings(tmp_path, holdout={"test": 0.0, "validation": 0.0})
    result = rayfl.run(content)
    rows = result.rounds.to_pylist()
    assert [row["n"] for row in official_rows(result)] == [TEST_ROWS] * 2
    assert {row["split"] for row in rows if row["cohort"] == "all"} == set()
    assert Parts(load_config(Experiment, content, [])).dataset.sizes()[:, 0].sum() == TRAIN_ROWS
    assert not summary_table(result).row_count
    (table,) = further_tables(result)
    assert table.title is not None and "official test part, 40 samples" in str(table.title) and table.row_count == 1
    assert all_further(result) == [row for row in official_rows(result) if row["round"] == 3]
    assert load_run(result.path, {"fedavg": FedAvg}).clients.num_rows == 0  # nothing is missing
    with pytest.raises(DataError, match="so that nobody would be evaluated"):
        parts_of({**content, "evaluation": {"every": 2}}).check()
