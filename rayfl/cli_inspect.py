"""The commands ``rayfl clients``, ``export``, ``replay`` and ``diff``."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rayfl import terminal
from rayfl.errors import ConfigError

if TYPE_CHECKING:
    from rayfl.inspection.folder import RunFolder

_DIFFERENCES_SHOWN = 20

Run = Annotated[str, typer.Argument(help="A run's folder: a path or a URI (file, s3, gs).")]
Model = Annotated[str, typer.Option(help="A row of the tables (global, lambda=0.5, ...), or the personalized model.")]


def register(app: typer.Typer, load: Callable[[str | None, list[str] | None], Any]) -> None:
    """Adds the commands.

    Args:
        app: the command ``rayfl``.
        load: makes a configuration of a preset or file and overrides.
    """

    def diff(
        first: Annotated[str, typer.Argument(help="A preset, a YAML file or a run's folder.")],
        second: Annotated[str, typer.Argument(help="Another one.")],
    ) -> None:
        """Show in which values two configurations differ, all resolved. Exit status 1 if they do."""
        from rayfl.inspection.differences import differences

        left, right = (_configuration(target, load) for target in (first, second))
        found = differences(left, right)
        table = Table()
        table.add_column("field", no_wrap=True)
        for name in (first, second):
            table.add_column(name, overflow="fold")
        for path, *values in found:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
            table.add_row(path, *texts)
        if found:
            terminal.out().print(table)
        same = left.fingerprint() == right.fingerprint()
        _say(f"{len(found)} differences; {'the same' if same else 'other'} results are to be expected")
        raise typer.Exit(1 if found else 0)

    app.command()(clients)
    app.command()(export)
    app.command()(replay)
    app.command()(diff)


def clients(
    run: Run,
    model: Model = "personalized",
    split: Annotated[str, typer.Option(help="validation or test.")] = "test",
    round: Annotated[int | None, typer.Option(help="After which round; default: the last evaluation.")] = None,
    sort: Annotated[str | None, typer.Option(help="A column; default: by number.")] = None,
    descending: Annotated[bool, typer.Option("--descending", help="The largest first.")] = False,
    filter: Annotated[list[str] | None, typer.Option(help="A condition such as 'top1<0.5'; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many clients.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values in place of a table.")] = False,
) -> None:
    """List the clients of a run: samples, metrics, how often they were selected, bytes."""
    from rayfl.inspection.listing import COLUMNS, chosen_rows, client_rows

    opened = _open(run)
    rows, name, evaluated = client_rows(opened, model, split, round)
    found = chosen_rows(rows, filter or [], sort, descending, limit)
    if as_csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        terminal.write(text.getvalue())
        return
    title = f"{opened.name}: {name} on the clients' {split} data after round {evaluated}"
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for row in found:
        table.add_row(*(_shown(row[column]) for column in COLUMNS))
    terminal.out().print(table)
    _say(f"{len(found)} of {len(rows)} clients")


def export(
    run: Run,
    client: Annotated[int, typer.Option(help="The client's number.")],
    out: Annotated[Path, typer.Option(help="File to write: .safetensors.")],
    model: Model = "personalized",
    round: Annotated[int | None, typer.Option(help="After which round; default: the newest commit.")] = None,
) -> None:
    """Write one model of a client as safetensors that PyTorch can load without rayfl."""
    from rayfl.inspection.committed import CommittedModels
    from rayfl.inspection.export import check_destination, export_model

    check_destination(out)
    made = export_model(CommittedModels(_open(run), round), client, model, out)
    _say(f"{made.row} of client {client} after round {made.round}: {made.parameters:,} numbers -> {out}")
    _say(made.modules)
    for split, metrics in made.metrics.items():
        _say(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def replay(
    run: Run,
    round: Annotated[int, typer.Option(help="The round, as the tables count: the first is 1.")],
    client: Annotated[int, typer.Option(help="A client that took part in it.")],
    whole_round: Annotated[
        bool, typer.Option("--whole-round", help="Do all clients' parts, and compare the server's tree as well.")
    ] = False,
) -> None:
    """Do a client's part of a round again, in this process, and compare the bits. Exit status 1 if they differ."""
    from cluster.replay import replay as replayed

    found = replayed(_open(run), round, client, whole_round)
    who = "the whole round" if found.whole else f"client {client} alone"
    what = ", ".join(f"{name} ({count} values)" for name, count in found.compared.items())
    _say(f"round {round}, {who}: compared {what}")
    if not found.differences:
        _say("equal to the bit")
        return
    for place, distance in list(found.differences.items())[:_DIFFERENCES_SHOWN]:
        _say(f"differs: {place} by up to {distance:.3g}")
    _say(f"{len(found.differences)} values differ; {found.note}")
    raise typer.Exit(1)


def _open(run: str) -> RunFolder:
    from algorithms.registry import Experiment
    from rayfl.inspection.folder import open_run

    return open_run(run, Experiment)


def _configuration(target: str, load: Callable[[str | None, list[str] | None], Any]) -> Any:
    """The configuration of a run's folder, a preset or a file."""
    if "://" in target or Path(target).expanduser().is_dir():
        return _open(target).config
    if "=" in target:
        raise ConfigError(f"{target!r} is no preset, file or folder: diff takes no overrides")
    return load(target, None)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _say(text: str) -> None:
    terminal.out().print(text, markup=False, highlight=False, soft_wrap=True)
