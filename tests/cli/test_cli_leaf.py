"""The commands that import LEAF's data sets, and what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from algorithms.registry import Experiment
from rayfl.cli.entry import main
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from tests.data.sources.leaf.test_leaf_nist import nist
from tests.data.sources.leaf.test_leaf_plays import written
from tests.data.sources.leaf.test_leaf_words import tweets
from tests.support.commands import command
from tests.support.leaf_sources import document, write_source
from tests.support.tff_files import stack_overflow, write_sqlite

SYNTHETIC = [
    "dataset={name: synthetic, num_clients: 6, dimension: 8, num_classes: 3}",
    "partition=natural",
    "model={name: two_nn, hidden: [4]}",
]


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))


def test_import_leaf_passes_its_options_on(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(ann=tweets("a b a"), bob=tweets()))
    options = ["--tokens", "characters", "--length", "4", "--vocabulary", "3"]
    text = command("data", "import-leaf", "sent140", str(source), *options)
    assert "1 clients, 1 train, 0 test samples" in text
    assert "users have no sample here" in text
    assert pq.read_table(tmp_path / "data" / "sent140.parquet").column("x").to_pylist() == [[1, 2, 1, 2]]


def test_import_femnist_raw(tmp_path: Path) -> None:
    source = nist(tmp_path / "n", {"f0000_14": "3A3z", "f0001_41": "zAz", "f0002_01": "3"})
    text = command(
        *("data", "import-femnist-raw", str(source), "--repeat-first", "--min-samples", "3", "--train-fraction", "0.5")
    )
    # Four images, and three with the first of them twice.
    assert "2 clients, 4 train, 4 test samples" in text
    assert "1 clients have fewer than 3 samples" in text
    assert pq.read_table(tmp_path / "data" / "femnist.parquet").num_rows == 8
    text = command("data", "import-femnist-raw", str(source), "--iid", "--iid-clients", "0.7", "--sample-fraction", "1")
    assert "2 clients" in text


def test_import_shakespeare_raw(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(written(dict.fromkeys(("HE", "SHE", "YOU"), "to be or not " * 40)))
    arguments = ["data", "import-shakespeare-raw", str(tmp_path / "p.txt"), "--seed", "3", "--train-fraction", "0.7"]
    text = command(*arguments, "--by", "user", "--out", str(tmp_path / "s.parquet"))
    assert "1 clients have a test part only" in text
    assert sorted(set(pq.read_table(tmp_path / "s.parquet").column("client").to_pylist())) == [
        "PLAY_HE",
        "PLAY_SHE",
        "PLAY_YOU",
    ]
    assert "3 clients" in command(*arguments)
    assert (tmp_path / "data" / "shakespeare.parquet").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import-leaf", "celeba", "x"], "celeba needs --images"),
        (["import-leaf", "femnist", "x", "--length", "3"], "--length does not apply to femnist"),
        (["import-femnist-raw", "nowhere"], "nowhere has neither by_class"),
        (["import-femnist-raw", "x", "--train-fraction", "2"], "--train-fraction is 2.0"),
        (["import-shakespeare-raw", "nowhere"], "nowhere cannot be read as text"),
        (["import-shakespeare-raw", "x", "--iid-clients", "0.2"], "--iid-clients is for --iid only"),
    ],
)
def test_errors_are_one_message(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rayfl", "data", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_synthetic_runs(tmp_path: Path) -> None:
    small = "train={rounds: 1, clients_per_round: 2, local_epochs: 1, batch_size: 500}"
    train = ["algorithm=fedavg", small, "cluster.backend=inline"]
    text = command("run", *SYNTHETIC, *train, f"storage_path={tmp_path}", "name=s", "holdout.test=0.1")
    assert "global" in text
    assert text.splitlines()[-6:] == command("run", str(tmp_path / "s" / "config.yaml")).splitlines()[-6:]


def parts(*overrides: str) -> Any:
    return Parts(load_config(Experiment, None, [*SYNTHETIC, *overrides]))


def test_synthetic_has_clients_of_its_own() -> None:
    dataset = parts("holdout.test=0.1", "holdout.validation=0").dataset
    assert dataset.names == tuple("012345")
    sizes = dataset.sizes()
    np.testing.assert_array_equal(sizes[:, 2], np.floor(0.1 * sizes.sum(axis=1) + 1e-9))
    again = parts("holdout.test=0.1", "holdout.validation=0").dataset
    assert all((dataset.load(k)["train"].x == again.load(k)["train"].x).all() for k in range(6))
    with pytest.raises(Exception, match=r"partition\.name: 'iid' cannot divide dataset 'synthetic'"):
        _ = parts("partition={name: iid, num_clients: 3}").dataset


def test_synthetics_configuration_is_read_again() -> None:
    config = parts("dataset.alpha=0", "dataset.beta=0", "dataset.iid=true").config
    content = json.loads(config.dataset.model_dump_json())
    assert type(config.dataset).model_validate(content) == config.dataset


def test_tffs_data_are_imported_and_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = stack_overflow()
    source = write_sqlite(tmp_path / "so.sqlite", {"train": parts["train"], "test": parts["test"], "heldout": {}})
    counts = tmp_path / "stackoverflow.word_count"
    counts.write_text("".join(f"w{word} {100 - word}\n" for word in range(1, 50)))
    said = command("data", "import-tff", "stackoverflow", str(source), "--clients", "3", "--vocabulary", "20", "--json")
    found = json.loads(said)
    assert found["clients"] == 3 and found["warnings"] == []
    assert found["file"] == str(tmp_path / "data" / "tff-stackoverflow.parquet")
    listed = command("data", "list")
    assert "stackoverflow" in listed and "24 tokens to choose from" in listed
    assert "good" in command("data", "verify")
    monkeypatch.setattr(sys, "argv", ["rayfl", "data", "import-tff", "emnist", str(source)])
    with pytest.raises(SystemExit):
        main()
    assert "has no client of the split 'all_train', but splits 'train', 'test'" in capsys.readouterr().err
