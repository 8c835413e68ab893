"""The listeners of a run that its configuration asks for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from actors.federation.federation import Federation
from cluster.rounds.gauges import Gauges
from cluster.rounds.recorder import Recorder
from rayfl.experiment.parts import Parts
from rayfl.tracking.callback import Callback
from rayfl.tracking.costs import FILE as COSTS
from rayfl.tracking.costs import CostLines
from rayfl.tracking.environment import FILE as ENVIRONMENT
from rayfl.tracking.environment import Environment
from rayfl.tracking.guarded import Guarded
from rayfl.tracking.mlflow import Mlflow
from rayfl.tracking.tensorboard import TensorBoard
from rayfl.tracking.timings import FILE as TIMINGS
from rayfl.tracking.timings import Timings
from rayfl.tracking.tune_files import CSV_FILE, JSON_FILE, TuneFiles
from rayfl.tracking.wandb import Wandb

_log = logging.getLogger("rayfl")


def tracking_listeners(parts: Parts, recorder: Recorder, federation: Federation) -> list[Callback]:
    """Returns the listeners that the configuration asks for. A listener that fails ends no run."""
    storage, config = parts.storage, parts.config
    folder, uri = storage.local_path, storage.uri
    every = config.storage.commit_every
    listeners: list[tuple[Callback, str]] = [
        (Timings(storage, every, recorder.lease.holds), f"{uri}/{TIMINGS}"),
        (CostLines(storage, recorder.states_on_storage, every, recorder.lease.holds), f"{uri}/{COSTS}"),
        (Environment(storage), f"{uri}/{ENVIRONMENT}"),
        (TuneFiles(storage), f"{uri}/{JSON_FILE} or {CSV_FILE}"),
    ]
    if config.tracking.tensorboard and folder is not None:
        listeners.append((TensorBoard(folder), f"{uri}/events.out.tfevents.*"))
    if config.tracking.wandb.enabled:
        listeners.append((Wandb(config.tracking.wandb, folder), "Weights & Biases"))
    if config.tracking.mlflow.enabled:
        listeners.append((Mlflow(config.tracking.mlflow, storage), "MLflow"))
    if config.cluster.backend == "ray":
        gauges = Gauges(config.run_name, lambda: recorder.state_bytes, lambda: federation.lookups)
        listeners.append((gauges, "Ray's gauges"))
    return [Guarded(listener, writes) for listener, writes in listeners]


def end_listeners(listeners: Sequence[Callback], rounds_completed: int) -> None:
    """Tells all listeners, whatever becomes of one; what has ended the run is more important than their errors."""
    ended_by, errors = sys.exception(), list[Exception]()
    for listener in listeners:
        try:
            listener.on_end(rounds_completed)
        except Exception as error:
            errors.append(error)
    if errors and ended_by is None:
        raise errors[0]
    for problem in errors:
        _log.warning("in addition: %s", problem)
