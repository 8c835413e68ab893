"""Where data files live when a configuration names them by a relative path."""

from __future__ import annotations

import os
from pathlib import Path


def data_root() -> Path:
    """The folder in the environment variable ``RAYFL_DATA``; ``~/.cache/rayfl`` where it is unset or empty."""
    return Path(os.environ.get("RAYFL_DATA") or "~/.cache/rayfl").expanduser()


def nor_here(path: Path) -> str:
    """Says of an absent path below the data root where else a relative path is looked up; nothing of others."""
    return f" (nor is it in the current folder {Path.cwd()})" if data_root() in path.parents else ""
