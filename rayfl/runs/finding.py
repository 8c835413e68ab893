"""Runs by their folders: one, those of a sweep or a reproduction, what was measured of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from rayfl.errors import DamageError, RayflError, RunError
from rayfl.results.schemas import ALL_TABLES
from rayfl.runs.loading import VERIFY_HINT, Run, content_of
from rayfl.storage.files import Storage
from rayfl.storage.run_folder import CONFIG


def load_runs(uris: Sequence[str], methods: Mapping[str, Any], models: Sequence[str] = ()) -> list[Run]:
    """Reads several runs; see :func:`load_run`.

    Args:
        uris: folders of runs, or of several runs: a sweep's, or a reproduction's.
        methods: see :func:`load_run`.
        models: see :func:`load_run`.

    Raises:
        RunError: listing everything that cannot be read, or a folder that is given twice.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for uri in [one for given in uris for one in runs_in(given)]:
        try:
            run = load_run(uri, methods, models)
        except RayflError as error:
            problems.append(str(error))
            continue
        if run.uri in {other.uri for other in runs}:
            problems.append(f"{run.uri} is given twice")
        runs.append(run)
    if problems:
        raise RunError("; ".join(problems))
    return runs


def runs_in(uri: str) -> list[str]:
    """Returns the runs that a folder stands for: itself, or if it is no run those that lie in it, by name.

    A sweep's folder has a run's folder for each of its experiments. A reproduction's has a folder for each setting, in
    which the runs' folders are.
    """
    place = uri.rstrip("/") or "/"
    storage = Storage(place)
    if storage.exists(CONFIG):
        return [uri]
    address, mark, options = place.partition("?")
    folders = storage.folders()
    inner = [name for name in folders if storage.exists(f"{name}/{CONFIG}")]
    if not inner:
        deeper = [f"{setting}/{name}" for setting in folders for name in storage.folders(setting)]
        inner = [name for name in deeper if storage.exists(f"{name}/{CONFIG}")]
    return [f"{address.rstrip('/')}/{name}{mark}{options}" for name in inner] or [uri]


def load_run(uri: str, methods: Mapping[str, Any], models: Sequence[str] = ()) -> Run:
    """Reads a run.

    Args:
        uri: its folder, a path or a URI.
        methods: the classes of all built-in methods by name; they know the rows of their personalized models.
        models: rows that the user names for runs that do not say which is the personalized model.

    Raises:
        RunError: there is no run, it is of an unknown format, or does not say which row is the personalized model.
        DamageError: a file of it cannot be read, naming it.
    """
    storage = Storage(uri.rstrip("/") or "/")
    content = content_of(storage)
    run = Run(storage, content, methods.get(str(content["algorithm"]["name"])), models)
    # a run whose clients have no samples of their own to be scored on has rows of the server's model alone
    of_clients = run.rounds.filter(pc.field("cohort") != "server")
    if of_clients.num_rows and not run.clients.num_rows:
        raise DamageError(f"{run.uri} has rounds.parquet, but clients.parquet is missing: {VERIFY_HINT}")
    # All that a report may ask for is read now: what is damaged is said before anything is made of the rest.
    for name in (*ALL_TABLES, "own", "notes", "timings", "costs", "partition_hash", "rounds_completed"):
        getattr(run, name)
    return run


def check_measured(runs: Sequence[Run]) -> None:
    """Refuses evaluations that only some experiments have, of runs of which one was evaluated without them.

    Raises:
        RunError: naming the run, and the option that makes them.
    """
    options = {
        "unseen": "evaluation.unseen_clients=0.1",
        "official": "evaluation.official_personalized=true",
        "train": "evaluation.splits=[train,validation,test]",
    }
    for run in runs:
        for wanted in (run.measured.cohort, run.measured.split):
            rows = run.rounds.filter((pc.field("cohort") != "server") & run.measured.rows)
            if wanted in options and run.rounds.num_rows and not rows.num_rows:
                raise RunError(
                    f"{run.uri} has no rows for {run.measured.options}: they come with {options[wanted]}, in a new run"
                )
