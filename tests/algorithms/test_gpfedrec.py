"""GPFedRec: invariants GPR, rounds against plain loops, graphs by hand and their extremes, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rayfl
from algorithms.fedper import FedPer
from algorithms.gpfedrec import GPFedRec, adjacency
from rayfl.errors import ConfigError
from rayfl.models.networks.recommenders import NeuralCF
from rayfl.params import Tree
from tests.support.partial_toys import initial, three_layers
from tests.support.rated_toys import COHORTS, ITEMS, SIZES, TRAIN, cross_entropy, plain_batches, rated_toy
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

EVERYONE = TRAIN.model_copy(update={"clients_per_round": "all"})


def plain_steps(
    toy: Toy, items: Tensor, user: Tensor, anchor: Tensor, client: int, round: int, pull: float
) -> tuple[Tensor, Tensor]:
    """SGD on the items and the user's vector together."""
    moved = [leaf.clone().requires_grad_() for leaf in (items, user)]
    optimizer = torch.optim.SGD(moved, lr=toy.train.lr, momentum=0.5, weight_decay=0.01)
    for x in plain_batches(toy, client, round):
        optimizer.zero_grad()
        loss = cross_entropy(*moved, x) + pull * F.mse_loss(moved[0], anchor)
        loss.backward()
        optimizer.step()
    return moved[0].detach(), moved[1].detach()


def plain_graph(rows: list[Tensor], neighbours: int | None, threshold: float) -> np.ndarray:
    """The neighbours of each, one by one."""
    flat = [row.flatten().numpy() for row in rows]
    s = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in flat] for a in flat])
    found = np.zeros_like(s)
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        if neighbours is None:
            near = [j for j in others if s[i, j] > threshold * s.mean()]
        else:
            near = sorted(others, key=lambda j, i=i: -s[i, j])[:neighbours]  # type: ignore[misc]
        found[i, [i, *near]] = 1 / (1 + len(near))
    return found


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"neighbours": 1, "hops": 2, "proximal_weight": 5.0, "aggregation": "samples"},
        {"threshold": 0.8, "hops": 3, "proximal_weight": 0.0},
        {"neighbours": 0, "aggregation": "population"},
    ],
    ids=["defaults", "nearest", "threshold", "alone"],
)
def test_inv_gpr_1_rounds_are_those_of_plain_loops(options: dict[str, Any], mode: str) -> None:
    method = GPFedRec(**options)
    toy = rated_toy(method, mode=mode)
    mean, first = (initial(toy)[name] for name in ("items.weight", "user.weight"))
    users: dict[int, Tensor] = dict.fromkeys(range(4), first)
    trained: dict[int, Tensor] = {}
    mixtures: dict[int, Tensor] = {}
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            anchor = mixtures.get(client, mean)
            trained[client], users[client] = plain_steps(
                toy, mean, users[client], anchor, client, round, method.proximal_weight
            )
        rows = [trained[client] for client in cohort]
        graph = plain_graph(rows, method.neighbours, method.threshold)
        mixed = rows
        for _ in range(method.hops):
            mixed = [sum(float(w) * row for w, row in zip(line, mixed, strict=True)) for line in graph]  # type: ignore[misc]
        mixtures |= dict(zip(cohort, mixed, strict=True))
        n = [1 if method.aggregation == "uniform" else SIZES[client] for client in cohort]
        total, rest = (sum(SIZES), sum(SIZES) - sum(n)) if method.aggregation == "population" else (sum(n), 0)
        mean = sum(count / total * row for count, row in zip(n, mixed, strict=True)) + rest / total * mean
        toy.step(cohort)
        assert_close(toy.server["shared"], {"items.weight": mean}, 1e-12)
        assert_close(toy.server["own"], {str(i): {"items.weight": row} for i, row in mixtures.items()}, 1e-12)
        for client, state in toy.states().items():
            kept = {"body": {"items.weight": trained[client]}, "personal": {"user.weight": users[client]}}
            assert_close(state, kept, 1e-12)
    for client, rows_of in toy.scores().items():
        x = toy.dataset.load(client)["test"].x
        assert set(rows_of) == {"personalized", "mixture"}
        for row, items in (("personalized", trained[client]), ("mixture", mixtures[client])):
            expected = float(cross_entropy(items, users[client], x))
            assert rows_of[row].loss == pytest.approx(expected, rel=1e-12)


def test_inv_gpr_2_graphs_by_hand() -> None:
    """Two alike, one between, one away from all: the mean of the 16 similarities is 0.5."""
    s = torch.tensor([[1.0, 0.9, 0.4, 0.0], [0.9, 1, 0.6, 0.0], [0.4, 0.6, 1, 0.1], [0.0, 0.0, 0.1, 1]]).double()
    assert float(s.mean()) == pytest.approx(0.5)
    third, half, one = 1 / 3, 0.5, 1.0
    expected = {
        (None, 1.0): [[half, half, 0, 0], [third, third, third, 0], [0, half, half, 0], [0, 0, 0, one]],
        (None, 0.7): [[third, third, third, 0], [third, third, third, 0], [third, third, third, 0], [0, 0, 0, one]],
        (None, 1.9): [[one, 0, 0, 0], [0, one, 0, 0], [0, 0, one, 0], [0, 0, 0, one]],
        (0, 1.0): [[one, 0, 0, 0], [0, one, 0, 0], [0, 0, one, 0], [0, 0, 0, one]],
        (1, 1.0): [[half, half, 0, 0], [half, half, 0, 0], [0, half, half, 0], [0, 0, half, half]],
        (3, 1.0): [[0.25] * 4] * 4,
        (9, 1.0): [[0.25] * 4] * 4,
    }
    for (size, threshold), rows in expected.items():
        assert_close(adjacency(s, size, threshold), torch.tensor(rows, dtype=torch.float64), 1e-15)


def test_inv_gpr_2_all_alike_are_all_neighbours_or_none() -> None:
    """With gamma below 1 a mixture is the mean, from 1 on it is the client's own."""
    alike = torch.ones(5, 5, dtype=torch.float64)
    assert_close(adjacency(alike, None, 0.99), torch.full((5, 5), 0.2, dtype=torch.float64), 1e-15)
    assert_close(adjacency(alike, None, 1.0), torch.eye(5, dtype=torch.float64), 0)
    assert_close(adjacency(torch.ones(1, 1).double(), 3, 1.0), torch.ones(1, 1).double(), 0)


@pytest.mark.parametrize(("size", "threshold"), [(None, 1.0), (None, 0.5), (2, 1.0)])
def test_inv_gpr_3_rows_sum_to_one_and_names_do_not_matter(size: int | None, threshold: float) -> None:
    rows = torch.randn(7, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trees = [{"items": row.reshape(3, 2)} for row in rows]
    method = GPFedRec(neighbours=size, threshold=threshold)
    found = method.graph(trees)
    assert_close(found.sum(1), torch.ones(7, dtype=torch.float64), 1e-15)
    assert (found.diagonal() > 0).all()
    order = torch.tensor([3, 1, 4, 0, 6, 5, 2])
    assert_close(method.graph([trees[i] for i in order]), found[order][:, order], 1e-15)
    longer = [{"items": (1 + i) * tree["items"]} for i, tree in enumerate(trees)]
    assert_close(method.graph(longer), found, 1e-15)


@pytest.mark.parametrize("model", [None, NeuralCF(factors=3, embedding=4, hidden=(5,))], ids=["mf", "neural_cf"])
@pytest.mark.parametrize("group", ["user", "all_but_items"])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_gpr_4_without_pull_and_neighbours_it_is_fedper(model: Any, group: Any, policy: Any) -> None:
    """Every mixture is the client's own body; with all as neighbours all mixtures are their plain mean."""
    options: dict[str, Any] = {"head_group": group, "aggregation": policy}
    toy = rated_toy(GPFedRec(proximal_weight=0, neighbours=0, **options), model=model)
    plain = rated_toy(FedPer(**options), model=model)
    for cohort in COHORTS:
        assert_close(toy.step(cohort)["shared"], plain.step(cohort)["shared"], 1e-12)
        for client in cohort:
            assert_close(toy.server["own"][str(client)], toy.states()[client]["body"], 1e-15)
            assert_close(toy.states()[client]["personal"], plain.states()[client]["personal"], 1e-12)


@pytest.mark.parametrize("hops", [1, 4])
def test_inv_gpr_5_with_all_as_neighbours_mixtures_are_the_plain_mean(hops: int) -> None:
    toy = rated_toy(GPFedRec(proximal_weight=0, neighbours=9, hops=hops, aggregation="samples"))
    plain = rated_toy(FedPer(aggregation="uniform"))
    for cohort in COHORTS:
        assert_close(toy.step(cohort)["shared"], plain.step(cohort)["shared"], 1e-12)
        for client in cohort:
            assert_close(toy.server["own"][str(client)], toy.server["shared"], 1e-12)


def test_inv_gpr_6_a_hop_more_reaches_an_edge_farther() -> None:
    """A chain: the first is mixed with the third only in two hops."""
    turned = [torch.tensor([np.cos(a), np.sin(a)]) for a in (0.0, 0.9, 1.75)]
    trees = [{"items": row} for row in turned]
    graph = GPFedRec(neighbours=1).graph(trees)
    assert (graph > 0).tolist() == [[True, True, False], [False, True, True], [False, True, True]]
    assert torch.linalg.matrix_power(graph, 2)[0].tolist() == [0.25, 0.5, 0.25]


def test_inv_gpr_7_users_of_one_kind_find_each_other() -> None:
    """Users 0 and 2 have the same rows, and so have 1 and 3: these and no others are mixed."""
    toy = rated_toy(GPFedRec(neighbours=1), EVERYONE.model_copy(update={"batch_size": None, "momentum": 0.0}))
    clients = toy.dataset._clients  # type: ignore[attr-defined]
    clients[2], clients[3] = clients[0], clients[1]
    toy.step(range(4))
    own: Tree = toy.server["own"]
    assert_close(own["0"], own["2"], 1e-12)
    assert_close(own["1"], own["3"], 1e-12)
    assert (own["0"]["items.weight"] - own["1"]["items.weight"]).abs().max() > 1e-3


def test_a_heavy_pull_keeps_clients_at_their_mixtures() -> None:
    """A client that is drawn with all weight ends where its mixture is, whatever the mean is."""
    train = TRAIN.model_copy(update={"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "local_epochs": 40})
    far = []
    for weight in (0.0, 1e3):
        toy = rated_toy(GPFedRec(proximal_weight=weight, neighbours=0), train)
        toy.step([0, 1])
        anchor = toy.server["own"]["0"]["items.weight"]
        toy.step([0])
        far.append(float((toy.states()[0]["body"]["items.weight"] - anchor).abs().max()))
    assert far[1] < 0.01 < far[0]


def test_mixtures_go_to_those_who_have_taken_part() -> None:
    toy = rated_toy(GPFedRec())
    size = 8 * ITEMS * 3
    for cohort, models in (([0, 1], 2), ([0, 2], 3), ([0, 1, 2], 6)):
        toy.step(cohort)
        assert toy.federation.traffic.down == models * size
        assert toy.federation.traffic.up == len(cohort) * size
    assert set(toy.server["own"]) == {"0", "1", "2"}
    scores = toy.scores()[3]
    x, shared, user = toy.dataset.load(3)["test"].x, toy.server["shared"]["items.weight"], initial(toy)["user.weight"]
    for row in ("personalized", "mixture"):
        assert scores[row].loss == pytest.approx(float(cross_entropy(shared, user, x)), rel=1e-12)


def test_running_statistics_are_averaged_and_in_no_mixture() -> None:
    toy = Toy(GPFedRec(), random_clients(SIZES), three_layers(), TRAIN)
    for _ in range(2):
        toy.step([0, 2])
    buffers = toy.task.network.buffer_names
    assert buffers and set(buffers) <= set(toy.server["shared"]) and not set(buffers) & set(toy.server["own"]["0"])
    means = torch.stack([toy.states()[client]["body"]["norm.running_mean"] for client in (0, 2)]).mean(0)
    assert_close(toy.server["shared"]["norm.running_mean"], means, 1e-12)


def test_newcomers_fit_a_head_to_the_mean() -> None:
    toy = rated_toy(GPFedRec(), unseen=1)
    toy.step([0, 1, 2])
    before = {name: leaf.clone() for name, leaf in toy.server["shared"].items()}
    found = toy.scores(newcomers=True)[3]["personalized"].loss
    x = toy.dataset.load(3)["test"].x
    assert found < float(cross_entropy(before["items.weight"], initial(toy)["user.weight"], x))
    assert_equal(toy.server["shared"], before)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"head_group": "all_but_items"}, r"head_group=all_but_items is for models with vectors of items"),
        ({"head_group": "all"}, r"head_group=all leaves nothing that clients share"),
    ],
)
def test_what_has_no_graph_is_refused(algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rayfl.run("quickstart", algorithm={"name": "gpfedrec", **algorithm})
