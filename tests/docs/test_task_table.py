"""The table of methods and tasks is what happens: every method works with a task, or refuses it before the start."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from algorithms.registry import METHODS
from scripts.docs.task_table import ADAPTED, TASKS, sections, tried
from tests.support.experiments import FEW
from tests.tasks.test_hosts import SLOW

ROOT = Path(__file__).parent.parent.parent
OTHERS = [task for task in TASKS if task != "classification"]
TRIED = list(zip([method for method in METHODS if method not in ADAPTED], cycle(OTHERS)))


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def cell(page: str, method: str, task: str) -> str:
    """What the page says of a method and a task, with the reason in place of its number."""
    (row,) = (line for line in page.splitlines() if line.startswith(f"| [`{method}`]"))
    found = row.split("|")[2 + list(TASKS).index(task)].strip()
    number = re.fullmatch(r"no \((\d+)\)", found)
    if number is None:
        return found
    (reason,) = re.findall(rf"^{number[1]}\. (.*)$", page, re.MULTILINE)
    return str(reason)


@pytest.mark.parametrize(
    ("method", "task"),
    [pytest.param(*one, marks=() if one[0] in FEW and one[1] not in SLOW else pytest.mark.slow) for one in TRIED],
)
def test_a_method_and_a_task_do_what_the_page_says(method: str, task: str, page: str) -> None:
    """Of the tasks other than classification one for each method; all are in the slow suite."""
    assert tried(sections(method, task)) == cell(page, method, task)


def test_every_method_has_a_row_and_classifies(page: str) -> None:
    assert {method: cell(page, method, "classification") for method in METHODS} == dict.fromkeys(METHODS, "yes")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_table_is_up_to_date() -> None:
    script = [sys.executable, "scripts/docs/task_table.py", "--check"]
    found = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}"
