"""What is typed as ``key=value``."""

from __future__ import annotations

from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.config.overrides import parse_override
from rayfl.errors import ConfigError
from rayfl.sweeps.space import parse_space


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.lr=0.1", ("train.lr", 0.1)),
        ("name=a=b", ("name", "a=b")),
        ("holdout={validation: 0.2}", ("holdout", {"validation": 0.2})),
        ("name=", ("name", None)),
        ("train.rounds=1e3", ("train.rounds", "1e3")),
    ],
)
def test_the_value_is_yaml(text: str, expected: tuple[str, Any]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize("text", ["train.rounds", "=3", ""])
def test_no_key_or_no_value(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option '.*' must look like root=/data"):
        parse_override(text, "root=/data", "option")


@pytest.mark.parametrize("value", ["[1, 2", "{a: b", "2020-99-99", "[" * 5000])
def test_no_yaml(value: str) -> None:
    with pytest.raises(ConfigError, match="the value is not valid YAML"):
        parse_override(f"train.lr={value}")


UNDONE = {
    "method": (["algorithm.radius=0.2", "algorithm=floco"], "algorithm is given after algorithm.radius"),
    "section": (["train.rounds=3", "train={lr: 0.2}"], "give train first"),
}


@pytest.mark.parametrize("case", UNDONE)
def test_no_override_undoes_another(case: str) -> None:
    texts, message = UNDONE[case]
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, None, texts)
    with pytest.raises(ConfigError, match=message):
        parse_space(texts)
    with pytest.raises(ConfigError, match=message):
        rayfl.run(None, **dict(parse_override(text) for text in texts))


def test_of_an_option_with_two_values_the_last_counts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(Experiment, None, ["train.rounds=3", "seed=1", "train.rounds=5", "seed=1"])
    assert (config.train.rounds, config.seed) == (5, 1)
    assert [record.getMessage() for record in caplog.records] == ["train.rounds is given twice: 5 counts, and not 3"]


def test_overrides_that_go_together() -> None:
    texts = ["algorithm=floco", "algorithm.radius=0.2", "train.rounds=3", "train.rounds=3", "train.rounds_x=1"]
    config = load_config(Experiment, None, texts[:-1])
    assert (config.algorithm.name, config.algorithm.radius, config.train.rounds) == ("floco", 0.2, 3)
    with pytest.raises(ConfigError, match="rounds_x: unknown"):
        load_config(Experiment, None, texts)
