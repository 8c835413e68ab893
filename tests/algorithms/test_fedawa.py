"""FedAWA: an oracle in plain PyTorch, federated averaging, what the weights do, messages, attacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedawa import FedAWA, distances, turned
from rayfl.engine.updates.batches import plan_batches
from rayfl.messages.attack import AttackConfig
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, initial, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, assert_close

SETTINGS: dict[str, dict[str, Any]] = {
    "steps": {"server_steps": 7, "server_lr": 0.2},
    "one": {"server_lr": 0.5, "aggregation": "uniform"},
}


def flat(tree: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.values()])


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_awa_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedAWA(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model, moved = initial(toy), torch.zeros(4, dtype=torch.float64)
    for round, cohort in enumerate([*COHORTS, [0, 1, 2, 3], [3]]):
        trained = []
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer: Any = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
                loss = F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained.append({key: leaf.detach() for key, leaf in leaves.items()})
        sizes = torch.tensor([1.0 if method.aggregation == "uniform" else SIZES[k] for k in cohort]).double()
        first = (sizes / sizes.sum()).log()
        logits = (first + moved[cohort]).requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=method.server_lr, betas=(0.5, 0.999))
        here, there = flat(model), torch.stack([flat(one) for one in trained])
        for _ in range(method.server_steps):
            p = logits.softmax(0)
            mean = (p[:, None] * (there - here)).sum(0)
            angles = 1 - F.cosine_similarity(there, here[None], dim=1)
            lengths = (there - here - mean).norm(dim=1) if len(cohort) > 1 else torch.zeros(1).double()
            logits.grad = torch.autograd.grad((p * lengths).sum() + (p * angles).sum(), logits)[0]
            optimizer.step()
        moved[cohort] = logits.detach() - first
        weights = logits.detach().softmax(0)
        model = {key: sum(w * one[key] for w, one in zip(weights, trained, strict=True)) for key in model}
        assert_close(toy.step(cohort)["model"], model, 1e-10)
        assert_close(toy.server["offsets"], moved, 1e-9)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_awa_2_without_steps_it_is_federated_averaging(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedAWA(server_steps=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_awa_3_of_one_client_the_weight_is_1_and_of_equal_updates_none_moves() -> None:
    method = FedAWA(server_steps=20, server_lr=0.5)
    w = {"a": torch.tensor([1.0, -2.0, 0.5]).double()}
    same = {"a": torch.tensor([1.5, -1.0, 0.0]).double()}
    logits = torch.tensor([0.3, -0.4, 0.0]).double()
    assert_close(method.learned(logits, [same] * 3, w).softmax(0), logits.softmax(0), 1e-9)
    assert method.learned(logits[:1], [same], w).softmax(0).tolist() == [1]


def test_inv_awa_4_an_update_far_from_the_others_loses_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    w = {"a": torch.randn(30, generator=generator, dtype=torch.float64)}
    step = torch.randn(30, generator=generator, dtype=torch.float64)
    models = [{"a": w["a"] + step + 0.1 * torch.randn(30, generator=generator).double()} for _ in range(4)]
    models.append({"a": w["a"] - 2 * step})
    found = FedAWA(server_steps=50, server_lr=0.05).learned(torch.zeros(5).double(), models, w).softmax(0)
    assert found[4] < 0.1 and abs(float(found.sum()) - 1) < 1e-12
    # the order of the clients makes no difference
    turned_round = FedAWA(server_steps=50, server_lr=0.05).learned(torch.zeros(5).double(), models[::-1], w).softmax(0)
    assert_close(turned_round.flip(0), found, 1e-9)


def test_distances_and_angles_are_those_of_the_vectors() -> None:
    generator = torch.Generator().manual_seed(1)
    vectors, weights = torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4])
    expected = (vectors - weights.double() @ vectors).norm(dim=1)
    assert_close(distances(vectors @ vectors.T, weights.double()), expected, 1e-12)
    assert not distances(torch.ones(2, 2).double(), torch.tensor([0.5, 0.5]).double()).any()
    models = [{"a": row[:2], "b": row[2:].reshape(2, 2)} for row in vectors]
    angles = 1 - F.cosine_similarity(vectors, vectors[:1])
    assert_close(turned(models, models[0]), angles, 1e-12)
    assert turned([{"a": torch.zeros(2)}], {"a": torch.ones(2)}).tolist() == [1]


def test_only_models_travel_and_clients_keep_nothing() -> None:
    toy = toy_of(FedAWA(), task=two_layers())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}
    assert not toy.server["offsets"][3] and toy.server["offsets"][:3].all()


def test_a_client_that_sends_noise_ends_with_less_weight_than_the_others() -> None:
    attack = AttackConfig(clients=[1], message="gaussian", strength=3.0)
    toy = toy_of(FedAWA(server_steps=20, server_lr=0.1, aggregation="uniform"), task=two_layers(), attack=attack)
    for _ in range(2):
        toy.step([0, 1, 2, 3])
    assert int(toy.server["offsets"].argmin()) == 1


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedAWA(server_steps=3, server_lr=0.1), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
