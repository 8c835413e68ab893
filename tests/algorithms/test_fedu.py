"""FedU: predictors that stay where an encoder has moved far."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedu import FedU, divergence
from algorithms.parts.targets import predictor_names
from tests.support.siamese import learned, starts, toy
from tests.support.toys import assert_equal


def test_inv_fedu_1_a_client_keeps_its_predictor_if_its_encoder_moved_far(monkeypatch: pytest.MonkeyPatch) -> None:
    started = starts(monkeypatch)
    task = learned("byol", "batch")
    names = predictor_names(task.network)
    assert names and all(name.startswith("predictor.") for name in names)
    assert any(name.endswith("running_mean") for name in names)
    for threshold, keeps in ((0.0, True), (1e9, False)):
        run = toy(FedU(threshold=threshold), task)
        run.step([0, 1])
        own, received = run.states()[0]["predictor"], run.server["model"]
        run.step([0, 2])
        for name, leaf in received.items():
            wanted = own[name] if keeps and name in names else leaf
            assert torch.equal(started[0][name], wanted)
        assert_equal(started[2], received)


def test_inv_fedu_2_divergence_is_the_mean_of_the_norms_of_an_encoders_weights() -> None:
    network = learned().network
    one, other = network.initialize(1), network.initialize(2)
    weights = ("encoder", "projector.0.weight", "projector.2.weight")
    names = [n for n in network.parameter_names if n.startswith(weights) and one[n].dim() == 2]
    expected = np.mean([np.linalg.norm((one[name] - other[name]).numpy()) for name in names])
    assert len(names) == 3
    assert float(divergence(one, other, network)) == pytest.approx(expected, rel=1e-6)


def test_inv_fedu_3_without_divergence_aware_updates_it_is_federated_averaging_of_online_networks() -> None:
    task = learned("simsiam")
    run, averaging = toy(FedU(threshold=1e9), task), toy(FedAvg(), task)
    for _ in range(2):
        run.step([0, 1, 2])
        averaging.step([0, 1, 2])
    assert_equal(run.server["model"], averaging.server["model"])
