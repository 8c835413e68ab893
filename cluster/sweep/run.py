"""Runs the experiments of a sweep side by side on Ray Tune; the same command continues one that stopped."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import pyarrow as pa
import ray

from actors.processes.labels import check_version
from actors.processes.placement import resources_of, whole_nodes
from actors.processes.working_folder import work_in, working_folder
from cluster.planning.autoscaling import AutoscalerRequest, demand
from cluster.planning.resources import wait_for_room
from cluster.planning.shared_storage import check_shared_storage
from cluster.rounds.interrupts import StopRequest, stop_requests
from cluster.rounds.session import ray_session
from cluster.sweep.checks import check_folder, check_scheduler
from cluster.sweep.folder import (
    committed,
    read_stopped,
    write_record,
    write_stopped,
    write_tables,
)
from cluster.sweep.progress import SweepProgress
from cluster.sweep.resources import TrialPlan, plan_trial
from cluster.sweep.trial import FAILURE, OBJECTIVE, ROUND, history, run_trial
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ResourceError
from rayfl.experiment.copies import with_absolute_places
from rayfl.experiment.parts import Parts
from rayfl.storage.lease import Lease
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.trials import Sweep, Trial

_TUNE_FOLDER = "tune"
_TUNE_SETTINGS = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # rayfl writes tables and TensorBoard files of its own
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # cluster.rounds.interrupts has one
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # most rounds end without an evaluation
    "RAY_AIR_NEW_OUTPUT": "0",  # prints a frame whatever the verbosity
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
}


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run.

    Attributes:
        measure: by what experiments are compared.
        scheduler: ``asha`` ends experiments that lag behind; None lets all run to their end.
        grace_rounds: no experiment is stopped before this number of rounds (asha).
        reduction: of n that reach a rung, n / reduction go on (asha).
        at_once: experiments at a time; None: as many as fit.
    """

    measure: Measure = field(default_factory=Measure)
    scheduler: Literal["asha"] | None = None
    grace_rounds: int = 1
    reduction: int = 3
    at_once: int | None = None


@dataclass(frozen=True)
class SweepResult:
    """What a sweep leaves in its folder.

    Attributes:
        path: the folder.
        trials: ``trials.parquet``, see ``rayfl.sweeps.report.trials_table``.
        groups: ``groups.parquet``, see ``rayfl.sweeps.report.groups_table``.
        stopped_by: KeyboardInterrupt or Terminated if somebody stopped the sweep.
    """

    path: str
    trials: pa.Table
    groups: pa.Table
    stopped_by: BaseException | None = None


def run_sweep(sweep: Sweep, options: SweepOptions, say: Callable[[str], None]) -> SweepResult:
    """Runs the remaining experiments of a sweep. A failed experiment does not end the others.

    Args:
        sweep: the experiments, validated.
        options: how they are run.
        say: prints a line about each experiment that starts or ends.

    Raises:
        ConfigError: when experiments have no data to be compared on, or the folder is that of a single run.
        ResourceError: when Ray Tune is not installed, or not even one experiment fits.
        RunError: when nothing can be written, or another process runs a sweep in this folder.
    """
    tune = _tune()
    check_folder(sweep)
    if options.scheduler:
        check_scheduler(sweep, options.scheduler, options.measure.judge, options.grace_rounds)
    # Another process's sweep of this name would write its own record and tables over these.
    with Lease(sweep.folder, sweep.trials[0].config.storage.lease_timeout_s):
        write_record(sweep)
        stopped = read_stopped(sweep) if options.scheduler else {}
        left = [t for t in sweep.trials if t.name not in stopped and not committed(t).over(t)]
        failures: dict[str, str] = {}
        stopped_by = None
        if left:
            say(f"{len(left)} of {len(sweep.trials)} experiments to run, in {sweep.folder.uri}")
            # A scheduler compares with all earlier experiments, so the finished ones report their results again.
            running = list(sweep.trials) if options.scheduler else left
            stopped_by = _run(tune, sweep, running, left, options, say, failures, stopped)
        trials, groups = write_tables(sweep, options.measure, failures, stopped)
    return SweepResult(sweep.folder.uri, trials, groups, stopped_by)


def _run(
    tune: Any,
    sweep: Sweep,
    running: Sequence[Trial],
    left: Sequence[Trial],
    options: SweepOptions,
    say: Callable[[str], None],
    failures: dict[str, str],
    stopped: dict[str, int],
) -> BaseException | None:
    """Runs the experiments with Ray Tune; returns the exception of a stopped sweep, else None."""
    cluster = running[0].config.cluster
    clients = max(Parts(trial.config).dataset.num_clients for trial in running)
    with (
        ray_session(cluster.address),
        _environment(_TUNE_SETTINGS),
        stop_requests(cluster.stop_grace_s, "the commits under way") as stop,
    ):
        stop.patient = True
        check_version(cluster.label_selector)
        plan = _plan(sweep, cluster, clients, options)
        check_shared_storage(sweep.folder, cluster.startup_timeout_s, labels=cluster.label_selector)

        def judged(trial: Trial, rounds: int) -> None:
            if not stop.requested and trial in left:
                stopped[trial.name] = rounds
                write_stopped(sweep, stopped)

        progress = SweepProgress(sweep, left, options.measure, say, failures, judged if options.scheduler else None)
        tuner = tune.Tuner(
            tune.with_resources(_trainable(running, left, options, plan), _placement(tune, plan)),
            param_space={"trial": tune.grid_search(list(range(len(running))))},
            tune_config=_tune_config(tune, running, options, plan),
            run_config=tune.RunConfig(
                name=f"attempt-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}",
                storage_path=_tune_folder(sweep),
                verbose=0,
                callbacks=[progress.callback(tune, running)],
                stop=_stopper(tune, stop),
                # A process that dies, as with its node, goes on from its last commit in another one.
                failure_config=tune.FailureConfig(max_failures=running[0].config.max_failures),
            ),
        )
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        tuner.fit()
        return stop.error() if stop.requested else None


def _plan(sweep: Sweep, cluster: ClusterConfig, clients: int, options: SweepOptions) -> TrialPlan:
    """Returns the plan of the experiments; waits for a cluster that has no room for one yet."""
    labels = cluster.label_selector
    with AutoscalerRequest(f"rayfl-{PurePath(sweep.folder.uri).name}-waits") as wish:
        return wait_for_room(
            cluster,
            lambda wanted: plan_trial(wanted, whole_nodes(labels), clients, options.at_once),
            ask=lambda: wish.ask(demand(cluster, resources_of(whole_nodes(labels)), clients), labels),
        )


def _trainable(running: Sequence[Trial], left: Sequence[Trial], options: SweepOptions, plan: TrialPlan) -> Any:
    """Returns the function that Ray Tune runs: an experiment by its number."""
    contents = [_content(trial, plan) if trial in left else None for trial in running]
    before = [history(committed(trial).table.to_pylist(), options.measure, trial.config.algorithm) for trial in running]
    folder, at_once = working_folder(), options.at_once

    def trainable(chosen: Mapping[str, Any]) -> None:
        from ray import tune

        work_in(folder)  # Ray Tune has changed to one of its own
        content = contents[chosen["trial"]]
        if content is None:
            for line in before[chosen["trial"]]:
                tune.report(line)
        else:
            here = ray.get_runtime_context().get_node_id()
            neighbours = max(plan.neighbours_on(node, at_once) for node in whole_nodes({}) if node.id == here)
            run_trial(content, options.measure, before[chosen["trial"]], neighbours, tune.report)

    return trainable


def _content(trial: Trial, plan: TrialPlan) -> dict[str, Any]:
    config = with_absolute_places(trial.config)
    return config.model_copy(update={"cluster": plan.cluster}).model_dump(mode="json")


def _placement(tune: Any, plan: TrialPlan) -> Any:
    labels = dict(plan.cluster.label_selector)
    # Ray leaves out a first bundle that reserves nothing, and wants a selector for each of the others.
    kept = len(plan.bundles) - (not any(plan.bundles[0].values()))
    selected = {"bundle_label_selector": [labels] * kept} if labels else {}
    return tune.PlacementGroupFactory([dict(bundle) for bundle in plan.bundles], **selected)


def _tune_config(tune: Any, running: Sequence[Trial], options: SweepOptions, plan: TrialPlan) -> Any:
    scheduler = None
    if options.scheduler == "asha":
        scheduler = importlib.import_module("ray.tune.schedulers").ASHAScheduler(
            time_attr=ROUND,
            metric=OBJECTIVE,
            mode=options.measure.mode,
            max_t=max(trial.config.train.rounds for trial in running),
            grace_period=options.grace_rounds,
            reduction_factor=options.reduction,
            stop_last_trials=False,
        )
    return tune.TuneConfig(
        scheduler=scheduler,
        # What experiments reserve limits them, also to what nodes have that join later.
        max_concurrent_trials=options.at_once if plan.reserves else plan.at_once,
        # a process is set up once and goes on with the next experiment
        reuse_actors=True,
        trial_name_creator=lambda found: running[found.config["trial"]].name,
        trial_dirname_creator=lambda found: running[found.config["trial"]].name,
    )


def _stopper(tune: Any, stop: StopRequest) -> Any:
    class WhenAsked(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return FAILURE in result

        def stop_all(self) -> bool:
            return stop.requested

    return WhenAsked()


def _tune() -> Any:
    """Returns the module ``ray.tune``."""
    try:
        tune = importlib.import_module("ray.tune")
    except ImportError:
        raise ResourceError("sweeps need more of Ray than rayfl does: pip install 'rayfl[sweep]'") from None
    if not hasattr(tune, "RunConfig"):
        raise ResourceError(f"sweeps need a newer Ray than {ray.__version__}: pip install 'rayfl[sweep]'")
    return tune


def _tune_folder(sweep: Sweep) -> str:
    """Returns the folder for Ray Tune's own files, which all nodes must reach."""
    folder = sweep.folder.inside(_TUNE_FOLDER)
    return str(folder.local_path) if folder.local_path is not None else folder.uri


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
