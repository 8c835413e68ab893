"""Runs with user-level differential privacy and with Poisson cohorts."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.engine.privacy import epsilon
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.runs.finding import load_run
from rayfl.runs.participation import participants
from rayfl.runs.summary import summary_table
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

NOISY = {"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.5}


def private(place: Path, name: str, method: str = "fedavg", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    train = {**content["train"], "clients_per_round": 4, "sampling": "poisson", **sections.pop("train", {})}
    algorithm = {**content["algorithm"], "aggregation": "uniform", **sections.pop("algorithm", {})}
    return {**content, "privacy": NOISY, **sections, "train": train, "algorithm": algorithm}


def test_an_interrupted_private_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole = rayfl.run(private(tmp_path, "whole", "superfed-mm"))
    pieces = private(tmp_path, "pieces", "superfed-mm")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    assert whole.epsilon == epsilon(whole.config.privacy, whole.config.train, 5, whole.rounds_completed)


def test_a_run_says_what_it_promises(tmp_path: Path) -> None:
    result = rayfl.run(private(tmp_path, "run"))
    written = io.StringIO()
    Console(file=written, width=300).print(summary_table(result))
    printed = " ".join(written.getvalue().split())
    assert f"epsilon = {result.epsilon:.2f} at delta = 0.5 for each client after 4 rounds" in printed
    assert rayfl.run(small_experiment(tmp_path, "other", "fedavg", backend="inline")).epsilon is None


def test_a_round_without_clients_changes_nothing(tmp_path: Path) -> None:
    sections = {"privacy": {}, "train": {"clients_per_round": 1, "rounds": 8}}
    result = rayfl.run(private(tmp_path, "run", "ditto", **sections))
    assert result.rounds_completed == 8
    assert verify(Storage(result.path)).problems == []
    took_part = participants(load_run(result.path, METHODS))
    assert took_part is not None
    sizes = [took_part["round"].to_pylist().count(round) for round in range(1, 9)]
    assert 0 in sizes and max(sizes) > 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"method": "floco"},
            "floco cannot be made private by clipping and noise: its clients send gradients",
        ),
        ({"algorithm": {"aggregation": "samples"}}, "set algorithm.aggregation=uniform"),
        ({"train": {"sampling": "fixed"}}, "set train.sampling=poisson"),
        (
            {"train": {"clients_per_round": 1}},
            "a client is alone in one of 4 rounds with a probability of up to 0.33, and delta is 0.5",
        ),
        ({"model": {"name": "tests.support.own_norm:normalized", "head": "4"}}, "set train.private_norm=statistics"),
        ({"system": {"name": "sampled"}}, "train.sampling=poisson: simulated devices"),
        ({"system": {"name": "sampled"}, "train": {"sampling": "fixed"}}, "privacy: on simulated devices"),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    method = sections.get("method", "fedavg")
    others = {key: value for key, value in sections.items() if key != "method"}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        rayfl.run(private(tmp_path, "run", method, **others))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"clients_per_round": "all", "sampling": "fixed"}},
        {
            "train": {"private_norm": "statistics"},
            "model": {"name": "tests.support.own_norm:normalized", "head": "4"},
        },
    ],
    ids=["everybody in every round", "statistics that are not sent"],
)
def test_what_can_be_private_says_what_it_promises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sections: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "rayfl")
    Parts(load_config(Experiment, private(tmp_path, "run", **sections), [])).check()
    assert "at delta = 0.5 for each client after 4 rounds" in caplog.text
    assert "privacy.delta: with a probability of 0.5 a client may be promised nothing" in caplog.text


def test_a_delta_that_promises_nothing_is_refused(tmp_path: Path) -> None:
    alone = {"partition": {"name": "iid", "num_clients": 1}, "train": {"clients_per_round": "all"}}
    with pytest.raises(ConfigError, match=r"privacy.delta: K\^-1.1 of one client is 1"):
        rayfl.run(private(tmp_path, "run", privacy={"clip_norm": 0.5, "noise_multiplier": 1.0}, **alone))


def test_without_the_accountant_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ConfigError, match=r"pip install 'rayfl\[privacy\]'"):
        rayfl.run(private(tmp_path, "run"))


def test_what_a_first_model_has_learned_is_said_not_to_be_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = rayfl.run(private(tmp_path, "first"))
    assert "is not counted in epsilon" not in caplog.text
    rayfl.run(private(tmp_path, "second", init={"from": str(first.path)}))
    assert "what the model of init.from has learned from these clients is not counted in epsilon" in caplog.text


def test_clipping_alone_needs_no_sampling_and_says_that_it_is_not_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"privacy": {"clip_norm": 0.5}, "train": {"sampling": "fixed"}}
    result = rayfl.run(private(tmp_path, "run", **sections))
    assert "messages are clipped, and nothing is private" in caplog.text
    assert result.epsilon is None


def test_a_fork_keeps_what_epsilon_is_of(tmp_path: Path) -> None:
    rayfl.run(private(tmp_path, "run"))
    wanted = {"privacy.noise_multiplier": 2, "train.clients_per_round": 5, "train.rounds": 6}
    with pytest.raises(ConfigError, match=r"privacy, train.clients_per_round: a fork goes on"):
        fork(str(tmp_path / "run"), "forked", None, wanted)


def test_a_run_that_begins_with_a_private_model_has_noise_and_cohorts_of_its_own(tmp_path: Path) -> None:
    """With the noise of both runs the same, the difference of their models would have none."""
    first = rayfl.run(private(tmp_path, "first"))
    second = rayfl.run(private(tmp_path, "second", init={"from": str(first.path)}))
    one, other = (Parts(run.config).context.streams for run in (first, second))
    for name in ("privacy", "sampling", "batches", "privacy.count"):
        assert one.generator(name, 0).random() != other.generator(name, 0).random()
    assert one.integer("init.global") == other.integer("init.global")
    assert one.generator("init.local", client=3).random() == other.generator("init.local", client=3).random()
    assert Parts(first.config).partition_hash == Parts(second.config).partition_hash
    cohorts = [participants(load_run(run.path, METHODS)) for run in (first, second)]
    assert None not in cohorts and cohorts[0] != cohorts[1]
    plain = {"privacy": {}, "train": {"sampling": "fixed", "clients_per_round": 3}}
    open_one = rayfl.run(private(tmp_path, "open", init={"from": str(first.path)}, **plain))
    assert Parts(open_one.config).context.streams == Parts(first.config).streams
