"""FedSoft: invariants SOFT, shares and centers by hand, limits that are other methods, and clients in two camps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedprox import FedProx
from algorithms.fedsoft import FedSoft, mixed
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients, two_camps

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=6, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 3], [1, 2, 3], [0, 1, 2], [0, 2, 3], [1, 3])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, make: Any = two_layers, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), make(), train, **options)


def logits(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    found: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def counted(toy: Toy, client: int, centers: list[Tree], least: float) -> list[float]:
    """u_k by loops over samples."""
    part, shares = toy.dataset.load(client)["train"], [0.0] * len(centers)
    for x, y in zip(part.x, part.y, strict=True):
        losses = [float(F.cross_entropy(logits(center, x[None]), y[None])) for center in centers]
        shares[losses.index(min(losses))] += 1 / len(part.y)
    shares = [max(share, least) for share in shares]
    return [share / sum(shares) for share in shares]


def trained(toy: Toy, start: Tree, terms: list[tuple[float, Tree]], client: int, round: int) -> Tree:
    """w_k in plain PyTorch, with a proximal term for each center."""
    part = toy.dataset.load(client)["train"]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    rule = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator).batches(CPU):
        loss = F.cross_entropy(logits(leaves, part.x[index]), part.y[index])
        for weight, center in terms:
            loss = loss + weight / 2 * sum((leaves[name] - leaf).square().sum() for name, leaf in center.items())
        rule.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize("start", ["mixture", "own"])
def test_inv_soft_1_rounds_are_those_of_an_oracle_in_plain_pytorch(start: Any) -> None:
    toy = toy_of(FedSoft(clusters=3, proximal_weight=0.7, estimate_every=2, least_share=0.05, start=start))
    kept: dict[int, tuple[list[float], int]] = {}
    own: dict[int, Tree] = {}
    fresh = 0
    for round, cohort in enumerate(COHORTS):
        centers = [toy.server["centers"][str(s)] for s in range(3)]
        for k in cohort:
            if k not in kept or round - kept[k][1] >= 2:
                kept[k], fresh = (counted(toy, k, centers, 0.05), round), fresh + 1
            shares = kept[k][0]
            mixture = {n: sum(u * c[n] for u, c in zip(shares, centers, strict=True)) for n in centers[0]}
            began = own[k] if start == "own" and k in own else mixture
            own[k] = trained(toy, began, [(0.7 * u, c) for u, c in zip(shares, centers, strict=True)], k, round)
        expected = {}
        for s in range(3):
            weights = {k: SIZES[k] * kept[k][0][s] for k in cohort}
            expected[str(s)] = {
                n: sum(w * own[k][n] for k, w in weights.items()) / sum(weights.values()) for n in centers[0]
            }
        toy.step(cohort)
        assert_close(toy.server["centers"], expected, 1e-12)
        for k, state in toy.states().items():
            assert_close(state["model"], own[k], 1e-12)
            assert state["shares"]["values"].tolist() == pytest.approx(kept[k][0], abs=1e-13)
            assert state["shares"]["round"] == kept[k][1]
    assert 4 < fresh < sum(map(len, COHORTS))


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_soft_2_one_center_is_fedprox(make: Any) -> None:
    one, plain = (
        toy_of(algorithm, make=make)
        for algorithm in (FedSoft(clusters=1, proximal_weight=0.3), FedProx(proximal_weight=0.3))
    )
    for cohort in COHORTS:
        assert_close(one.step(cohort)["centers"]["0"], plain.step(cohort)["model"], 1e-12)


def test_inv_soft_3_centers_that_are_equal_stay_so() -> None:
    toy = toy_of(FedSoft(clusters=2, least_share=0.5))
    first = toy.server["centers"]["0"]
    toy.server = {"centers": {"0": first, "1": {name: leaf.clone() for name, leaf in first.items()}}}
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert_equal(toy.server["centers"]["0"], toy.server["centers"]["1"])
    for state in toy.states().values():
        assert state["shares"]["values"].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_inv_soft_4_a_center_that_nobody_has_samples_of_stays() -> None:
    """A center that is sure of class 0 loses all samples of other classes, and with sigma = 0 nothing is its own."""
    toy = toy_of(FedSoft(clusters=2, least_share=0.0))
    first = toy.server["centers"]["0"]
    sure = {**first, "head.bias": first["head.bias"] + torch.tensor([300.0, 0.0, 0.0], dtype=torch.float64)}
    toy.server = {"centers": {"0": first, "1": sure}}
    classes = {k: toy.dataset.load(k)["train"].y for k in range(4)}
    found = toy.step([0, 1, 2])["centers"]
    for k in (0, 1, 2):
        expected = float((classes[k] == 0).double().mean())
        assert float(toy.states()[k]["shares"]["values"][1]) == pytest.approx(expected)
    assert not torch.equal(found["1"]["head.bias"], sure["head.bias"])
    data = [(part.x, part.y.clamp(max=1)) for part in (toy.dataset.load(k)["train"] for k in range(4))]
    others = Toy(FedSoft(clusters=2, least_share=0.0), ListDataset(data), two_layers(), TRAIN)
    worst = {**first, "head.bias": first["head.bias"] + torch.tensor([0.0, 0.0, 300.0], dtype=torch.float64)}
    others.server = {"centers": {"0": first, "1": worst}}
    after = others.step([0, 1, 2])["centers"]
    assert_equal(after["1"], worst)
    assert not torch.equal(after["0"]["head.bias"], first["head.bias"])


def test_inv_soft_5_clients_of_two_camps_come_to_centers_of_their_own() -> None:
    """One camp's labels are the other's with classes exchanged: one model for all cannot tell them."""
    dataset = ListDataset(two_camps(6))
    train = TrainConfig(rounds=12, clients_per_round="all", local_epochs=5, batch_size=8, lr=0.3)
    toy = Toy(FedSoft(clusters=2, proximal_weight=0.05), dataset, two_layers(), train)
    toy.run()
    shares = [state["shares"]["values"] for _, state in sorted(toy.states().items())]
    sides = [int(each.argmax()) for each in shares]
    assert len(set(sides[::2])) == len(set(sides[1::2])) == 1 and sides[0] != sides[1]
    assert min(float(each.max()) for each in shares) > 0.7


def test_inv_soft_6_all_centers_go_down_and_one_model_up() -> None:
    toy = toy_of(FedSoft(clusters=3))
    size = num_bytes(toy.server["centers"]["0"])
    toy.step([0, 2, 3])
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2, 3), (3 * size, size + 3 * 8))


def test_those_who_never_took_part_and_newcomers_have_the_mixture() -> None:
    toy = toy_of(FedSoft(clusters=3), unseen=1)
    toy.step([0, 1])
    rows = {**toy.scores(), **toy.scores(newcomers=True)}
    centers = [toy.server["centers"][str(s)] for s in range(3)]
    for client in (2, 3):
        shares = counted(toy, client, centers, 1e-4)
        part = toy.dataset.load(client)["test"]
        model = mixed(toy.server["centers"], torch.tensor(shares, dtype=torch.float64))
        expected = float(F.cross_entropy(logits(model, part.x), part.y))
        for row in ("personalized", "mixture"):
            assert rows[client][row].loss == pytest.approx(expected)
    assert rows[0]["personalized"].loss != pytest.approx(rows[0]["mixture"].loss)


@pytest.mark.parametrize("double", [True, False])
def test_both_modes_agree(double: bool) -> None:
    assert_modes_agree(FedSoft(clusters=2), SIZES, TRAIN, double, 1e-12 if double else 1e-5)
