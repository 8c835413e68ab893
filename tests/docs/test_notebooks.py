"""The notebooks in examples/ run from the first cell to the last, and show what they say."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

NOTEBOOKS = {"first_run": (), "own_data": (), "own_method": (), "reading_results": ("duckdb", "polars")}
"""By name, what a notebook needs beyond rayfl and the extra docs."""


def test_notebooks_have_been_run_from_the_first_cell_to_the_last() -> None:
    """What they show is there without running them, none shows an error, and none the machine that they were run on."""
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    for name in NOTEBOOKS:
        text = (EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8")
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        assert not [out for cell in cells for out in cell["outputs"] if out["output_type"] == "error"]
        assert not re.search(r"/tmp/|/home/|/root/|\\u001b\[31merror", text), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nbclient", "ipykernel", "pandas", *NOTEBOOKS[name]):
        pytest.importorskip(package, reason="notebooks need the extra docs: pip install -e '.[docs]'")
    import nbclient
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3", resources=place).execute()
    printed = "".join(out.get("text", "") for cell in book.cells for out in cell.get("outputs", []))
    said = {
        "first_run": "superfed   98.3%",
        "own_data": "rayfl.data-stats/1",
        "own_method": "did you mean 'rounds'?",
        "reading_results": "personalized",
    }
    assert said[name] in printed and "error: " not in printed
