"""The table of methods and tasks is what happens: every method works with a task, or refuses it before the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from algorithms.registry import METHODS

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(1200)
def test_the_table_is_up_to_date_and_has_every_method() -> None:
    script = [sys.executable, "scripts/docs/task_table.py", "--check"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}"
    lines = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8").splitlines()
    for name in METHODS:
        (row,) = (line for line in lines if line.startswith(f"| [`{name}`]"))
        assert row.split("|")[2].strip() == "yes", f"{name} cannot classify"
