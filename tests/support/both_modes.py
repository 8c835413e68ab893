"""Clients that are trained one by one, and the same clients in stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import tensors
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

COHORTS = ([0, 1, 2], [1, 3], [0, 1, 2, 3], [2])


def assert_modes_agree(
    algorithm: Any, sizes: Sequence[int], train: TrainConfig, double: bool, tolerance: float
) -> None:
    """Plays rounds of four clients in both modes: the same server and states, and who is not sampled keeps its own.

    Args:
        algorithm: the method.
        sizes: samples of the clients.
        train: how they train.
        double: in float64 in the place of float32.
        tolerance: of every number.
    """
    dtype = torch.float64 if double else torch.float32
    looped, stacked = (
        Toy(algorithm, random_clients(sizes, dtype=dtype), two_layers(double=double), train, mode=mode)
        for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        before = looped.states()
        assert_close(looped.step(cohort), stacked.step(cohort), tolerance)
        assert all(leaf.dtype == dtype for leaf in tensors(stacked.server) if leaf.is_floating_point())
        for client in set(before) - set(cohort):
            assert_equal(looped.states()[client], before[client])
    assert_close(looped.states(), stacked.states(), tolerance)
