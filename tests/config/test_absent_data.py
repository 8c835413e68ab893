"""A preset whose data are absent says which file it looked for and how to get it, before it does anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import rayfl
from rayfl.config.loading import preset_names, preset_text
from rayfl.errors import DataError

MADE = ("quickstart", "synthetic")
"""Beginnings of presets whose data are generated, or come with scikit-learn."""
OWN = ("dataset.path: ", "put the file there, or give its path")
"""What is said of a file that no command of rayfl gets."""


def with_data_of_their_own() -> list[str]:
    """Returns the first preset of each data set that has to be got first."""
    found: dict[str, str] = {}
    for name in preset_names():
        if not name.startswith(MADE):
            content = yaml.load(preset_text(name), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            found.setdefault(json.dumps(content["dataset"], sort_keys=True), name)
    return list(found.values())


@pytest.mark.parametrize("preset", with_data_of_their_own())
def test_absent_data_are_named_with_the_command_that_gets_them(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    monkeypatch.setenv("RAYFL_DATA", str(data))
    with pytest.raises(DataError) as caught:
        rayfl.run(preset, **{"cluster.backend": "inline", "storage_path": str(runs)})
    said = str(caught.value)
    assert f"{data}/" in said
    assert re.search(r"`rayfl data [a-z-]+ [^`]+`", said) or all(part in said for part in OWN)
    assert not runs.exists() and not list(data.iterdir())


def test_a_relative_path_is_named_with_both_folders_it_may_lie_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for dataset in ({"name": "parquet", "path": "f/mine.csv"}, {"name": "huggingface", "path": "f/mine.csv"}):
        with pytest.raises(DataError) as caught:
            rayfl.run("quickstart", dataset=dataset, storage_path=str(tmp_path / "runs"))
        assert f"{tmp_path}/data/f/mine.csv" in str(caught.value)
        assert f"nor is it in the current folder {tmp_path}" in str(caught.value)
