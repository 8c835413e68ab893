"""pFedGraph: invariants PG, what a client is sent, the direction's sign, partial participation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.pfedgraph import PFedGraph, along, cosines, mixing_weights
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, num_bytes, tensors
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
DISTANCES, SHARES = np.array([[-1.0, -0.3, 0.2]]), np.array([0.2, 0.3, 0.5])


def toy_of(algorithm: PFedGraph, make: Any = two_layers, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), make(), train, **options)


def sent_to(toy: Toy, client: int) -> Tree:
    """What a client would receive next."""
    row = toy.server["graph"][client].tolist()
    found: Tree = toy.algorithm.collaborated(row, toy.server["own"], toy.server["model"])  # type: ignore[attr-defined]
    return found


def flat(tree: Any) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in tensors(tree)])


@pytest.mark.parametrize("alpha", [0.05, 0.8, 20.0])
def test_inv_pg_1_weights_are_optimal_on_the_simplex(alpha: float) -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        d, p = random.uniform(-1, 1, (4, 6)), random.dirichlet(np.ones(6))
        for row, weights in zip(d, mixing_weights(d, p, alpha), strict=True):
            assert abs(weights.sum() - 1) < 1e-12
            assert (weights >= 0).all()
            slope, used = row + 2 * alpha * (weights - p), weights > 0
            assert np.ptp(slope[used]) < 1e-10
            assert (slope[~used] >= slope[used].max() - 1e-10).all()


def test_inv_pg_2_of_a_large_and_a_small_pull() -> None:
    assert np.allclose(mixing_weights(DISTANCES, SHARES, 1e12), SHARES, atol=1e-11)
    assert mixing_weights(DISTANCES, SHARES, 1e-6)[0].tolist() == [1.0, 0.0, 0.0]
    # two nearest ones share by the projection of p
    assert np.allclose(mixing_weights(np.array([[-1.0, -1.0, 0.2]]), SHARES, 1e-6), [[0.45, 0.55, 0.0]], atol=1e-9)


def test_inv_pg_3_of_equal_changes_everybody_is_averaged() -> None:
    assert np.allclose(mixing_weights(-np.ones((3, 3)), SHARES, 0.8), SHARES, atol=1e-15)
    change = [torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2)]
    assert np.allclose(cosines([change, [2 * leaf for leaf in change]]), 1, atol=1e-7)


def test_inv_pg_4_known_values() -> None:
    expected = {
        0.8: [0.595833333333, 0.258333333333, 0.145833333333],
        5.0: [0.263333333333, 0.293333333333, 0.443333333333],
        0.1: [1.0, 0.0, 0.0],
    }
    for alpha, weights in expected.items():
        assert np.allclose(mixing_weights(DISTANCES, SHARES, alpha)[0], weights, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_pg_5_without_a_graph_it_is_federated_averaging(make: Any) -> None:
    graph = toy_of(PFedGraph(alignment_weight=0, graph_weight=1e12, evaluate="mixed"), make)
    plain = Toy(FedAvg(), random_clients(SIZES), make(), TRAIN)
    for _ in range(3):
        graph.step()
        plain.step()
    left, right = graph.scores(), plain.scores()
    for client in range(4):
        assert np.allclose(left[client]["personalized"].vector, right[client]["global"].vector, rtol=0, atol=1e-8)
        sent = sent_to(graph, client)
        assert set(sent) == {"model"}
        assert_close(sent["model"], plain.server["model"], 1e-10)


def test_inv_pg_6_the_direction_turns_and_never_stretches() -> None:
    generator = torch.Generator().manual_seed(0)
    names = ("a", "b")
    w, s = ({n: torch.randn(3, 2, generator=generator, dtype=torch.float64) for n in names} for _ in range(2))
    leaves = {name: leaf.requires_grad_() for name, leaf in w.items()}
    gradient = torch.autograd.grad(along(leaves, s), list(leaves.values()))
    flat_w, flat_s, found = flat(w).detach(), flat(s), torch.cat([g.flatten() for g in gradient])
    assert abs(float(found @ flat_w)) < 1e-14
    length = flat_w.norm()
    assert_close(found, flat_s / length - (flat_s @ flat_w) * flat_w / length**3, 1e-14)
    zero = {name: torch.zeros(3, 2, dtype=torch.float64, requires_grad=True) for name in names}
    (first, *_) = torch.autograd.grad(along(zero, s), list(zero.values()))
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_two_rounds_by_hand(mode: str) -> None:
    a = torch.tensor([[3.0, 0.0], [-1.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    n = np.array([2.0, 4.0, 6.0])
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    algorithm = PFedGraph(alignment_weight=0.3, graph_weight=0.7, snap_above=None)
    toy = Toy(algorithm, quadratic_clients(a.tolist(), [2, 4, 6]), Quadratic(2), train, mode=mode)
    w0 = torch.ones(2, dtype=torch.float64)
    w = w0 + 0.1 * (a - w0)
    toy.step()
    unit = (w - w0) / (w - w0).norm(dim=1, keepdim=True)
    weights = torch.from_numpy(mixing_weights(-(unit @ unit.T).numpy(), n / n.sum(), 0.7))
    assert_close(toy.server["graph"], weights, 1e-12)
    toy.step()
    u, s = weights @ w, weights @ (w / w.norm(dim=1, keepdim=True))
    length = u.norm(dim=1, keepdim=True)
    turn = s / length - (s * u).sum(1, keepdim=True) * u / length**3
    expected = u - 0.1 * (u - a - 0.3 * turn)
    found = torch.stack([toy.server["own"][str(i)]["measured"]["theta"] for i in range(3)])
    assert_close(found, expected, 1e-12)


def test_the_official_sign_turns_away() -> None:
    found = {}
    for alignment in ("towards", "code"):
        algorithm = PFedGraph(alignment_weight=5, alignment=alignment, graph_weight=50)  # type: ignore[arg-type]
        toy = toy_of(algorithm, train=TRAIN.model_copy(update={"lr": 0.02}))
        toy.step()
        direction = sent_to(toy, 0)["direction"]
        toy.step()
        found[alignment] = float(along(toy.server["own"]["0"]["measured"], direction))
    assert found["towards"] > found["code"] + 5e-5


def test_a_client_that_has_not_moved_is_alike_to_nobody() -> None:
    toy = toy_of(PFedGraph(), train=TRAIN.model_copy(update={"local_epochs": 0}))
    toy.run(2)
    assert_close(toy.server["graph"], torch.tensor([SIZES] * 4, dtype=torch.float64) / sum(SIZES), 1e-15)
    assert cosines([[torch.zeros(3)], [torch.ones(3)]]).tolist() == [[0.0, 0.0], [0.0, 1.0]]


def test_cosines_above_the_threshold_count_as_one() -> None:
    cosine = np.array([[1.0, 0.95, 0.9], [0.95, 1.0, -0.95], [0.9, -0.95, 1.0]])
    assert PFedGraph().distances(cosine).tolist() == [[-1.0, -1.0, -0.9], [-1.0, -1.0, 0.95], [-0.9, 0.95, -1.0]]
    assert PFedGraph(snap_above=None).distances(cosine).tolist() == (-cosine).tolist()


def test_partial_participation_keeps_rows_and_never_mixes_strangers() -> None:
    toy = toy_of(PFedGraph())
    size = num_bytes(toy.task.network.initialize(0))
    toy.step([1, 3])
    assert toy.federation.traffic.by_client == dict.fromkeys((1, 3), (size, size))
    assert set(toy.server["own"]) == {"1", "3"}
    before = copy(toy.server)["graph"]
    assert not before[[0, 2]].any()
    assert not before[:, [0, 2]].any()
    toy.step([0, 3])
    # the model and the direction; the initial model alone in a client's first round
    assert toy.federation.traffic.by_client == {0: (size, size), 3: (2 * size, size)}
    assert torch.equal(toy.server["graph"][1], before[1])
    assert not toy.server["graph"][3, 1]
    assert_close(toy.server["graph"][[0, 1, 3]].sum(1), torch.ones(3, dtype=torch.float64), 1e-12)
    first = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    assert_close(toy.server["model"], first, 0)
    assert not toy.states()


def test_a_single_client_is_local_training() -> None:
    alone = Toy(PFedGraph(alignment_weight=0), random_clients((8,)), two_layers(), TRAIN)
    local = Toy(Local(), random_clients((8,)), two_layers(), TRAIN)
    for _ in range(3):
        alone.step()
        local.step()
    assert_close(alone.server["own"]["0"]["measured"], local.states()[0]["local"], 0)


def test_the_classifier_alone_may_be_compared() -> None:
    toy = toy_of(PFedGraph(measure="classifier"))
    toy.run(2)
    names = set(toy.task.network.classifier_names)
    assert set(toy.server["own"]["0"]["measured"]) == names
    assert set(toy.server["own"]["0"].get("others", {})) == set(toy.task.network.parameter_names) - names
    assert all(np.isfinite(found["personalized"].loss) for found in toy.scores().values())
    toy.task.network.classifier_names = ()
    with pytest.raises(ConfigError, match=r"algorithm\.measure"):
        toy.algorithm.check(toy.task, toy.context)


def test_local_steps_are_mini_batches() -> None:
    counted, epochs = toy_of(PFedGraph(local_steps=4)), toy_of(PFedGraph())
    # two epochs of a client with eight samples are four mini-batches
    assert_close(counted.step([0])["own"]["0"], epochs.step([0])["own"]["0"], 0)


def test_running_statistics_are_mixed_with_the_parameters() -> None:
    toy = toy_of(PFedGraph(), normalized_layers)
    toy.run(2)
    assert set(toy.server["own"]["0"]["buffers"]) == set(toy.task.network.buffer_names)
    sent = sent_to(toy, 0)
    assert set(sent["model"]) == set(toy.server["model"])
    assert set(sent["direction"]) == set(toy.task.network.parameter_names)
