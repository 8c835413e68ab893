"""Stacks of clients with small networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.models.base import Network
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import assert_close, assert_equal

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def network_of(factory: Callable[[], Any], dtype: torch.dtype) -> Network:
    return (DoubleNetwork if dtype == torch.float64 else Network)(factory)


def engine(network: Network, mode: str = "vectorized", width: int = 32) -> Engine:
    return Engine(Classification(network), CPU, EngineConfig(mode=mode, width=width))  # type: ignore[arg-type]


def run(network: Network, requests: Sequence[TrainRequest], width: int = 32) -> list[Tree]:
    """Runs requests vectorised and checks each against the looped engine."""
    before = [copy(r.trainable) for r in requests]
    replies = engine(network, width=width).execute(requests)
    for reply, update, start in zip(replies, requests, before, strict=True):
        if isinstance(reply, Exception):
            raise reply
        dtype = update.trainable["head.weight"].dtype
        assert_close(reply, looped.train(update, Classification(network), CPU), TOLERANCE[dtype])
        assert_equal(update.trainable, start)
    return replies
