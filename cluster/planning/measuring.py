"""Plans a run on Ray: waits for room, measures what a client costs if that matters, and logs the plan."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import ray
from ray.util.placement_group import get_current_placement_group

from actors.probing.actor import probe
from actors.probing.measure import Measured
from actors.probing.probe_calls import probe_calls
from actors.processes.labels import check_version
from actors.processes.placement import ActorOptions, Node, free_nodes, resources_of, room, whole_nodes
from cluster.planning.autoscaling import AutoscalerRequest, demand
from cluster.planning.model_memory import memory_warning
from cluster.planning.plan import Plan, depends_on_measuring, final_plan
from cluster.planning.resources import actors_between, plan_actors, wait_for_room
from cluster.planning.sample_memory import check_samples, sample_warning
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.stack_sizes import ENOUGH_ROWS, clients_for_rows
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")
_LABEL_BYTES = 8
_RETURN_TIMEOUT_S = 5.0
_ASK_EVERY_S = 0.5
_CHECKPOINTING = "model.checkpointing=auto is true"


def plan_run(parts: Parts, sizes: np.ndarray) -> Plan:
    """Plans the actors of a run, and logs the plan.

    Where their number is free, there are no more of them than fit beside what others use, if that is enough.

    Inside the placement group of a sweep's experiment nothing is measured, because its resources are reserved.

    Args:
        parts: parts of the experiment.
        sizes: samples by client and split (K, 3).

    Raises:
        ConfigError: when options contradict each other.
        ResourceError: when the cluster has too little, with numbers.
    """
    config, num_clients = parts.config, parts.dataset.num_clients
    labels = config.cluster.label_selector
    check_version(labels)

    def nodes() -> list[Node]:
        return whole_nodes(labels)

    with AutoscalerRequest(f"rayfl-{config.run_name}-waits") as wish:

        def ask() -> None:
            wish.ask(demand(config.cluster, resources_of(nodes()), num_clients), labels)

        options = wait_for_room(
            config.cluster,
            lambda wanted: plan_actors(wanted, resources_of(found := nodes()), num_clients, found),
            ask=ask,
        )
    (least, most), reserved = actors_between(config.cluster, num_clients), get_current_placement_group() is not None
    usable = nodes()
    if least < most and not reserved:
        usable = nodes_with_room(options, least)
        options = plan_actors(config.cluster, resources_of(usable), num_clients, usable)
    measures = depends_on_measuring(config, options) and not reserved
    here_alone = [node.id for node in usable] == [ray.get_runtime_context().get_node_id()]
    if here_alone:
        check_samples(parts, options.count)

    def planned(config: ExperimentConfig) -> Plan:
        measured = _measured(parts, config, sizes, options) if measures else []
        return final_plan(config, options, usable, num_clients, parts.context.cohort_size, measured)

    plan = planned(config)
    saving = config.model_copy(update={"model": config.model.saving_memory()})
    if saving.model != config.model:
        plan = with_room(plan, saving, _asked_for(parts, sizes), planned)
    for line in plan.lines:
        _log.info("%s", line)
    too_large = _too_large(parts, plan.options) if here_alone else []
    for line in (*plan.warnings, *too_large):
        _log.warning("%s", line)
    return replace(plan, options=replace(plan.options, begins_with=least))


def _too_large(parts: Parts, options: ActorOptions) -> list[str]:
    """Returns warnings if made-up samples, or models of actors on CPUs, may not fit into this machine's memory."""
    check_samples(parts, options.count)
    found = [sample_warning(parts, options.count)]
    if options.device == "cpu":
        # A custom task's ``network`` may be any object.
        found.append(memory_warning(getattr(parts.task.network, "num_parameters", 0), options.count))
    return [warning for warning in found if warning]


def nodes_with_room(options: ActorOptions, least: int) -> list[Node]:
    """Returns nodes with what is free on them; with all that they have where that is too little.

    Actors that have just ended give back what they had after a moment, for which this waits.

    Args:
        options: planned actors, where all of the nodes is free.
        least: minimum number of actors.
    """
    ends = time.monotonic() + _RETURN_TIMEOUT_S
    while True:
        # Of a GPU that others use in part, the rest is of no use.
        free = [replace(node, gpus=math.floor(node.gpus)) for node in free_nodes(options.labels)]
        fitting = room(free, options.num_cpus, options.per_gpu, options.count)
        if fitting >= options.count or time.monotonic() >= ends:
            break
        time.sleep(_ASK_EVERY_S)
    if fitting < least:
        return whole_nodes(options.labels)
    if fitting < options.count:
        _log.info("others use a part of the cluster: %d of %d actors have room", fitting, options.count)
    return free


def _measured(parts: Parts, config: ExperimentConfig, sizes: np.ndarray, options: ActorOptions) -> list[Measured]:
    samples_bytes = int(sizes.sum()) * sample_bytes(parts.dataset.spec)
    return probe(config.model_dump(mode="json"), options, probe_calls(parts, sizes), samples_bytes)


def _asked_for(parts: Parts, sizes: np.ndarray) -> int | None:
    """Returns the number of clients that fill the rows of a step; None if ``engine.rows_per_step`` is not set."""
    config, largest = parts.config, int(sizes[:, 0].max(initial=0))
    batch_size = min(config.train.batch_size or largest, largest)
    rows = config.engine.rows_per_step
    return clients_for_rows(ENOUGH_ROWS if rows == "auto" else rows, parts.task, batch_size)


def with_room(
    plan: Plan, saving: ExperimentConfig, asked_for: int | None, planned: Callable[[ExperimentConfig], Plan]
) -> Plan:
    """Returns a plan with steps that save memory, if stacks would otherwise be smaller than asked for.

    Args:
        plan: plan without steps that save memory.
        saving: configuration with steps that save memory.
        asked_for: number of clients that fill the rows of a step; None if ``engine.rows_per_step`` is not set.
        planned: measures and plans a configuration.
    """
    if plan.saves_memory:
        why = "memory does not suffice otherwise"
        return replace(plan, config=_saving(plan.config, saving), lines=(*plan.lines, f"{_CHECKPOINTING}: {why}"))
    if not plan.lacks_room(asked_for):
        return plan
    other = planned(saving)
    wanted = f"of {min(asked_for or plan.own_part, plan.own_part)} clients, as engine.rows_per_step asks for,"
    found = f"{plan.fitting} {wanted} fit at a time without"
    if other.fitting is None or plan.fitting is None or other.fitting <= plan.fitting:
        return replace(plan, lines=(*plan.lines, f"model.checkpointing=auto is left: {found}, and no more with it"))
    return replace(other, lines=(*other.lines, f"{_CHECKPOINTING}: {found}, {other.fitting} with it"))


def _saving(planned: ExperimentConfig, saving: ExperimentConfig) -> ExperimentConfig:
    return planned.model_copy(update={"model": saving.model})


def sample_bytes(spec: InputSpec) -> int:
    """Bytes of a sample on a device, with its label."""
    return math.prod(spec.shape) * (8 if spec.kind == "tokens" else 4) + _LABEL_BYTES
