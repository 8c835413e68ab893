"""Names of a wrong form are explained in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from algorithms.registry import Experiment
from cluster.jobs.templating import template_options
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError

ROOT = Path(__file__).parents[2]
SIGNS_OF_AN_EXPRESSION = re.compile(r"\^|\$|\\|\[A-Z|\+\)|\*\)|pattern")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "my run"}, "name: must be 1 to 100 letters (a-z, A-Z), digits and the signs . _ and -, the first"),
        ({"name": "a" * 101}, "must be 1 to 100 letters"),
        ({"dataset": {"name": "custom", "function": "nothing"}}, "must be a module, a colon and a name in it, such as"),
        ({"model": {"name": "custom", "factory": "a b:c"}}, "must be a module, a colon and a name in it, such as"),
    ],
)
def test_of_a_configuration(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, None, overrides)
    assert message in str(caught.value)
    assert not SIGNS_OF_AN_EXPRESSION.search(str(caught.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "My_Run"}, "--name: must be 1 to 40 small letters"),
        ({"name": "run-"}, "the last none of the signs"),
        ({"image": "a b"}, "--image: must be letters, digits and the signs"),
        ({"time": "soon"}, "--time: must be numbers with : or - between them, such as 24:00:00"),
    ],
)
def test_of_the_options_of_a_template(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        template_options(options)
    assert message in str(caught.value)
    assert not SIGNS_OF_AN_EXPRESSION.search(str(caught.value))


def test_no_field_shows_its_expression() -> None:
    """pydantic's own ``pattern`` does, in its errors."""
    for package in ("rayfl", "actors", "algorithms", "cluster"):
        for path in (ROOT / package).rglob("*.py"):
            assert "pattern=" not in path.read_text(encoding="utf-8"), path
