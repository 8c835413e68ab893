"""The plan of a run on Ray: waits for room, measures what a client costs where that matters, says what was decided."""

from __future__ import annotations

import logging
import math

import numpy as np
from ray.util.placement_group import get_current_placement_group

from actors.probing.actor import probe
from actors.probing.measure import Measured
from actors.probing.rehearsal import rehearsals
from actors.processes.labels import check_version
from actors.processes.placement import ActorOptions, Node, resources_of, whole_nodes
from cluster.planning.autoscaling import NodesAskedFor, demand
from cluster.planning.plan import Plan, depends_on_measuring, settle
from cluster.planning.resources import wait_for_room
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts

_log = logging.getLogger("rayfl")
_LABEL_BYTES = 8


def plan_run(parts: Parts, sizes: np.ndarray) -> Plan:
    """Returns which actors to start; logs the plan.

    In a placement group that is given (an experiment of a sweep) nothing is measured: what its actors get is reserved.

    Args:
        parts: the experiment.
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

    with NodesAskedFor(f"rayfl-{config.run_name}-waits") as wish:

        def ask() -> None:
            wish.ask(demand(config.cluster, resources_of(nodes()), num_clients), labels)

        options = wait_for_room(config.cluster, lambda: resources_of(nodes()), num_clients, nodes=nodes, ask=ask)
    measured: list[Measured] = []
    if depends_on_measuring(config, options) and get_current_placement_group() is None:
        measured = _measured(parts, sizes, options)
    plan = settle(config, options, nodes(), num_clients, parts.context.cohort_size, measured)
    for line in plan.lines:
        _log.info("%s", line)
    for line in plan.warnings:
        _log.warning("%s", line)
    return plan


def _measured(parts: Parts, sizes: np.ndarray, options: ActorOptions) -> list[Measured]:
    samples_bytes = int(sizes.sum()) * sample_bytes(parts.dataset.spec)
    return probe(parts.config.model_dump(mode="json"), options, rehearsals(parts, sizes), samples_bytes)


def sample_bytes(spec: InputSpec) -> int:
    """Bytes of a sample on a device, with its label."""
    return math.prod(spec.shape) * (4 if spec.kind == "image" else 8) + _LABEL_BYTES
