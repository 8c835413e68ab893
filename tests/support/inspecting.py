"""Finished runs of which all commits are kept, opened as the inspecting commands do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from algorithms.registry import Experiment
from rayfl.runs.folder import RunFolder, open_run

Finished = Callable[[str], Path]
"""Gives the folder of the run of a method, which is made when it is first asked for."""


def opened(path: Path) -> RunFolder:
    """A run's folder, with its experiment."""
    return open_run(str(path), Experiment)
