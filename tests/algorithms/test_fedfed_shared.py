"""FedFed: what clients share of their samples, what they are lent of it, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from algorithms.fedfed import FedFed
from algorithms.parts.autoencoders import decoded, encoded, told
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch
from tests.support.fedfed_toys import COHORTS, INPUTS, SIZES, SMALL, TRAIN, first_autoencoder, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, assert_close, assert_equal


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_inv_fedfed_3_everybodys_features_are_shared_once_with_labels(noise: float) -> None:
    toy = toy_of(FedFed(**SMALL, noise=noise))
    for cohort in COHORTS[:2]:
        toy.step(cohort)
        assert "shared" not in toy.server
    network: Tree = toy.server["autoencoder"]
    shared = toy.step([2])["shared"]
    x, y = (torch.cat([getattr(toy.dataset.load(i)["train"], name) for i in range(4)]) for name in ("x", "y"))
    assert_equal(shared["y"], y)
    added = shared["x"] - (x - decoded(network, encoded(network, x)[0]))
    if noise:
        assert 0.8 * noise < added.std() < 1.2 * noise and added.unique().numel() == added.numel()
    else:
        assert added.abs().max() < 1e-14
    assert_equal(toy.step([0, 1])["shared"], shared)
    assert toy.server["autoencoder"] == {}


def test_inv_fedfed_4_a_client_is_lent_as_many_distinct_samples_as_it_has_and_uses_all_in_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy, used = toy_of(FedFed(**SMALL), TRAIN.model_copy(update={"local_epochs": 1})), []
    # each label says which sample of D^s it is
    toy.server |= {"shared": {"x": torch.zeros(32, INPUTS).double(), "y": torch.arange(32)}}
    toy.round = 2

    def record(self: Any, model: Any, batch: Batch, x: Tensor, y: Tensor, task: Any) -> tuple[Tensor, Tensor]:
        used.extend(y.tolist())
        return task.loss(model, batch), task.loss(model, batch)

    monkeypatch.setattr(FedFed, "losses", record)
    for client in (1, 0, 2):
        used.clear()
        drawn = toy.context.streams.generator("shared", toy.round, client)
        toy.step([client])
        assert sorted(used) == sorted(drawn.choice(32, SIZES[client], replace=False))


def test_inv_fedfed_5_codes_tell_a_divergence_of_gaussians_and_nothing_at_a_standard_normal() -> None:
    mean, log_variance = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = Normal(mean, log_variance.exp().sqrt())
    expected = kl_divergence(one, Normal(torch.zeros_like(mean), torch.ones_like(mean))).sum(-1)
    assert_close(told(mean, log_variance), expected, 1e-12)
    assert not told(torch.zeros(4, 3), torch.zeros(4, 3)).any()


@pytest.mark.slow
def test_inv_fedfed_6_a_heavier_bound_leaves_less_of_samples_in_what_is_shared() -> None:
    left = {}
    for weight in (0.0, 5.0):
        options = {**SMALL, "distillation_epochs": 60, "code_dim": 5, "hidden": 20}
        toy = toy_of(FedFed(**{**options, "noise": 0.0, "bound_weight": weight}))
        for _ in range(3):
            toy.step([0, 1, 3])
        left[weight] = float(toy.server["shared"]["x"].square().mean())
    assert left[5.0] < 0.7 * left[0.0]


def test_images_keep_their_form() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.rand(n, 1, 2, 3, generator=generator).double(), torch.arange(n) % 3) for n in (5, 8)]
    task = two_layers(inputs=6)
    flat = task.network.logits
    task.network.logits = lambda model, x, **rest: flat(model, x.flatten(1), **rest)  # type: ignore[method-assign]
    toy = toy_of(FedFed(**SMALL), data=ListDataset(clients), task=task)
    for _ in range(3):
        toy.step([0, 1])
    assert toy.server["shared"]["x"].shape == (13, 1, 2, 3)


def test_what_travels() -> None:
    toy = toy_of(FedFed(**SMALL))
    model = num_bytes(toy.server["model"])
    network = num_bytes(first_autoencoder(toy, toy.server["model"]["head.weight"]))
    sample = 8 * INPUTS + 8
    toy.step([0, 3])  # the first q follows from the seed
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 3), (model, model + network))
    toy.step([0, 3])
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 3), (model + network, model + network))
    for _ in range(2):
        once = network if toy.round == 2 else 0
        toy.step([0, 3])
        expected = {k: (once, n * sample if once else 0) for k, n in enumerate(SIZES) if once or k in (0, 3)}
        for k in (0, 3):
            down, up = expected[k]
            expected[k] = (down + model + SIZES[k] * sample, up + model)
        assert toy.federation.traffic.by_client == expected
