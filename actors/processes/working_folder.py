"""The driver's working folder, in which other processes of a run find the files that it names by relative paths."""

from __future__ import annotations

import os


def working_folder() -> str:
    """Returns this process's working folder; empty if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def work_in(folder: str) -> None:
    """Changes to a folder if this node has it: Ray starts processes in other ones."""
    if os.path.isdir(folder):
        os.chdir(folder)
