"""Ray's workers look for modules in the driver's current folder first: none there may have the name of rayfl's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray

from cluster.rounds.session import ray_session
from rayfl.errors import ConfigError, ResourceError

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that exists is used: no Ray starts."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.mark.parametrize("place", ["algorithms/__init__.py", "actors/__init__.py", "cluster.py", "rayfl/__init__.py"])
def test_modules_with_names_of_rayfl_are_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).touch()
    monkeypatch.chdir(tmp_path)
    found = tmp_path / place.removesuffix("/__init__.py")
    with pytest.raises(ConfigError, match=rf"would import {found} in place of .*rename it"), ray_session(None):
        pass


def test_a_folder_without_modules_shadows_an_editable_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python finds such an installation after everything that is on its path."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place).resolve() != ROOT])
    monkeypatch.chdir(tmp_path)
    with ray_session(None):
        pass
    (tmp_path / "algorithms").mkdir()
    with pytest.raises(ConfigError, match="algorithms"), ray_session(None):
        pass


def test_what_nobody_would_import_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "mine.py").touch()  # Python prefers a package with an __init__.py
    (tmp_path / "rayfl").mkdir()
    for folder in (tmp_path, ROOT, ROOT / "docs"):
        monkeypatch.chdir(folder)
        with ray_session(None):
            pass
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with ray_session(None):
        pass


def test_a_connection_by_a_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with (
        pytest.raises(ResourceError, match=r"is connected by a Ray Client, .* submit the run as a Ray job"),
        ray_session(None),
    ):
        pass
