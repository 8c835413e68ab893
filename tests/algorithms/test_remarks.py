"""What a method says before a run whose rounds end before its phases begin."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import rayfl
from algorithms import registry
from algorithms.fedme import FedMe
from algorithms.fedrod import FedRoD
from algorithms.fml import FML
from algorithms.parts.settings import TOGETHER
from algorithms.scaffold import Scaffold
from algorithms.superfed import SuPerFed
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.experiment.checks import statistics_remarks
from rayfl.randomness import RandomStreams
from tests.support.experiments import EVERY, small_experiment
from tests.support.toy_networks import normalized_layers, two_layers


def remarks(caplog: pytest.LogCaptureFixture, folder: Path, method: str, **options: Any) -> list[str]:
    config = small_experiment(folder, "run", method, backend="inline")
    config["algorithm"] |= options
    with caplog.at_level(logging.WARNING):
        rayfl.run(config, **{"train.rounds": 2})
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("algorithm: ")]


@pytest.mark.parametrize(
    ("method", "option", "late", "early", "words"),
    [
        ("floco", "assignment_round", 2, 1, "algorithm.assignment_round is 2, but the run has 2 rounds"),
        ("cfl", "split_from", 2, 1, "algorithm.split_from is 2, but the run has 2 rounds"),
        ("fedme", "cluster_rounds", [2], [1], r"algorithm.cluster_rounds is [2], of which none is before"),
        ("superfed-mm", "start", 1, 0.9, "no client trains a local model: algorithm.start=1"),
        ("pfedsim", "warmup", 1, 0.9, "it is federated averaging: algorithm.warmup is 1"),
    ],
)
@pytest.mark.two_cases
def test_a_phase_that_no_round_reaches_is_named(
    method: str, option: str, late: Any, early: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = remarks(caplog, tmp_path, method, **{option: late})
    assert words in said
    caplog.clear()
    assert remarks(caplog, tmp_path / "reached", method, **{option: early}) == []


@pytest.mark.parametrize(("method", "warned"), [(SuPerFed(), True), (Scaffold(), False)])
def test_running_statistics_that_fit_no_mixture_are_named(method: Any, warned: bool) -> None:
    assert bool(statistics_remarks(method, normalized_layers())) == warned
    assert statistics_remarks(method, two_layers()) == []


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (FedRoD(), "the model and of the personal head"),
        (FML(), "the private model and of the meme model"),
        (FedMe(model_clustering=False), "the personal and of the exchanged model"),
    ],
)
def test_gradients_that_are_clipped_together_are_named(method: Any, what: str) -> None:
    context = RoundContext(0, 500, 5, TrainConfig(max_grad_norm=1.0), RandomStreams(0))
    (said,) = method.remarks(context)
    assert f"train.max_grad_norm is about the gradients of {what} together" in said
    assert method.remarks(replace(context, train=TrainConfig())) == ()


def test_clipped_gradients_that_control_variates_are_read_from_are_named() -> None:
    train = TrainConfig(max_grad_norm=1.0)
    context = RoundContext(0, 2, 5, train, RandomStreams(0))
    (said,) = Scaffold().remarks(context)
    assert "train.max_grad_norm shortens corrected gradients" in said
    assert Scaffold(control_update="option1").remarks(context) == ()
    assert Scaffold().remarks(replace(context, train=TrainConfig())) == ()


@pytest.mark.parametrize(
    ("method", "options", "train", "words"),
    [
        (
            "pfedme",
            {"local_iterations": 20},
            {"max_local_steps": 3},
            "train.max_local_steps has no effect: algorithm.l",
        ),
        ("pfedgraph", {"local_steps": 20}, {"min_local_steps": 3}, "train.min_local_steps has no effect: algorithm.l"),
        ("pfedhn", {}, {"max_local_steps": 3}, "train.max_local_steps has no effect: algorithm.inner_steps says"),
        ("pfedhn", {}, {"local_epochs": 2}, "train.local_epochs has no effect: algorithm.inner_steps says"),
        (
            "fedrep",
            {},
            {"local_epochs": 2},
            "train.local_epochs=2 has no effect in rounds: algorithm.head_epochs=10 and",
        ),
        ("flute", {"head_epochs": 2}, {"local_epochs": 3}, "algorithm.head_epochs=2 and algorithm.joint_epochs=1 say"),
        ("fml", {"persist_private_optimizer": True}, {}, "algorithm.persist_private_optimizer has no effect: SGD"),
        ("fednova", {"effective_steps": "steps"}, {}, "algorithm.effective_steps has no effect: without momentum"),
    ],
)
def test_what_has_no_effect_beside_the_training_section_is_named(
    method: str, options: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    context = RoundContext(0, 2, 5, TrainConfig(**train), RandomStreams(0))
    (said,) = registry.METHODS[method](**options).remarks(context)
    assert words in said
    assert registry.METHODS[method](**options).remarks(replace(context, train=TrainConfig(momentum=0.9))) == ()


def test_epochs_of_the_training_section_that_a_pass_or_stragglers_take_are_not_called_idle() -> None:
    context = RoundContext(0, 2, 5, TrainConfig(local_epochs=3), RandomStreams(0))
    assert registry.METHODS["fedrep"](body_epochs=None).remarks(context) == ()
    stragglers = TrainConfig(local_epochs=3, stragglers=0.5)
    assert registry.METHODS["fedrep"]().remarks(replace(context, train=stragglers)) == ()


def test_one_cluster_by_choice_needs_no_remark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remarks(caplog, tmp_path, "fedme", cluster_rounds=[], model_clustering=False) == []


@pytest.mark.parametrize(
    ("method", "options", "other", "words"),
    [
        ("fedphp", {"temperature": 2.0}, {"transfer": "kd"}, "algorithm.temperature has no effect: it is for"),
        (
            "fedphp",
            {"macro_momentum": 0.5, "momentum_schedule": "c"},
            {"momentum_schedule": "b"},
            "=a or b, and that is c",
        ),
        ("superfed-mm", {"lm_lstm_per_layer": True}, {"mode": "lm"}, "algorithm.mode=lm, and that is mm"),
        ("fedamp", {"self_weight": 0.5, "heuristic": False}, {"heuristic": True}, "=true, and that is false"),
        (
            "apple",
            {"peer_base": 2.0, "peers": None},
            {"peers": 2},
            "algorithm.peer_base has no effect: algorithm.peers is null",
        ),
        (
            "apple",
            {"penalty_half": False, "relation_penalty": 0},
            {"relation_penalty": 0.1},
            "algorithm.penalty_half has no effect: algorithm.relation_penalty is 0",
        ),
        (
            "fedkd",
            {"mutual": "separate", "distillation_weight": 0, "hidden_weight": 0},
            {"hidden_weight": 0.5},
            "algorithm.distillation_weight is 0.0 and algorithm.hidden_weight is 0.0",
        ),
        (
            "floco",
            {"radius": 0.5, "simplex_dimension": 0, "assignment_round": 100},
            {"simplex_dimension": 2},
            "algorithm.radius has no effect: algorithm.simplex_dimension is 0",
        ),
    ],
)
def test_a_setting_without_effect_is_named(
    method: str, options: dict[str, Any], other: dict[str, Any], words: str
) -> None:
    settings = {**EVERY[method], **options}
    (said,) = registry.METHODS[settings["name"]](**settings).idle_settings()
    assert words in said
    assert registry.METHODS[settings["name"]](**{**settings, **other}).idle_settings() == []


def test_settings_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = remarks(caplog, tmp_path, "fedphp", temperature=2.0)
    assert said == ["algorithm: algorithm.temperature has no effect: it is for algorithm.transfer=kd, and that is mmd"]


def test_options_that_settings_depend_on_are_there() -> None:
    for method in registry.METHODS.values():
        for name, field in method.model_fields.items():
            extra: Any = field.json_schema_extra or {}
            for other, values in [*extra.get("only", {}).items(), *extra.get("unless", {}).items()]:
                names = other.split(TOGETHER)
                for value in values:
                    for one, its in zip(names, value if len(names) > 1 else [value], strict=True):
                        adapted = TypeAdapter(method.model_fields[one].annotation)
                        assert adapted.validate_python(its) == its, (method, name)
