"""The pages on methods are those that the script makes now."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from algorithms.registry import METHODS

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "methods"


def test_the_pages_are_up_to_date() -> None:
    script = [sys.executable, "scripts/docs/method_pages.py", "--check"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}run python scripts/docs/method_pages.py"


def test_every_method_has_a_page_a_paper_and_tests_of_its_invariants() -> None:
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        (row,) = (line for line in index.splitlines() if line.startswith(f"| [`{name}`]"))
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert cells[2] == method.citation != ""
        assert int(cells[-1]) > 0, f"{name} has no tests of its invariants"
        assert "## Differences" in (PAGES / f"{name}.md").read_text(encoding="utf-8")
