"""Runs whose clipping norm follows a quantile: what is committed, shown and refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.replay import replay
from cluster.rounds.forking import fork
from cluster.run import run_config
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import known_schema, recorded_schema
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.participation import participants
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tracking.scalars import Overview, scalars
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

PRIVACY = {"clip_norm": 0.05, "noise_multiplier": 0.3, "delta": 0.5, "target_quantile": 0.5, "clip_lr": 0.5}


def adaptive(place: Path, name: str, method: str = "ditto", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    train = {**content["train"], "clients_per_round": 4, "sampling": "poisson", **sections.pop("train", {})}
    privacy = {**PRIVACY, **sections.pop("privacy", {})}
    algorithm = {**content["algorithm"], "aggregation": "uniform"}
    return {**content, "privacy": privacy, **sections, "train": train, "algorithm": algorithm}


def norms(rounds: pa.Table) -> dict[int, float]:
    """The column by round; all rows of a round have the same."""
    pairs = set(zip(rounds["round"].to_pylist(), rounds["clip_norm"].to_pylist(), strict=True))
    assert len(pairs) == len({round for round, _ in pairs})
    return dict(sorted(pairs))


def last_norm(folder: Path) -> float | None:
    manifest = CommitStore(Storage(str(folder))).latest()
    assert manifest is not None
    return manifest.clip_norm


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> rayfl.Result:
    place = tmp_path_factory.mktemp("whole")
    return rayfl.run(adaptive(place, "whole", storage={"keep_commits": 9}))


def test_each_round_has_its_norm(whole: rayfl.Result) -> None:
    found = norms(whole.rounds)
    assert list(found) == [1, 2, 3, 4] and found[1] == 0.05 and len(set(found.values())) == 4
    store = CommitStore(Storage(str(whole.path)))
    after = {round: store.read_manifest(f"manifest-{round:06d}.json").clip_norm for round in found}
    assert {round + 1: norm for round, norm in after.items() if round < 4} == {t: found[t] for t in (2, 3, 4)}
    schema = whole.rounds.schema
    assert known_schema("rounds", schema) and not known_schema("rounds", schema.remove(len(schema) - 1))
    assert recorded_schema("rounds", schema.metadata, False, False).equals(schema)
    assert verify(Storage(str(whole.path))).problems == []


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.first_case
def test_an_interrupted_run_continues_to_the_same_bits(whole: rayfl.Result, tmp_path: Path, after: int) -> None:
    pieces = adaptive(tmp_path, "whole")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(Path(whole.path)), outcome(tmp_path / "whole"))
    assert last_norm(tmp_path / "whole") == last_norm(Path(whole.path)) is not None


def test_more_rounds_go_on_with_the_norm(whole: rayfl.Result, tmp_path: Path) -> None:
    rayfl.run(adaptive(tmp_path, "whole", train={"rounds": 2}))
    rayfl.run(tmp_path / "whole", **{"train.rounds": 4})
    assert_same(outcome(Path(whole.path)), outcome(tmp_path / "whole"))


def test_a_fork_goes_on_with_the_norm(whole: rayfl.Result, tmp_path: Path) -> None:
    config, begun = fork(str(whole.path), "forked", 2, {"storage_path": str(tmp_path)})
    assert begun == 2
    run_config(config)
    assert_same(outcome(Path(whole.path)), outcome(tmp_path / "forked"))
    with pytest.raises(ConfigError, match=r"privacy: a fork goes on"):
        fork(str(whole.path), "other", 2, {"storage_path": str(tmp_path), "privacy.clip_lr": 0.1})


@pytest.mark.parametrize("alone", [True, False], ids=["a client", "the whole round"])
def test_a_round_is_replayed_with_its_norm(whole: rayfl.Result, alone: bool) -> None:
    run = open_run(str(whole.path), Experiment)
    client = run.parts.cohort(2)[0]
    found = replay(run, 3, client, whole=not alone)
    assert found.differences == {} and ("server" in found.compared) is not alone


def test_a_round_without_clients_changes_nothing(tmp_path: Path) -> None:
    sections = {"privacy": {"noise_multiplier": 0, "delta": None}, "train": {"clients_per_round": 1, "rounds": 8}}
    result = rayfl.run(adaptive(tmp_path, "run", evaluation={"every": 1}, **sections))
    assert result.epsilon is None
    took_part = participants(load_run(result.path, METHODS))
    assert took_part is not None
    sizes = [took_part["round"].to_pylist().count(round) for round in range(1, 9)]
    found = norms(result.rounds)
    assert 0 in sizes[:-1] and max(sizes) > 1
    assert [found[round] == found[round + 1] for round in range(1, 8)] == [size == 0 for size in sizes[:-1]]


def test_trackers_have_one_curve_of_it(whole: rayfl.Result) -> None:
    rows = [row for row in whole.rounds.to_pylist() if row["round"] == 2]
    for chosen in (None, Overview("global", "", "top1")):
        found = scalars(rows, chosen)
        assert [name for name in found if "clip_norm" in name] == ["clip_norm"]
        assert found["clip_norm"] == norms(whole.rounds)[2]


def test_runs_with_a_fixed_norm_have_no_column(tmp_path: Path) -> None:
    content = adaptive(tmp_path, "run")
    fixed = {key: value for key, value in PRIVACY.items() if key not in ("target_quantile", "clip_lr")}
    result = rayfl.run({**content, "privacy": fixed})
    assert "clip_norm" not in result.rounds.schema.names and last_norm(Path(result.path)) is None


def test_epsilon_is_that_of_a_fixed_norm(whole: rayfl.Result, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rayfl")
    fixed = {"target_quantile": None, "clip_lr": 0.2}
    other = load_config(Experiment, adaptive(tmp_path, "run", privacy=fixed), [])
    Parts(other).check()
    assert f"epsilon = {whole.epsilon:.2f} at" in caplog.text and "gets noise" not in caplog.text
    Parts(whole.config).check()
    assert "gets noise of 0.2, and the sum of 0.4536 times the norm, which together cost as much as 0.3" in caplog.text


def test_noise_that_the_count_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy.count_noise: .* noise of 0.2 alone .* must be above 0.2"):
        rayfl.run(adaptive(tmp_path, "run", privacy={"noise_multiplier": 0.4}))
    assert not (tmp_path / "run").exists()
