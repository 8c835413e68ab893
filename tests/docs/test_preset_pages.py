"""The page on presets is the one that the script makes now."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rayfl.config.loading import preset_names
from rayfl.reproduction.reference import reference_tables

ROOT = Path(__file__).parent.parent.parent


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    pages = importlib.import_module("preset_pages")
    assert pages.main(["--check"]) == 0, "run python scripts/docs/preset_pages.py"


def test_every_preset_and_every_printed_table_is_on_it() -> None:
    text = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    for name in preset_names():
        assert f"| `{name}` |" in text
    for table in reference_tables():
        assert f": `{table.name}`\n" in text
        for remark in table.remarks:
            assert remark.reason in text
