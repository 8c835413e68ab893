"""``rayfl replay``: rounds of finished runs computed again, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from cluster.replay import replay, sent_message
from cluster.rounds.forking import fork
from rayfl.errors import ConfigError, RunError
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.rows import where
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.commands import command
from tests.support.experiments import small_experiment
from tests.support.inspecting import Finished, opened

METHODS = ("superfed-mm", "fedavg", "fedphp", "fedme", "floco", "scaffold", "fedpac")


@pytest.mark.two_cases
@pytest.mark.parametrize("round", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_has_the_same_bits(finished: Finished, method: str, round: int) -> None:
    run = opened(finished(method))
    client = run.parts.cohort(round - 1)[1]
    found = replay(run, round, client)
    assert found.differences == {}
    assert found.compared["rows"] > 0
    assert ("state" in found.compared) == (client in run.manifest(round).states)
    # In these rounds the client does more than one thing, and others' results come in between.
    assert found.whole == ((method, round) in {("fedme", 1), ("fedme", 3), ("fedpac", 1), ("fedpac", 3), ("floco", 3)})


@pytest.mark.parametrize("method", ["superfed-mm", "scaffold", "floco"])
def test_a_whole_round_gives_the_servers_bits(finished: Finished, method: str) -> None:
    run = opened(finished(method))
    found = replay(run, 3, run.parts.cohort(2)[0], whole=True)
    assert found.whole and found.compared["server"] > 0
    assert found.differences == {}


def test_clients_that_a_method_has_drawn_itself_are_replayed(tmp_path: Path) -> None:
    """DRFA trains clients by its weights, and asks those that were sampled for their losses."""
    rayfl.run(small_experiment(tmp_path, "r", "drfa", backend="inline"), **{"train.rounds": 1, "train.momentum": 0})
    run = opened(tmp_path / "r")
    trained = where(run.clients, round=1, cohort="selected")["client"].to_pylist()
    others = sorted(set(trained) - set(run.parts.cohort(0)))
    assert others, "the test needs a client that was drawn by the method alone"
    assert replay(run, 1, others[0]).differences == {}


def test_a_replay_changes_nothing(superfed: RunFolder) -> None:
    path = superfed.storage.local_path
    assert path is not None
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    text = command("replay", str(path), "--round", "2", "--client", str(superfed.parts.cohort(1)[0]))
    assert "equal to the bit" in text
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_replay_finds_other_bits_in_a_run_that_was_moved(superfed: RunFolder, tmp_path: Path) -> None:
    path = Path(shutil.copytree(superfed.storage.uri, tmp_path / "moved"))
    run = opened(path)
    client = run.parts.cohort(2)[0]
    store, manifest = CommitStore(Storage(str(path))), run.manifest(3)
    state = store.read_states(manifest.states[client])[client]
    state["local"]["head.bias"] = state["local"]["head.bias"] + 0.5
    changed = store.write_states(3, 0, {client: state})
    store.write_manifest(manifest.model_copy(update={"states": {**manifest.states, client: changed}}))
    found = replay(opened(path), 3, client)
    assert found.differences == {"state/local/head.bias": pytest.approx(0.5, abs=1e-6)}
    text = command("replay", str(path), "--round", "3", "--client", str(client), status=1)
    assert "differs: state/local/head.bias" in text


def test_what_cannot_be_replayed(finished: Finished, tmp_path: Path, superfed: RunFolder) -> None:
    absent = next(client for client in range(5) if client not in superfed.parts.cohort(1))
    with pytest.raises(ConfigError, match=f"client {absent} took no part in round 2"):
        replay(superfed, 2, absent)
    with pytest.raises(ConfigError, match="has rounds 1 to 3, not 4"):
        replay(superfed, 4, 0)
    path = Path(shutil.copytree(finished("fedavg"), tmp_path / "run"))
    (path / "commits" / "manifest-000001.json").unlink()
    run = opened(path)
    with pytest.raises(RunError, match="no commit of round 1; kept are those of rounds: 2, 3"):
        replay(run, 2, run.parts.cohort(1)[0])


def test_without_rows_and_state_there_is_nothing_to_compare(tmp_path: Path) -> None:
    options = {"evaluation.cohort_every": 0, "train.rounds": 1}
    rayfl.run(small_experiment(tmp_path, "r", "fedavg", backend="inline"), **options)
    run = opened(tmp_path / "r")
    client = run.parts.cohort(0)[0]
    with pytest.raises(RunError, match="--whole-round"):
        replay(run, 1, client)
    found = replay(run, 1, client, whole=True)
    assert list(found.compared) == ["server"] and not found.differences


@pytest.mark.two_cases
@pytest.mark.parametrize(
    "section",
    [{}, {"algorithm": "fedavgm"}, {"compression": {"name": "sign"}}, {"aggregator": {"name": "median"}}],
    ids=lambda section: next(iter(section), "mean"),
)
def test_the_first_round_is_replayed_where_normalization_stays_with_the_clients(
    tmp_path: Path, section: dict[str, Any]
) -> None:
    """The server begins without the tensors that stay, so that changes of others and the server's own steps fit."""
    train = {"train.private_norm": "all", "train.rounds": 1}
    rayfl.run({**small_experiment(tmp_path, "r", "fedbn", backend="inline"), "algorithm": "fedavg", **section}, **train)
    run = open_run(str(tmp_path / "r"), Experiment, trust=True)
    client = run.parts.cohort(0)[0]
    for whole in (False, True):
        assert replay(run, 1, client, whole).differences == {}
    assert any(not leaf.numel() for leaf in sent_message(run, 1, client).sent.values())


def test_a_fork_replays_its_own_rounds_alone(tmp_path: Path) -> None:
    keep = {"storage.keep_commits": 4, "train.rounds": 2}
    rayfl.run(small_experiment(tmp_path, "source", "fedavg", backend="inline"), **keep)
    fork(str(tmp_path / "source"), "forked", 1, {"train.lr": 0.01})
    rayfl.run(tmp_path / "forked")
    run = opened(tmp_path / "forked")
    assert replay(run, 2, run.parts.cohort(1)[0], whole=True).differences == {}
    for repeat in (replay, sent_message):
        with pytest.raises(RunError, match="begins after round 1: earlier ones are those of another run"):
            repeat(run, 1, run.parts.cohort(0)[0])
