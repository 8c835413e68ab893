"""FED-PUB: invariants PUB, rounds against plain loops, weights, masks, embeddings, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedpub import FedPub, mixing_weights
from algorithms.parts.random_inputs import random_inputs
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.params import Tree, num_bytes
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 3], [2])
WEIGHTS = ("inner.weight", "head.weight")


def toy_of(algorithm: FedPub, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def used(model: Tree, masks: Tree, threshold: float = 0.0) -> Tree:
    return {
        name: leaf * torch.where(masks[name].abs() < threshold, 0, masks[name]) if name in masks else leaf
        for name, leaf in model.items()
    }


def hidden(model: Tree, x: Tensor) -> Tensor:
    return torch.relu(x @ model["inner.weight"].T + model["inner.bias"])


def weighted(weights: Any, models: list[Tree]) -> Tree:
    return {name: sum(float(w) * one[name] for w, one in zip(weights, models, strict=True)) for name in models[0]}


def plain_steps(toy: Toy, received: Tree, masks: Tree, client: int, round: int, mu: float, nu: float) -> list[Tree]:
    """Plain SGD of model and mask together."""
    samples = toy.dataset.load(client)["train"]
    generator = toy.context.streams.generator("batches", round, client)
    plan = plan_batches(len(samples.y), 4, 2 * -(-len(samples.y) // 4), generator)
    model, masks = ({name: leaf.clone().requires_grad_() for name, leaf in one.items()} for one in (received, masks))
    moved = [*model.values(), *masks.values()]
    optimizer = torch.optim.SGD(moved, lr=toy.train.lr, momentum=0.5, weight_decay=0.01)
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        whole = used(model, masks)
        outputs = hidden(whole, samples.x[index]) @ whole["head.weight"].T + whole["head.bias"]
        loss = F.cross_entropy(outputs, samples.y[index]) + mu * sum(mask.abs().sum() for mask in masks.values())
        loss = loss + nu * sum((model[name] - received[name]).square().sum() for name in model)
        loss.backward()
        optimizer.step()
    return [{name: leaf.detach() for name, leaf in one.items()} for one in (model, masks)]


@pytest.mark.parametrize(("mu", "nu", "tau"), [(1e-3, 1e-3, 10.0), (0.05, 0.2, 3.0), (0.0, 0.0, 0.0)])
def test_inv_pub_1_rounds_are_those_of_plain_loops(mu: float, nu: float, tau: float) -> None:
    method = FedPub(mask_weight=mu, proximal_weight=nu, scale=tau, threshold=0.3, proxies=7)
    toy = toy_of(method)
    mean: Tree = toy.server["model"]
    mixtures: dict[int, Tree] = {}
    masks: dict[int, Tree] = {}
    last: dict[int, Tree] = {}
    x = random_inputs(toy.dataset.spec, 7, toy.context.streams.generator("proxies")).to(torch.float64)
    for round, cohort in enumerate(COHORTS):
        trained = {}
        for client in cohort:
            first = {name: torch.ones_like(mean[name]) for name in WEIGHTS}
            start = mixtures.get(client, mean)
            trained[client], masks[client] = plain_steps(toy, start, masks.get(client, first), client, round, mu, nu)
        rows = [hidden(used(trained[client], masks[client], 0.3), x).mean(0) for client in cohort]
        cosines = np.array([[float(F.cosine_similarity(a, b, dim=0, eps=1e-30)) for b in rows] for a in rows])
        weights = np.exp(tau * cosines) / np.exp(tau * cosines).sum(1, keepdims=True)
        for client, row in zip(cohort, weights, strict=True):
            mixtures[client] = weighted(row, [trained[other] for other in cohort])
        n = np.array([SIZES[client] for client in cohort]) / sum(SIZES[client] for client in cohort)
        mean = weighted(n, [trained[client] for client in cohort])
        toy.step(cohort)
        assert_close(toy.server["model"], mean, 1e-12)
        assert_close(toy.server["own"], {str(client): model for client, model in mixtures.items()}, 1e-12)
        for client, state in toy.states().items():
            assert_close(state["masks"], masks[client], 1e-12)
        last |= trained
    scores = toy.scores()
    for client in range(4):
        examples, own = toy.dataset.load(client)["test"], used(last[client], masks[client], 0.3)
        outputs = hidden(own, examples.x) @ own["head.weight"].T + own["head.bias"]
        expected = float(F.cross_entropy(outputs, examples.y))
        assert scores[client]["personalized"].loss == pytest.approx(expected, rel=1e-12)


def test_inv_pub_2_weights() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    weights = mixing_weights(rows, 4.0)
    assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64), 1e-15)
    assert (weights.diagonal() == weights.max(1).values).all()
    assert_close(mixing_weights(3.0 * rows, 4.0), weights, 1e-6)
    assert_close(mixing_weights(rows, 0.0), torch.full((5, 5), 0.2, dtype=torch.float64), 1e-15)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert_close(mixing_weights(rows[order], 4.0), weights[order][:, order], 1e-12)
    alike = mixing_weights(torch.stack((rows[0], rows[0], -rows[0])), 1e3)
    assert_close(alike, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).double(), 1e-6)
    assert torch.isfinite(mixing_weights(torch.zeros(2, 3), 10.0)).all()


def test_inv_pub_3_masks_stay_and_models_travel_once() -> None:
    toy = toy_of(FedPub())
    toy.step([0, 1, 2])
    size, hidden_size = num_bytes(toy.server["model"]), toy.server["model"]["head.weight"].shape[1]
    traffic = toy.federation.traffic
    assert traffic.down == 3 * size
    assert traffic.up == 3 * (size + 8 * hidden_size)
    assert set(toy.states()[0]) == {"model", "masks"} and not toy.states().get(3)


def test_inv_pub_4_a_heavy_price_empties_masks_and_what_is_below_the_threshold_is_unused() -> None:
    dense, sparse = toy_of(FedPub(mask_weight=0)), toy_of(FedPub(mask_weight=0.5, threshold=0.6))
    for toy in (dense, sparse):
        for cohort in COHORTS:
            toy.step(cohort)
    kept = []
    for toy in (dense, sparse):
        own = toy.algorithm.pruned(toy.states()[1])  # type: ignore[attr-defined]
        kept.append(sum(int((own[name] != 0).sum()) for name in WEIGHTS))
    assert kept[1] < kept[0] == sum(toy.server["model"][name].numel() for name in WEIGHTS)


def test_inv_pub_5_who_never_took_part_has_the_mean_and_receives_it() -> None:
    toy = toy_of(FedPub())
    toy.step([0, 1, 2])
    assert_equal(toy.algorithm.received_by(3, toy.server), toy.server["model"])  # type: ignore[attr-defined]
    samples, model = toy.dataset.load(3)["test"], toy.server["model"]
    expected = float(F.cross_entropy(toy.task.network.logits(model, samples.x), samples.y))
    assert toy.scores()[3]["personalized"].loss == pytest.approx(expected, rel=1e-12)


def test_buffers_are_those_of_all_and_biases_have_no_mask() -> None:
    toy = toy_of(FedPub(), normalized_layers())
    toy.step([0, 1, 2])
    buffers = toy.task.network.buffer_names
    assert buffers and not set(buffers) & set(toy.server["own"]["0"])
    assert all(leaf.dim() > 1 for leaf in toy.states()[0]["masks"].values())
    received = toy.algorithm.received_by(0, toy.server)  # type: ignore[attr-defined]
    assert_equal({name: received[name] for name in buffers}, {name: toy.server["model"][name] for name in buffers})


def test_random_inputs_are_as_the_network_takes_them() -> None:
    tokens = random_inputs(InputSpec("tokens", (7,), 4, 11), 50, np.random.default_rng(0))
    assert tokens.shape == (50, 7) and tokens.dtype == torch.int64 and set(tokens.flatten().tolist()) == set(range(11))
    numbers = random_inputs(InputSpec("image", (1, 9, 9), 4), 50, np.random.default_rng(0))
    assert numbers.shape == (50, 1, 9, 9) and abs(float(numbers.mean())) < 0.05 and abs(float(numbers.std()) - 1) < 0.05


def test_random_graphs_are_symmetric_and_have_as_many_nodes_as_are_asked_for() -> None:
    graphs = random_inputs(InputSpec("graph", (6, 9), 2), 50, np.random.default_rng(0))
    edges, numbers = graphs[..., :6], graphs[..., 6:]
    assert len(graphs) == 9 and (edges == edges.transpose(1, 2)).all() and not edges.diagonal(dim1=1, dim2=2).any()
    assert 0.02 < float(edges.mean()) < 0.2 and set(edges.unique().tolist()) == {0.0, 1.0}
    assert (numbers[..., 0] == 1).all() and abs(float(numbers[..., 1:].mean())) < 0.3
