"""Builds a host from an experiment's configuration, for an actor or for this process."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
from threadpoolctl import threadpool_limits

from actors.hosting.allocator import reuse_freed_memory
from actors.hosting.host import ClientHost
from actors.hosting.memory import Spill
from actors.hosting.state import ClientStates
from rayfl.config.cluster_section import ClusterConfig
from rayfl.config.schema import ExperimentConfig
from rayfl.data.sources.root import data_root
from rayfl.diagnosis.machine_memory import machine_memory
from rayfl.engine.engine import Engine
from rayfl.engine.precision import set_arithmetic
from rayfl.errors import DataError
from rayfl.experiment.parts import Parts
from rayfl.naming.objects import names_an_object

_AUTOMATIC_SHARE = {"state_memory": 0.4, "data_memory": 0.3}
"""Shares of what :func:`automatic_memory` divides for states and for samples, and of a GPU's memory for samples."""
_OBJECT_STORE = 0.3
"""Ray's object store takes this share of a machine's memory, unless Ray was started with another."""
_OWN_BYTES = 512 << 20
"""Memory that an actor takes before it has a client: interpreter and libraries, about 450 MiB."""
_LEAST_SHARE = 0.1
"""Share of a machine's memory that is divided at least, however many actors it has."""
_DEVICE_STATES = 0.04
"""Share of a GPU's free memory for resident states, and as much for prefetched ones. Both together stay below the tenth
that the plan leaves free."""


def build_host(
    config: ExperimentConfig,
    host: int,
    device: str,
    neighbours: int = 1,
    tell: Callable[[str], None] | None = None,
    content: str | None = None,
) -> ClientHost:
    """Builds a host. Clients' samples and states are loaded when jobs need them.

    Args:
        config: configuration of the experiment.
        host: number of the host.
        device: ``cpu`` or ``cuda``.
        neighbours: number of hosts that share this machine's memory, this one included.
        tell: called with each line that clients' code prints; if None, lines are part of the results.
        content: SHA-256 of the samples that the driver has; None where it is not known.

    Raises:
        DataError: when there are other samples here.
    """
    reuse_freed_memory()
    set_arithmetic(config.engine.precision)
    parts = Parts(config)
    _check_samples(parts, content)
    engine = Engine(parts.task, torch.device(device), config.engine)
    if config.tracking.flops:
        engine.count_flops()
    return ClientHost(
        algorithm=config.algorithm,
        engine=engine,
        dataset=parts.dataset,
        context=parts.context,
        states=ClientStates(
            parts.commits,
            host,
            Spill(_state_memory(config.cluster, neighbours), config.cluster.spill_dir),
            config.storage.commit_every,
        ),
        batch_size=config.evaluation.batch_size,
        data_memory=data_memory_of(config.cluster, torch.device(device), neighbours),
        official=lambda: parts.official_test,
        tell=tell,
        device_state_memory=device_state_memory_of(config.cluster, torch.device(device)),
        read_ahead=config.cluster.read_ahead,
        backdoor=parts.backdoor,
        input_attack=parts.input_attack,
    )


def _check_samples(parts: Parts, content: str | None) -> None:
    """Checks that this node has the driver's samples. Last bits of users' functions may depend on the threads."""
    name = parts.config.dataset.name
    if content is not None and not names_an_object(name) and parts.dataset.content_hash() != content:
        raise DataError(
            f"dataset {name}: node {socket.gethostname()} has other samples than the driver. Copy the same files to "
            f"all nodes (RAYFL_DATA is {data_root()} there), or to a folder that all of them see"
        )


def _state_memory(cluster: ClusterConfig, neighbours: int) -> int:
    """Returns the bytes of the machine's memory for states."""
    wanted = cluster.state_memory
    return automatic_memory("state_memory", neighbours) if wanted == "auto" else int(wanted)


def device_state_memory_of(cluster: ClusterConfig, device: torch.device) -> int:
    """Returns the bytes of a GPU's memory for resident states; 0 on CPUs, where states are in memory anyway."""
    if device.type != "cuda":
        return 0
    if cluster.device_state_memory != "auto":
        return int(cluster.device_state_memory)
    free, _ = torch.cuda.mem_get_info(device)
    sharing = 1 if cluster.actors_per_gpu == "auto" else cluster.actors_per_gpu
    return int(free * _DEVICE_STATES / sharing)


def data_memory_of(cluster: ClusterConfig, device: torch.device, neighbours: int) -> int:
    """Returns the bytes of the device's memory for samples."""
    wanted = cluster.data_memory
    if wanted != "auto":
        return int(wanted)
    if device.type != "cuda":
        return automatic_memory("data_memory", neighbours)
    free, _ = torch.cuda.mem_get_info(device)
    sharing = 1 if cluster.actors_per_gpu == "auto" else cluster.actors_per_gpu
    return automatic_data_memory(free, sharing)


def automatic_data_memory(free: int, sharing: int) -> int:
    """Returns the bytes that ``data_memory=auto`` stands for on a GPU.

    Args:
        free: bytes of the GPU that the run's actors may use.
        sharing: number of actors that share the GPU.
    """
    return max(int(free * _AUTOMATIC_SHARE["data_memory"] / sharing), 1)


def automatic_memory(field: str, neighbours: int) -> int:
    """Returns the bytes that ``auto`` stands for in ``state_memory`` or ``data_memory`` on this machine.

    Args:
        field: name of the option.
        neighbours: number of hosts that share the machine's memory, the asking one included.
    """
    total = machine_memory()
    left = total * (1 - _OBJECT_STORE) - neighbours * _OWN_BYTES
    return int(max(left, total * _LEAST_SHARE) * _AUTOMATIC_SHARE[field] / neighbours)


def pin_threads(threads: int) -> None:
    """Sets the number of threads of PyTorch, BLAS and OpenMP, on which the last bits of a sum depend."""
    torch.set_num_threads(threads)
    threadpool_limits(threads)
