"""Configurations and overrides: the answer is a configuration, or an error that names the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from algorithms.registry import Experiment
from rayfl.config.loading import load_config, to_yaml
from rayfl.errors import ConfigError
from tests.support.fuzz_inputs import PATHS, QUICK, THOROUGH, TYPED, VALUES, damaged, tried


def checked_override(path: str, value: Any) -> None:
    """The result is a configuration that survives YAML, or an error that names the path or its section."""
    config, message = tried(ConfigError, lambda: load_config(Experiment, "quickstart", {path: value}))
    named = [part for part in path.split(".") if part]
    assert config is not None or not named or any(part in message for part in [*named, "(top level)"]), message
    if config is not None:
        assert yaml.safe_load(to_yaml(config)) == config.model_dump(mode="json")


def checked_text(text: str) -> None:
    """The same for an override as it is typed."""
    config, message = tried(ConfigError, lambda: load_config(Experiment, "quickstart", [text]))
    assert config is not None or text.partition("=")[0].partition(".")[0] in message or repr(text) in message


OVERRIDES = st.tuples(
    st.sampled_from(PATHS)
    | st.text(max_size=12)
    | st.sampled_from(PATHS).flatmap(lambda path: st.text(max_size=5).map(lambda more: f"{path}.{more}")),
    VALUES,
)


@QUICK
@given(OVERRIDES)
def test_overrides_from_python(given_: tuple[str, Any]) -> None:
    checked_override(*given_)


@pytest.mark.slow
@THOROUGH
@given(OVERRIDES)
def test_overrides_from_python_thoroughly(given_: tuple[str, Any]) -> None:
    checked_override(*given_)


@QUICK
@given(TYPED)
def test_overrides_as_typed(text: str) -> None:
    checked_text(text)


@pytest.mark.slow
@THOROUGH
@given(TYPED)
def test_overrides_as_typed_thoroughly(text: str) -> None:
    checked_text(text)


def checked_file(folder: Path, content: bytes) -> None:
    """A configuration file is one, or the error names it."""
    file = folder / "config.yaml"
    file.write_bytes(content)
    config, message = tried(ConfigError, lambda: load_config(Experiment, file, []))
    # Only a method or module that the file names is called by that name.
    assert config is not None or str(file) in message or "algorithm" in message


CONFIG = to_yaml(load_config(Experiment, "quickstart", [])).encode()
CONFIGS = damaged(CONFIG)


@QUICK
@given(CONFIGS)
def test_configuration_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_file(tmp_path_factory.getbasetemp(), content)


@pytest.mark.slow
@THOROUGH
@given(CONFIGS)
def test_configuration_files_thoroughly(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_file(tmp_path_factory.getbasetemp(), content)
