"""APPLE: invariants APPLE, limited downloads, which cores a personal model is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.apple import APPLE, draw_downloads, mixture
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, num_bytes, tensors
from rayfl.tasks.base import Batch
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round="all", local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: APPLE, make: Any = two_layers, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), make(), train, **options)


def give(toy: Toy, states: Mapping[int, Tree]) -> None:
    """Puts states in the place of the clients'."""
    for client, state in states.items():
        toy.client_hosts[0].states.replace(client, copy(state), 0)


def scalar(mode: str, algorithm: APPLE) -> Toy:
    """Two clients with the cores 1 and 2, of which the first has the point 3 and the relations .6 and .4."""
    train = TrainConfig(rounds=10, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    toy = Toy(algorithm, quadratic_clients([3, 0], [2, 2]), Quadratic(), train, mode=mode)
    toy.server = {"cores": {"theta": torch.tensor([[1.0], [2.0]], dtype=torch.float64)}}
    give(toy, {0: {"relation": torch.tensor([0.6, 0.4], dtype=torch.float64)}})
    return toy


@MODES
def test_inv_apple_1_known_values(mode: str) -> None:
    toy = scalar(mode, APPLE(relation_lr=0.01, relation_share=1))
    toy.step()
    assert float(toy.server["cores"]["theta"][0]) == pytest.approx(1.096, abs=1e-14)
    assert_close(toy.states()[0]["relation"], torch.tensor([0.6159, 0.4321], dtype=torch.float64), 1e-14)
    whole = scalar(mode, APPLE(relation_lr=0.01, relation_share=1, penalty_half=False))
    whole.step()
    # the gradient of mu ||p - p_0||^2 is twice as large
    assert_close(whole.states()[0]["relation"], torch.tensor([0.6158, 0.4322], dtype=torch.float64), 1e-14)


def test_inv_apple_1_gradients_in_closed_form() -> None:
    toy, generator = toy_of(APPLE()), torch.Generator().manual_seed(1)
    models = [toy.task.network.initialize(number) for number in range(3)]
    cores = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    p, p0 = (torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(2))
    part = toy.dataset.load(0)["train"]
    batch = Batch(part.x, part.y)
    trained = {
        "core": {name: leaf.clone().requires_grad_() for name, leaf in models[1].items()},
        "relation": {"p": p.clone().requires_grad_()},
    }
    own = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    frozen = {"cores": cores, "own": own, "start": p0, "pull": 0.3}
    value = toy.algorithm.objective(trained, batch, toy.task, frozen, None)
    found = torch.autograd.grad(value, tensors(trained))
    mixed = {name: sum(p[j] * models[j][name] for j in range(3)).requires_grad_() for name in cores}
    g = dict(zip(mixed, torch.autograd.grad(toy.task.loss(mixed, batch), list(mixed.values())), strict=True))
    for gradient, name in zip(found, mixed, strict=False):
        assert_close(gradient, p[1] * g[name], 1e-14)
    inner = torch.stack([sum((g[name] * models[j][name]).sum() for name in g) for j in range(3)])
    assert_close(found[-1], inner + 0.3 * (p - p0), 1e-14)


@MODES
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
@pytest.mark.parametrize("peers", [None, 1])
def test_inv_apple_2_of_its_own_core_alone_it_is_local_training(peers: Any, make: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"clients_per_round": 3})
    apple = toy_of(APPLE(relation_lr=0, peers=peers), make, train, mode=mode)
    local = Toy(Local(), random_clients(SIZES), make(), train, mode=mode)
    give(apple, {i: {"relation": torch.eye(4, dtype=torch.float64)[i]} for i in range(4)})
    for _ in range(TRAIN.rounds):
        apple.step()
        local.step()
    for client, state in local.states().items():
        own = {name: leaf[client] for name, leaf in apple.server["cores"].items()}
        assert_equal({**own, **apple.states()[client].get("buffers", {})}, state["local"])
    left, right = apple.scores(), local.scores()
    for client in local.states():
        for row in ("personalized", "core"):
            assert left[client][row].vector.tolist() == right[client]["personalized"].vector.tolist()


def test_inv_apple_3_of_equal_cores_the_sum_is_that_core() -> None:
    toy = toy_of(APPLE(), train=TRAIN.model_copy(update={"local_epochs": 0}))
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    before = copy(toy.server["cores"])
    toy.run(2)
    assert_equal(toy.server["cores"], before)
    for state in toy.states().values():
        assert_close(state["personal"], initial, 1e-15)
        assert_close(state["relation"], torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES), 1e-16)


def test_inv_apple_4_the_penalty_ends() -> None:
    exponential, cosine = (APPLE(relation_schedule=s, relation_share=0.2) for s in ("exponential", "cosine"))
    for algorithm in (exponential, cosine):
        assert algorithm.penalty_in(0, 50) == 1
        assert [algorithm.penalty_in(t, 50) for t in (10, 11, 49)] == [0, 0, 0]
        assert APPLE(relation_share=0).penalty_in(0, 50) == 0
    assert exponential.penalty_in(5, 50) == pytest.approx(0.0316227766, abs=1e-10)
    assert cosine.penalty_in(5, 50) == pytest.approx(0.5, abs=1e-15)


def test_inv_apple_5_a_strong_penalty_holds_the_relations() -> None:
    held = toy_of(APPLE(relation_lr=1e-7, relation_penalty=1e6, relation_share=1))
    free = toy_of(APPLE(relation_lr=1e-2, relation_penalty=0))
    for toy, moves in ((held, False), (free, True)):
        toy.run(3)
        for state in toy.states().values():
            moved = (state["relation"] - torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)).abs().max()
            assert (moved > 1e-3) if moves else (moved < 1e-5)


def test_inv_apple_6_relations_of_clients_not_sampled_stay() -> None:
    toy = toy_of(APPLE(relation_lr=0.1))
    toy.step([0, 1, 2])
    before = copy(toy.states()[1])
    cores = copy(toy.server["cores"])
    toy.step([0, 2, 3])
    assert_equal(toy.states()[1], before)
    assert_equal(toy.server["cores"]["head.bias"][1], cores["head.bias"][1])
    assert not torch.equal(toy.server["cores"]["head.bias"][0], cores["head.bias"][0])


@pytest.mark.parametrize("peers", [None, 2])
def test_inv_apple_7_vectorized_agrees_with_looped(peers: Any) -> None:
    looped, stacked = (toy_of(APPLE(relation_lr=0.05, peers=peers), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [0, 2], [1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-13)
        assert_close(looped.states(), stacked.states(), 1e-13)


def test_the_own_row_of_the_stack_is_not_read() -> None:
    core = {"w": torch.tensor([5.0])}
    cores, own = {"w": torch.tensor([[1.0], [1e9], [3.0]])}, torch.tensor([0.0, 1.0, 0.0])
    assert mixture(core, torch.tensor([1.0, 2.0, 3.0]), cores, own)["w"].tolist() == [20.0]


def test_clients_download_what_they_never_had_and_then_what_they_take_most_of() -> None:
    generator = np.random.default_rng(0)
    relation = [0.5, 0.0, -9.0, 0.1, 0.2]
    assert draw_downloads(relation, 0, [False, True, True, False, True], 1, 1.5, generator) == [3]
    assert 3 in draw_downloads(relation, 0, [False, True, True, False, True], 2, 1.5, generator)
    assert draw_downloads(relation, 0, [False] * 5, 9, 1.5, generator) == [1, 2, 3, 4]
    drawn = [draw_downloads(relation, 0, [True] * 5, 1, 1.5, generator)[0] for _ in range(2000)]
    weights = 1.5 ** np.abs(np.array(relation[1:]))
    assert np.allclose(np.bincount(drawn, minlength=5)[1:] / 2000, weights / weights.sum(), atol=0.03)
    # of relations without bounds nobody's chance becomes zero
    assert len(draw_downloads([0.0, 1e6, 0.0, 0.0, 0.0], 0, [True] * 5, 3, 1.5, generator)) == 3


def test_limited_downloads_keep_older_copies() -> None:
    toy = toy_of(APPLE(relation_lr=0.05, peers=1), hosts=2)
    size = num_bytes(toy.task.network.initialize(0))
    toy.step()
    # in the first round everybody's core is the initial model; p_0 are four numbers
    assert toy.federation.traffic.by_client == dict.fromkeys(range(4), (size + 32, size))
    history = [copy(toy.server["cores"])]
    for round in range(1, 4):
        toy.step()
        assert toy.federation.traffic.by_client == dict.fromkeys(range(4), (2 * size + 32, size + 8))
        for client, state in toy.states().items():
            assert int(state["downloaded"].sum()) == round
            for j in range(4):
                versions = [torch.equal(state["copies"]["head.bias"][j], c["head.bias"][j]) for c in history]
                assert any(versions) == (j != client and bool(state["downloaded"][j]))
        history.append(copy(toy.server["cores"]))


def test_the_base_of_the_draws_grows_with_the_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """b = max(``peer_base``, ``peer_growth`` t M / K), in the rounds in which clients choose."""
    bases: list[float] = []

    def noting(relation: Any, own: int, seen: Any, count: int, base: float, generator: Any) -> list[int]:
        bases.append(base)
        return draw_downloads(relation, own, seen, count, base, generator)

    monkeypatch.setattr("algorithms.apple.draw_downloads", noting)
    toy = toy_of(APPLE(peers=2, peer_base=1.25, peer_growth=1.0))
    for _ in range(4):
        toy.step([0])
    assert bases == [1.25, 1.25, 1.5]


def test_as_many_downloads_as_there_are_others_is_no_limit() -> None:
    everything, plain = toy_of(APPLE(peers=3)), toy_of(APPLE())
    for _ in range(2):
        assert_equal(everything.step(), plain.step())


def test_personal_models_are_of_the_cores_that_were_downloaded_or_of_the_newest() -> None:
    stored, fresh = (toy_of(APPLE(relation_lr=0.05, fresh_peers=f)) for f in (False, True))
    for toy in (stored, fresh):
        toy.step([0, 1, 2])
    first = {i: (stored.scores()[i]["personalized"].loss, fresh.scores()[i]["personalized"].loss) for i in range(4)}
    for toy in (stored, fresh):
        toy.step([1, 2])
    for i, (kept, newest) in first.items():
        assert (stored.scores()[i]["personalized"].loss == kept) == (i in (0, 3))
        assert fresh.scores()[i]["personalized"].loss != newest
    state, cores = fresh.states()[0], fresh.server["cores"]
    mixed = {name: torch.tensordot(state["relation"], leaf, dims=1) for name, leaf in cores.items()}
    part = fresh.dataset.load(0)["test"]
    expected = float(fresh.task.loss(mixed, Batch(part.x, part.y)))
    assert fresh.scores()[0]["personalized"].loss == pytest.approx(expected, abs=1e-12)
    # a client never sampled has p_0
    shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    mixed = {name: torch.tensordot(shares, leaf, dims=1) for name, leaf in cores.items()}
    part = fresh.dataset.load(3)["test"]
    expected = float(fresh.task.loss(mixed, Batch(part.x, part.y)))
    assert fresh.scores()[3]["personalized"].loss == pytest.approx(expected, abs=1e-12)


def test_running_statistics_stay_with_their_client() -> None:
    toy = toy_of(APPLE(), normalized_layers)
    toy.run(2)
    names = set(toy.task.network.buffer_names)
    assert names and not names & set(toy.server["cores"])
    means = [state["buffers"]["norm.running_mean"] for state in toy.states().values()]
    assert not torch.equal(means[0], means[1])
    private = toy_of(APPLE(), normalized_layers, TRAIN.model_copy(update={"private_norm": "statistics"}))
    assert_equal(private.run(2), toy.server)


def test_relations_are_neither_decayed_nor_left_out_of_the_schedule() -> None:
    decayed = TRAIN.model_copy(update={"weight_decay": 0.5, "local_epochs": 1})
    toy = toy_of(APPLE(relation_lr=0.0), train=decayed)
    toy.run(2)
    assert_close(toy.states()[0]["relation"], torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES), 1e-15)
    # the second round of a halved rate
    runs = []
    for lr, relation_lr, decay, start in ((0.2, 0.04, 0.5, 1), (0.1, 0.02, 1.0, 1)):
        train = TRAIN.model_copy(update={"lr": lr, "lr_decay": decay})
        toy = toy_of(APPLE(relation_lr=relation_lr, relation_share=0), train=train)
        toy.round = start
        runs.append(toy.step())
    assert_equal(runs[0], runs[1])


def test_a_single_client_has_but_one_relation() -> None:
    toy = Toy(APPLE(relation_lr=0.05), random_clients((8,)), two_layers(), TRAIN)
    toy.run(2)
    assert toy.states()[0]["relation"].shape == (1,)
    assert toy.states()[0]["relation"] != 1
