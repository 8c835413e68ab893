"""FedRAP: invariants RAP, rounds against plain loops, the two terms by hand, their schedule, and what travels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rayfl
from algorithms.fedper import FedPer
from algorithms.fedrap import FedRAP
from rayfl.errors import ConfigError
from rayfl.models.networks.recommenders import NeuralCF
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from tests.support.partial_toys import initial, three_layers
from tests.support.rated_toys import (
    COHORTS,
    ITEMS,
    SIZES,
    TRAIN,
    cross_entropy,
    plain_batches,
    rated_task,
    rated_toy,
    weighted,
)
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

NAMES = {"common": "items.weight", "own": "items.weight", "head": "user.weight"}
PLAIN = TRAIN.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})


def plain_steps(
    toy: Toy, views: dict[str, Tensor], client: int, round: int, apart: float, sparse: float, own_lr: float | None
) -> dict[str, Tensor]:
    """SGD on C, D and p together."""
    moved = {name: leaf.clone().requires_grad_() for name, leaf in views.items()}
    rates = {"own": toy.train.lr if own_lr is None else own_lr}
    groups = [{"params": [leaf], "lr": rates.get(name, toy.train.lr)} for name, leaf in moved.items()]
    optimizer = torch.optim.SGD(groups, lr=toy.train.lr, momentum=0.5, weight_decay=0.01)
    for x in plain_batches(toy, client, round):
        optimizer.zero_grad()
        loss = cross_entropy(moved["common"] + moved["own"], moved["head"], x)
        loss = loss - apart * (moved["own"] - moved["common"]).square().sum() + sparse * moved["common"].abs().sum()
        loss.backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in moved.items()}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "difference_weight": 0.02, "sparsity_weight": 0.05, "ramp": 0.0, "own_start": "zero"},
        {"difference_weight": 0.0, "sparsity_weight": 2.0, "ramp": 1.5, "own_lr": 0.05, "aggregation": "uniform"},
        {"difference_weight": 3.0, "sparsity_weight": 0.0, "own_lr": 0.0},
    ],
    ids=["defaults", "sums", "sparse", "apart"],
)
def test_inv_rap_1_rounds_are_those_of_plain_loops(options: dict[str, Any], mode: str) -> None:
    method = FedRAP(**options)
    toy = rated_toy(method, mode=mode)
    begun, drawn = initial(toy), toy.task.network.initialize(toy.context.streams.integer("init.local", client=-1))
    first = drawn["items.weight"] if method.own_start == "drawn" else torch.zeros(ITEMS, 3, dtype=torch.float64)
    common = begun["items.weight"]
    own: dict[int, Tensor] = dict.fromkeys(range(4), first)
    heads: dict[int, Tensor] = dict.fromkeys(range(4), begun["user.weight"])
    for round, cohort in enumerate(COHORTS):
        grown = 1.0 if method.ramp == 0 else math.tanh(round / method.ramp)
        scale = grown / (common.numel() if method.reduction == "mean" else 1)
        sent = {}
        for client in cohort:
            views = {"common": common, "own": own[client], "head": heads[client]}
            apart, sparse = scale * method.difference_weight, scale * method.sparsity_weight
            trained = plain_steps(toy, views, client, round, apart, sparse, method.own_lr)
            sent[client], own[client], heads[client] = trained["common"], trained["own"], trained["head"]
        n = np.array([1 if method.aggregation == "uniform" else SIZES[client] for client in cohort])
        common = weighted(n / n.sum(), [{"items": leaf} for leaf in sent.values()])["items"]
        toy.step(cohort)
        assert_close(toy.server, {"shared": {"items.weight": common}}, 1e-12)
        for client, state in toy.states().items():
            kept = {"own": {"items.weight": own[client]}, "personal": {"user.weight": heads[client]}}
            assert_close(state, kept, 1e-12)
    for client, rows in toy.scores().items():
        x = toy.dataset.load(client)["test"].x
        expected = float(cross_entropy(common + own[client], heads[client], x))
        assert set(rows) == {"personalized"}
        assert rows["personalized"].loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", [None, NeuralCF(factors=3, embedding=4, hidden=(5,))], ids=["mf", "neural_cf"])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_rap_2_without_views_of_ones_own_it_is_fedper(model: Any, policy: Any) -> None:
    """D stays 0, and both terms are left out: on users' vectors, FCF and FedNCF."""
    options: dict[str, Any] = {"head_group": "user", "aggregation": policy}
    method = FedRAP(difference_weight=0, sparsity_weight=0, own_start="zero", own_lr=0, **options)
    toy, plain = rated_toy(method, model=model), rated_toy(FedPer(**options), model=model)
    for cohort in COHORTS:
        assert_close(toy.step(cohort)["shared"], plain.step(cohort)["shared"], 1e-12)
        for client, state in plain.states().items():
            assert_close(toy.states()[client]["personal"], state["personal"], 1e-12)
        assert toy.federation.traffic == plain.federation.traffic


def test_inv_rap_3_without_terms_both_views_move_alike() -> None:
    """They have one gradient: what C_k moves away from C, D_k moves away from what it was."""
    toy = rated_toy(FedRAP(difference_weight=0, sparsity_weight=0), PLAIN)
    for client in (2, 0, 2):
        received = toy.server["shared"]["items.weight"]
        before = toy.states().get(client, {}).get("own")
        toy.step([client])
        if before is not None:
            moved = toy.states()[client]["own"]["items.weight"] - before["items.weight"]
            assert_close(moved, toy.server["shared"]["items.weight"] - received, 1e-14)
            assert moved.abs().max() > 1e-3


@pytest.mark.parametrize("weight", [0.5, 4.0])
def test_inv_rap_4_driving_the_views_apart_leaves_their_sum_alone(weight: float) -> None:
    """The second term's gradients in C and in D cancel, and the loss reads their sum: a user alone scores the same."""
    found = []
    for lam in (0.0, weight):
        toy = rated_toy(FedRAP(difference_weight=lam, sparsity_weight=0, ramp=1.0), PLAIN)
        for _ in range(4):
            toy.step([1])
        views = toy.server["shared"]["items.weight"], toy.states()[1]["own"]["items.weight"]
        found.append((views[0] + views[1], (views[0] - views[1]).norm()))
    assert_close(found[0][0], found[1][0], 1e-10)
    assert found[1][1] > 1.05 * found[0][1]


def test_inv_rap_5_the_price_of_the_shared_view_makes_it_small() -> None:
    sums = []
    for mu in (0.0, 2.0, 20.0):
        toy = rated_toy(FedRAP(difference_weight=0, sparsity_weight=mu, ramp=0), PLAIN)
        for cohort in COHORTS:
            toy.step(cohort)
        sums.append(float(toy.server["shared"]["items.weight"].abs().sum()))
    assert sums[2] < sums[1] < sums[0]


def test_inv_rap_6_weights_grow_from_nothing_by_tanh() -> None:
    method = FedRAP(difference_weight=2.0, sparsity_weight=0.5, ramp=10, reduction="sum")
    assert method.weights(0, 12) == {"apart": 0.0, "sparse": 0.0}
    grown = method.weights(10, 12)
    assert grown["apart"] == pytest.approx(2 * 0.761594155956) and grown["sparse"] == pytest.approx(0.380797077978)
    assert method.weights(5, 12)["sparse"] == pytest.approx(0.5 * 0.46211715726)
    assert method.weights(400, 12)["apart"] == pytest.approx(2.0)
    means = FedRAP(difference_weight=2.0, sparsity_weight=0.5, ramp=0, reduction="mean")
    assert means.weights(0, 4) == {"apart": 0.5, "sparse": 0.125}


def test_inv_rap_7_the_terms_by_hand() -> None:
    """C = (1, -2), D = (3, 1) for one item: ||D - C||^2 = 4 + 9 and ||C||_1 = 3; p = (1, 2), so that the score is 2."""
    method = FedRAP(difference_weight=1, sparsity_weight=1)
    rows = torch.zeros(1, 5, dtype=torch.int64)
    views: dict[str, Tree] = {
        "common": {"items.weight": torch.tensor([[1.0, -2.0]], dtype=torch.float64)},
        "own": {"items.weight": torch.tensor([[3.0, 1.0]], dtype=torch.float64)},
        "head": {"user.weight": torch.tensor([[1.0, 2.0]], dtype=torch.float64)},
    }
    leaves = {key: tree[NAMES[key]].requires_grad_() for key, tree in views.items()}
    weights = {"apart": 0.25, "sparse": 0.5}
    value = method.objective(views, Batch(rows, torch.zeros(1)), rated_task(), weights)
    # the chosen item's cross-entropy is log(1 + e^-2), that of the four others log(1 + e^2)
    assert float(value.detach()) == pytest.approx(
        (0.126928011043 + 4 * 2.126928011043) / 5 - 0.25 * 13 + 0.5 * 3, abs=1e-11
    )
    value.backward()
    slope = (0.880797077978 - 1) / 5 + 4 / 5 * 0.880797077978  # of the score
    common = [[slope + 0.25 * 2 * 2 + 0.5, 2 * slope + 0.25 * 2 * 3 - 0.5]]
    own = [[slope - 0.25 * 2 * 2, 2 * slope - 0.25 * 2 * 3]]
    for key, expected in (("common", common), ("own", own), ("head", [[4 * slope, -slope]])):
        assert_close(leaves[key].grad, torch.tensor(expected, dtype=torch.float64), 1e-11)


def test_the_users_view_never_travels_and_is_the_same_at_first() -> None:
    toy = rated_toy(FedRAP(), TRAIN.model_copy(update={"lr": 0.0}))
    toy.step([0, 3])
    assert toy.federation.traffic.down == toy.federation.traffic.up == 2 * 8 * ITEMS * 3
    assert set(toy.server) == {"shared"} and set(toy.server["shared"]) == {"items.weight"}
    states = toy.states()
    assert_equal(states[0], states[3])
    assert (states[0]["own"]["items.weight"] - initial(toy)["items.weight"]).abs().min() > 0


def test_views_of_items_alone() -> None:
    """In the other models that recommend, the layers are then the user's, too."""
    toy = rated_toy(FedRAP(head_group="all_but_items"), model=NeuralCF(factors=3, embedding=4, hidden=(5,)))
    toy.step([0, 1])
    assert set(toy.server["shared"]) == {"factors.weight", "embedding.weight"} == set(toy.states()[0]["own"])
    assert {"user.factors", "user.embedding", "head.weight", "hidden.0.bias"} <= set(toy.states()[0]["personal"])


def test_running_statistics_are_shared_and_nothing_is_added_to_them() -> None:
    toy = Toy(FedRAP(), random_clients(SIZES), three_layers(), PLAIN)
    toy.step([0, 2])
    buffers = toy.task.network.buffer_names
    assert buffers and set(buffers) <= set(toy.server["shared"]) and not set(buffers) & set(toy.states()[0]["own"])
    assert not toy.server["shared"]["norm.running_mean"].equal(initial(toy)["norm.running_mean"])


def test_newcomers_fit_their_view_and_leave_the_shared_one() -> None:
    toy = rated_toy(FedRAP(own_start="zero"), unseen=1)
    toy.step([0, 1, 2])
    before = {"shared": {name: leaf.clone() for name, leaf in toy.server["shared"].items()}}
    found = toy.scores(newcomers=True)[3]["personalized"].loss
    x = toy.dataset.load(3)["test"].x
    alone = float(cross_entropy(before["shared"]["items.weight"], initial(toy)["user.weight"], x))
    assert found < alone
    assert_equal(toy.server, before)


@pytest.mark.parametrize(
    ("algorithm", "model", "message"),
    [
        ({"head_group": "all_but_items"}, "two_nn", r"head_group=all_but_items is for models with vectors of items"),
        ({"head_group": "user"}, "two_nn", r"head_group=user is for models with vectors of a user"),
        ({"head_group": "all"}, "two_nn", r"head_group=all leaves nothing that clients share"),
    ],
)
def test_what_has_nothing_to_add_to_is_refused(algorithm: dict[str, Any], model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rayfl.run("quickstart", algorithm={"name": "fedrap", **algorithm}, model=model)
