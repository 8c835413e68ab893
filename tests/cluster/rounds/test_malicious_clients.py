"""Runs with malicious clients and robust aggregation: who is scored, what they train on, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS
from rayfl.experiment.parts import Parts
from rayfl.report.protocol import message_settings
from rayfl.runs.finding import load_run
from rayfl.runs.rows import where
from tests.cluster.rounds.test_unseen_clients import experiment as twelve_clients
from tests.support.experiments import assert_same, outcome

ATTACK = {"clients": [1, 4, 7], "message": "sign_flip", "strength": 3}
HONEST = {0, 2, 3, 5, 6, 8, 9, 10, 11}


def experiment(folder: Path, name: str = "run", method: str = "fedper", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits for two rounds, three of them malicious."""
    train = {"clients_per_round": 9, **changes.pop("train", {})}
    sections = {"attack": ATTACK, "aggregator": {"name": "trimmed_mean", "malicious": 2}, **changes}
    content = twelve_clients(folder, name, method, **{"evaluation": {"every": 1}, **sections})
    return {**content, "train": {**content["train"], **train}}


def parts(folder: Path, **changes: Any) -> Parts:
    return Parts(load_config(Experiment, experiment(folder, **changes), {}))


def scored(run: Any, **chosen: Any) -> set[int]:
    return set(where(run.clients, **chosen)["client"].to_pylist())


def test_honest_clients_alone_are_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluation = {"every": 1, "cohort_every": 1, "cohort_received": True, "unseen_clients": 0}
    run = rayfl.run(experiment(tmp_path, evaluation=evaluation))
    assert scored(run, cohort="all", round=1) == scored(run, cohort="all", round=2) == HONEST
    for phase in ("trained", "received"):
        cohort = set(Parts(run.config).cohort(0))
        assert cohort & {1, 4, 7}, "the test needs a malicious client in the first round"
        assert scored(run, cohort="selected", phase=phase, round=1) == cohort - {1, 4, 7}
    rows = where(run.rounds, cohort="selected", phase="trained", round=1).to_pylist()
    plain = rayfl.run(experiment(tmp_path, "plain", evaluation=evaluation, attack={}, aggregator="mean"))
    others = where(plain.rounds, cohort="selected", phase="trained", round=1).to_pylist()
    assert rows[0]["update_variance"] == pytest.approx(others[0]["update_variance"]), "of what was trained"
    assert "attack: 3 of 12 clients are malicious, and in no score: 1, 4, 7" in caplog.text


def test_drawn_clients_are_honest(tmp_path: Path) -> None:
    drawn = parts(tmp_path, evaluation={"clients": 5}).evaluated(1)
    assert drawn is not None and len(drawn) == 5 and set(drawn) <= HONEST
    with pytest.raises(ConfigError, match=r"evaluation\.clients is 10, but 9 clients are honest"):
        parts(tmp_path, evaluation={"clients": 10}).check()


def test_newcomers_are_scored_beside_malicious_clients(tmp_path: Path) -> None:
    attack = {"share": 0.2, "labels": "flipped"}
    run = rayfl.run(
        experiment(tmp_path, attack=attack, evaluation={"unseen_clients": 0.2}, train={"clients_per_round": 7})
    )
    malicious = Parts(run.config).attackers
    assert len(malicious) == 2 and run.malicious == malicious
    assert scored(run, cohort="all", round=2) == set(range(10)) - malicious
    assert scored(run, cohort="unseen", round=2) == {10, 11}


@pytest.mark.parametrize("kind", ["flipped", "random"])
def test_malicious_clients_train_on_wrong_labels(kind: str, tmp_path: Path) -> None:
    attack = {"clients": [1, 4], "labels": kind}
    holdout = {"test": 0.2, "validation": 0.2}
    honest, poisoned = (parts(tmp_path, attack=one, holdout=holdout).dataset for one in ({}, attack))
    for client in range(12):
        for split in SPLITS:
            right, found = (one.load(client)[split].y.numpy() for one in (honest, poisoned))
            np.testing.assert_array_equal(poisoned.labels(client)[split], found)
            if client not in (1, 4) or split == "test":
                np.testing.assert_array_equal(found, right)
            elif kind == "flipped":
                np.testing.assert_array_equal(found, 9 - right)
            else:
                assert found.dtype == right.dtype and (found != right).mean() > 0.6
        np.testing.assert_array_equal(honest.load(client)["train"].x, poisoned.load(client)["train"].x)
    assert (honest.sizes() == poisoned.sizes()).all()
    assert parts(tmp_path, attack=attack).partition_hash == parts(tmp_path, attack={}).partition_hash


def test_a_continued_run_has_the_same_bits(tmp_path: Path) -> None:
    attack = {"share": 0.25, "labels": "random", "message": "gaussian", "strength": 0.1}
    changes = {"attack": attack, "aggregator": {"name": "geometric_median", "steps": 3, "smoothing": 1e-5}}
    rayfl.run(experiment(tmp_path, "whole", **changes))
    rayfl.run(experiment(tmp_path, "parts", **changes, train={"rounds": 1}))
    rayfl.run(str(tmp_path / "parts"), **{"train.rounds": 2})
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))


def test_runs_without_either_keep_their_fingerprint(tmp_path: Path) -> None:
    plain, none = (parts(tmp_path, attack={}, aggregator=one).config for one in ("mean", {"name": "mean"}))
    assert "attack" not in plain.identity() and "aggregator" not in plain.identity()
    assert plain.fingerprint() == none.fingerprint() != parts(tmp_path, attack={}).config.fingerprint()


@pytest.mark.parametrize("aggregator", ["mean", "geometric_median"])
def test_a_round_that_has_nobody_needs_no_message(aggregator: str, tmp_path: Path) -> None:
    """With Poisson sampling a cohort may be empty: then nothing is combined, and the server's model stays."""
    train = {"sampling": "poisson", "clients_per_round": 1, "rounds": 4}
    content = experiment(tmp_path, aggregator=aggregator, train=train)
    sizes = [len(Parts(load_config(Experiment, content, {})).cohort(round)) for round in range(4)]
    assert 0 in sizes and any(sizes), "the test needs a round with clients and one without"
    assert rayfl.run(content).rounds_completed == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "scaffold"}, "aggregator=trimmed_mean: it is for changes of one model.*; scaffold: its clients"),
        ({"method": "local", "aggregator": "mean"}, "attack.message: it is for changes of one model.*; local"),
        ({"train": {"clients_per_round": 4}}, "trimmed_mean needs 5 clients in a round, and there are 4: raise"),
        (
            {"train": {"min_clients_per_round": 3}},
            "trimmed_mean needs 5 clients in a round, and there are 3 in the smallest round",
        ),
        (
            {"train": {"sampling": "poisson"}},
            r"needs 5 clients.*are 0 in the smallest round \(with train\.sampling=poisson there may be none\): "
            r"set train\.sampling=fixed or cyclic, or lower aggregator\.malicious",
        ),
        ({"aggregator": "foolsgold", "train": {"clients_per_round": 1}}, r"raise train\.clients_per_round$"),
        ({"aggregator": {"name": "bulyan", "malicious": 2}}, "bulyan needs 11 clients in a round"),
        (
            {"aggregator": {"name": "bucketing", "size": 3, "then": {"name": "krum", "malicious": 1}}},
            "bucketing needs 13 clients in a round.*or lower aggregator.then.malicious",
        ),
        (
            {"aggregator": "flame", "model": {"name": "resnet9", "norm": "batch"}},
            "aggregator=flame: its noise would also be in the running statistics.*or aggregator.noise=0",
        ),
        ({"aggregator": {"name": "krum", "malicious": 1, "kept": 10}}, "krum needs 10 clients"),
        ({"algorithm": {"name": "fedavg", "aggregation": "population"}}, "the server's own model is part of that mean"),
        ({"method": "fedas"}, "trimmed_mean: not with algorithm.aggregation=fisher: choose samples or uniform"),
        (
            {"algorithm": {"name": "fedavg", "aggregation": "uniform"}, "privacy": {"clip_norm": 1}},
            "together with noise that the server adds it is not defined",
        ),
        ({"attack": {"share": 0.05, "labels": "random"}}, "attack.share is 0.05, which of 12 clients"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(tmp_path, **changes).check()


def test_labels_of_other_kinds_than_classes_are_refused(tmp_path: Path) -> None:
    content = {
        "dataset": "diabetes",
        "task": "regression",
        "partition": {"name": "iid", "num_clients": 4},
        "model": "two_nn",
        "algorithm": "fedavg",
        "train": {"clients_per_round": 2},
        "attack": {"clients": [0], "labels": "random"},
        "storage_path": str(tmp_path),
    }
    with pytest.raises(ConfigError, match=r"attack\.labels: wrong labels are those of another class"):
        Parts(load_config(Experiment, content, {})).check()


def test_weights_that_a_rule_has_no_place_for_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts(tmp_path).check()
    assert "every client counts alike; algorithm.aggregation=samples has no effect on models" in caplog.text
    caplog.clear()
    parts(tmp_path, aggregator={"name": "norm_bounding", "radius": 1}).check()
    assert "counts alike" not in caplog.text


def test_a_report_says_what_was_done_to_messages(tmp_path: Path) -> None:
    plain = {"attack": {}, "aggregator": "mean"}
    for name, changes in {"attacked": {"compression": "sign"}, "plain": plain}.items():
        rayfl.run(experiment(tmp_path, name, **changes), **{"train.rounds": 1})
    said = message_settings(load_run(str(tmp_path / "attacked"), METHODS))
    assert said == (
        "messages compressed by sign (error_feedback=True), aggregator trimmed_mean, malicious clients [1, 4, 7], "
        "their messages sign_flip"
    )
    assert message_settings(load_run(str(tmp_path / "plain"), METHODS)) == ""
