"""Values, columns and options of users' own data that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rayfl
from actors.hosting.samples import Samples as Samples_
from rayfl.data.federated import FederatedDataset
from rayfl.data.sources.base import Samples
from rayfl.errors import ClientError, DataError
from rayfl.examples import Examples, InputSpec
from tests.support.own_files import (
    GAP,
    HERE,
    MADE,
    N,
    X,
    of_file,
    of_function,
    parts,
    remarks,
    table,
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))


class Own(FederatedDataset):
    """Four clients of ten samples; one value of sample 5 that the third one trains on is wrong."""

    def __init__(self, value: float, label: int = 1) -> None:
        self.spec = InputSpec("image", (3,), 2)
        self.names = ("ann", "bob", "eve", "zoe")
        self._x = torch.from_numpy(X.astype(np.float32))
        self._y = torch.arange(N) % 2
        self._x[25, 1], self._y[25] = value, label

    def sizes(self) -> np.ndarray:
        return np.array([[6, 2, 2]] * 4)

    def load(self, client: int) -> dict[str, Examples]:
        x, y = self._x[10 * client :], self._y[10 * client :]
        places = {"train": slice(0, 6), "validation": slice(6, 8), "test": slice(8, 10)}
        return {split: Examples(x[at], y[at]) for split, at in places.items()}


@pytest.mark.parametrize(
    ("value", "label", "message"),
    [
        (np.nan, 1, r"x of sample 5 holds a value that is not finite"),
        (np.inf, 1, r"x of sample 5 holds a value that is not finite"),
        (0.0, 7, r"the label of sample 5 is 7, but the data set says that it has 2 classes"),
    ],
)
@pytest.mark.parametrize(("on_error", "method"), [("fail", "fedavg"), ("skip", "fedavg"), ("skip", "centralized")])
def test_values_in_the_data_are_no_divergence(
    tmp_path: Path, value: float, label: int, message: str, on_error: str, method: str
) -> None:
    MADE["data"] = Own(value, label)
    config = {
        "name": "run",
        "storage_path": str(tmp_path),
        "dataset": f"{HERE}:made",
        "model": "two_nn",
        "algorithm": method,
        "train": {"rounds": 1, "clients_per_round": "all"},
        "clients": {"on_error": on_error},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
    }
    with pytest.raises(ClientError) as raised:
        rayfl.run(config)
    text = str(raised.value)
    assert f"client 2 (eve), train: {message}" in text
    assert "diverged" not in text


def test_values_in_public_samples_are_found() -> None:
    samples = Samples_(Own(0.0), torch.device("cpu"), None)
    assert samples.public().shape == (0, 3)
    broken = Own(0.0)
    broken.load_public = lambda: torch.tensor([[0.0, 1.0], [np.nan, 1.0]])  # type: ignore[method-assign]
    with pytest.raises(DataError, match="the public samples: x of sample 1 holds"):
        Samples_(broken, torch.device("cpu"), None).public()


def test_values_of_a_function_and_of_files_are_found_before_the_start(tmp_path: Path) -> None:
    x = X.copy()
    x[17, 2] = np.nan
    y, clients = np.arange(N) % 4, np.repeat(["ann", "bob"], 20)
    with pytest.raises(DataError, match="x of sample 17 holds a value that is not finite"):
        parts(of_function(x, y, 4)).dataset  # noqa: B018
    with pytest.raises(DataError, match=r"x of sample 17 \(client 'ann'\) holds a value that is not finite"):
        parts(of_function(x, y, 4, clients), partition="natural").dataset  # noqa: B018
    large = X.copy()
    large[3, 0] = 1e300  # finite, but not in float32
    with pytest.raises(DataError, match="x of sample 3 holds"):
        parts(of_function(large, y, 4)).dataset  # noqa: B018
    path = table(tmp_path / "f.parquet", x=x.tolist(), client=clients.tolist())
    with pytest.raises(DataError, match=r"column 'x', row 17 \(client 'ann'\) holds a value that is not finite"):
        parts(of_file(path), partition="natural").dataset  # noqa: B018


def test_clients_without_training_samples_are_left_out_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, split = np.repeat(["a", "b", "c", "d"], 10), np.array(["train", "test"] * 20)
    split[20:30] = "test"
    path = table(tmp_path / "f.parquet", client=client.tolist(), split=split.tolist())
    (remark,) = remarks(of_file(path), caplog, partition="natural")
    assert remark.endswith("have test samples and none to train on are left out, 1 of the data's: 'c'")
    assert parts(of_file(path), partition="natural").dataset.names == ("a", "b", "d")
    split[20:30] = "train"
    path = table(tmp_path / "g.parquet", client=client.tolist(), split=split.tolist())
    assert remarks(of_file(path), caplog, partition="natural") == []


def test_a_column_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("x0,x1,x0,y\n1,2,3,0\n4,5,6,1\n")
    with pytest.raises(DataError, match=r"twice.csv has several columns called 'x0': rename or remove one"):
        parts(of_file(path)).dataset  # noqa: B018


@pytest.mark.parametrize("labels", ["as_found", "renumbered"])
def test_labels_beyond_64_bits_with_a_sign_are_named(tmp_path: Path, labels: str) -> None:
    y = pa.array([0, 2**63 - 1, 2**63 + 1], pa.uint64())
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "y": y}), tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"column 'y', row 2 is 9223372036854775809; labels are at most .*as text"):
        parts({**of_file(tmp_path / "f.parquet"), "labels": labels}).dataset  # noqa: B018


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"x": 1, "y": 0, "client": 2**70}], r"column 'client' has an integer of more than 64 bits: write names as"),
        ([{"x": 10**30, "y": 0}, {"x": 1, "y": 1}], r"column 'x' has an integer of more than 64 bits"),
        ([{"x": 1, "y": 0}, {"x": 2, "y": "one"}], r"column 'y': Could not convert 'one'"),
    ],
)
def test_columns_of_json_that_have_no_type_are_named(tmp_path: Path, rows: list[dict[str, object]], words: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=rf"rows.json is not a readable JSON file: {words}"):
        parts(of_file(path)).dataset  # noqa: B018


def test_a_data_set_of_ones_own_numbers_its_labels_itself() -> None:
    MADE["data"] = Own(0.0)
    with pytest.raises(DataError, match=r"dataset.labels is renumbered, but .* returned a FederatedDataset"):
        parts({"name": "custom", "function": f"{HERE}:made", "labels": "renumbered"}, partition="natural").dataset  # noqa: B018
    MADE["data"] = Samples(X, np.array(GAP), InputSpec("image", X.shape[1:], 4))
    for option, value in {"labels": "renumbered", "vocabulary": 9}.items():
        with pytest.raises(DataError, match=rf"dataset.{option} is {value}, but .* returned a Samples"):
            parts({"name": "custom", "function": f"{HERE}:made", option: value}).dataset  # noqa: B018


SPEC = InputSpec("image", (3,), 4)
FLOATS, CLASSES = X.astype(np.float32), np.arange(N) % 4


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            Samples(np.where(np.arange(N)[:, None] == 17, np.float32("nan"), FLOATS), CLASSES, SPEC),
            "x of sample 17 holds a value that is not finite",
        ),
        (
            Samples(np.full((N, 3), 9), CLASSES, InputSpec("tokens", (3,), 4, 9)),
            "a token of sample 0 is 9, but the data set says that it has 9 tokens",
        ),
        (
            Samples(FLOATS, CLASSES, SPEC, np.arange(30)),
            r"clients have the shape \(30,\); needed is .* each of 40 samples",
        ),
        (Samples(FLOATS, CLASSES, SPEC, domains=("a",), domain=np.arange(N) % 2), "among the 1 names in domains"),
        (Samples(FLOATS, CLASSES, SPEC, domains=("a",), domain=np.zeros(9, int)), r"domain has .* the shape \(9,\)"),
        (Samples(torch.from_numpy(FLOATS), CLASSES, SPEC), "x of Samples is a Tensor; needed is a NumPy array"),  # type: ignore[arg-type]
        (Samples(FLOATS, CLASSES[:9], SPEC, CLASSES), r"x has the shape \(40, 3\) and y \(9,\)"),
        ((X, CLASSES, 4, ["a", None] * 20), "the client of sample 1 is None: name it, or remove the sample"),
        ((X, CLASSES, 4, ["a", float("nan")] * 20), "the client of sample 1 is nan"),
        ((X, CLASSES, 4, np.array(["a", 1] * 20, dtype=object)), "clients cannot be sorted .*: name all by texts"),
        ((X, CLASSES, 4, ["1", 1] * 20), "clients are named by texts and by others, such as 1: name all by texts"),
        ((X, CLASSES, 4, ["a", ""] * 20), "the client of sample 1 is '': name it, or remove the sample"),
    ],
)
def test_samples_and_clients_of_a_function_are_looked_at(made: object, message: str) -> None:
    MADE["data"] = made
    with pytest.raises(DataError, match=message):
        parts({"name": "custom", "function": f"{HERE}:made"}, partition="natural").dataset  # noqa: B018


def test_options_of_other_inputs_and_targets_are_refused() -> None:
    with pytest.raises(DataError, match=r"dataset.vocabulary is 9, but x has the type float64"):
        parts(of_function(X, np.array(GAP), 4, vocabulary=9)).dataset  # noqa: B018
    with pytest.raises(DataError, match=r"dataset.labels=renumbered is for classes, and there are none"):
        parts(of_function(X, X[:, :1], None, labels="renumbered"), task="regression").dataset  # noqa: B018


def test_inputs_of_no_column_are_refused(tmp_path: Path) -> None:
    own = parts(of_file(table(tmp_path / "own.parquet"), x=[], y="y"))
    with pytest.raises(DataError, match=r"dataset\.x names no column: name at least one"):
        own.dataset.sizes()
