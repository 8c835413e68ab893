"""Linters of other languages, from the extra dev."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def lint(linter: str, *arguments: str) -> None:
    """Has one of the linters of the extra dev look at a file."""
    found = shutil.which(linter, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None and sys.platform != "linux":
        pytest.skip(f"there is no {linter} for this system")
    assert found, f"{linter} is missing: pip install -e '.[dev]'"
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
