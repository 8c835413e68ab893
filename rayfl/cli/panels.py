"""The order in which ``rayfl --help`` has its commands, by what they are for."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from typer.models import CommandInfo, TyperInfo

PANELS = {
    "Experiments": ("run", "list", "show", "new", "diff", "sweep", "reproduce"),
    "Results": ("report", "compare", "plot", "clients", "watch", "export", "answers"),
    "Runs and their commits": ("fork", "verify", "repair", "replay"),
    "Attacks on privacy": ("membership", "invert"),
    "Data and models": ("data", "model"),
    "Clusters": ("submit", "status", "logs", "stop", "cluster", "doctor"),
}
"""By its title, the commands of a panel."""

_ORDER = [name for names in PANELS.values() for name in names]


def arrange(app: typer.Typer) -> None:
    """Puts the commands of an app into their panels, and into this order.

    Raises:
        ValueError: a command is in no panel.
    """
    for entries in (app.registered_commands, app.registered_groups):
        _place(entries)
    app.registered_commands.sort(key=lambda command: _ORDER.index(_name(command)))
    app.registered_groups.sort(key=lambda group: _ORDER.index(_name(group)))


def _place(entries: Sequence[CommandInfo] | Sequence[TyperInfo]) -> None:
    for entry in entries:
        title = next((title for title, names in PANELS.items() if _name(entry) in names), None)
        if title is None:
            raise ValueError(f"rayfl {_name(entry)} is in no panel of {__name__}")
        entry.rich_help_panel = title


def _name(entry: CommandInfo | TyperInfo) -> str:
    return entry.name or (entry.callback.__name__ if entry.callback is not None else "")
