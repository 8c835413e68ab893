"""Makes a host from an experiment's configuration, the same in an actor and in this process."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits

from actors.host import ClientHost
from actors.state import ClientStates
from rayfl.commits import CommitStore
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.engine import Engine
from rayfl.experiment import Parts


def build_host(config: ExperimentConfig, host: int, device: str) -> ClientHost:
    """A host without clients' data or states; both are loaded as jobs ask for them."""
    parts = Parts(config)
    return ClientHost(
        algorithm=config.algorithm,
        engine=Engine(parts.task, torch.device(device), config.engine),
        dataset=parts.dataset,
        context=parts.context,
        states=ClientStates(CommitStore(parts.storage), host),
        batch_size=config.evaluation.batch_size,
    )


def pin_threads(threads: int) -> None:
    """Limits PyTorch, BLAS and OpenMP of this process: how a sum is split over threads changes its last bits."""
    torch.set_num_threads(threads)
    threadpool_limits(threads)
