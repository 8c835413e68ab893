"""From the sections of a configuration to clients: users' functions, transforms, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.registry import Experiment
from rayfl.config.loading import load_config, to_yaml
from rayfl.data.federated import FederatedDataset
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.examples import SPLITS
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from tests.support import own_data

BASE = {"model": "two_nn", "algorithm": "fedavg", "partition": {"name": "iid", "num_clients": 4}}


def opened(dataset: Any, **sections: Any) -> FederatedDataset:
    return Parts(load_config(Experiment, {**BASE, "dataset": dataset, **sections}, [])).dataset


def own(name: str) -> str:
    return f"tests.support.own_data:{name}"


def test_a_function_of_the_streams_or_of_the_seed() -> None:
    vectors = opened(own("from_streams"))
    assert vectors.spec.shape == (6,) and vectors.spec.num_classes == 3 and vectors.num_clients == 4
    again, other = opened(own("from_streams")), opened(own("from_streams"), seed=1)
    assert (vectors.load(0)["train"].x == again.load(0)["train"].x).all()
    assert vectors.load(0)["train"].x.mean() != other.load(0)["train"].x.mean()
    pixels = opened(own("from_seed"), seed=51)
    np.testing.assert_allclose(pixels.load(0)["train"].x.numpy(), 0.2)


def test_a_function_with_clients_keeps_them() -> None:
    dataset = opened(own("with_clients"), partition="natural", holdout={"test": 0.5, "validation": 0})
    assert dataset.names == ("ann", "zoe")
    np.testing.assert_array_equal(dataset.sizes(), [[5, 0, 5], [15, 0, 15]])
    with pytest.raises(ConfigError, match="samples already belong to clients; set partition=natural"):
        opened(own("with_clients"))


def test_samples_are_not_gone_through_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, plain = list[int](), np.flatnonzero

    def counted(values: Any) -> np.ndarray:
        passes.append(len(values))
        return plain(values)

    monkeypatch.setattr(np, "flatnonzero", counted)
    dataset = opened(own("with_many_clients"), partition="natural", holdout={"test": 0.25, "validation": 0})
    assert (dataset.sizes() == [3, 0, 1]).all() and dataset.num_clients == 500
    assert passes.count(4 * 500) < 5


def test_a_whole_data_set_is_used_as_it_is() -> None:
    assert opened(own("whole"), partition="natural").num_clients == 5
    for section in (
        {"holdout": {"test": 0.5}},
        {"noise": {"kind": "pair", "ratio": 0.1}},
        {"transform": {"resize": 3}},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(section))}: a FederatedDataset of your own"):
            opened(own("whole"), partition="natural", **section)
    with pytest.raises(ConfigError, match="set partition=natural"):
        opened(own("whole"))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("failing", DataError, r"own_data:failing fails: KeyError: 'no such thing'"),
        ("nothing", DataError, "returned a NoneType; needed are"),
        ("bad_x", DataError, "x has the type int64"),
        ("of_no_samples", DataError, r"x has the shape \(0, 4\): there are no samples"),
        ("bad_y", DataError, r"y has the type int64 and the shape \(3,\)"),
        ("bad_classes", DataError, "num_classes is 0"),
        ("bad_labels", DataError, r"bad_labels: y of sample 0 is 5, but with num_classes=2 .*labels=renumbered"),
        ("ragged", DataError, r"ragged: x: sample 1 has 1 values, but sample 0 2; give all samples the same shape"),
        ("words", DataError, r"words: y has the type <U3 .*one class a sample; number the classes, from 0"),
        ("bad_clients", DataError, r"clients have the shape \(1,\)"),
        ("bad_lengths", DataError, r"lengths: that of sample 7 \(client '3'\) is 13, but rows have 12 tokens"),
        ("few_lengths", DataError, r"lengths have the type int64 and the shape \(119,\); .*each of the 120 texts"),
        ("three_inputs", DataError, r"x is a tuple of 3; needed is an array, or tokens and their lengths"),
        ("absent", ConfigError, "has no 'absent'"),
    ],
)
def test_a_function_that_does_not_fit(name: str, error: type[RayflError], message: str) -> None:
    with pytest.raises(error, match=message):
        opened(own(name))


def test_tensors_of_a_network_are_taken_as_they_are() -> None:
    dataset = opened(own("of_a_network"))
    rows = np.concatenate([dataset.load(client)[split].x for client in range(4) for split in SPLITS])
    assert sorted(rows.ravel().tolist()) == list(range(24)) and not dataset.load(0)["train"].x.requires_grad


def test_tokens_with_lengths_are_filled_up_with_a_token_of_their_own() -> None:
    dataset = opened(own("texts"), partition="natural")
    assert dataset.spec.vocabulary == 9 and dataset.spec.padding == 8
    (tokens, lengths), *_ = own_data.texts(RandomStreams(0))
    rows = np.concatenate([dataset.load(k)[split].x for k in range(4) for split in SPLITS])
    assert sorted(dataset.spec.lengths(torch.from_numpy(rows)).tolist()) == sorted(lengths.tolist())
    assert ((rows < 8).sum(1) == np.sort((rows < 8) * np.arange(1, 13), axis=1)[:, -1]).all()
    assert np.bincount(rows[rows < 8]).tolist() == np.bincount(tokens[np.arange(12) < lengths[:, None]]).tolist()


def test_rows_that_are_padded_on_the_left_are_named() -> None:
    section = {"name": own("left_padded"), "vocabulary": 5}
    (remark,) = opened(section).remarks()
    assert remark.startswith("8 of 12 rows have the token that fills rows up before other tokens")
    assert remark.endswith("let the function return (tokens, lengths)")


def test_the_function_survives_a_round_trip_through_yaml(tmp_path: Path) -> None:
    config = load_config(Experiment, {**BASE, "dataset": own("from_streams")}, [])
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(Experiment, tmp_path / "c.yaml", []) == config
    assert config.dataset.name == "custom"


def test_transforms_reach_pooled_clients() -> None:
    plain, changed = opened("digits"), opened("digits", transform={"resize": 5, "normalize": "dataset"})
    assert changed.spec.shape == (1, 5, 5)
    assert changed.load(2)["test"].x.shape == (len(plain.load(2)["test"]), 1, 5, 5)
    whole = opened("digits", transform={"normalize": "dataset"})
    x = np.concatenate([part.x.numpy().ravel() for client in range(4) for part in whole.load(client).values()])
    assert abs(x.mean()) < 1e-4 and abs(x.std() - 1) < 1e-4
    scaled = opened("digits", transform={"normalize": {"mean": [0.5], "std": [0.25]}}).load(1)["train"].x
    np.testing.assert_allclose(scaled.numpy(), (plain.load(1)["train"].x.numpy() - 0.5) / 0.25, rtol=1e-6)


def test_wrong_transforms_are_named() -> None:
    with pytest.raises(ConfigError, match=r"transform\.normalize"):
        opened("digits", transform={"normalize": "always"})
    with pytest.raises(ConfigError, match=r"transform\.normalize\.std|std has|those of std above 0"):
        opened("digits", transform={"normalize": {"mean": [0], "std": [0]}})
    with pytest.raises(ConfigError, match=r"transform\.normalize: 2 numbers"):
        opened("digits", transform={"normalize": {"mean": [0, 0], "std": [1, 1]}})


def test_clients_without_training_samples_are_refused_by_name() -> None:
    sections = {name: value for name, value in BASE.items() if name != "partition"}
    content = {**sections, "dataset": own("without_training"), "train": {"clients_per_round": 2}}
    with pytest.raises(DataError, match=r"1 of 4 clients have no training samples.*: 1 \(bob\)\. Leave them out"):
        Parts(load_config(Experiment, content, [])).check()


def test_names_that_look_the_same_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["Zo\u00eb", "Zoe\u0308", "c 1", "c  1 ", "c1", "C1"]
    path = tmp_path / "clients.csv"
    rows = [f"{i % 7},{i % 2},{name}" for name in names for i in range(20)]
    path.write_text("\n".join(["x,y,who", *rows]), encoding="utf-8")
    dataset = {"name": "parquet", "path": str(path), "x": ["x"], "y": "y", "client": "who"}
    config = {**BASE, "dataset": dataset, "partition": "natural", "model": "tabular_mlp"}
    Parts(load_config(Experiment, config, ["train.clients_per_round=2"])).check()
    (said,) = [record.getMessage() for record in caplog.records if "names of clients" in record.getMessage()]
    assert "differ only by blanks or by the Unicode form of their letters" in said
    assert r"'Zo\xeb'" in said and r"'Zoe\u0308'" in said and "'c 1'" in said and "'c  1 '" in said
    assert "c1" not in said and "C1" not in said
