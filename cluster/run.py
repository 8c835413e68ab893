"""Runs an experiment from its configuration: the function behind ``rayfl run`` and ``rayfl.run``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from actors.federation.federation import Federation
from actors.hosting.building import build_host
from actors.hosting.memory import check_spill_dir
from actors.hosting.running_clients import log_printed, printed_on_console
from actors.processes.client_actor import host_name
from actors.processes.pool import HostPool, InlinePool
from actors.processes.ray_pool import RayPool
from algorithms.registry import Experiment
from cluster.planning.balance import hosts_of
from cluster.planning.measuring import plan_run
from cluster.planning.model_memory import server_warning
from cluster.planning.sample_memory import check_samples, sample_warning
from cluster.planning.shared_storage import SharedFolder, all_ready
from cluster.rounds.claim import claim_folder
from cluster.rounds.driver import Driver
from cluster.rounds.extending import extend
from cluster.rounds.interrupts import StopRequest, stop_requests
from cluster.rounds.listeners import end_listeners, tracking_listeners
from cluster.rounds.log_file import buffered_log, log_file, warnings_shown
from cluster.rounds.progress import Progress, empty_tables
from cluster.rounds.recorder import Recorder
from cluster.rounds.session import ray_session
from rayfl.config.identity import older_fingerprints
from rayfl.config.loading import load_config
from rayfl.config.overrides import refuse_undone
from rayfl.config.schema import ExperimentConfig
from rayfl.data.partitions.assignment import to_parquet
from rayfl.engine.precision import arithmetic
from rayfl.errors import ResourceError, RunError
from rayfl.experiment.client_privacy import client_promise
from rayfl.experiment.copies import with_absolute_places
from rayfl.experiment.example_privacy import example_promise
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.runs.folder import is_run_folder, reopened
from rayfl.runs.older_runs import where_begun
from rayfl.storage.lease import Lease
from rayfl.storage.run_folder import check_run_folder, input_digests
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.own_callbacks import check_callbacks

_log = logging.getLogger("rayfl")


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    /,
    callbacks: Sequence[Callback] = (),
    **overrides: Any,
) -> Result:
    """Runs an experiment, or continues it where it stopped.

    Args:
        config: a preset's name, a YAML file, or a mapping; None for the preset ``quickstart``. The folder of a run goes
            on with that run, with a larger ``train.rounds`` beyond its end.
        callbacks: listeners, in addition to those that the configuration asks for.
        **overrides: values by dotted path; write ``train__rounds=10`` or pass ``**{"train.rounds": 10}``.

    Warnings go to standard error, or to where the program's ``logging`` sends them, and to ``rayfl.log`` in the run's
    folder.

    Returns:
        The tables of the whole run, also when it was finished before.

    Raises:
        RayflError: for all errors that the caller can fix; nothing that was committed is lost.
    """
    settings = {path.replace("__", "."): value for path, value in overrides.items()}
    refuse_undone(list(settings.items()))
    with warnings_shown():
        if is_run_folder(config):
            return run_config(reopened(str(config), Experiment, settings), callbacks, extends=True)
        return run_config(load_config(Experiment, config, settings), callbacks)


def run_config(
    config: ExperimentConfig, callbacks: Sequence[Callback] = (), extends: bool = False, waits: bool = False
) -> Result:
    """Runs a validated configuration; see :func:`run`.

    Args:
        config: the configuration.
        callbacks: listeners.
        extends: whether the run in the configuration's folder may be given more rounds.
        waits: whether to wait for the lease of a process that cannot be observed from here, see :class:`Lease`.
    """
    with buffered_log() as early:
        for remark in check_callbacks(callbacks):
            _log.warning("%s", remark)
        config = where_begun(config)
        parts = Parts(config)
        sizes = parts.check()
        check_run_folder(parts.storage, parts.copy)
        with (
            arithmetic(config.engine.precision),
            Lease(parts.storage, config.storage.lease_timeout_s, waits) as lease,
        ):
            return _run_claimed(parts, sizes, lease, callbacks, early, extends)


def _run_claimed(
    parts: Parts, sizes: np.ndarray, lease: Lease, callbacks: Sequence[Callback], early: MemoryHandler, extends: bool
) -> Result:
    restored = extend(parts) if extends else []
    restored += claim_folder(parts)
    with log_file(parts.storage, early):
        for line in restored:
            _log.info("%s", line)
        return _run_alone(parts, sizes, lease, callbacks)


def _run_alone(parts: Parts, sizes: np.ndarray, lease: Lease, callbacks: Sequence[Callback]) -> Result:
    config = parts.config
    storage, keep = parts.storage, config.storage.keep_commits
    today = config.fingerprint()
    older = {found: rule for found, rule in older_fingerprints(config.identity()) if found != today}
    recorder = Recorder(storage, today, keep, lease, parts.copy, input_digests(storage), older)
    try:
        progress = recorder.restore(empty_tables(parts))
        if progress is None and config.init.what == "commit":
            raise RunError(
                f"{storage.uri} was to be forked from {config.init.source}, but has no commit: the fork was cut short. "
                "Give the command `rayfl fork` once more"
            )
        if not parts.storage.exists("partition.parquet"):
            parts.storage.write("partition.parquet", to_parquet(parts.assignment))
        if progress is None or not progress.over(config.train.rounds):
            _check_same_bits(recorder)
            progress = _continue(parts, sizes, recorder, callbacks)
        tables = recorder.results()
    finally:
        recorder.close()
    optional = {name: tables[name] for name in ("skipped", "damage", "contributions") if name in tables}
    return Result(
        parts.storage.uri,
        config,
        tables["rounds"],
        tables["clients"],
        progress.rounds_completed,
        parts.partition_hash,
        ended_early=progress.ended_early,
        samples=tuple(sizes[: parts.num_clients, 0].tolist()),
        summed=parts.summed,
        **optional,
    )


def _continue(parts: Parts, sizes: np.ndarray, recorder: Recorder, callbacks: Sequence[Callback]) -> Progress:
    if warning := server_warning(parts):
        _log.warning("%s", warning)
    with printed_on_console(), _pool(parts, sizes) as (pool, stop, plan):
        config = parts.config
        hosts = pool.descriptions if isinstance(pool, RayPool) else []
        _check_same_bits(recorder, {host["device"] for host in hosts} or {inline_device(config.cluster.device)})
        clients = hosts_of(pool, config, hosts)
        federation = Federation(
            clients, parts.task, parts.context, sizes, config.clients, parts.samples_in, parts.summed
        )
        listeners = [*callbacks, *tracking_listeners(parts, recorder, federation)]
        driver = Driver(parts, federation, recorder, listeners, stop)
        for note in sorted({host["note"] for host in hosts} - {""}):
            _log.warning("%s", note)
        if isinstance(pool, RayPool):
            _log.info("actors %s to %s in namespace %s", host_name(0), host_name(pool.size - 1), pool.namespace)
        info = RunInfo(
            config,
            parts.storage.uri,
            parts.num_clients,
            driver.progress.rounds_completed,
            hosts,
            plan,
            recorder.fingerprint,
            parts.task.measures.metrics,
            _promises(parts, sizes),
        )
        try:
            for listener in listeners:
                listener.on_start(info)
            return driver.run()
        finally:
            driver.settle()
            end_listeners(listeners, driver.progress.rounds_completed)


def _promises(parts: Parts, sizes: np.ndarray) -> list[str]:
    """Returns what the run promises about its clients and their samples, in words."""
    config, rounds, found = parts.config, parts.config.train.rounds, []
    if config.privacy.noise_multiplier:
        found.append(client_promise(config, parts.num_clients, parts.summed, rounds))
    if config.privacy.example_noise_multiplier:
        found.append(example_promise(config, sizes[: parts.num_clients, 0].tolist(), rounds, planned=True))
    return found


def _check_same_bits(recorder: Recorder, devices: set[str] | None = None) -> None:
    """Refuses to continue a run of an older rayfl whose next rounds would be computed in another way.

    Args:
        recorder: recorder that has restored the run.
        devices: types of the devices that it would continue on; None if they are not known yet.
    """
    rule = recorder.began_under
    if rule is None or (devices or set()) <= rule.devices != frozenset():
        return
    where = f"on {', '.join(sorted(devices))} " if devices and rule.devices else ""
    other = f"cluster.device={' or '.join(sorted(rule.devices))}, or with " if rule.devices else ""
    raise RunError(
        f"{recorder.storage.uri} was begun by rayfl {rule.release} or before, and {where}it would not go on as it "
        f"began: {rule.changed}. Go on with {other}the rayfl that began it, or choose another name to begin again"
    )


@contextmanager
def _pool(parts: Parts, sizes: np.ndarray) -> Iterator[tuple[HostPool, StopRequest, Sequence[str]]]:
    """Yields the hosts of the run, its stop requests, and the plan in words; ends the hosts afterwards."""
    config = parts.config
    cluster = config.cluster
    if cluster.backend == "inline":
        with limited_threads(cluster.threads_per_actor), stop_requests(cluster.stop_grace_s) as stop:
            check_spill_dir(cluster.spill_dir)
            check_samples(parts, hosts=1)
            if warning := sample_warning(parts, hosts=1):
                _log.warning("%s", warning)
            host = build_host(config, 0, inline_device(cluster.device), tell=lambda line: log_printed([line]))
            yield InlinePool([host]), stop, ()
        return
    with ray_session(cluster.address), stop_requests(cluster.stop_grace_s) as stop:
        plan = plan_run(parts, sizes)
        places = _places(parts)
        for place in places:
            place.check()
        sent = with_absolute_places(plan.config).model_dump(mode="json")
        pool = RayPool(
            sent,
            plan.options,
            config.run_name,
            lambda: all_ready(places),
            parts.dataset.content_hash(),
        )
        try:
            yield pool, stop, plan.lines
        finally:
            pool.close()
            for place in places:
                place.close()


def _places(parts: Parts) -> list[SharedFolder]:
    """Returns the folders that must be the same place on all nodes: the run's own, and that of its copies."""
    timeout_s, labels = parts.config.cluster.startup_timeout_s, parts.config.cluster.label_selector
    own = SharedFolder(parts.storage, timeout_s, labels=labels)
    if parts.copy is None:
        return [own]
    return [own, SharedFolder(parts.copy, timeout_s, "storage.copies_path", labels)]


def inline_device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ResourceError("cluster.device is cuda, but this process sees no GPU; set cluster.device=auto or cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Limits this process to the number of threads that an actor has, for the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(threads):
            yield
    finally:
        torch.set_num_threads(before)
