"""Runs an experiment from its configuration: the function behind ``rayfl run`` and ``rayfl.run``."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from threadpoolctl import threadpool_limits

from actors.building import build_host
from actors.client_actor import host_name
from actors.federation import Federation
from actors.pool import HostPool, InlinePool
from actors.ray_pool import RayPool
from algorithms.registry import Experiment
from cluster.balance import hosts_of
from cluster.driver import Driver
from cluster.gauges import Gauges
from cluster.interrupts import StopRequest, stop_requests
from cluster.measuring import plan_run
from cluster.recorder import Progress, Recorder
from cluster.session import ray_session
from cluster.shared_storage import check_shared_storage
from rayfl.config.loading import load_config, to_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.data.assignment import assignment_hash, to_parquet
from rayfl.engine.precision import arithmetic
from rayfl.errors import DamageError, ResourceError, RunError
from rayfl.experiment import Parts
from rayfl.lease import Lease
from rayfl.result import Result
from rayfl.system.devices import devices_table
from rayfl.table_files import from_parquet
from rayfl.table_files import to_parquet as table_to_parquet
from rayfl.table_schemas import SKIPPED_SCHEMA
from rayfl.tables import ResultTables
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.environment import Environment
from rayfl.tracking.mlflow import Mlflow
from rayfl.tracking.tensorboard import TensorBoard
from rayfl.tracking.timings import Timings
from rayfl.tracking.tune_files import TuneFiles
from rayfl.tracking.wandb import Wandb

_log = logging.getLogger("rayfl")
_DEVICES = "devices.parquet"


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    /,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> Result:
    """Runs an experiment, or continues it where it stopped.

    Args:
        config: a preset's name, a YAML file, or a mapping; None for the preset ``quickstart``.
        callbacks: listeners, besides those the configuration asks for.
        **overrides: values by dotted path; write ``train__rounds=10`` or pass ``**{"train.rounds": 10}``.

    Returns:
        The tables of the whole run, also when it was finished before.

    Raises:
        RayflError: for whatever the caller can mend; nothing that was committed is lost.
    """
    settings = {path.replace("__", "."): value for path, value in overrides.items()}
    return run_config(load_config(Experiment, config, settings), callbacks)


def run_config(config: ExperimentConfig, callbacks: Sequence[Callback] = ()) -> Result:
    """Runs a validated configuration; see :func:`run`."""
    parts = Parts(config)
    sizes = parts.check()
    with arithmetic(config.engine.precision), Lease(parts.storage, config.storage.lease_timeout_s) as lease:
        _claim_folder(parts)
        return _run_alone(parts, sizes, lease, callbacks)


def _run_alone(parts: Parts, sizes: np.ndarray, lease: Lease, callbacks: Sequence[Callback]) -> Result:
    config = parts.config
    recorder = Recorder(parts.storage, config.fingerprint(), config.storage.keep_commits, lease)
    try:
        progress = recorder.restore(ResultTables(parts.dataset.names, config.algorithm.sweep, parts.partition_hash))
        if not parts.storage.exists("partition.parquet"):
            parts.storage.write("partition.parquet", to_parquet(parts.assignment))
        if progress is None or progress.rounds_completed < config.train.rounds:
            progress = _continue(parts, sizes, recorder, callbacks)
        recorder.publish()
        tables = recorder.results()
    finally:
        recorder.close()
    rounds, skipped = progress.rounds_completed, tables.get("skipped", SKIPPED_SCHEMA.empty_table())
    return Result(parts.storage.uri, config, tables["rounds"], tables["clients"], rounds, parts.partition_hash, skipped)


def _continue(parts: Parts, sizes: np.ndarray, recorder: Recorder, callbacks: Sequence[Callback]) -> Progress:
    with _log_file(parts), _pool(parts, sizes) as (pool, stop, plan):
        config = parts.config
        hosts = pool.descriptions if isinstance(pool, RayPool) else []
        federation = Federation(hosts_of(pool, config, hosts), parts.context, sizes, config.clients)
        listeners = [*callbacks, *_tracking(parts, recorder, federation)]
        driver = Driver(parts, federation, recorder, listeners, stop)
        for note in sorted({host["note"] for host in hosts} - {""}):
            _log.warning("%s", note)
        if isinstance(pool, RayPool):
            _log.info("actors %s to %s in namespace %s", host_name(0), host_name(pool.size - 1), pool.namespace)
        info = RunInfo(
            parts.config, parts.storage.uri, parts.dataset.num_clients, driver.progress.rounds_completed, hosts, plan
        )
        try:
            for listener in listeners:
                listener.on_start(info)
            return driver.run()
        finally:
            driver.settle()
            _end(listeners, driver.progress.rounds_completed)


def _end(listeners: Sequence[Callback], rounds_completed: int) -> None:
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
        _log.warning("besides: %s", problem)


def _tracking(parts: Parts, recorder: Recorder, federation: Federation) -> list[Callback]:
    folder, config = parts.storage.local_path, parts.config
    listeners: list[Callback] = [
        Timings(parts.storage),
        Environment(parts.storage),
        TuneFiles(parts.storage),
    ]
    if config.tracking.tensorboard and folder is not None:
        listeners.append(TensorBoard(folder))
    if config.tracking.wandb.enabled:
        listeners.append(Wandb(config.tracking.wandb, folder))
    if config.tracking.mlflow.enabled:
        listeners.append(Mlflow(config.tracking.mlflow, parts.storage))
    if config.cluster.backend == "ray":
        listeners.append(Gauges(config.run_name, lambda: recorder.state_bytes, lambda: federation.lookups))
    return listeners


@contextmanager
def _pool(parts: Parts, sizes: np.ndarray) -> Iterator[tuple[HostPool, StopRequest, Sequence[str]]]:
    """The hosts the configuration asks for, ended afterwards, what Ctrl-C and SIGTERM say, and the plan in words."""
    config = parts.config
    cluster = config.cluster
    if cluster.backend == "inline":
        with limited_threads(cluster.threads_per_actor), stop_requests(cluster.stop_grace_s) as stop:
            yield InlinePool([build_host(config, 0, inline_device(cluster.device))]), stop, ()
        return
    with ray_session(cluster.address), stop_requests(cluster.stop_grace_s) as stop:
        plan = plan_run(parts, sizes)
        admit = partial(check_shared_storage, parts.storage, cluster.startup_timeout_s)
        admit()
        pool = RayPool(plan.config.model_dump(mode="json"), plan.options, config.run_name, admit)
        try:
            yield pool, stop, plan.lines
        finally:
            pool.close()


def inline_device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ResourceError("cluster.device is cuda, but this process sees no GPU; set cluster.device=auto or cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """The same number of threads as an actor has, for the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        torch.set_num_threads(before)


def _claim_folder(parts: Parts) -> None:
    """Writes ``config.yaml``, or makes sure that the folder's run is this one."""
    storage, config = parts.storage, parts.config
    if not storage.exists("config.yaml"):
        storage.write("partition.parquet", to_parquet(parts.assignment))
        if parts.devices:
            storage.write(_DEVICES, table_to_parquet(devices_table(parts.devices)))
        storage.write("config.yaml", to_yaml(config).encode())
        return
    try:
        stored = load_config(Experiment, yaml.safe_load(storage.read("config.yaml")), {})
    except Exception as error:
        raise RunError(f"{storage.uri}/config.yaml cannot be read ({error}); choose another name") from error
    if stored.fingerprint() != config.fingerprint():
        changes = _differences(stored.model_dump(mode="json"), config.model_dump(mode="json"))
        raise RunError(
            f"{storage.uri} holds another run: {'; '.join(changes)}. Choose another name, or restore these values"
        )
    if storage.exists("partition.parquet"):
        try:
            written = assignment_hash(pq.read_table(io.BytesIO(storage.read("partition.parquet"))))
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise DamageError(
                f"{storage.uri}/partition.parquet is damaged ({error}): restore it, or delete it, and the same command "
                "writes it anew"
            ) from error
        if written != parts.partition_hash:
            raise RunError(
                f"{storage.uri}/partition.parquet says that the run began with other data than the configuration gives "
                "now: the data set's files or the partition's file have changed. Restore them, or choose another name"
            )

    if parts.devices and storage.exists(_DEVICES):
        if not from_parquet(storage.read(_DEVICES)).equals(devices_table(parts.devices)):
            raise RunError(
                f"{storage.uri}/{_DEVICES} says that the run began with other devices than system gives now: the "
                "trace's files have changed. Restore them, or choose another name"
            )


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        free = {"name", "storage_path", "cluster", "clients", "storage", "tracking", "max_failures"}
        skipped = free if not path else set()
        return [
            line
            for key in {**old, **new}
            if key not in skipped
            for line in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


class _LogFile(logging.FileHandler):
    """A log that a full disk only makes incomplete: the error is that of a commit, said once."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing."""

    def close(self) -> None:
        """Closes the file, though what it still had to write may be lost."""
        with suppress(OSError):
            super().close()


@contextmanager
def _log_file(parts: Parts) -> Iterator[None]:
    """Copies rayfl's log lines to ``rayfl.log`` in the run's folder, where that is on a disk."""
    folder = parts.storage.local_path
    if folder is None:
        yield
        return
    try:
        handler = _LogFile(folder / "rayfl.log", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {folder / 'rayfl.log'}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    level = _log.level
    _log.setLevel(logging.INFO)
    _log.addHandler(handler)
    try:
        yield
    except Exception:
        _log.info("the run ended with an error", exc_info=True)
        raise
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
        handler.close()
