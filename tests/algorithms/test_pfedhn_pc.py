"""pFedHN-PC: heads and running statistics stay with their clients."""

from __future__ import annotations

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.pfedhn import PFedHN
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.tasks.classification import Classification
from tests.support.pfedhn_toys import SIZES, TRAIN, toy_of
from tests.support.toy_networks import SoftmaxRegression, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal


def test_a_private_head_stays_with_its_client_and_so_does_its_momentum() -> None:
    toy = toy_of(private_head=True)
    network = toy.task.network
    assert set(toy.server["generator"]["heads"]) == set(network.body_names)
    before = toy.step([0, 3]) and toy.states()
    model = network.initialize(0)
    body = sum(8 * model[name].numel() for name in network.body_names)
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (2 * body, 2 * body)
    assert set(before[0]) == {"personal", "optimizer"}
    assert set(before[0]["personal"]) == set(network.head_names)
    assert set(before[0]["optimizer"]["main"]) == {"personal"}
    toy.step([3, 4])
    assert_equal(toy.states()[0], before[0])
    assert not torch.equal(toy.states()[3]["personal"]["head.weight"], before[3]["personal"]["head.weight"])


def test_a_private_head_without_momentum_is_the_plain_local_pass_of_both_parts() -> None:
    train = TRAIN.model_copy(update={"momentum": 0.0})
    toy = toy_of(train=train, private_head=True)
    sent = toy.federation.on_server(
        toy.algorithm.generate,  # type: ignore[attr-defined]
        {"generator": toy.server["generator"], "embeddings": toy.server["embeddings"], "clients": torch.tensor([1])},
    )["1"]
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    plain = Toy(FedAvg(), toy.dataset, toy.task, TrainConfig(rounds=1, local_epochs=1, batch_size=4, lr=0.1))
    plain.server = {"model": {**initial, **sent}}
    toy.step([1])
    expected = plain.step([1])["model"]  # 12 samples are three steps
    assert_close(toy.states()[1]["personal"], {name: expected[name] for name in ("head.weight", "head.bias")}, 1e-12)


def test_running_statistics_stay_with_the_client() -> None:
    train = TRAIN.model_copy(update={"batch_size": 3})
    toy = toy_of(normalized_layers(), train)
    assert not any("running" in name for name in toy.server["generator"]["heads"])
    toy.step([0, 2])
    kept = toy.states()[0]["buffers"]
    assert kept["norm.running_mean"].any()
    assert toy.federation.traffic.up == 2 * 8 * toy.task.network.num_parameters
    found = toy.scores()
    assert found[0]["personalized"].n == SIZES[0] and found[1]["personalized"].n == SIZES[1]


def test_what_pfedhn_pc_cannot_do_is_refused() -> None:
    context = toy_of().context
    with pytest.raises(ConfigError, match="no body is left"):
        PFedHN(private_head=True).check(Classification(Network(SoftmaxRegression)), context)
    persisting = toy_of(train=TRAIN.model_copy(update={"persist_optimizer": True})).context
    with pytest.raises(ConfigError, match=r"train\.persist_optimizer"):
        PFedHN(private_head=True).check(two_layers(), persisting)
    PFedHN().check(two_layers(), persisting)
    PFedHN(private_head=True).check(two_layers(), context)
