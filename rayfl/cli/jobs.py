"""The commands ``rayfl submit``, ``status``, ``logs`` and ``stop``: runs as jobs on a cluster."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rayfl.cli import completion
from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.errors import ConfigError, ResourceError
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from ray.job_submission import JobDetails


Address = Annotated[
    str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard, such as http://host:8265.")
]
_LOCAL = "http://127.0.0.1:8265"
RunOrId = Annotated[str, typer.Argument(help="A run's name, for its newest job, or a job's id.")]


def register(app: typer.Typer, load: Callable[[str | None, list[str] | None], Any]) -> None:
    """Adds the commands to ``rayfl``.

    Args:
        app: the command line.
        load: makes a configuration of a preset or file and overrides.
    """

    def submit(
        config: Annotated[
            str, typer.Argument(help="A preset or a YAML file.", autocompletion=completion.configurations)
        ],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Dotted overrides.", autocompletion=completion.overrides)
        ] = None,
        address: Address = _LOCAL,
        wait: Annotated[bool, typer.Option("--wait", help="Follow the run; exit with its status.")] = False,
        working_dir: Annotated[
            Path | None,
            typer.Option(
                callback=at_home,
                help="Folder of your own code and files, less what .gitignore and .rayignore name (where "
                "RAY_RUNTIME_ENV_IGNORE_GITIGNORE is 1: .rayignore alone), at most 100 MiB zipped; default: the "
                "modules that the configuration names.",
            ),
        ] = None,
        uv: Annotated[
            list[str] | None,
            typer.Option(
                help="A package for the run, such as timm, or a file of requirements; uv installs it. Repeat."
            ),
        ] = None,
        ship: Annotated[
            bool,
            typer.Option(
                "--ship/--no-ship", help="Send this rayfl along, for the nodes' pip to install; not where it is there."
            ),
        ] = True,
        env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the run, such as RAYFL_DATA=/data.")] = None,
        as_json: AsJson = False,
    ) -> None:
        """Start a run as a job on a cluster; submitting it again finds the job, or starts the next attempt."""
        if as_json and wait:
            raise ConfigError("--json and --wait: choose one; `rayfl status` tells how the job ended")
        jobs = _jobs()
        options = jobs.JobOptions(ship, working_dir, _environment(env or []), required_packages(uv or []))
        settings = load(config, overrides)
        client = jobs.connect(address)
        job = jobs.submit(client, settings, options)
        if as_json:
            write_json("submit", {"job": job.id, "attached": job.attached})
            return
        terminal.say(f"job {job.id} {'is under way already' if job.attached else 'submitted'}")
        if wait:
            raise typer.Exit(_follow(client, job.id))
        terminal.say(f"follow it: rayfl logs {job.id} --follow --address {address}")

    app.command("submit")(submit)
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("stop")(stop)


def status(
    run: Annotated[str | None, typer.Argument(help="A run's name or a job's id; all runs if left out.")] = None,
    address: Address = _LOCAL,
    as_json: AsJson = False,
) -> None:
    """Show the jobs of a cluster's runs; for one run, exit with its status once it has ended."""
    jobs = _jobs()
    client = jobs.connect(address)
    found = [jobs.find(client, run)] if run is not None else jobs.jobs(client)
    headings = ("job", "run", "method", "data", "status", "minutes", "exit status")
    if as_json:
        names = [heading.replace(" ", "_") for heading in headings]
        write_json("status", {"jobs": [dict(zip(names, _row(job), strict=True)) for job in found]})
    else:
        table = Table(*headings)
        for job in found:
            table.add_row(*_row(job))
        terminal.out().print(table)
    if run is not None and found[0].status.is_terminal():
        from cluster.jobs.ending import exit_status

        raise typer.Exit(exit_status(found[0]))


def logs(
    run: RunOrId,
    address: Address = _LOCAL,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run ends; exit with its status.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what a run has printed."""
    if as_json and follow:
        raise ConfigError("--json and --follow: choose one; `rayfl status --json` tells how the job ended")
    jobs = _jobs()
    client = jobs.connect(address)
    details = jobs.find(client, run)
    job = details.submission_id
    if follow:
        raise typer.Exit(_follow(client, job))
    from cluster.jobs.ending import why_not_run

    text = client.get_job_logs(job) + why_not_run(details)
    if as_json:
        write_json("logs", {"job": job, "text": text})
        return
    terminal.write(text)


def stop(
    run: RunOrId,
    address: Address = _LOCAL,
    timeout: Annotated[float, typer.Option(help="How long to wait for its end, in seconds.")] = 120,
    as_json: AsJson = False,
) -> None:
    """Stop a run after its round; submitting it again continues it."""
    jobs = _jobs()
    client = jobs.connect(address)
    job = jobs.find(client, run).submission_id
    stopped = jobs.stop(client, job, timeout)
    if as_json:
        write_json("stop", {"job": job, "stopped": stopped})
        return
    terminal.say(f"job {job} {'has stopped; submit the run again to continue it' if stopped else 'had ended already'}")


def _jobs() -> Any:
    """The module ``cluster.jobs.jobs``, and what it needs of Ray."""
    try:
        importlib.import_module("aiohttp")
        return importlib.import_module("cluster.jobs.jobs")
    except ImportError as error:
        raise ResourceError(
            f"jobs need more of Ray than rayfl does, or a newer one ({error}): pip install 'rayfl[cluster]'"
        ) from None


def _follow(client: Any, job: str) -> int:
    from cluster.jobs.following import follow

    try:
        code = follow(client, job, _passed_on)
    except KeyboardInterrupt:
        terminal.say(f"job {job} goes on; rayfl stop {job} ends it")
        return terminal.INTERRUPTED
    return code


def _passed_on(text: str) -> None:
    terminal.write(text)
    if terminal.unread():
        sys.exit(terminal.UNREAD)


def _environment(pairs: list[str]) -> dict[str, str]:
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ConfigError(f"--env {wrong[0]} must look like NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def required_packages(given: list[str]) -> list[str]:
    """Returns the requirements that ``--uv`` gives; a file stands for its lines.

    Raises:
        ConfigError: a file cannot be read, or has options of pip.
    """
    found = []
    for one in given:
        if not one.endswith(".txt"):
            found.append(one)
            continue
        try:
            lines = Path(one).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--uv {one}: cannot be read: {error}") from None
        lines = [line.partition(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
        if options := [line for line in lines if line.startswith("-")]:
            raise ConfigError(f"--uv {one}: {options[0]!r} is an option, not a package; only packages are taken")
        found += lines
    return found


def _row(job: JobDetails) -> tuple[str, ...]:
    metadata = job.metadata or {}
    end = job.end_time or time.time() * 1000
    minutes = f"{(end - job.start_time) / 60_000:.1f}" if job.start_time else ""
    ended = "" if job.driver_exit_code is None else str(job.driver_exit_code)
    names = (metadata.get(key, "") for key in ("run", "method", "data"))
    return (str(job.submission_id), *names, str(job.status.value), minutes, ended)
