"""The command ``rayfl repair``."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from rayfl.cli.outputs import AsJson, write_json
from rayfl.tracking import terminal


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(repair)


def repair(
    run: Annotated[str, typer.Argument(help="A run's folder: a path or a URI (file, s3, gs).")],
    as_json: AsJson = False,
) -> None:
    """Let a run go on whose clients' states are damaged: these clients begin again, which is put on record.

    A damaged model of the server is never made up: such a run is refused.
    """
    from rayfl.experiment.copies import copy_by_config, settings_of, share_commits
    from rayfl.runs.repair import repair as repaired
    from rayfl.storage.commits import CommitStore
    from rayfl.storage.files import Storage
    from rayfl.storage.lease import Lease
    from rayfl.storage.run_folder import check_run_folder

    storage = Storage(run.rstrip("/") or run)
    settings, copy = settings_of(storage), copy_by_config(storage)
    check_run_folder(storage, copy)
    with Lease(storage, settings.lease_timeout_s):
        said = [] if copy is None else share_commits(storage, copy)
        said += repaired(CommitStore(storage, copy), storage)
    if as_json:
        write_json("repair", {"run": run, "repaired": said})
        return
    for line in said:
        terminal.say(line)
    what = "repaired: the same command that started the run continues it" if said else "nothing needs repair"
    terminal.say(f"{what}; `rayfl verify {shlex.quote(run)}` looks it over")
