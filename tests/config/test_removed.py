"""Options that there are no more: dropped at their defaults, else named with what to do instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.config.removed import REMOVED
from rayfl.errors import ConfigError, RunError
from rayfl.runs.folder import open_run
from tests.support.experiments import Interrupt, small_experiment

OTHER = {"engine.kernel": "fast", "engine.lend_cores": True}
"""Values that did something."""


def at(path: str, value: Any) -> dict[str, Any]:
    section, key = path.split(".")
    return {section: {key: value}}


@pytest.mark.parametrize("path", REMOVED)
def test_at_its_default_an_option_is_dropped(path: str) -> None:
    plain = load_config(Experiment, "quickstart", {})
    assert load_config(Experiment, "quickstart", {path: REMOVED[path].default}) == plain


@pytest.mark.parametrize("path", REMOVED)
def test_else_the_error_says_since_when_and_what_to_use_instead(path: str, tmp_path: Path) -> None:
    words = rf"{path}: is gone since rayfl 0\.2\.0 \(got {OTHER[path]!r}\): leave it out"
    with pytest.raises(ConfigError, match=words):
        load_config(Experiment, "quickstart", {path: OTHER[path]})
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(at(path, OTHER[path])))
    with pytest.raises(ConfigError, match=rf"mine\.yaml: 1 problem\n  {words}"):
        load_config(Experiment, tmp_path / "mine.yaml", {})


def test_an_option_that_never_was_is_unknown_as_ever() -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.kernels: unknown; allowed: capture, compile, mode, precision, rows_per_step, width"
    ):
        load_config(Experiment, "quickstart", {"engine.kernels": "fast"})


@pytest.mark.parametrize("path", REMOVED)
def test_a_run_with_it_is_read_and_not_continued(path: str, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(1)])
    record = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(record.read_text())
    for value, refused in ((REMOVED[path].default, False), (OTHER[path], True)):
        content["engine"][path.partition(".")[2]] = value
        record.write_text(yaml.safe_dump(content))
        assert open_run(str(tmp_path / "run"), Experiment).config.engine.mode == "auto"
        if refused:
            with pytest.raises(RunError, match=f"was begun with {path}={value}, which rayfl no longer has"):
                rayfl.run(config)
        else:
            with pytest.raises(KeyboardInterrupt):
                rayfl.run(config, callbacks=[Interrupt(2)])
