"""Options that came later leave runs from before what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from algorithms.registry import Experiment
from rayfl.config.added import ADDED, without_added
from rayfl.config.loading import load_config


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
