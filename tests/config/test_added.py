"""Options that came later leave runs from before what they were."""

from __future__ import annotations

import pytest

from algorithms.registry import Experiment
from rayfl.config.added import ADDED, without_added
from rayfl.config.loading import load_config


def nested(path: str, value: object) -> dict[str, object]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", ADDED)
def test_the_value_of_before_does_not_count(path: str) -> None:
    *parents, _ = path.split(".")
    assert without_added(nested(path, ADDED[path])) == nested(".".join(parents), {})
    assert without_added(nested(path, "another")) == nested(path, "another")


@pytest.mark.parametrize("method", ["fedmmd", "fedphp"])
def test_mini_batches_of_one_sample(method: str) -> None:
    def fingerprint(*overrides: str) -> str:
        return load_config(Experiment, "quickstart", [f"algorithm={method}", *overrides]).fingerprint()

    assert fingerprint() == fingerprint("algorithm.one_sample=skip") != fingerprint("algorithm.one_sample=paper")
