"""Runs with Adam and schedules: interrupted ones go on to the same bits, and what can be refused is, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

ADAM = {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}
QUICK = (("superfed-mm", "looped"), ("fedavg", "vectorized"))
"""Those of the quick suite: a method with states, and one whose server's model is all."""
COSINE = {"name": "cosine", "warmup": 2, "minimum": 0.001}


def experiment(folder: Path, name: str, method: str = "fedavg", **train: Any) -> dict[str, Any]:
    content = small_experiment(folder, name, method, backend="inline")
    return {**content, "train": {**content["train"], **train}}


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        pytest.param(method, mode, marks=() if (method, mode) in QUICK else pytest.mark.slow)
        for method in ("fedavg", "local", "centralized", "fml", "superfed-mm", "ditto")
        for mode in ("looped", "vectorized")
    ],
)
@pytest.mark.first_case
def test_an_interrupted_run_with_adam_continues_to_the_same_bits(method: str, mode: str, tmp_path: Path) -> None:
    """Moments, numbers of steps and rates are those of the run that nobody stopped."""
    train = {**ADAM, "optimizer": "adamw", "weight_decay": 0.1, "persist_optimizer": True, "schedule": COSINE}
    engine = {"engine": {"mode": mode}}
    rayfl.run({**experiment(tmp_path, "whole", method, **train), **engine})
    pieces = {**experiment(tmp_path, "pieces", method, **train), **engine}
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    whole = outcome(tmp_path / "whole")
    assert_same(whole, outcome(tmp_path / "pieces"))
    kept = [tree for state in whole.states.values() for tree in state["optimizer"].values()]
    assert kept
    for tree in kept:
        assert set(tree) == {"m", "v", "count"}
        assert all(count > 0 for count in tree["count"].values())


@pytest.mark.slow
def test_adam_schedules_and_what_is_kept_change_results(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"eps": 0.01},
        {"betas": [0.5, 0.9]},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"weight_decay": 0.1},
        {"persist_optimizer": True},
        {"schedule": {"name": "linear"}},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.5},
        {"optimizer": "sgd", "momentum": 0.5, "dampening": 0.5},
        {"optimizer": "sgd", "momentum": 0.5, "nesterov": True},
        {"max_grad_norm": 1e-9},
        {"optimizer": "adagrad"},
        {"optimizer": "adagrad", "optimizer_options": {"initial": 0.1}},
        {"optimizer": "rmsprop"},
        {"optimizer": "rmsprop", "optimizer_options": {"momentum": 0.5}},
        {"optimizer": "lion"},
        {"optimizer": "lion", "optimizer_options": {"betas": [0.5, 0.9]}},
    ]
    seen = []
    for number, change in enumerate(changes):
        rayfl.run(experiment(tmp_path, str(number), **{**ADAM, **change}))
        seen.append(outcome(tmp_path / str(number)).server["model"]["head.weight"])
    for number, one in enumerate(seen):
        assert not any((one == other).all() for other in seen[:number]), changes[number]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({**ADAM, "momentum": 0.9}, r"train: optimizer=adam has no momentum: set momentum=0\.0, or optimizer=sgd"),
        (
            {**ADAM, "nesterov": True, "dampening": 0.1},
            r"optimizer=adam has no dampening, nesterov: set dampening=0\.0, nesterov=False",
        ),
        (
            {"betas": [0.5, 0.9]},
            r"train: optimizer=sgd has no betas: set betas=\(0\.9, 0\.999\), or optimizer=adam or adamw",
        ),
        ({"eps": 0.1}, r"train: optimizer=sgd has no eps"),
        (
            {"nesterov": True, "momentum": 0.0},
            r"train: nesterov without momentum does nothing: set momentum, or drop nesterov",
        ),
        ({"dampening": 0.1, "momentum": 0.0}, r"train: dampening without momentum does nothing"),
        ({"nesterov": True, "dampening": 0.1}, r"train: nesterov is defined without dampening"),
        ({"schedule": {"name": "linear", "factor": 0.5}}, r"train\.schedule\.factor: unknown; allowed: name, warmup"),
        ({"schedule": {"name": "cosin"}}, r"train\.schedule: 'cosin' does not exist \(did you mean 'cosine'\?\)"),
        ({"schedule": {"name": "step"}}, r"train\.schedule\.every: required"),
        (
            {"schedule": {"name": "linear"}, "lr_decay": 0.9},
            r"train: schedule and lr_decay both.*: set lr_decay=1, or schedule=null",
        ),
        (
            {"optimizer": "adagard"},
            r"train\.optimizer: there is no optimizer 'adagard' \(did you mean 'adagrad'\?\): choose sgd",
        ),
        (
            {"optimizer": "rmsprop", "momentum": 0.5},
            r"train: optimizer=rmsprop has no momentum: set momentum=0\.0, give its own options as optimizer_options",
        ),
        (
            {"optimizer": "lion", "momentum": 0.0, "optimizer_options": {"beta": 0.9}},
            r"train: optimizer_options: lion has no 'beta' \(did you mean 'betas'\?\); it has betas",
        ),
        (
            {"optimizer": "rmsprop", "momentum": 0.0, "optimizer_options": {"alpha": 1.0}},
            r"train: optimizer_options\.alpha: Input should be less than 1",
        ),
        (
            {"optimizer": "rmsprop", "momentum": 0.0, "optimizer_options": {"alpha": {"x": 1}}},
            r"train: optimizer_options\.alpha must be a number, a text or a list",
        ),
        (
            {"optimizer_options": {"alpha": 0.9}},
            r"train: optimizer_options are for adagrad, lion, rmsprop and optimizers of your own: those of sgd are",
        ),
        ({"betas": [0.9, 1.0], "optimizer": "adam"}, r"train\.betas\.1: "),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused_by_name(
    train: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, experiment(tmp_path, "run", **train), {})


def test_an_optimizer_that_keeps_nothing_cannot_persist(tmp_path: Path) -> None:
    """Older runs may have asked for it: such a configuration can be read, but not run."""
    content = experiment(tmp_path, "run", momentum=0.0, persist_optimizer=True)
    config = load_config(Experiment, content, {})
    with pytest.raises(ConfigError, match=r"train\.persist_optimizer: sgd without momentum keeps nothing"):
        Parts(config).check()
    with pytest.raises(ConfigError, match=r"train\.persist_optimizer"):
        rayfl.run(content)
    assert not (tmp_path / "run").exists()
    Parts(load_config(Experiment, content, {"train.momentum": 0.5})).check()
    Parts(load_config(Experiment, content, {"train.optimizer": "adam"})).check()


def test_a_warm_up_without_an_end_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No refusal: a trial of few rounds may well be of a configuration for many."""
    for warmup, warned in ((3, False), (4, True)):
        caplog.clear()
        content = experiment(tmp_path, "run", schedule={"name": "linear", "warmup": warmup})
        Parts(load_config(Experiment, content, {})).check()
        assert (
            "warm-up of 4 rounds takes up all 4 rounds: nothing is left for the schedule linear" in caplog.text
        ) == warned


@pytest.mark.parametrize(
    ("schedule", "warned"),
    [
        ({"name": "multistep", "milestones": [4, 7]}, True),
        ({"name": "multistep", "milestones": [3, 7]}, False),
        ({"name": "step", "every": 3, "warmup": 1}, True),
        ({"name": "step", "every": 3}, False),
        ({"name": "constant"}, False),
    ],
    ids=str,
)
def test_a_schedule_without_effect_is_warned_of(
    schedule: dict[str, Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Parts(load_config(Experiment, experiment(tmp_path, "run", schedule=schedule), {})).check()
    assert (f"the schedule {schedule['name']} changes no rate in the" in caplog.text) == warned


def test_training_that_moves_nothing_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for option in ("lr", "local_epochs"):
        caplog.clear()
        Parts(load_config(Experiment, experiment(tmp_path, "run", **{option: 0}), {})).check()
        assert f"train.{option} is 0: " in caplog.text
    caplog.clear()
    Parts(load_config(Experiment, experiment(tmp_path, "run"), {})).check()
    assert " is 0: " not in caplog.text


def test_a_method_that_supposes_sgd_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SCAFFOLD needs train\.optimizer=sgd, not adam"):
        rayfl.run(experiment(tmp_path, "run", "scaffold", **ADAM))
    assert not (tmp_path / "run").exists()
