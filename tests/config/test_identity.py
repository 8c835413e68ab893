"""Fingerprints of today and of before, options that came later, and what a record of an older rayfl says."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.registry import Experiment
from rayfl.config import added, identity
from rayfl.config.added import changed_defaults, comparable, values_of_before, without_added
from rayfl.config.identity import OlderRule, fingerprint_of, older_fingerprints
from rayfl.config.loading import as_recorded, load_config
from rayfl.config.schema import ExperimentConfig

CPU = frozenset({"cpu"})


def experiment(**values: Any) -> ExperimentConfig:
    return load_config(Experiment, "quickstart", values)


def rule(path: str, release: str = "0.1.0") -> OlderRule:
    """Before this rule, a key of what counts did not."""
    return OlderRule(release, lambda content: {k: v for k, v in content.items() if k != path}, CPU, f"{path} differs")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three options that pretend to be younger than the first release; the second's default is not what was done."""
    values = {"holdout.test": 0.3, "train.lr_decay": 1.0, "algorithm.no_such_option": 1}
    monkeypatch.setattr(added, "ADDED", values)


def test_the_quickstart_has_the_fingerprint_of_the_first_release_among_its_own() -> None:
    config = experiment()
    known = {config.fingerprint(), *(found for found, _ in older_fingerprints(config.identity()))}
    assert "edf90c182f4c9ed5c62466028a36637d1d5a434b424f9f42cf5e938cac86a800" in known


def test_on_cpus_the_number_of_threads_decides_the_last_bits() -> None:
    one, two = experiment(), experiment(**{"cluster.threads_per_actor": 2})
    assert one.fingerprint() == two.fingerprint() and not one.same_results(two)
    assert two.same_results(experiment(**{"cluster.threads_per_actor": 2, "cluster.num_actors": 3}))
    assert one.same_results(experiment(**{"cluster.threads_per_actor": 2, "cluster.device": "cuda"}))


@pytest.mark.parametrize(
    ("engine", "before"),
    [
        ({}, "auto"),
        ({"mode": "looped"}, "looped"),
        ({"precision": "tf32"}, None),
        ({"mode": "vectorized", "precision": "bfloat16"}, None),
    ],
)
def test_before_there_were_precisions_there_was_float32(engine: dict[str, str], before: str | None) -> None:
    content = experiment(engine=engine).identity()
    expected = [] if before is None else [fingerprint_of({**content, "engine": before})]
    assert [found for found, _ in older_fingerprints(content)][:1] == expected


def test_rules_are_applied_to_what_newer_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "OLDER", (rule("seed", "0.3.0"), rule("noise", "0.2.0")))
    content = experiment().identity()
    without_seed = {k: v for k, v in content.items() if k != "seed"}
    neither = {k: v for k, v in without_seed.items() if k != "noise"}
    found = [(fingerprint, rule.release) for fingerprint, rule in older_fingerprints(content)]
    assert found == [(fingerprint_of(without_seed), "0.3.0"), (fingerprint_of(neither), "0.2.0")]
    never = OlderRule("0.3.0", lambda content: None, CPU, "")
    monkeypatch.setattr(identity, "OLDER", (never, rule("noise")))
    assert list(older_fingerprints(content)) == []


@pytest.mark.usefixtures("later")
def test_an_option_counts_unless_it_is_at_the_value_of_before() -> None:
    content = {"holdout": {"test": 0.3, "validation": 0.2}, "train": {"lr_decay": 0.9}, "algorithm": "x"}
    assert without_added(content) == {"holdout": {"validation": 0.2}, "train": {"lr_decay": 0.9}, "algorithm": "x"}
    assert content["holdout"] == {"test": 0.3, "validation": 0.2}
    assert experiment(**{"holdout.test": 0.3}).identity()["holdout"].keys() == {"validation", "public"}
    assert "lr_decay" in experiment(**{"train.lr_decay": 0.9}).identity()["train"]


@pytest.mark.usefixtures("later")
def test_a_record_that_lacks_an_option_is_about_what_was_done_before() -> None:
    config = experiment(**{"holdout.test": 0.25, "train.lr_decay": 0.9})
    record = config.model_dump(mode="json")
    assert as_recorded(record, lambda known, values: load_config(Experiment, known, values)) == config
    del record["holdout"]["test"], record["train"]["lr_decay"]
    found = as_recorded(record, lambda known, values: load_config(Experiment, known, values))
    assert (found.holdout.test, found.train.lr_decay) == (0.3, 1.0)
    assert values_of_before(record, config.model_dump()) == {"holdout.test": 0.3, "train.lr_decay": 1.0}


@pytest.mark.usefixtures("later")
def test_records_of_all_ages_compare() -> None:
    old = {"holdout": {"validation": 0.2}, "train": {"lr_decay": 0.9}, "engine": {"mode": "auto"}}
    new = {**old, "holdout": {"validation": 0.2, "test": 0.3}, "engine": {"mode": "auto", "precision": "float32"}}
    assert comparable(old) == comparable(new)
    assert comparable({**new, "engine": {"mode": "auto", "precision": "tf32"}}) != comparable(old)


def test_defaults_that_do_another_thing_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    default = type(experiment().holdout).model_fields["validation"].default
    monkeypatch.setattr(added, "ADDED", {"holdout.validation": default + 0.1, "train.lr_decay": 1.0, "system.none": 1})
    assert changed_defaults(experiment(**{"holdout.validation": default})) == {"holdout.validation": default + 0.1}
    assert changed_defaults(experiment(**{"holdout.validation": default + 0.1})) == {}
    assert changed_defaults(experiment(**{"holdout.validation": default + 0.05})) == {}
