"""PeFLL: invariants PL, a round written out in PyTorch, and what descriptors depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.parts.hypernetworks import produced
from algorithms.pefll import PeFLL, embedded, scale_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import copy, leaves, subtract
from tests.support.partial_toys import held_out_accuracy, planted_clients
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10, 7)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5)


def toy_of(data: Any = None, train: TrainConfig = TRAIN, task: Any = None, mode: str = "looped", **options: Any) -> Toy:
    settings = {"inner_steps": 3, "hidden": 6, "trunk_layers": 2, "embedding_dim": 3, "server_lr": 0.01, **options}
    return Toy(PeFLL(**settings), data or random_clients(SIZES), task or two_layers(), train, mode=mode)


def pairs(sizes: Any = SIZES) -> list[tuple[Tensor, Tensor]]:
    data = random_clients(sizes)
    return [(part.x, part.y) for part in (data.load(k)["train"] for k in range(len(sizes)))]


def phi(embedding: Any, x: Tensor, y: Tensor) -> Tensor:
    """The embedding network of a perceptron with ReLU, written out."""
    body, hidden, out = embedding["body"], embedding["layers"]["hidden"], embedding["layers"]["out"]
    features = torch.relu(x @ body["inner.weight"].T + body["inner.bias"])
    both = torch.cat([features, F.one_hot(y, 3).double()], 1)
    return torch.relu(both @ hidden["weight"].T + hidden["bias"]) @ out["weight"].T + out["bias"]


def test_the_embedding_network_reads_features_and_class() -> None:
    toy = toy_of()
    x, y = pairs()[1]
    found = embedded(toy.server["embedding"], toy.task, toy.task.network.initialize(0), x, y)
    assert_close(found, phi(toy.server["embedding"], x, y), 1e-12)
    assert not torch.allclose(
        found, embedded(toy.server["embedding"], toy.task, toy.task.network.initialize(0), x, 2 - y)
    )


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("limit", [None, 0.02])
def test_inv_pl_1_the_servers_steps_are_adam_on_both_networks(standardize: bool, limit: float | None) -> None:
    """One backward pass through h and phi together gives what the three exchanges give."""
    toy = toy_of(descriptor_batches=None, standardize=standardize, server_max_grad_norm=limit)
    networks = copy({name: toy.server[name] for name in ("generator", "embedding")})
    parameters = {path: leaf.requires_grad_() for path, leaf in leaves(networks)}
    rule = torch.optim.Adam(parameters.values(), lr=0.01)
    m, s = torch.tensor(0.0, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    for number, cohort in enumerate(([0, 3], [1, 3, 4])):
        described = {k: phi(networks["embedding"], *pairs()[k]).mean(0) for k in cohort}
        if standardize and number == 0:
            m, s = described[0].detach().mean(), described[0].detach().std()
        made = {k: produced(networks["generator"], (v - m) / s) for k, v in described.items()}
        like = toy.task.network.initialize(0)
        sent = {k: {name: flat.detach().view_as(like[name]) for name, flat in made[k].items()} for k in cohort}
        toy.federation.begin_round(toy.round)
        update: Any = toy.algorithm.local_update  # type: ignore[attr-defined]
        replies = toy.federation.map(update, cohort, {}, {k: {"model": sent[k]} for k in cohort})
        changes = {k: subtract(sent[k], replies[k]["model"]) for k in cohort}
        products = [(changes[k][name].flatten() * flat).sum() for k in cohort for name, flat in made[k].items()]
        rule.zero_grad()
        (torch.stack(products).sum() / len(cohort)).backward()
        if limit is not None:
            assert torch.nn.utils.clip_grad_norm_(list(parameters.values()), limit) > limit
        rule.step()
        after = toy.step(cohort)
        for path, leaf in leaves({name: after[name] for name in ("generator", "embedding")}):
            assert_close(leaf, parameters[path].detach(), 1e-10, path)


def test_inv_pl_2_without_local_steps_nothing_moves() -> None:
    toy = toy_of(inner_steps=0)
    before = copy({name: toy.server[name] for name in ("generator", "embedding")})
    for _ in range(2):
        after = toy.step([0, 3])
        assert_equal({name: after[name] for name in before}, before)


def test_inv_pl_3_clients_with_the_same_samples_in_any_order_have_the_same_model() -> None:
    given = pairs()
    given[4] = tuple(part.flip(0) for part in given[1])  # type: ignore[assignment]
    toy = toy_of(ListDataset(given))
    toy.run()
    scores = toy.scores()
    assert scores[1]["personalized"].loss == pytest.approx(scores[4]["personalized"].loss, abs=1e-12)
    assert scores[1]["personalized"].loss != pytest.approx(scores[2]["personalized"].loss, abs=1e-3)


def test_inv_pl_4_a_model_depends_on_its_clients_samples_alone() -> None:
    given = pairs()
    first, second = toy_of(ListDataset(given)), toy_of(ListDataset([given[0], *pairs((5, 8, 3, 4))]))
    first.run()
    second.server = first.server
    one, other = first.scores(), second.scores()
    assert one[0]["personalized"].vector.tolist() == other[0]["personalized"].vector.tolist()
    assert one[1]["personalized"].vector.tolist() != other[1]["personalized"].vector.tolist()


def test_inv_pl_5_where_phi_is_constant_all_have_one_model() -> None:
    toy = toy_of(standardize=False)
    toy.server["embedding"]["layers"]["out"]["weight"].zero_()
    replies = toy.federation.map(toy.algorithm.describe, [0, 1, 4], {"embedding": toy.server["embedding"]})  # type: ignore[attr-defined]
    for reply in replies.values():
        assert_close(reply["descriptor"], toy.server["embedding"]["layers"]["out"]["bias"], 1e-12)


def test_a_newcomer_has_the_model_of_a_client_with_its_samples() -> None:
    given = pairs()
    toy = toy_of(ListDataset(given))
    late = Toy(toy.algorithm, ListDataset([*given, given[2]]), toy.task, TRAIN, unseen=1)
    toy.run()
    late.server = toy.server
    scores = late.scores(newcomers=True)
    assert list(scores) == [5]
    assert scores[5]["personalized"].loss == pytest.approx(toy.scores()[2]["personalized"].loss, abs=1e-12)


def test_the_first_descriptor_settles_the_scale() -> None:
    toy = toy_of(descriptor_batches=None)
    first = phi(toy.server["embedding"], *pairs()[1]).mean(0)
    scale = toy.step([1, 2])["mean_and_deviation"]
    assert_close(scale, torch.stack([first.mean(), first.std()]), 1e-12)
    assert_equal(toy.step([0, 3])["mean_and_deviation"], scale)
    assert_equal(
        toy_of(standardize=False).step([1, 2])["mean_and_deviation"], torch.tensor([0, 1], dtype=torch.float64)
    )
    for constant in ([3.0], [2.0, 2.0]):
        assert scale_of(torch.tensor(constant)).tolist() == [0, 1]


def test_mini_batches_of_a_descriptor_are_the_rounds_own() -> None:
    toy, seen = toy_of(), []
    for _ in range(2):
        toy.federation.begin_round(toy.round)
        reply = toy.federation.map(toy.algorithm.describe, [1], {"embedding": toy.server["embedding"]})  # type: ignore[attr-defined]
        seen.append(reply[1]["descriptor"])
        toy.round += 1
    assert not torch.equal(*seen)
    several = toy_of(descriptor_batches=3)  # three of four samples are all twelve of this client
    several.federation.begin_round(0)
    reply = several.federation.map(several.algorithm.describe, [1], {"embedding": several.server["embedding"]})  # type: ignore[attr-defined]
    assert_close(reply[1]["descriptor"], phi(several.server["embedding"], *pairs()[1]).mean(0), 1e-12)


def test_a_client_without_samples_changes_nothing_by_itself() -> None:
    given = pairs()
    given[2] = given[2][0][:0], given[2][1][:0]
    toy = toy_of(ListDataset(given), standardize=False)
    before = copy(toy.server["embedding"])
    assert_equal(toy.step([2])["embedding"], before)


def test_running_statistics_stay_with_the_client() -> None:
    toy = toy_of(task=normalized_layers())
    toy.step([0, 3])
    states = toy.states()
    assert {name for state in states.values() for name in state} == {"buffers"} and sorted(states) == [0, 3]
    assert set(toy.server["embedding"]["body"]) <= set(toy.task.network.parameter_names)


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())


@pytest.mark.slow
def test_clients_whose_labels_differ_get_models_of_their_own() -> None:
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.3)
    found = {}
    for algorithm in (PeFLL(inner_steps=None, hidden=20, trunk_layers=2, server_lr=0.01), FedAvg()):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train)
        toy.run()
        found[algorithm.name] = held_out_accuracy(toy, algorithm.personalized)
    assert found["pefll"] > found["fedavg"] + 0.1
