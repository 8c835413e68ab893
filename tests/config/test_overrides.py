"""What is typed as ``key=value``."""

from __future__ import annotations

from typing import Any

import pytest

from rayfl.config.overrides import parse_override
from rayfl.errors import ConfigError


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
