"""Runs whose clients train by differentially private steps."""

from __future__ import annotations

import io
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rayfl
from algorithms.registry import Experiment
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.engine.example_accounting import example_epsilon
from rayfl.engine.updates.cohorts import cohort_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError, MethodError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from rayfl.runs.summary import summary_table
from tests.support.compiler import NEEDS_COMPILER
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

NOISY = {"example_clip_norm": 0.5, "example_noise_multiplier": 1.0}


def private(place: Path, name: str, method: str = "fedavg", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    train = {**content["train"], **sections.pop("train", {})}
    algorithm = {**content["algorithm"], **sections.pop("algorithm", {})}
    return {**content, "privacy": NOISY, **sections, "train": train, "algorithm": algorithm}


@pytest.mark.parametrize("method", ["superfed-mm", pytest.param("scaffold", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_interrupted_private_run_continues_to_the_same_bits(tmp_path: Path, method: str) -> None:
    whole = rayfl.run(private(tmp_path, "whole", method))
    pieces = private(tmp_path, "pieces", method)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    continued = rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
    assert whole.example_epsilons == continued.example_epsilons


def test_epsilon_is_that_of_each_client_and_its_own_rounds(tmp_path: Path) -> None:
    content = private(tmp_path, "run")
    result = rayfl.run(content)
    config, clients = result.config, len(result.samples)
    train = config.train
    cohorts = [
        cohort_of(RandomStreams(config.seed), t, clients, train.clients_per_round, None, "fixed")
        for t in range(result.rounds_completed)
    ]
    attended = [sum(client in cohort for cohort in cohorts) for client in range(clients)]
    assert len(set(attended)) > 1
    expected = [
        example_epsilon(config.privacy, {1: times * train.steps_of(n)}, n, train.batch_size)
        for times, n in zip(attended, result.samples, strict=True)
    ]
    assert result.example_epsilons == expected
    assert result.epsilon is None
    written = io.StringIO()
    Console(file=written, width=300).print(summary_table(result))
    printed = " ".join(written.getvalue().split())
    assert f"epsilon = {max(expected):.2f} for the client where it is largest" in printed
    assert f"{statistics.median(expected):.2f} at the median" in printed
    assert rayfl.run(small_experiment(tmp_path, "other", "fedavg", backend="inline")).example_epsilons is None


def test_before_a_run_the_promise_is_for_clients_that_are_in_every_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayfl")
    parts = Parts(load_config(Experiment, private(tmp_path, "run"), []))
    sizes = parts.check()
    train = parts.config.train
    expected = [
        example_epsilon(parts.config.privacy, {1: train.rounds * train.steps_of(n)}, n, train.batch_size)
        for n in sizes[:, 0].tolist()
    ]
    assert f"Privacy of samples: epsilon = {max(expected):.2f}" in caplog.text
    assert "if every client is in each" in caplog.text


def test_both_kinds_of_privacy_have_an_epsilon_each(tmp_path: Path) -> None:
    sections = {
        "privacy": {**NOISY, "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 0.5},
        "train": {"clients_per_round": 4, "sampling": "poisson"},
        "algorithm": {"aggregation": "uniform"},
    }
    result = rayfl.run(private(tmp_path, "run", **sections))
    assert result.epsilon and result.example_epsilons and result.epsilon not in result.example_epsilons


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"method": "fedgh"}, "not with fedgh: .* nobody has checked that .*: its clients send"),
        ({"method": "local"}, "not with local: its clients send nothing"),
        ({"method": "apfl"}, "with algorithm.adaptive or algorithm.mix=logits"),
        ({"method": "scaffold", "algorithm": {"control_update": "option1"}}, "a gradient of all samples without noise"),
        (
            {"model": {"name": "tests.support.own_norm:normalized", "head": "4"}},
            "batch normalization mixes .*norm=group",
        ),
        ({"system": {"name": "sampled"}}, "leave out system"),
        ({"train": {"drop_last": True}}, "train.drop_last: .*Poisson sampling"),
        ({"train": {"shuffle": False}}, "train.shuffle: .*Poisson sampling"),
        pytest.param(
            {"engine": {"mode": "vectorized", "compile": True}},
            "engine.compile: not with privacy.example_clip_norm",
            marks=NEEDS_COMPILER,
        ),
        ({"engine": {"mode": "vectorized", "capture": True}}, "engine.capture: not with privacy.example_clip_norm"),
        ({"early_stopping": {"patience": 1}, "holdout": {"validation": 0.2}}, "early_stopping: scores are not private"),
    ],
)
def test_what_cannot_be_private_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    others = {key: value for key, value in sections.items() if key != "method"}
    with pytest.raises(ConfigError, match=message):
        rayfl.run(private(tmp_path, "run", sections.get("method", "fedavg"), **others))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"example_noise_multiplier": 1}, "set privacy.example_clip_norm"),
        ({"example_delta": 0.1}, "set privacy.example_clip_norm"),
        ({"example_clip_norm": 1, "example_delta": 0.1}, "example_delta without noise"),
    ],
)
def test_options_without_an_effect_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, private(tmp_path, "run", privacy=given), [])


def test_without_the_accountant_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(ConfigError, match=r"pip install 'rayfl\[privacy\]'"):
        rayfl.run(private(tmp_path, "run"))


def test_clipping_alone_says_that_it_is_not_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = rayfl.run(private(tmp_path, "run", privacy={"example_clip_norm": 0.5}))
    assert "gradients of samples are clipped, and nothing is private" in caplog.text
    assert result.example_epsilons is None


def test_a_fork_keeps_what_epsilon_is_of(tmp_path: Path) -> None:
    rayfl.run(private(tmp_path, "run"))
    wanted = {"train.local_epochs": 3, "train.batch_size": 7, "algorithm.finetune_epochs": 2, "train.rounds": 6}
    message = r"train.batch_size, train.local_epochs, algorithm: a fork goes on"
    with pytest.raises(ConfigError, match=message):
        fork(str(tmp_path / "run"), "forked", None, wanted)


def test_delta_depends_on_the_samples_of_a_client(tmp_path: Path) -> None:
    config = load_config(Experiment, private(tmp_path, "run"), [])
    assert config.privacy.example_delta_of(50) == 1 / 500
    given = load_config(Experiment, private(tmp_path, "run", privacy={**NOISY, "example_delta": 1e-4}), [])
    assert given.privacy.example_delta_of(50) == 1e-4
    assert TrainConfig().sampling == "fixed"  # cohorts need not be Poisson samples


def own(place: Path, name: str) -> dict[str, Any]:
    return private(place, name) | {"algorithm": {"name": f"tests.support.own_methods:{name}"}}


def test_a_users_own_method_says_that_samples_can_be_private(tmp_path: Path) -> None:
    result = rayfl.run(own(tmp_path, "OfSamples"))
    usual = rayfl.run(private(tmp_path, "fedavg", algorithm={"finetune_epochs": None}))
    assert result.example_epsilons == usual.example_epsilons and result.example_epsilons
    assert result.config.algorithm.why_no_gradient() == ""
    with pytest.raises(ConfigError, match="nobody has checked that of this method"):
        rayfl.run(own(tmp_path, "Silent"))


def test_a_second_call_in_a_round_is_refused_for_it_would_have_the_noise_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="may ask its clients once in a round"):
        rayfl.run(own(tmp_path, "Twice"))
    rayfl.run(own(tmp_path, "Twice") | {"name": "open", "privacy": {}})


@pytest.mark.parametrize(("delta", "warned"), [(0.06, True), (0.05, False), (None, False)])
def test_a_delta_that_promises_little_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, delta: float | None, warned: bool
) -> None:
    privacy = {**NOISY, "example_delta": delta}
    Parts(load_config(Experiment, private(tmp_path, "run", privacy=privacy), [])).check()
    assert ("privacy.example_delta: with a probability of 0.06" in caplog.text) == warned
