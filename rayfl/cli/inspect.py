"""The commands ``rayfl clients``, ``export``, ``replay`` and ``diff``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.errors import ConfigError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.config.schema import ExperimentConfig
    from rayfl.runs.folder import RunFolder

_DIFFERENCES_SHOWN = 20

Load = Callable[[str | None, list[str] | None, bool], Any]

Run = Annotated[str, typer.Argument(help="A run's folder: a path or a URI (file, s3, gs).")]
Model = Annotated[
    str | None,
    typer.Option(help="A row of the tables (global, lambda=0.5, ...); default: the method's personalized model."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Import code that the configuration names (module:name); without it nothing is."),
]


def register(app: typer.Typer, load: Load) -> None:
    """Adds the commands.

    Args:
        app: the command ``rayfl``.
        load: makes a configuration of a preset or file and overrides; the last argument says whether a user's own
            method is imported.
    """

    def diff(
        first: Annotated[str, typer.Argument(help="A preset, a YAML file or a run's folder.")],
        second: Annotated[str, typer.Argument(help="Another one.")],
        trust: Trust = False,
        as_json: AsJson = False,
    ) -> None:
        """Show in which values two configurations differ, all resolved. Exit status 1 if they do."""
        from rayfl.config.differences import differences, text_of

        for target in (first, second):
            if "=" in target and "://" not in target and not Path(target).expanduser().exists():
                raise ConfigError(f"{target!r} is no preset, file or folder: diff takes no overrides")
        left, right = (configuration(target, None, trust, load) for target in (first, second))
        found = differences(left.model_dump(mode="json"), right.model_dump(mode="json"))
        if as_json:
            listed = [{"field": path, "first": one, "second": other} for path, one, other in found]
            same = left.same_results(right)
            write_json("diff", {"first": first, "second": second, "differences": listed, "same_results": same})
            raise typer.Exit(1 if found else 0)
        table = Table()
        table.add_column("field", no_wrap=True)
        for name in (first, second):
            table.add_column(name, overflow="fold")
        for path, *values in found:
            table.add_row(path, *map(text_of, values))
        if found:
            terminal.out().print(table)
        same = left.same_results(right)
        terminal.say(f"{len(found)} differences; {'the same' if same else 'other'} results are to be expected")
        raise typer.Exit(1 if found else 0)

    app.command()(clients)
    app.command()(export)
    app.command()(replay)
    app.command()(diff)


def clients(
    run: Run,
    model: Model = None,
    split: Annotated[
        Literal["test", "validation", "train", "official"],
        typer.Option(help="Whose numbers; train: with evaluation.splits; official: the common test data."),
    ] = "test",
    cohort: Annotated[
        Literal["all", "unseen"], typer.Option(help="all that may train, or unseen: those held out from training.")
    ] = "all",
    round: Annotated[int | None, typer.Option(help="After which round; default: the last evaluation.")] = None,
    sort: Annotated[str | None, typer.Option(help="A column; default: by number.")] = None,
    descending: Annotated[bool, typer.Option("--descending", help="The largest first.")] = False,
    filter: Annotated[list[str] | None, typer.Option(help="A condition such as 'top1<0.5'; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many clients.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values in place of a table.")] = False,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """List the clients of a run: samples, metrics, how often they were selected, bytes."""
    from rayfl.results.personalized import of_clients, recorded_unseen
    from rayfl.results.plain_csv import plain_cell
    from rayfl.runs.listing import chosen_rows, listed_clients

    opened = open_folder(run, trust)
    rows, name, evaluated = listed_clients(opened, model, split, round, cohort)
    found, columns = chosen_rows(rows, filter or [], sort, descending, limit), tuple(rows[0])
    if as_csv and as_json:
        raise ConfigError("--csv and --json: choose one")
    if as_json:
        about = {"run": opened.storage.uri, "model": name, "split": split, "round": evaluated, "evaluated": len(rows)}
        write_json("clients", {**about, "cohort": cohort, "clients": found})
        return
    if as_csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "name": plain_cell(str(row["name"]))} for row in found)
        terminal.write(text.getvalue())
        return
    unseen = cohort == "unseen"
    scored = of_clients(len(rows), recorded_unseen(opened.rounds) if unseen else opened.num_clients)
    scored += " held-out" if unseen else ""
    title = f"{opened.name}: {name} on the clients' {split} data after round {evaluated}, {scored} clients"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))  # room for all in 80 columns
    named = any(row["name"] != str(row["client"]) for row in found)
    shown = [column for column in columns if column != "name" or named]
    for column in shown:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in found:
        table.add_row(*(_shown(row[column]) for column in shown))
    terminal.out().print(table)
    terminal.say(f"{len(found)} of {len(rows)} clients listed")


def export(
    run: Run,
    client: Annotated[int, typer.Option(help="The client's number.")],
    out: Annotated[
        Path, typer.Option(callback=at_home, help="File to write: .safetensors; of the other formats, a folder.")
    ],
    model: Model = None,
    format: Annotated[
        Literal["safetensors", "peft", "transformers"],
        typer.Option(
            help="All tensors in one file; of a pretrained model, its adapters as peft reads them, or the whole model "
            "with them merged into its weights, as from_pretrained of transformers reads it."
        ),
    ] = "safetensors",
    round: Annotated[int | None, typer.Option(help="After which round; default: the newest commit.")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write one model of a client as safetensors that PyTorch, peft or transformers can load without rayfl."""
    from rayfl.runs.committed import CommittedModels
    from rayfl.runs.export import check_destination, export_adapter, export_merged, export_model

    if format == "safetensors":
        check_destination(out)
    write = {"safetensors": export_model, "peft": export_adapter, "transformers": export_merged}[format]
    made = write(CommittedModels(open_folder(run, trust), round), client, model, out)
    if as_json:
        about = {"file": str(out), "client": client, "row": made.row, "round": made.round}
        write_json("export", {**about, "parameters": made.parameters, "metrics": made.metrics})
        return
    terminal.say(f"{made.row} of client {client} after round {made.round}: {made.parameters:,} numbers -> {out}")
    terminal.say(made.modules)
    for split, metrics in made.metrics.items():
        terminal.say(f"{split}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def replay(
    run: Run,
    round: Annotated[int, typer.Option(help="The round, as the tables count: the first is 1.")],
    client: Annotated[int, typer.Option(help="A client that took part in it.")],
    whole_round: Annotated[
        bool, typer.Option("--whole-round", help="Do all clients' parts, and compare the server's tree as well.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Do a client's part of a round again, in this process, and compare the bits. Exit status 1 if they differ.

    Code that the run's configuration names is imported.
    """
    from cluster.replay import replay as replayed

    found = replayed(open_folder(run, trust=True), round, client, whole_round)
    if as_json:
        distances = {place: float(distance) for place, distance in found.differences.items()}
        note = found.note if distances else ""
        write_json("replay", {"round": round, "compared": found.compared, "differences": distances, "note": note})
        raise typer.Exit(1 if distances else 0)
    who = "the whole round" if found.whole else f"client {client} alone"
    what = ", ".join(f"{name} ({count} values)" for name, count in found.compared.items())
    terminal.say(f"round {round}, {who}: compared {what}")
    if not found.differences:
        terminal.say("equal to the bit")
        return
    for place, distance in list(found.differences.items())[:_DIFFERENCES_SHOWN]:
        terminal.say(f"differs: {place} by up to {distance:.3g}")
    terminal.say(f"{len(found.differences)} values differ; {found.note}")
    raise typer.Exit(1)


def open_folder(run: str, trust: bool) -> RunFolder:
    """Opens a run's folder; code that its configuration names is imported if it is trusted."""
    from algorithms.registry import Experiment
    from rayfl.runs.folder import open_run

    return open_run(run, Experiment, trust)


def configuration(target: str, overrides: list[str] | None, trust: bool, load: Load) -> ExperimentConfig:
    """The configuration of a run's folder, a preset or a file, for commands that only look at it.

    Of a user's own method that is not imported it has the values as they are written; a note says so where these may
    not be all.
    """
    from rayfl.config.own_code import NamedMethod

    if "://" in target or Path(target).expanduser().is_dir():
        if overrides:
            raise ConfigError(f"overrides do not apply to the folder of a run, {target}")
        return open_folder(target, trust).config
    found: ExperimentConfig = load(target, overrides, trust)
    if isinstance(found.algorithm, NamedMethod):
        terminal.warn(
            f"note: {found.algorithm.name} is not imported: its values are shown as they are written, without defaults "
            "and unchecked; with --trust it is",
        )
    return found


def _shown(value: Any) -> str:
    """Returns a value as a cell of a table; a dash where a client has no number."""
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
