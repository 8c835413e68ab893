"""Decides whether clients are divided among actors equally or by measured times."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from actors.federation.hosts import Hosts
from actors.processes.pool import HostPool
from rayfl.config.schema import ExperimentConfig

_log = logging.getLogger("rayfl")


def hosts_of(pool: HostPool, config: ExperimentConfig, descriptions: Sequence[Mapping[str, Any]]) -> Hosts:
    """Returns the hosts of a run.

    Args:
        pool: pool of the hosts.
        config: configuration of the run.
        descriptions: descriptions of the actors; empty without actors.
    """
    cluster = config.cluster
    devices = {_device(host) for host in descriptions}
    # The last bits depend on which clients are stacked together, and on the kind of device that trains a client:
    # neither should depend on measured times.
    in_doubt = len(devices) > 1 or any(host["vectorized"] for host in descriptions)
    if cluster.balance == "auto" and len(devices) > 1:
        _log.warning(
            "actors have different devices (%s) and get equal work, since the last bits of results depend on which of "
            "them trains a client: cluster.balance=measured gives fast ones more; these bits then depend on what was "
            "measured",
            ", ".join(sorted(devices)),
        )
    return Hosts(
        pool,
        pinned=cluster.clients_per_actor == 1,
        deadline_s=config.clients.deadline_s,
        measured=cluster.balance == "measured" or (cluster.balance == "auto" and not in_doubt),
    )


def _device(host: Mapping[str, Any]) -> str:
    """Returns the kind of an actor's device: the GPU's name, or which of the CPU's instructions PyTorch uses."""
    name = str(host["device_name"])
    return f"{name} with {host['instructions']}" if name == "cpu" else name
