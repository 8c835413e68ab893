"""Runs with cyclic cohorts and the noise of a tree: what is gone on with, said and refused."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.replay import replay
from cluster.rounds.forking import fork
from cluster.run import run_config
from rayfl.config.loading import load_config
from rayfl.engine.privacy import epsilon
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.report.protocol import message_settings
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.participation import participants
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

NOISY = {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.1, "noise": "tree"}


def private(place: Path, name: str, method: str = "fedavgm", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    train = {**content["train"], "clients_per_round": 2, "sampling": "cyclic", **sections.pop("train", {})}
    privacy = {**NOISY, **sections.pop("privacy", {})}
    algorithm = {**content["algorithm"], "aggregation": "uniform"}
    return {**content, **sections, "train": train, "privacy": privacy, "algorithm": algorithm}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> rayfl.Result:
    return rayfl.run(private(tmp_path_factory.mktemp("whole"), "whole", storage={"keep_commits": 9}))


def test_all_clients_take_part_in_turn(whole: rayfl.Result) -> None:
    took_part = participants(load_run(whole.path, METHODS))
    assert took_part is not None and whole.rounds_completed == 4
    clients = [took_part["client"].to_pylist()[2 * round : 2 * round + 2] for round in range(4)]
    assert took_part["round"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert all(len({*one, *others}) == 4 for one, others in pairwise(clients))
    assert verify(Storage(whole.path)).problems == []
    assert whole.epsilon == epsilon(whole.config.privacy, whole.config.train, 5, 4)
    assert "noise multiplier 1.0, noise shared by rounds (tree)" in message_settings(load_run(whole.path, METHODS))


@pytest.mark.parametrize("noise", ["tree", "honaker", "banded"])
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.first_case
def test_an_interrupted_run_continues_to_the_same_bits(tmp_path: Path, after: int, noise: str) -> None:
    rayfl.run(private(tmp_path, "whole", privacy={"noise": noise}))
    pieces = private(tmp_path, "pieces", privacy={"noise": noise})
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_more_rounds_and_forks_go_on_with_the_tree(whole: rayfl.Result, tmp_path: Path) -> None:
    rayfl.run(private(tmp_path, "whole", train={"rounds": 2}))
    rayfl.run(tmp_path / "whole", **{"train.rounds": 4})
    assert_same(outcome(Path(whole.path)), outcome(tmp_path / "whole"))
    config, begun = fork(str(whole.path), "forked", 1, {"storage_path": str(tmp_path)})
    assert begun == 1
    run_config(config)
    assert_same(outcome(Path(whole.path)), outcome(tmp_path / "forked"))
    for option in ("privacy.noise=honaker", "privacy.tree_rounds=2", "train.sampling=poisson"):
        changed = "train.sampling" if option.startswith("train") else "privacy"
        with pytest.raises(ConfigError, match=rf"{changed}: a fork goes on"):
            fork(str(whole.path), "other", 2, [f"storage_path={tmp_path}", option])


def test_a_round_is_replayed_with_its_noise(whole: rayfl.Result) -> None:
    run = open_run(whole.path, Experiment)
    found = replay(run, 4, run.parts.cohort(3)[0], whole=True)
    assert found.differences == {} and "server" in found.compared


def test_rounds_of_a_banded_matrix_say_their_epsilon(tmp_path: Path) -> None:
    """Five clients in cohorts of two: two rounds lie between a client's rounds, or one, and b is 2."""
    run = rayfl.run(private(tmp_path, "run", privacy={"noise": "banded"}))
    assert run.epsilon == epsilon(run.config.privacy.model_copy(update={"bands": 2}), run.config.train, 5, 4)
    assert run.epsilon != epsilon(run.config.privacy.model_copy(update={"bands": 3}), run.config.train, 5, 4)
    assert "noise shared by rounds (banded)" in message_settings(load_run(run.path, METHODS))
    opened = open_run(run.path, Experiment)
    assert replay(opened, 4, opened.parts.cohort(3)[0], whole=True).differences == {}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"privacy": {"bands": 2}}, "bands is of the noise of a banded matrix"),
        ({"privacy": {"noise": "banded", "tree_rounds": 2}}, "tree_rounds is of the noise of a tree"),
        (
            {"privacy": {"noise": "banded"}, "train": {"sampling": "poisson"}},
            "noise=banded: epsilon depends on",
        ),
        (
            {"train": {"sampling": "fixed"}},
            "privacy.noise=tree: .* with train.sampling=fixed .* set train.sampling=cyclic",
        ),
        ({"train": {"sampling": "poisson"}}, "with train.sampling=poisson it may be in any: set train.sampling=cyclic"),
        ({"privacy": {"target_quantile": 0.5}}, "known for one norm in all rounds: leave target_quantile out"),
        (
            {"privacy": {"noise": "independent", "target_quantile": 0.5, "count_noise": 2.0}},
            "privacy.target_quantile: with train.sampling=cyclic",
        ),
        ({"system": {"name": "sampled"}}, "train.sampling=cyclic: simulated devices"),
        ({"train": {"min_clients_per_round": 1}}, "leave min_clients_per_round out"),
    ],
)
def test_what_has_no_epsilon_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rayfl.run(private(tmp_path, "run", **sections))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"privacy": {"noise": "independent"}},
        {"privacy": {"noise": "honaker", "tree_rounds": 3}},
        {"train": {"sampling": "fixed", "clients_per_round": "all"}},
    ],
    ids=["independent noise in cyclic cohorts", "several trees", "everybody in every round"],
)
def test_what_has_one_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, Any]) -> None:
    caplog.set_level(logging.INFO, "rayfl")
    parts = Parts(load_config(Experiment, private(tmp_path, "run", **sections), []))
    parts.check()
    wanted = epsilon(parts.config.privacy, parts.config.train, 5, 4)
    assert f"epsilon = {wanted:.2f} at delta = 0.1 for each client after 4 rounds" in caplog.text
