"""FedCAC: invariants CAC, who is whose partner, what a client receives, and clients in two camps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedcac import FedCAC, critical, overlaps, partners
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, map_leaves, tensors
from tests.support.partial_toys import held_out_accuracy, planted_clients
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def received(toy: Toy, client: int) -> Tree:
    assert isinstance(toy.algorithm, FedCAC)
    return toy.algorithm.received_by(client, toy.server)


def masks(*rows: str) -> list[Tree]:
    return [{"w": torch.tensor([bit == "1" for bit in row])} for row in rows]


def trained_by(toy: Toy, client: int) -> Tree:
    """What a client makes in the next round of what it receives."""
    toy.federation.begin_round(toy.round, ("test",))
    reply = toy.federation.map(toy.algorithm.personal_update, [client], {"model": received(toy, client)})[client]  # type: ignore[attr-defined]
    found: Tree = reply["parameters"]
    return found


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *leaves: torch.stack(leaves).mean(0), *trees)


def test_inv_cac_1_after_beta_rounds_critical_elements_are_the_own_ones() -> None:
    toy = toy_of(FedCAC(collaboration_rounds=1))
    toy.step([0, 1, 2])  # t + 1 = beta: those with the largest overlap still have partners
    own = {client: trained_by(toy, client) for client in (0, 1, 3)}
    toy.step([0, 1, 3])
    for client, tree in own.items():
        entry, found = toy.server["own"][str(client)], received(toy, client)
        for name, leaf in tree.items():
            assert torch.equal(entry["model"][name], leaf)
            assert torch.equal(found[name], torch.where(entry["mask"][name], leaf, toy.server["model"][name]))
    assert partners(torch.tensor([[1.0, 0.6], [0.6, 1.0]]).double(), 7.0).tolist() == [[1, 1], [1, 1]]
    assert partners(torch.tensor([[1.0, 0.6], [0.5, 1.0]]).double(), 7.0).tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_cac_2_without_critical_elements_it_is_fedavg(policy: Any) -> None:
    toy, plain = toy_of(FedCAC(critical_share=0, aggregation=policy)), toy_of(FedAvg(aggregation=policy))
    for cohort in ([0, 1, 2], [1, 3], [0, 2, 3], [2]):
        assert_equal(toy.step(cohort)["model"], plain.step(cohort)["model"])
        for client in range(4):
            assert_equal(received(toy, client), plain.server["model"])


def test_inv_cac_3_if_all_is_critical_all_are_partners() -> None:
    toy = toy_of(FedCAC(critical_share=1, collaboration_rounds=1))
    for cohort in ([0, 1, 2], [1, 3]):
        expected = mean([trained_by(toy, client) for client in cohort])
        toy.step(cohort)
        for client in cohort:
            assert_close(received(toy, client), expected, 1e-12)


def test_inv_cac_4_known_overlaps() -> None:
    found = overlaps(masks("1100", "1010", "0011"))
    assert_close(found, torch.tensor([[1, 0.5, 0], [0.5, 1, 0.5], [0, 0.5, 1]]).double(), 1e-12)
    # not symmetric where ties made one mask larger
    found = overlaps(masks("1110", "1000"))
    assert float(found[0, 1]) == pytest.approx(1 - 2 / 6, abs=1e-12)
    assert float(found[1, 0]) == 0
    assert float(overlaps(masks("0000", "0000"))[0, 1]) == 1


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, "00000"), (0.2, "00010"), (0.39, "00010"), (0.4, "10010"), (0.6, "11110"), (0.8, "11110"), (1.0, "11111")],
)
def test_the_critical_elements(share: float, expected: str) -> None:
    # scores 0.8, 0.3, 0.3, 4, 0
    start, trained = torch.tensor([1.0, 1.0, -1.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 2.0])
    trained[:4] = torch.tensor([-0.5246951, 1.2416198, -1.2416198, 2.0])
    found = critical({"w": trained}, {"w": start}, share)["w"]
    assert "".join(str(int(bit)) for bit in found) == expected


def test_only_elements_that_matter_are_critical() -> None:
    found = critical({"w": torch.tensor([0.0, 0.0, 3.0, 0.0])}, {"w": torch.tensor([0.0, 5.0, 2.0, 0.0])}, 0.75)["w"]
    assert found.tolist() == [False, False, True, False]
    still = critical({"w": torch.ones(4)}, {"w": torch.ones(4)}, 0.5)["w"]
    assert not still.any()


@pytest.mark.parametrize("progress", [0.01, 0.5, 1.0])
def test_partners_are_those_above_the_threshold(progress: float) -> None:
    overlap = torch.rand(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).fill_diagonal_(1)
    pairs = [float(overlap[i, j]) for i in range(5) for j in range(5) if i != j]
    threshold = sum(pairs) / 20 + progress * (max(pairs) - sum(pairs) / 20)
    for i, row in enumerate(partners(overlap, progress).tolist()):
        assert row == [float(i == j or float(overlap[i, j]) >= threshold - 1e-15) for j in range(5)]
    assert partners(torch.ones(1, 1), progress).tolist() == [[1]]


def test_a_round_is_the_definition() -> None:
    toy = toy_of(FedCAC(collaboration_rounds=50))
    toy.step([0, 1, 2])
    cohort = [0, 1, 3]
    start = {client: received(toy, client) for client in cohort}
    parts = {client: trained_by(toy, client) for client in cohort}
    toy.step(cohort)
    found = [critical(parts[client], start[client], 0.5) for client in cohort]
    groups = [row.nonzero()[:, 0].tolist() for row in partners(overlaps(found), 2 / 50)]
    assert any(len(group) > 1 for group in groups)
    for i, client in enumerate(cohort):
        own = mean([parts[cohort[j]] for j in groups[i]])
        for name, leaf in received(toy, client).items():
            assert_close(leaf, torch.where(found[i][name], own[name], toy.server["model"][name]), 1e-12)


def test_who_was_not_sampled_gets_the_latest_mean_where_nothing_is_critical() -> None:
    toy = toy_of(FedCAC())
    toy.step([0, 1, 2])
    entry = toy.server["own"]["0"]
    toy.step([1, 2, 3])
    assert_equal(toy.server["own"]["0"], entry)
    for name, leaf in received(toy, 0).items():
        rest = ~entry["mask"][name]
        assert torch.equal(leaf[rest], toy.server["model"][name][rest])
    fresh = toy_of(FedCAC())
    fresh.step([0, 1])
    assert_equal(received(fresh, 3), fresh.server["model"])


def test_without_training_nothing_changes() -> None:
    toy = toy_of(FedCAC(), TRAIN.model_copy(update={"local_epochs": 0}))
    before = received(toy, 0)
    toy.run(2)
    for client in range(4):
        assert_equal(received(toy, client), before)


def test_buffers_are_averaged_and_never_critical() -> None:
    toy, plain = (toy_of(a, task=normalized_layers()) for a in (FedCAC(), FedAvg()))
    toy.step([0, 1, 2])
    plain.step([0, 1, 2])
    assert_equal(toy.server["model"], plain.server["model"])
    assert list(toy.server["model"]) == list(plain.server["model"])
    assert set(toy.server["own"]["0"]["mask"]) == set(toy.task.network.parameter_names)
    assert_equal(received(toy, 0)["norm.running_mean"], plain.server["model"]["norm.running_mean"])


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedCAC(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2], [1, 2, 3]):
        looped.step(cohort)
        stacked.step(cohort)
    for one, other in zip(tensors(looped.server), tensors(stacked.server), strict=True):
        assert_close(one.double(), other.double(), 1e-9)


@pytest.mark.slow
def test_personal_models_fit_clients_with_rules_of_their_own() -> None:
    train = TrainConfig(rounds=30, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
    toy = Toy(FedCAC(collaboration_rounds=10), planted_clients("head"), two_layers(12, 8), train)
    toy.run()
    assert held_out_accuracy(toy, "personalized") > held_out_accuracy(toy, "global") + 0.1
