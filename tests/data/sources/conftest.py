"""Where tests of data sources have their files, and what they download from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, serving


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Downloads that fail are tried again at once."""
    monkeypatch.setattr("rayfl.data.sources.preparation.download.RETRY_PAUSES_S", ())
    with serving(Server({})) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data root."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"
