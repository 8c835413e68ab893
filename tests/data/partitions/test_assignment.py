"""Who owns which sample: written beside a run, hashed into its results, and usable as a partition."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.data.partitions.assignment import ASSIGNMENT_SCHEMA, FilePartition, assignment_hash
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.errors import ConfigError, DataError, RunError
from rayfl.examples import SPLITS
from rayfl.experiment.parts import Parts
from rayfl.report.comparison import compare
from rayfl.results.schemas import PARTITION_KEY, data_metadata, same_data
from rayfl.runs.finding import load_runs
from rayfl.runs.folder import open_run
from tests.support.experiments import small_experiment


def experiment(folder: Path, name: str, **sections: Any) -> dict[str, Any]:
    return small_experiment(folder, name, "fedavg", backend="inline") | {"holdout": {"public": 20}} | sections


def test_a_run_names_its_partition_and_another_run_can_take_it_over(tmp_path: Path) -> None:
    first = rayfl.run(experiment(tmp_path, "first"))
    file = tmp_path / "first" / "partition.parquet"
    table = pq.read_table(file)
    assert table.schema.equals(ASSIGNMENT_SCHEMA)
    assert len(np.unique(table["sample"].to_numpy())) == table.num_rows == 1797
    assert table["split"].to_pylist().count("public") == 20
    assert first.partition == assignment_hash(table)
    assert first.rounds.schema.metadata[PARTITION_KEY].decode() == first.partition
    stored = pq.read_table(tmp_path / "first" / "clients.parquet")
    assert stored.schema.metadata[PARTITION_KEY].decode() == first.partition
    reused = experiment(tmp_path, "second", partition={"name": "file", "path": str(file)}, holdout={}, seed=7)
    second = rayfl.run(reused)
    assert second.partition == first.partition
    assert (tmp_path / "second" / "partition.parquet").read_bytes() == file.read_bytes()


def test_another_seed_is_another_partition(tmp_path: Path) -> None:
    hashes = {Parts(load_config(Experiment, experiment(tmp_path, "x", seed=s), [])).partition_hash for s in (0, 0, 1)}
    assert len(hashes) == 2


def test_a_run_whose_data_changed_is_not_continued(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "first"))
    file = tmp_path / "own.parquet"
    table = pq.read_table(tmp_path / "first" / "partition.parquet")
    pq.write_table(table, file)
    config = experiment(tmp_path, "second", partition={"name": "file", "path": str(file)}, holdout={})
    rayfl.run(config)
    pq.write_table(table.slice(1), file)
    with pytest.raises(RunError, match=r"second/partition.parquet says that the run began with other data"):
        rayfl.run(config)


def in_a_file(folder: Path, name: str, factor: float, **sections: Any) -> dict[str, Any]:
    """A run on a table whose clients are as large whatever is in its rows."""
    rows = [f"{client},{factor * (client + row)},{row % 2}" for client in range(3) for row in range(8)]
    path = folder / "own.csv"
    path.write_text("\n".join(["client,x1,y", *rows]))
    return experiment(folder, name, dataset={"name": "parquet", "path": str(path), "root": str(folder)}, **sections) | {
        "partition": "natural",
        "holdout": {"test": 0.25},
    }


def test_other_samples_of_the_same_clients_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longer = {"train.rounds": 9}
    rayfl.run(in_a_file(tmp_path, "run", 1.0))
    in_a_file(tmp_path, "run", 2.0)
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(RunError, match="are of other data than the configuration gives now"):
        rayfl.run(tmp_path / "run", **longer)
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before
    with pytest.raises(RunError, match="are of other data than the configuration gives now"):
        rayfl.run(tmp_path / "run")
    with pytest.raises(RunError, match="was made on other data"):
        _ = open_run(str(tmp_path / "run"), Experiment).parts
    with pytest.raises(RunError, match="was made on other data"):
        fork(str(tmp_path / "run"), "fork", None, longer)
    rayfl.run(in_a_file(tmp_path, "other", 2.0, algorithm={"name": "ditto"}))
    with pytest.raises(RunError, match="same configuration and seed, but other samples in its files"):
        compare(load_runs([str(tmp_path / "run"), str(tmp_path / "other")], METHODS))
    in_a_file(tmp_path, "run", 1.0)
    assert rayfl.run(tmp_path / "run", **longer).rounds_completed == 9


def test_samples_that_no_checksum_is_known_of_are_taken_as_they_are() -> None:
    old, one, other = (data_metadata("partition", content) for content in (None, "a", "b"))
    assert same_data(old, one) and same_data(one, old) and same_data(one, one)
    assert not same_data(one, other) and not same_data(one, data_metadata("another", "a"))


def write(path: Path, rows: list[tuple[int, str, int]]) -> Path:
    columns = list(zip(*rows, strict=True))
    pq.write_table(pa.Table.from_arrays([pa.array(c) for c in columns], names=ASSIGNMENT_SCHEMA.names)
                   .cast(ASSIGNMENT_SCHEMA), path)  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, "train", 0), (1, "train", 0)], "gives a sample to two"),
        ([(0, "train", 0), (0, "test", 9)], "names samples up to 9, but the source has 9"),
        ([(0, "train", 0), (1, "test", 1)], "client 1 has no train sample"),
        ([(0, "train", 0), (2**31 - 1, "train", 1)], "client 1 has no train sample"),
        ([(0, "other", 0)], "is not a partition.parquet"),
    ],
)
def test_files_that_do_not_fit_are_refused(rows: list[tuple[int, str, int]], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", rows)
    with pytest.raises(DataError, match=message):
        FilePartition(path=path).splits(9)


def test_many_clients_take_no_time_each(tmp_path: Path) -> None:
    """It was minutes in every process: each client looked at all rows."""
    rows = [(client, split, 3 * client + place) for client in range(20_000) for place, split in enumerate(SPLITS)]
    path = write(tmp_path / "p.parquet", rows[::-1])
    started = time.monotonic()
    found, public = FilePartition(path=path).splits(60_000)
    assert time.monotonic() - started < 30
    assert {name: places.tolist() for name, places in found[9].items()} == {
        "train": [27],
        "validation": [28],
        "test": [29],
    }
    assert len(found) == 20_000 and not len(public)


def test_a_wrong_hash_a_missing_file_and_a_holdout_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", [(0, "train", 0)])
    with pytest.raises(DataError, match=r"partition\.sha256 is abc"):
        FilePartition(path=path, sha256="abc").splits(9)
    with pytest.raises(DataError, match="cannot be read"):
        FilePartition(path=tmp_path / "missing.parquet").splits(9)
    config = experiment(tmp_path, "x", partition={"name": "file", "path": str(path)})
    with pytest.raises(ConfigError, match=r"leave out the section, or set holdout=\{\}"):
        _ = Parts(load_config(Experiment, config, [])).dataset
    assert load_config(Experiment, config, ["holdout={}"]).holdout == HoldoutConfig()  # the fix that is named
