"""The page of a part of the campaign."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checks.running import Check

_TITLES = {
    "a": "Is it right?",
    "b": "How fast is it?",
    "c": "What if something goes wrong?",
    "d": "Adapters over a pretrained base",
    "e": "What else could be done?",
    "f": "How fast are others?",
    "g": "Kinds of adapters",
}
_REHEARSAL = "**A rehearsal on a CPU**, with less work: its numbers say nothing about GPUs, nor about the goals."


def write_page(
    path: Path, part: str, device: str, checks: Sequence[Check], answers: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes what a part of the campaign has found, as Markdown.

    Args:
        path: of the page.
        part: its letter.
        device: where it ran.
        checks: in their order.
        answers: by check.
    """
    lines = [
        f"# {_TITLES[part]}",
        "",
        f"`{' '.join(['python', *sys.argv])}`, {time.strftime('%Y-%m-%d')}, {_machine()}.",
    ]
    if device == "cpu":
        lines += ["", _REHEARSAL]
    goals = [goal for answer in answers.values() for goal in answer["goals"]]
    if goals:
        lines += ["", "| goal | wanted | measured | |", "|---|---|--:|---|"]
        for goal in goals:
            met = "" if device == "cpu" else "met" if goal["met"] else "**missed**"
            lines.append(f"| {goal['goal']} | {goal['wanted']} | {_text(goal['found'])} | {met} |")
    lines += ["", "| check | what | | seconds |", "|---|---|---|--:|"]
    for check in checks:
        answer = answers[check.name]
        status = answer["status"] if answer["status"] == "ok" else f"**{answer['status']}**"
        lines.append(f"| {check.name} | {check.what} | {status} | {answer['seconds']} |")
    for check in checks:
        answer = answers[check.name]
        lines += ["", f"## {check.name}", ""]
        if answer["reason"]:
            lines += ["```text", answer["reason"].strip(), "```", ""]
        lines += _items(answer["found"])
    path.write_text("\n".join(lines) + "\n")


def _items(found: Mapping[str, Any], indent: str = "") -> list[str]:
    """Values by name, as a nested list."""
    lines = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}- {name}", *_items(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}- {name}: {_text(value)}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value)
    return str(value).strip().replace("\n", "; ")


def _machine() -> str:
    """The processor and, where there is one, the GPU."""
    import torch

    found = [f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"]
    if torch.cuda.is_available():
        found.append(f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    return ", ".join(found)
