"""Tables with named columns, several labels and numbers to predict: what is read of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.preprocessing import StandardScaler

import rayfl
from rayfl.data.held_out import WithUnseen
from rayfl.data.partitions.base import IIDPartition, PathologicalPartition
from rayfl.data.partitions.dirichlet import DirichletPartition
from rayfl.data.sources.official import open_official_test
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import ConfigError, DataError, ModelError
from rayfl.models.networks.perceptron import TabularMLP
from rayfl.randomness import RandomStreams
from tests.support.tables import AGES, INPUTS, ROWS, opened, own_section, written


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The section ``dataset`` of a file that is written with some columns changed."""
    return partial(own_section, tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_named_columns_are_numbers_and_categories(own: Callable[..., dict[str, Any]], kind: str) -> None:
    dataset = opened(own(kind, x=[*INPUTS, "smokes"], y="outcome"))
    assert dataset.names == ("A", "B", "C")
    assert dataset.spec.shape == (6,)
    train = dataset.load(0)["train"]
    assert torch.equal(train.x[0], torch.tensor([30.0, 20.0, 1.0, 0.0, 0.0, 1.0]))
    assert set(train.y.tolist()) <= {0, 1}


@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("column", ["hospital", "client"])
@pytest.mark.parametrize(
    "names",
    [
        ("01", "1", "10"),
        ("1", "1.1", "1.10"),
        ("TRUE", "True", "true"),
        (f"{2**64 + 1}", f"{2**64 + 2}", f"{2**64 + 3}"),
    ],
)
def test_clients_of_a_csv_file_are_called_as_it_stands_there(
    own: Callable[..., dict[str, Any]], names: tuple[str, ...], column: str, quoted: bool
) -> None:
    changes = {"hospital": None, column: [name for name in names for _ in range(4)]}
    source = own("csv", changes, x=["age", "bmi"], y="outcome")
    if column == "client":
        del source["client"]  # found by its name
    if not quoted:
        source["path"].write_text(source["path"].read_text().replace('"', ""))
    assert opened(source).names == names


def test_embeddings_of_categories_are_those_of_a_lookup_and_of_unknown_values_zero(
    own: Callable[..., dict[str, Any]],
) -> None:
    changes = {"sex": ["f", "m", "x"] * 4, "split": ["train", "train", "test"] * 4}  # x is in no training row
    dataset = opened(own(changes=changes, x=["sex", "age", "smokes"], y="outcome"), test=None, validation=0)
    assert dataset.spec.categories == ((0, 3), (4, 2))
    network = TabularMLP(hidden=(4,), embedding=5).network(dataset.spec)
    assert network.vectorizable
    model = network.initialize(0)
    sex, smokes = model["embeddings.tables.0"], model["embeddings.tables.1"]
    assert sex.shape == (3, 5) and smokes.shape == (2, 5)
    layer = model["hidden.0.weight"], model["hidden.0.bias"]
    for split, vectors in (("train", sex[[0, 1, 0]]), ("test", torch.zeros(1, 5))):
        x = dataset.load(0)[split].x
        smoking = smokes[x[:, 5].long()]
        expected = torch.cat([vectors[: len(x)], smoking, x[:, 3:4]], dim=1) @ layer[0].T + layer[1]
        torch.testing.assert_close(network.features(model, x), expected.relu())
    with pytest.raises(ModelError, match=r"tabular_mlp needs a table with categorical columns .* option embedding"):
        TabularMLP(embedding=5).network(opened(own(x=["age", "bmi"], y="outcome")).spec)


@pytest.mark.parametrize("pooled", [False, True])
def test_numbers_are_standardized_by_the_training_samples_of_all_clients(
    own: Callable[..., dict[str, Any]], pooled: bool
) -> None:
    client = "none" if pooled else "hospital"
    partition = IIDPartition(num_clients=3) if pooled else None
    changes = {"split": None} if pooled else {}
    section = own(changes=changes, x=INPUTS, y="outcome", client=client)
    plain = opened({**section, "missing": "mean"}, partition=partition, validation=0.25)
    dataset = opened({**section, "standardize": "global"}, partition=partition, validation=0.25)
    rows = [plain.load(k)["train"].x.numpy() for k in range(3)]
    scaler = StandardScaler().fit(np.concatenate(rows)[:, :2])
    for k in range(3):
        for split in ("train", "validation", "test"):
            before, after = plain.load(k)[split].x.numpy(), dataset.load(k)[split].x.numpy()
            if len(before):
                np.testing.assert_allclose(after[:, :2], scaler.transform(before[:, :2]), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(after[:, 2:], before[:, 2:])


def test_moments_of_all_are_what_a_server_makes_of_clients_means_and_variances(
    own: Callable[..., dict[str, Any]],
) -> None:
    """StatAvg: mu = sum n_k mu_k / n, and sigma^2 = sum n_k (sigma_k^2 + (mu_k - mu)^2) / n; no samples travel."""
    section = own(x=["age", "bmi"], y="outcome")
    rows = [opened(section, validation=0).load(k)["train"].x.numpy().astype(np.float64) for k in range(3)]
    told = opened({**section, "standardize": "global"}, validation=0).made_by(0)["columns"]
    sizes = np.array([len(one) for one in rows])
    for column, found in enumerate(told):
        means = np.array([one[:, column].mean() for one in rows])
        variances = np.array([one[:, column].var() for one in rows])
        mean = (sizes * means).sum() / sizes.sum()
        variance = (sizes * (variances + (means - mean) ** 2)).sum() / sizes.sum()
        assert found["mean"] == pytest.approx(mean, rel=1e-12) and found["std"] == pytest.approx(
            variance**0.5, rel=1e-12
        )


def test_numbers_are_standardized_by_each_clients_own_training_samples(own: Callable[..., dict[str, Any]]) -> None:
    dataset = opened(own(x=["age", "bmi"], y="outcome", standardize="client"), validation=0)
    for k in range(3):
        train = dataset.load(k)["train"].x
        torch.testing.assert_close(train.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
        torch.testing.assert_close(train.std(0, correction=0), torch.ones(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{"standardize": "client", "missing": "indicator"}, {"missing": "mean"}])
def test_what_is_told_of_columns_makes_a_models_inputs(
    own: Callable[..., dict[str, Any]], options: dict[str, Any]
) -> None:
    ages: list[float | None] = [None, *AGES[1:]]
    ages[5] = None
    changes = {"age": ages, "weeks": [None] * 11 + [3.0], "sex": ["f", "m"] * 5 + ["m", "x"]}
    section = own(changes=changes, x=[*INPUTS, "weeks"], y="outcome", **options)
    dataset, rows = WithUnseen(opened(section, validation=0.4), [0]), pq.read_table(section["path"]).to_pylist()
    for client, hospital in enumerate(dataset.names):
        of_it = [row for row in rows if row["hospital"] == hospital]
        for split, places in dataset.places(client).items():
            for row, seen in zip([of_it[place] for place in places], dataset.load(client)[split].x, strict=True):
                found = list[float]()
                for column in dataset.made_by(client)["columns"]:
                    name, _, category = column["name"].partition("=")
                    if column.get("unused"):
                        value = 0.0
                    elif column.get("missing"):
                        value = float(row[name] is None)
                    elif category:
                        value = float(row[name] == category)
                    else:
                        value = column["filled"] if row[name] is None else row[name]
                        value = (value - column.get("mean", 0)) / column.get("std", 1)
                    found.append(value)
                torch.testing.assert_close(torch.tensor(found), seen)


def test_missing_numbers_are_filled_by_the_training_mean_and_said(own: Callable[..., dict[str, Any]]) -> None:
    ages = [None if i in (0, 7) else age for i, age in enumerate(AGES)]
    section = own(changes={"age": ages}, x=["age", "bmi"], y="outcome")
    with pytest.raises(DataError, match=r"column 'age', row 0 \(client 'A'\) is null; .*missing=mean"):
        opened(section)
    with pytest.raises(DataError, match=r"rows.parquet: column 'age', row 0 \(client 'A'\) is missing.*missing=mean"):
        opened({**section, "standardize": "global"})
    dataset = opened({**section, "missing": "indicator"}, validation=0)
    assert dataset.spec.shape == (3,)
    trained = [age for i, age in enumerate(ages) if age is not None and i % 4 != 3]
    first, test = dataset.load(0)["train"].x, dataset.load(1)["test"].x
    assert first[0].tolist() == pytest.approx([np.mean(trained), 20.0, 1.0])
    assert first[1].tolist() == pytest.approx([40.0, 27.0, 0.0])
    assert test[0].tolist() == pytest.approx([np.mean(trained), ROWS["bmi"][7], 1.0])


def test_what_no_training_sample_tells_is_0_in_tests(own: Callable[..., dict[str, Any]]) -> None:
    """Weights of such columns are as they were drawn, and would make of them whatever these say."""
    ages = [None if i == 3 else age for i, age in enumerate(AGES)]  # of a test row alone
    weights = [float(i) if i == 3 else None for i in range(12)]
    section = own(changes={"age": ages, "weeks": weights}, x=["age", "weeks"], y="outcome", missing="indicator")
    dataset = opened(section, validation=0)
    first, test = dataset.load(0)["train"].x, dataset.load(0)["test"].x
    assert first[0].tolist() == [30.0, 0.0, 0.0, 1.0]  # age, weeks, and where they are missing
    assert test[0].tolist() == [pytest.approx(np.mean([AGES[i] for i in range(12) if i % 4 != 3])), 0.0, 0.0, 0.0]


def test_a_category_that_no_training_sample_has_is_unknown(own: Callable[..., dict[str, Any]]) -> None:
    sexes = ["f", "m", "f", "x"] + ["f", "m", "f", "m"] * 2
    dataset = opened(own(changes={"sex": sexes}, x=INPUTS, y="outcome"))
    assert dataset.spec.shape == (5,)
    assert dataset.load(0)["test"].x[0, 2:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("target", "y", "expected"),
    [
        ("labels", ["cough", "fever"], [[0, 1], [1, 0], [0, 0]]),
        ("values", "days", [[45.0], [60.0], [75.0]]),
        ("values", ["days", "weeks"], [[45.0, 15.0], [60.0, 20.0], [75.0, 25.0]]),
        ("values", "outcome", [[0.0], [1.0], [0.0]]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_several_labels_and_numbers_to_predict(
    own: Callable[..., dict[str, Any]], kind: str, target: str, y: Any, expected: list[list[float]]
) -> None:
    dataset = opened(own(kind, x=["age", "bmi"], y=y), target, validation=0)
    found = dataset.load(0)["train"].y
    assert found.dtype == torch.float32
    assert found.tolist() == expected
    assert dataset.spec.target == target
    assert dataset.spec.num_classes == len(expected[0])


def test_integers_that_are_no_float64_are_the_nearest(own: Callable[..., dict[str, Any]]) -> None:
    """Such as times in nanoseconds."""
    times = [2**60 + 10**15 * i + 1 for i in range(12)]
    changes = {"days": times, "weeks": times}
    dataset = opened(own(changes=changes, x=["weeks", "bmi"], y="days", missing="mean"), "values", validation=0)
    train = dataset.load(0)["train"]
    expected = np.array(times[:3], dtype=np.float32)
    np.testing.assert_array_equal(train.x[:, 0].numpy(), expected)
    np.testing.assert_array_equal(train.y[:, 0].numpy(), expected)


def test_a_table_has_no_official_test_part(own: Callable[..., dict[str, Any]]) -> None:
    section = own(x=INPUTS, y="outcome", part="train")
    with pytest.raises(ConfigError, match=r"evaluation.official_test: dataset 'parquet' is a table.*leave the option"):
        open_official_test(ParquetSource(**section), opened(section), RandomStreams(0))


def test_targets_in_lists(tmp_path: Path) -> None:
    rows = {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [[0, 1, 1], [1, 0, 0]], "client": ["a", "a"]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    dataset = opened({"path": tmp_path / "rows.parquet", "root": tmp_path}, "labels", test=0, validation=0)
    assert dataset.load(0)["train"].y.tolist() == [[0, 1, 1], [1, 0, 0]]
    ragged = {**rows, "y": [[0, 1, 1], [1, 0]]}
    pq.write_table(pa.table(ragged), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"column 'y', row 1 \(client 'a'\) has 2 values, but row 0 has 3"):
        opened({"path": tmp_path / "rows.parquet", "root": tmp_path}, "labels")


def test_numbers_are_divided_by_their_order_and_not_by_classes(own: Callable[..., dict[str, Any]]) -> None:
    section = own(changes={"split": None}, client="none", x=["age", "bmi"], y="days")
    dataset = opened(section, "values", PathologicalPartition(num_clients=3, shards_per_client=1), test=0, validation=0)
    bounds = sorted((float(y.min()), float(y.max())) for y in (dataset.load(k)["train"].y for k in range(3)))
    assert all(before[1] < after[0] for before, after in pairwise(bounds))
    with pytest.raises(ConfigError, match=r"'dirichlet' divides samples by their classes.*choose iid, pathological"):
        opened(section, "values", DirichletPartition(num_clients=3, alpha=1))


def test_embeddings_are_the_same_looped_and_stacked(own: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    settings = {
        "dataset": {"name": "parquet", **own(x=INPUTS, y="outcome", standardize="global")},
        "model": {"name": "tabular_mlp", "hidden": [4], "embedding": 2},
        "algorithm": "fedper",
        "train": {"rounds": 2, "clients_per_round": 3, "local_epochs": 2, "batch_size": 2, "lr": 0.1},
        "tracking": {"tensorboard": False},
    }
    losses = []
    for mode in ("looped", "vectorized"):
        folder = {"cluster.backend": "inline", "storage_path": str(tmp_path), "name": mode, "engine.mode": mode}
        losses.append(np.array(rayfl.run(settings, **folder).clients["loss"]).astype(float))
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)


def test_a_copy_of_before_is_found_and_moments_need_no_other(tmp_path: Path) -> None:
    path = written(tmp_path)
    section: dict[str, Any] = {"path": path, "root": tmp_path, "x": ("age", "bmi"), "y": "outcome"}
    plain = ParquetSource(**section)
    assert plain.prepared_path == plain.aimed_at("class").prepared_path != plain.aimed_at("values").prepared_path
    standardized = ParquetSource(**section, standardize="global")
    assert standardized.prepared_path == ParquetSource(**section, standardize="client").prepared_path
    assert standardized.prepared_path != plain.prepared_path


def test_clients_of_several_csv_files_are_told_apart_as_they_stand_there(tmp_path: Path) -> None:
    for name, clients in (("a.csv", ("001", " 1", "1")), ("b.csv", ("001", "one", "1"))):
        lines = [f"{i}.5,{i % 2},{client}" for client in clients for i in range(4)]
        (tmp_path / name).write_text("\n".join(["x,y,client", *lines]) + "\n")
    dataset = opened({"paths": (tmp_path / "a.csv", tmp_path / "b.csv"), "root": tmp_path})
    assert dataset.names == ("001", "1", "one")
    assert dataset.sizes().sum(1).tolist() == [8, 12, 4]
