"""A short campaign of faults: the same command again gives the bits of an undisturbed run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayfl.storage import local_files
from rayfl.storage.files import Storage

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_call_of_a_write_and_of_a_deletion_has_its_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "chaos"))
    boundaries: Any = importlib.import_module("chaos_boundaries").count()
    for name in ("open", "os"):  # put back at the end
        monkeypatch.setattr(local_files, name, getattr(local_files, name, open), raising=False)
    monkeypatch.setattr(Storage, "delete", Storage.delete)
    boundaries.install()
    storage = Storage(str(tmp_path))
    storage.write("commits/one", b"content")
    written = list(boundaries.names)
    assert [name for name in written if name.startswith("before")][:4] == [
        "before open", "before write", "before fsync", "before rename",
    ]  # fmt: skip
    assert "within write" in written
    storage.delete("commits/one")
    assert boundaries.names[len(written) :] == ["before delete", "after delete"]


@pytest.mark.slow
def test_a_short_campaign(tmp_path: Path) -> None:
    report, page = tmp_path / "trials.json", PAGE.read_bytes()
    script = [sys.executable, "scripts/chaos/chaos.py", "--short", "--seed", "7", "--json", str(report)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    trials = json.loads(report.read_text())
    assert [trial["problem"] for trial in trials] == [""] * len(trials)
    struck = {trial["fault"] for trial in trials if trial["struck"]}
    assert {"client raises", "an actor killed", "file of the newest commit damaged"} <= struck
    assert {
        "tables of all commits damaged",
        "commits/ is a link to another folder",
        "folder of somebody else",
    } <= struck
    assert {"files damaged in one of two copies", "states of all commits damaged, then repaired"} <= {
        trial["fault"] for trial in trials
    }
    assert sum("at a boundary" in trial["fault"] for trial in trials) >= 3
    assert PAGE.read_bytes() == page


def test_the_page_has_the_figures_of_a_whole_campaign() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").partition("<!-- chaos: begin -->")[2].splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    ]
    total = next(row for row in rows if row[0] == "all")
    assert int(total[1]) >= 200
    assert all(row[1] == row[3] for row in rows if row[0] and row[1].isdigit() and len(row) == 6)
