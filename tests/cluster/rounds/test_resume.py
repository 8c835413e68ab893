"""Every method continues an interrupted run to the same bits."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import cluster.rounds.recorder
import rayfl
import rayfl.storage.tables
from rayfl import Callback
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.commits_alike import assert_same_commits
from tests.support.experiments import (
    FEW,
    FURTHER,
    METHODS,
    PRETRAINED,
    Interrupt,
    assert_same,
    each_method,
    outcome,
    small_experiment,
)


@pytest.mark.two_cases
@pytest.mark.parametrize(
    "method", each_method([*METHODS, *sorted(FURTHER.keys() - PRETRAINED)], quick={*FEW, "fedphp", "gcfl", "fedbuff"})
)
def test_an_interrupted_run_continues_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """All that an undisturbed run has committed in any round, file by file."""
    storage = {"storage": {"keep_commits": 4}}
    rayfl.run(small_experiment(tmp_path, "whole", method, backend="inline") | storage)
    pieces = small_experiment(tmp_path, "pieces", method, backend="inline") | storage
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    assert_same_commits(tmp_path / "whole", tmp_path / "pieces")


def test_rows_in_many_parts_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rayfl.run(small_experiment(tmp_path, "whole", "scaffold", backend="inline"))
    monkeypatch.setattr(rayfl.storage.tables, "LARGE_PART_BYTES", 1)
    pieces = small_experiment(tmp_path, "pieces", "scaffold", backend="inline")
    for after in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    result = rayfl.run(pieces)
    assert result.clients.num_rows == pq.read_table(tmp_path / "pieces" / "clients.parquet").num_rows
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    manifest = CommitStore(Storage(str(tmp_path / "pieces"))).latest()
    assert manifest is not None
    assert len(manifest.tables["clients"]) == manifest.rounds_completed


class Rows(Callback):
    """Notes how many rows of clients users see after each commit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.seen: list[int] = []

    def on_commit(self, rounds_completed: int) -> None:
        self.seen.append(pq.read_metadata(self._folder / "clients.parquet").num_rows)


def test_tables_are_put_beside_the_commits_now_and_then_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often, seldom = Rows(tmp_path / "often"), Rows(tmp_path / "seldom")
    rayfl.run(small_experiment(tmp_path, "seldom", "fedavg", backend="inline"), callbacks=[seldom])
    monkeypatch.setattr(cluster.rounds.recorder, "PUBLISH_EVERY_S", 0)
    monkeypatch.setattr(cluster.rounds.recorder, "PUBLISH_SPACING", 0)
    rayfl.run(small_experiment(tmp_path, "often", "fedavg", backend="inline"), callbacks=[often])
    assert often.seen == sorted(set(often.seen))
    assert len(set(seldom.seen)) < len(often.seen)
    contents = [(tmp_path / name / "clients.parquet").read_bytes() for name in ("often", "seldom")]
    assert contents[0] == contents[1]


def test_an_interrupted_run_leaves_tables_of_its_last_commit(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(small_experiment(tmp_path, "run", "fedavg", backend="inline"), callbacks=[Interrupt(3)])
    storage = Storage(str(tmp_path / "run"))
    manifest = CommitStore(storage).latest()
    assert manifest is not None
    table = pq.read_table(tmp_path / "run" / "clients.parquet")
    assert set(table["round"].to_pylist()) == set(range(1, manifest.rounds_completed + 1))
    assert verify(storage).problems == []
