"""The pages on methods are those that the script makes now."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from algorithms.registry import METHODS, Experiment
from rayfl.cli.catalog import describe_method
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "methods"
LARGEST_PICTURE = 15_000
"""Bytes: there is one for each method."""


def test_the_pages_are_up_to_date(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    status = importlib.import_module("method_pages").main(["--check"])
    assert status == 0, f"{capsys.readouterr().out}run python scripts/docs/method_pages.py"


def test_pages_count_the_methods() -> None:
    """In the list README's number is made; in texts it is written."""
    for page in ("README.md", "docs/index.md", "docs/llms.txt"):
        counts = re.findall(r"(\d+) methods", " ".join((ROOT / page).read_text(encoding="utf-8").split()))
        assert counts and set(counts) == {str(len(METHODS))}, page
    assert f"| methods | {len(METHODS)} |" in (ROOT / "docs/peers.md").read_text(encoding="utf-8")


def test_every_method_has_a_page_a_paper_and_tests_of_its_invariants() -> None:
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    for name, method in METHODS.items():
        (row,) = (line for line in index.splitlines() if line.startswith(f"| [`{name}`]"))
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert cells[2] == method.citation != ""
        assert int(cells[-1]) > 0, f"{name} has no tests of its invariants"
        assert "## Differences" in (PAGES / f"{name}.md").read_text(encoding="utf-8")


def test_every_formula_of_a_docstring_is_set_and_none_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are the docstrings' own lines, so that a docstring and its page say the same."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    mathematics = importlib.import_module("mathematics")
    written = yaml.safe_load((PAGES / "formulas.yaml").read_text(encoding="utf-8"))
    docstrings = {name: describe_method(method).partition("\nReferences:")[0] for name, method in METHODS.items()}
    used = {line for text in docstrings.values() for line in mathematics.formulas_of(text)}
    assert used == set(written["formulas"])
    assert {name for name, text in docstrings.items() if not mathematics.formulas_of(text)} == set(written["equation"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v_k, alpha_k", r"$v_{k}$, $\alpha_{k}$"),
        ("theta_1..theta_M", r"$\theta_{1} \ldots \theta_{M}$"),
        ("c_k^+ and xbar", r"$c_{k}^{+}$ and $\bar x$"),
        ("a client's `w_k`, i.e. eta_ft", r"a client's `w_k`, i.e. $\eta_{\mathrm{ft}}$"),
        ("W_k's rows, the client's server_lr", "$W_{k}$'s rows, the client's server_lr"),
        ("mu/2 ||theta - (w - d_k)||^2", r"$\mu$/2 $\lVert \theta - (w - d_{k}) \rVert^{2}$"),
        ("||a_k||_1 and ||.||", r"$\lVert a_{k} \rVert_{1}$ and $\lVert \cdot \rVert$"),
        ("0.01 x 0.99^t, 10^-1.5.", "0.01 $x$ $0.99^{t}$, $10^{-1.5}$."),
        ("KL(p || q), true || false", "KL($p$ || $q$), true || false"),
        ("sum_m alpha_m theta_m(x)", r"$\sum_{m}$ $\alpha_{m}$ $\theta_{m}$($x$)"),
    ],
)
def test_symbols_within_a_text(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    assert importlib.import_module("mathematics").with_symbols(text) == expected


@pytest.mark.slow
def test_a_page_has_a_picture_a_command_a_curve_and_its_source() -> None:
    """The command is one that can be run: its configuration is valid, and the data are right for the method."""
    for name in METHODS:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        picture = text[text.index('<div class="messages"') : text.index("```bash")]
        assert [part in picture for part in ("Server keeps", "Down", "Up", "Client keeps")] == [True] * 4
        (command,) = re.findall(r"```bash\nrayfl run (.+)\n```", text)
        preset, *overrides = command.split()
        if preset == "quickstart-lora":
            from tests.support.bases import base  # skips where transformers is missing

            overrides.append(f"model.folder={base('vit')}")
        if preset == "quickstart-clip":
            from tests.support.clips import clip_base

            overrides.append(f"model.folder={clip_base()}")
        Parts(load_config(Experiment, preset, overrides)).check()
        for curve in re.findall(r"!\[[^]]+\]\((.+)\)", text):
            assert curve == f"curves/{name}.svg" and 0 < (PAGES / curve).stat().st_size < LARGEST_PICTURE
        (source,) = re.findall(r"\]\((\.\./\.\./algorithms/\w+\.py)\)", text)
        assert (PAGES / source).is_file()


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that makes the small runs."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    return importlib.import_module("method_curves")


def test_small_runs_have_learned_something(curves: Any) -> None:
    """Guessing gives 10 %, of ten digits."""
    table = curves.read_table()
    assert "algorithm=fedavg" in table and set(table) <= set(curves.all_settings())
    assert {settings: curve.last for settings, curve in table.items() if not curve.last > 15} == {}


def test_the_table_of_small_runs_is_read_as_it_was_written(
    curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = (PAGES / "curves.csv").read_text(encoding="utf-8")
    monkeypatch.setattr("small_runs.TABLE", tmp_path / "curves.csv")
    assert curves.read_table() == {}
    monkeypatch.setattr("small_runs.TABLE", PAGES / "curves.csv")
    table = curves.read_table()
    monkeypatch.setattr("small_runs.TABLE", tmp_path / "curves.csv")
    curves.write_table(table)
    assert (tmp_path / "curves.csv").read_text(encoding="utf-8") == written


@pytest.mark.slow
def test_the_curves_are_those_of_the_table_and_of_today(curves: Any) -> None:
    script = [sys.executable, "scripts/docs/method_curves.py", "--check"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}run python scripts/docs/method_curves.py"
    for settings in ("algorithm=fedper", "algorithm=superfed"):
        recorded, now = curves.read_table()[settings], curves.measured(settings)
        # Other processors round otherwise, and rounding grows from round to round.
        assert now.rounds == recorded.rounds and now.last == pytest.approx(recorded.last, abs=5)
