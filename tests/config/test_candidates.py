"""Several architectures in one configuration: the shorthand, the tasks built, and who may use them."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.registry import METHODS, Experiment
from rayfl.config.added import comparable
from rayfl.config.loading import load_config, to_yaml
from rayfl.errors import ConfigError, ModelError
from rayfl.experiment.parts import Parts
from rayfl.models.zoo import Candidates, TwoNN

PAIR = [{"name": "two_nn", "hidden": [5]}, {"name": "two_nn", "hidden": [7, 6]}]


def parts(model: Any, algorithm: Any, **sections: Any) -> Parts:
    content = {
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "model": model,
        "algorithm": algorithm,
        "train": {"clients_per_round": "all"},
        **sections,
    }
    return Parts(load_config(Experiment, content, []))


def test_candidates_need_no_name() -> None:
    models = ({"candidates": PAIR}, {"name": "candidates", "candidates": PAIR})
    short, long = (parts(model, "fedme").config for model in models)
    assert short.model == Candidates(candidates=(TwoNN(hidden=(5,)), TwoNN(hidden=(7, 6))))
    assert short == long
    assert short.fingerprint() == long.fingerprint()


def test_candidates_do_not_count_options_that_came_later() -> None:
    config = parts({"candidates": [{"name": "two_cnn"}, PAIR[0]]}, "fedme").config
    assert "padding" not in config.identity()["model"]["candidates"][0]
    other = parts({"candidates": [{"name": "two_cnn", "padding": 0}, PAIR[0]]}, "fedme").config
    assert other.identity()["model"]["candidates"][0]["padding"] == 0
    record = config.model_dump(mode="json")
    assert comparable(record)["model"]["candidates"][0] == {"name": "two_cnn", "init": "torch"}


def test_candidates_survive_a_round_trip_through_yaml(tmp_path: Any) -> None:
    config = parts({"candidates": PAIR}, "fedme").config
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(Experiment, file, []) == config


def test_candidates_are_one_task_each() -> None:
    task = parts({"candidates": PAIR}, "fedme").task
    assert [c.network.num_parameters for c in task.candidates] == [64 * 5 + 5 + 50 + 10, 64 * 7 + 7 + 42 + 6 + 60 + 10]
    assert task.network is task.candidates[0].network
    assert all(candidate.candidates == (candidate,) for candidate in task.candidates)
    single = parts({"name": "two_nn", "hidden": [5]}, "fedme").task
    assert single.candidates == (single,)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"candidates": PAIR[:1]}, r"model\.candidates"),
        ({"candidates": []}, r"model\.candidates"),
        ({"candidates": [PAIR[0], {"name": "two_mm"}]}, r"model\.candidates\.1.*two_nn"),
        ({"candidates": [PAIR[0], {"name": "two_nn", "hiden": [3]}]}, r"model\.candidates\.1\.hiden"),
        ({"candidates": [PAIR[0], {"name": "candidates", "candidates": PAIR}]}, r"model\.candidates\.1"),
        ({"name": "two_nn", "candidates": PAIR}, r"model\.candidates"),
        ({"candidates": PAIR, "hidden": [3]}, r"model\.hidden"),
    ],
)
def test_wrong_candidates_are_named(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(model, "fedme")


def test_a_candidate_that_does_not_fit_the_inputs_is_refused() -> None:
    with pytest.raises(ModelError, match="char_lstm needs"):
        _ = parts({"candidates": [*PAIR, {"name": "char_lstm"}]}, "fedme").task


@pytest.mark.parametrize("name", sorted(name for name, method in METHODS.items() if not method.mixes_architectures))
def test_a_method_that_cannot_mix_architectures_refuses_them(name: str) -> None:
    message = rf"model\.candidates: all clients of {name} share one architecture; give a single model"
    with pytest.raises(ConfigError, match=message):
        parts({"candidates": PAIR}, name).check()


def test_a_method_that_mixes_architectures_accepts_them() -> None:
    sizes = parts({"candidates": PAIR}, "fedme", holdout={"validation": 0.2}).check()
    assert sizes.shape == (4, 3)


@pytest.mark.parametrize(
    ("algorithm", "sections", "message"),
    [
        ({"cluster_rounds": [1]}, {}, r"holdout\.public is 0"),
        ({}, {"holdout": {"validation": 0.0}}, r"holdout\.validation leaves 4 of 4 clients"),
        ({"initial_architecture": 2}, {}, r"algorithm\.initial_architecture is 2"),
        ({}, {"train": {"clients_per_round": 2}}, r"train\.clients_per_round=all"),
    ],
)
def test_what_fedme_cannot_run_with_is_found_before_any_actor_starts(
    algorithm: Any, sections: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parts({"candidates": PAIR}, {"name": "fedme", **algorithm}, **sections).check()
    parts({"candidates": PAIR}, {"name": "fedme", "cluster_rounds": [1]}, holdout={"public": 100}).check()
