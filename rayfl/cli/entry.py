"""The command ``rayfl``."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rayfl.cli import answers as cli_answers
from rayfl.cli import cluster as cli_cluster
from rayfl.cli import compare as cli_compare
from rayfl.cli import completion, panels
from rayfl.cli import data as cli_data
from rayfl.cli import fork as cli_fork
from rayfl.cli import inspect as cli_inspect
from rayfl.cli import invert as cli_invert
from rayfl.cli import jobs as cli_jobs
from rayfl.cli import leaf as cli_leaf
from rayfl.cli import membership as cli_membership
from rayfl.cli import model as cli_model
from rayfl.cli import new as cli_new
from rayfl.cli import plot as cli_plot
from rayfl.cli import repair as cli_repair
from rayfl.cli import report as cli_report
from rayfl.cli import reproduce as cli_reproduce
from rayfl.cli import show_model as cli_show_model
from rayfl.cli import sweep as cli_sweep
from rayfl.cli import verify as cli_verify
from rayfl.cli import watch as cli_watch
from rayfl.cli.catalog import KINDS, LONG, Kind, catalog, fields
from rayfl.cli.outputs import AsJson, write_json
from rayfl.diagnosis.tracebacks import own_frames
from rayfl.errors import ConfigError, RayflError, text_of
from rayfl.tracking import terminal

app = typer.Typer(
    help="Personalized federated learning on Ray.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Import and describe data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
cli_model.register(app)
cli_leaf.register(data_app)
cli_verify.register(app)
cli_repair.register(app)
cli_fork.register(app)
cli_watch.register(app)
cli_plot.register(app)
cli_report.register(app)
cli_compare.register(app)
cli_answers.register(app)
cli_membership.register(app)
cli_invert.register(app)

_LONGEST_MESSAGE = 500

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Dotted overrides, for instance algorithm=floco train.rounds=10.", autocompletion=completion.overrides
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from rayfl import __version__

        terminal.write(f"rayfl {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of all commands."""
    if debug:
        os.environ["RAYFL_DEBUG"] = "1"
        sys.excepthook = terminal.show_traceback
    warnings.showwarning = terminal.show_warning
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(terminal.VisibleFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler])


@app.command()
def run(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a YAML file, or the folder of a run, which goes on (with train.rounds=N beyond its end); "
            "the preset quickstart if left out.",
            autocompletion=completion.configurations,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment; the same command continues one that was interrupted."""
    from algorithms.registry import Experiment
    from cluster.rounds.interrupts import TERMINATED, Terminated
    from cluster.run import run_config
    from rayfl.runs.contributions import contribution_rows
    from rayfl.runs.damage import described
    from rayfl.runs.folder import is_run_folder, reopened
    from rayfl.runs.further import all_further, further_tables
    from rayfl.runs.summary import shown_rows, skipped_table, summary_table
    from rayfl.storage.files import Storage
    from rayfl.tracking.console import ConsoleProgress

    progress = terminal.err() if as_json else terminal.out()
    there = is_run_folder(config)
    settings = reopened(str(config), Experiment, overrides or []) if there else load_experiment(config, overrides)
    try:
        result = run_config(settings, callbacks=[ConsoleProgress(progress)], extends=there)
    except (KeyboardInterrupt, Terminated) as stop:
        terminal.err().print("interrupted; the same command continues from the last commit", markup=False)
        raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else terminal.INTERRUPTED) from None
    if as_json:
        about = {"folder": result.path, "method": settings.algorithm.name, "rounds": settings.train.rounds}
        counts = {"rounds_completed": result.rounds_completed, "skipped": result.skipped.num_rows}
        rows = {"summary": shown_rows(result), "further": all_further(result), "damage": described(result.damage)}
        rows["contributions"] = contribution_rows(result)
        write_json("run", {**about, **counts, **rows})
        return
    if (table := summary_table(result)).row_count or table.caption:
        terminal.out().print(table)
    for table in further_tables(result):
        terminal.out().print(table)
    if result.skipped.num_rows:
        terminal.out().print(skipped_table(result))
    for line in described(result.damage):
        terminal.out().print(f"{line} See damage.parquet.", style="red", markup=False, highlight=False)
    folder, root = result.path, Storage(settings.storage_path)
    board = f"\nTensorBoard:  tensorboard --logdir {shlex.quote(str(root.local_path or root.uri))}"
    terminal.out().print(
        f"run folder:   {folder}\n"
        f"tables:       rounds.parquet, clients.parquet (pandas.read_parquet and friends)\n"
        f"continue:     the same command goes on where a run stopped; config.yaml in the folder is its exact input\n"
        f"report:       rayfl report {shlex.quote(str(folder))}{board if settings.tracking.tensorboard else ''}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command("list")
def list_(
    what: Annotated[
        Kind | None,
        typer.Argument(help="Which list; all but presets and tables if left out. Methods are algorithms."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be named in a configuration: methods first."""
    kinds = list(KINDS) if what is None else ["algorithms" if what == "methods" else what]
    if as_json:
        found = {kind: [dict(zip(fields(kind), entry, strict=False)) for entry in catalog(kind)] for kind in kinds}
        write_json("list", {"kind": found})
        return
    for title in kinds:
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        table.add_column(no_wrap=True)  # a name is there to be copied
        for name, about, *of_paper in catalog(title):
            # A paper's preset has its paper, table and data; a column for each would be narrow for all others.
            table.add_row(name, *([", ".join([about, *of_paper])] if title == "presets" else [about, *of_paper]))
        terminal.out().print(table)
    if what is None:
        terminal.out().print(f"also: {', '.join(f'rayfl list {kind}' for kind in LONG)}", markup=False, highlight=False)


@app.command()
def show(
    target: Annotated[
        str,
        typer.Argument(
            help="A method (also a module:Class of your own), a preset, a YAML file or a run's folder; or model=NAME.",
            autocompletion=completion.targets,
        ),
    ],
    overrides: Overrides = None,
    methods: Annotated[
        str | None,
        typer.Option(help="With model=NAME: of which methods bytes are counted, with commas; default all."),
    ] = None,
    trust: cli_inspect.Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show a method with its hyper-parameters, or a configuration with all its values resolved.

    `rayfl show model=NAME dataset=NAME` shows a model: its parameters, whether many clients' models can be stacked, and
    what each method sends and keeps.
    """
    from algorithms.registry import METHODS
    from rayfl.cli.catalog import describe_method, hyper_parameters
    from rayfl.config.loading import to_yaml
    from rayfl.config.paper_presets import preset_names
    from rayfl.naming.objects import import_object, names_an_object
    from rayfl.naming.spelling import nearest

    if target.startswith(("model=", "model.")):
        cli_show_model.show_model(load_experiment(target, overrides, trust), methods, as_json)
        return
    if methods is not None:
        raise ConfigError("--methods is for models: rayfl show model=NAME dataset=NAME --methods ...")
    method: Any = import_object(target, "method") if names_an_object(target) else METHODS.get(target)
    if method is not None:
        if overrides:
            raise ConfigError(f"overrides do not apply to the method {target!r}; give a preset or a file")
        if as_json:
            headings = ("field", "symbol", "default", "range", "meaning")
            listed = [dict(zip(headings, row, strict=True)) for row in hyper_parameters(method)]
            write_json("show-method", {"name": target, "about": describe_method(method), "fields": listed})
            return
        terminal.out().print(describe_method(method), markup=False, highlight=False)
        table = Table("field", "symbol", "default", "range", "meaning")
        for row in hyper_parameters(method):
            table.add_row(*row)
        terminal.out().print(table)
        return
    named = target in preset_names() or "=" in target or "://" in target or names_an_object(target)
    if not named and not Path(target).expanduser().exists():
        close = nearest(target, [*METHODS, *preset_names()])
        raise ConfigError(f"{target!r} is no method, preset, file or folder{close}; `rayfl list` has them all")
    config = cli_inspect.configuration(target, overrides, trust, load_experiment)
    if as_json:
        values = config.model_dump(mode="json")
        write_json("show-configuration", {"configuration": values, "fingerprint": config.fingerprint()})
        return
    terminal.out().print(to_yaml(config), markup=False, highlight=False, soft_wrap=True, end="")


def load_experiment(config: str | None, overrides: list[str] | None, trust: bool = True) -> Any:
    """Returns the experiment that a command's arguments describe; the configuration may be left out.

    Raises:
        ConfigError: as of :func:`rayfl.config.loading.load_config`.
    """
    from algorithms.registry import Experiment
    from rayfl.config.loading import load_config

    extra = list(overrides or [])
    if config is not None and "=" in config and not Path(config).expanduser().is_file():
        extra.insert(0, config)
        config = None
    return load_config(Experiment, config, extra, trust)


cli_data.register(data_app, load_experiment)
cli_jobs.register(app, load_experiment)
cli_inspect.register(app, load_experiment)
cli_cluster.register(app, load_experiment)
cli_sweep.register(app)
cli_reproduce.register(app)
cli_new.register(app)
panels.arrange(app)


def main() -> None:
    """Entry point: an error ends with one message, and no traceback without ``--debug``.

    Exit status 2: the user can mend it. 1: a defect, in rayfl or in code that the configuration names.
    """
    terminal.lose_nothing()
    try:
        app(standalone_mode=True)
    except SystemExit as end:
        if not end.code and (why := terminal.lost_output()):
            message = f"error: standard output lacks something of what was printed ({why}); all else is done"
            terminal.err().print(message, markup=False, highlight=False, soft_wrap=True, style="red")
            sys.exit(2)
        raise
    except Exception as error:
        if os.environ.get("RAYFL_DEBUG"):
            raise
        known = isinstance(error, RayflError)
        text = text_of(error) if known else _unexpected(error)
        if '\n  File "' not in text:
            text += own_frames(error)
        terminal.err().print(f"error: {text}", markup=False, highlight=False, soft_wrap=True, style="red")
        sys.exit(2 if known else 1)


def _unexpected(error: Exception) -> str:
    """An error that nobody foresaw, in one line."""
    said = " ".join(text_of(error).split())
    shorter = said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}..."
    command = shlex.join(["rayfl", "--debug", *sys.argv[1:]])
    # With lines of a user's own files, the user knows where to look.
    strange = "this should not happen. " if not own_frames(error) else ""
    return f"{type(error).__name__}: {shorter or 'no message'}; {strange}`{command}` shows where it did"
