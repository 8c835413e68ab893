"""The commands ``rayfl data prepare``, ``list``, ``verify``, ``stats`` and ``show``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from rayfl.cli import completion
from rayfl.cli.inspect import Load, Trust, configuration
from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.data.sources.root import data_root
from rayfl.errors import ConfigError, DataError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.config.schema import ExperimentConfig
    from rayfl.data.federated import FederatedDataset
    from rayfl.data.sources.preparation.download import Progress as Report


_Root = Annotated[Path | None, typer.Option(callback=at_home, help="Data root; default RAYFL_DATA or ~/.cache/rayfl.")]


_Config = Annotated[
    str, typer.Argument(help="A preset, a YAML file or a run's folder.", autocompletion=completion.configurations)
]
_Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides.", autocompletion=completion.overrides)]


def register(app: typer.Typer, load: Load) -> None:
    """Adds the commands to ``rayfl data``.

    Args:
        app: the group of commands.
        load: makes a configuration of a preset or file and overrides; the last argument says whether a user's own
            method is imported.
    """

    def stats(config: _Config, overrides: _Overrides = None, trust: Trust = False, as_json: AsJson = False) -> None:
        """Describe the clients of a configuration: how many, how large, which labels."""
        from rayfl.data.partitions.stats import dataset_stats

        settings, dataset = _opened(config, overrides, trust, load)
        if as_json:
            about = {"dataset": settings.dataset.name, "clients": dataset.num_clients}
            facts = dict(dataset_stats(dataset).rows())
            write_json("data-stats", {**about, "facts": facts, "notes": list(dataset.remarks())})
            return
        table = Table(show_header=False, box=None, padding=(0, 2))
        for label, value in dataset_stats(dataset).rows():
            table.add_row(label, value)
        terminal.out().print(table)
        for remark in dataset.remarks():
            terminal.say(f"note: {remark}")

    def show(
        config: _Config,
        overrides: _Overrides = None,
        out: Annotated[Path, typer.Option(callback=at_home, help="File to write: .png, .pdf or .svg.")] = Path(
            "partition.png"
        ),
        trust: Trust = False,
        as_json: AsJson = False,
    ) -> None:
        """Draw the partition of a configuration: classes by client, and sizes."""
        from rayfl.plots.partition import check_format, draw_partition, save_figure

        check_format(out)
        settings, dataset = _opened(config, overrides, trust, load)
        title = f"{settings.dataset.name}, {settings.partition.name}, seed {settings.seed}"
        save_figure(draw_partition(dataset, title), out)
        if as_json:
            write_json("data-show", {"dataset": settings.dataset.name, "clients": dataset.num_clients, "file": out})
            return
        terminal.say(f"{dataset.num_clients:,} clients -> {out}")

    app.command("prepare")(prepare)
    app.command("list")(list_prepared)
    app.command("verify")(verify)
    app.command("stats")(stats)
    app.command("show")(show)


def _opened(
    config: str, overrides: list[str] | None, trust: bool, load: Load
) -> tuple[ExperimentConfig, FederatedDataset]:
    """A configuration and its clients; the section ``dataset`` may name code of users, which is looked at first."""
    from rayfl.config.loading import names_in, overrides_given
    from rayfl.config.own_code import named_code, refuse_code
    from rayfl.experiment.parts import Parts

    settings = configuration(config, overrides, trust, load)
    if not trust:
        typed = names_in(overrides_given(overrides or []))
        refuse_code([name for name in named_code(settings, ["dataset", "task"]) if name not in typed], config)
    return settings, Parts(settings).dataset


def prepare(
    name: Annotated[str, typer.Argument(help="mnist, cifar10 or another of `rayfl list datasets`; parquet.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of the section dataset, for instance split=balanced.")
    ] = None,
    root: _Root = None,
    source: Annotated[
        str | None, typer.Option(help="Path or address to take the source's files from, in place of the usual one.")
    ] = None,
    sha256: Annotated[str | None, typer.Option(help="What the file at --source must have.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Download nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Prepare again what is prepared already.")] = False,
    as_json: AsJson = False,
) -> None:
    """Get a data set and write the file that all processes of a machine read in place."""
    from rayfl.data.sources.preparation.preparing import Order, PreparableSource

    chosen = _source(name, options or [], root)
    if not isinstance(chosen, PreparableSource):
        advice = "make its file with `rayfl data import-leaf`" if name == "leaf" else "it needs no preparation"
        raise ConfigError(f"{name} cannot be prepared: {advice}")
    with _progress() as report:
        path = chosen.prepare(Order(source, sha256, offline, force, report))
    if as_json:
        write_json("data-prepare", {"dataset": name, "file": path})
        return
    terminal.say(f"{name} -> {path}")


def list_prepared(root: _Root = None, as_json: AsJson = False) -> None:
    """List the prepared and imported data sets of a data root."""
    from rayfl.data.sources.preparation.inventory import inventory

    place = root or data_root()
    entries = inventory(place)
    if as_json:
        files = [
            {"kind": one.kind, "content": one.content, "path": str(one.path), "bytes": one.size, "source": one.source}
            for one in entries
        ]
        write_json("data-list", {"root": str(place), "files": files})
        return
    if not entries:
        terminal.say(f"nothing is prepared in {place}; see `rayfl data prepare --help`")
        return
    terminal.say(f"in {place}:")
    for entry in entries:
        source = f", made from {entry.source}" if entry.source else ""
        terminal.say(f"{entry.kind}: {entry.content}, {entry.size / 1e6:,.1f} MB")
        terminal.say(f"    {entry.path.relative_to(place)}{source}")


def verify(
    files: Annotated[
        list[Path] | None, typer.Argument(callback=at_home, help="Prepared files; all of the data root if left out.")
    ] = None,
    root: _Root = None,
    as_json: AsJson = False,
) -> None:
    """Compare checksums of prepared files, of their content and of what they were made from."""
    from rayfl.data.sources.preparation.inventory import prepared_files
    from rayfl.data.sources.preparation.inventory import verify as compare

    damaged, listed = 0, []
    paths = files or prepared_files(root or data_root())
    for path in paths:
        wrong, unknown = compare(path)
        listed.append({"path": str(path), "wrong": wrong, "unknown": unknown})
        damaged += bool(wrong)
        if as_json:
            continue
        terminal.say(f"{'DAMAGED' if wrong else 'good   '}  {path}")
        for line in [*wrong, *unknown]:
            terminal.say(f"         {line}")
    if as_json:
        write_json("data-verify", {"files": listed})
    if damaged:
        raise DataError(
            f"{damaged} of {len(paths)} files are not what they were; make them again with `rayfl data prepare --force`"
            ", or import them again"
        )


def _source(name: str, options: list[str], root: Path | None) -> Any:
    """The section ``dataset`` that name and options make."""
    from pydantic import BaseModel, ValidationError, create_model

    from rayfl.config.messages import explain
    from rayfl.config.overrides import parse_overrides
    from rayfl.data.sources.registry import DatasetConfig

    section: dict[str, Any] = {"name": name}
    section |= dict(parse_overrides(options, "split=balanced", "option"))
    if root is not None:
        section["root"] = root.expanduser().absolute()
    schema: type[BaseModel] = create_model("Preparation", dataset=(DatasetConfig, ...))
    try:
        return schema.model_validate({"dataset": section}).dataset  # type: ignore[attr-defined]
    except ValidationError as error:
        raise ConfigError(explain(error, schema, f"data prepare {name}")) from None


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar for each thing that is reported, on standard error."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal.err(), transient=True, disable=not terminal.err().is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report
