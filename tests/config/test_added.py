"""Options that came later leave runs from before what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from algorithms.registry import Experiment
from rayfl.config.added import ADDED, changed_defaults, comparable, without_added
from rayfl.config.loading import as_recorded, load_config


def nested(keys: Sequence[str], value: Any) -> Any:
    for key in reversed(keys):
        value = {key: value}
    return value


@pytest.mark.parametrize("path", ADDED)
def test_the_value_of_before_does_not_count(path: str) -> None:
    keys = path.split(".")
    assert without_added(nested(keys, ADDED[path])) == nested(keys[:-1], {})
    assert without_added(nested(keys, "another")) == nested(keys, "another")


@pytest.mark.parametrize("method", ["fedmmd", "fedphp"])
def test_mini_batches_of_one_sample(method: str) -> None:
    def fingerprint(*overrides: str) -> str:
        return load_config(Experiment, "quickstart", [f"algorithm={method}", *overrides]).fingerprint()

    assert fingerprint() == fingerprint("algorithm.one_sample=skip") != fingerprint("algorithm.one_sample=paper")


def fingerprint(*overrides: str) -> str:
    plain = ("train.momentum=0", "train.lr_decay=1")
    return load_config(Experiment, "quickstart", [*plain, *overrides]).fingerprint()


@pytest.mark.parametrize(
    "changes",
    [
        ["train.optimizer=adam"],
        ["train.optimizer=adam", "train.betas=[0.5, 0.9]"],
        ["train.optimizer=adam", "train.eps=0.1"],
        ["train.optimizer=adamw"],
        ["train.optimizer=lion"],
        ["train.optimizer=lion", "train.optimizer_options.betas=[0.5, 0.9]"],
        ["train.momentum=0.9", "train.nesterov=true"],
        ["train.momentum=0.9", "train.dampening=0.1"],
        ["train.schedule={name: cosine}", "train.schedule={name: cosine, warmup: 1}"],
        ["train.schedule={name: cosine}"],
    ],
    ids=str,
)
def test_optimizers_and_schedules_count_where_they_are_chosen(changes: list[str]) -> None:
    assert fingerprint(*changes) != fingerprint(*changes[:-1])


def test_optimizers_and_schedules_do_not_count_at_what_was_done_before() -> None:
    """Momentum and decay were there; a run's identity has nothing of the others, also where they are written out."""
    config = load_config(Experiment, "quickstart", ["train.momentum=0.9", "train.lr_decay=0.9"])
    new = {"optimizer", "optimizer_options", "betas", "eps", "nesterov", "dampening", "schedule"}
    assert not new & config.identity()["train"].keys()
    written = ["train.optimizer=sgd", "train.betas=[0.9, 0.999]", "train.eps=1.0e-8", "train.schedule=null"]
    assert fingerprint(*written) == fingerprint()
    record = config.model_dump(mode="json")
    old = {**record, "train": {key: value for key, value in record["train"].items() if key not in new}}
    assert as_recorded(old, lambda known, values: load_config(Experiment, known, values)) == config
    assert comparable(old) == comparable(record)
    assert changed_defaults(config).keys() <= {"algorithm.one_sample"}
