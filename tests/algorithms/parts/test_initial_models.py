"""Methods of several models refuse models that begin alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedem import FedEM
from algorithms.hypcluster import HypCluster
from algorithms.parts.requirements import check_initial_models
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1)
A, B, HEAD = "layer.lora_A.weight", "layer.lora_B.weight", "head.weight"


@pytest.mark.parametrize("method", [FedEM(components=3), HypCluster(clusters=2)])
def test_models_that_begin_alike_are_refused(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(method, random_clients([6, 6], seed=0), two_layers(), TRAIN)
    method.check(toy.task, toy.context)
    given = toy.task.network.initialize(0)
    monkeypatch.setattr(toy.task.network, "initialize", lambda seed: given)
    with pytest.raises(ConfigError, match=f"{method.name} needs initial models that differ"):
        method.check(toy.task, toy.context)
    alone = method.model_copy(update={"components" if method.name == "fedem" else "clusters": 1})
    alone.check(toy.task, toy.context)


@pytest.mark.parametrize(("drawn", "refused"), [({A}, True), ({A, HEAD}, False), ({A, B}, False)])
def test_adapters_that_add_nothing_do_not_differ(drawn: set[str], refused: bool) -> None:
    def initialize(seed: int) -> dict[str, Tensor]:
        return {name: torch.full((2,), float(seed + 1) if name in drawn else 0.0) for name in (A, B, HEAD)}

    network: Any = SimpleNamespace(initialize=initialize, groups={"lora_a": (A,), "lora_b": (B,)})
    if not refused:
        check_initial_models("fedem", network)
        return
    with pytest.raises(ConfigError, match="its adapters add nothing"):
        check_initial_models("fedem", network)
