"""Makes a host from an experiment's configuration, the same in an actor and in this process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from threadpoolctl import threadpool_limits

from actors.allocator import reuse_freed_memory
from actors.host import ClientHost
from actors.memory import Spill, machine_memory
from actors.state import ClientStates
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.engine import Engine
from rayfl.experiment import Parts

_AUTOMATIC_SHARE = {"state_memory": 0.4, "data_memory": 0.3}
"""What share of a machine's memory its actors may fill with each."""


def build_host(
    config: ExperimentConfig,
    host: int,
    device: str,
    neighbours: int = 1,
    tell: Callable[[str], None] | None = None,
) -> ClientHost:
    """A host without clients' data or states; both are loaded as jobs ask for them.

    Args:
        config: the experiment.
        host: the host's number.
        device: ``cpu`` or ``cuda``.
        neighbours: how many hosts share this machine's memory, itself included.
        tell: called with each line that clients' code prints; None: results have them.
    """
    reuse_freed_memory()
    parts = Parts(config)
    return ClientHost(
        algorithm=config.algorithm,
        engine=Engine(parts.task, torch.device(device), config.engine),
        dataset=parts.dataset,
        context=parts.context,
        states=ClientStates(
            parts.commits,
            host,
            Spill(_bytes(config, "state_memory", neighbours), config.cluster.spill_dir),
            config.storage.commit_every,
        ),
        batch_size=config.evaluation.batch_size,
        data_memory=_bytes(config, "data_memory", neighbours),
        official=lambda: parts.official_test,
        tell=tell,
    )


def _bytes(config: ExperimentConfig, field: str, neighbours: int) -> int:
    wanted = getattr(config.cluster, field)
    return automatic_memory(field, neighbours) if wanted == "auto" else int(wanted)


def automatic_memory(field: str, neighbours: int) -> int:
    """Bytes that ``auto`` stands for in ``state_memory`` or ``data_memory`` on this machine."""
    return int(machine_memory() * _AUTOMATIC_SHARE[field] / neighbours)


def pin_threads(threads: int) -> None:
    """Limits PyTorch, BLAS and OpenMP of this process: how a sum is split over threads changes its last bits."""
    torch.set_num_threads(threads)
    threadpool_limits(threads)
