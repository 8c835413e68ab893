"""Parameters and curves of a run in MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rayfl.config.storage_section import MlflowConfig
from rayfl.storage.files import Storage
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.scalars import hyper_parameters, imported, scalars

FILE = "mlflow_run.txt"
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-./ ]")
_LONGEST_VALUE = 500


class Mlflow(Callback):
    """Sends parameters at the start and the summaries of every evaluation; a continued run goes on in its place.

    The run's id is kept in the run's folder as ``mlflow_run.txt``. Characters that MLflow's names cannot have become
    underscores.

    Args:
        config: the section ``tracking.mlflow``.
        storage: the run's folder.

    Raises:
        ResourceError: when mlflow is not installed.
    """

    def __init__(self, config: MlflowConfig, storage: Storage) -> None:
        self._config = config
        self._storage = storage
        self._mlflow = imported("mlflow", "tracking.mlflow.enabled")
        self._started = False

    def on_start(self, run: RunInfo) -> None:
        if self._config.tracking_uri is not None:
            self._mlflow.set_tracking_uri(self._config.tracking_uri)
        self._mlflow.set_experiment(self._config.experiment)
        known = self._storage.read(FILE).decode().strip() if self._storage.exists(FILE) else None
        started = self._mlflow.start_run(run_id=known, run_name=None if known else run.config.run_name)
        self._started = True
        if known is None:
            self._storage.write(FILE, f"{started.info.run_id}\n".encode())
            values = hyper_parameters(run.config)
            self._mlflow.log_params({path: str(value)[:_LONGEST_VALUE] for path, value in values.items()})

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            named = {_FORBIDDEN.sub("_", name): value for name, value in scalars(rows).items()}
            self._mlflow.log_metrics(named, step=int(rows[0]["round"]))

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._mlflow.log_metrics({"time/seconds per round": seconds}, step=rounds_completed)

    def on_end(self, rounds_completed: int) -> None:
        if self._started:
            self._mlflow.end_run()
