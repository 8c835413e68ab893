"""What clients have that take no part in training, by every method; and that nobody else notices them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from algorithms.base import Algorithm
from algorithms.ditto import Ditto
from algorithms.fedavg import FedAvg
from algorithms.fedfomo import FedFomo
from algorithms.fedper import FedPer
from algorithms.fedrod import FedRoD
from algorithms.hypcluster import HypCluster
from algorithms.pfedhn import PFedHN
from algorithms.registry import METHODS
from rayfl.engine.client import Client
from rayfl.params import Tree
from tests.support.cases import ALGORITHMS, TRAIN, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.toy_networks import normalized_layers
from tests.support.toys import Toy, assert_equal, random_clients

LATE = (8, 11)
"""Samples of the clients that are held out."""


def with_newcomers(case: Case, **options: Any) -> Toy:
    """The method on five clients that train and two that do not."""
    public = 6 if case.public else 0
    data = random_clients((*SIZES, *LATE), public=public)
    return toy_of(case, dataset=data, unseen=len(LATE), **options)


def plain(scores: dict[int, dict[str, Any]]) -> dict[int, dict[str, list[float]]]:
    """Statistics as lists, which compare to the bit."""
    return {client: {row: one.vector.tolist() for row, one in rows.items()} for client, rows in scores.items()}


JOINING = {name: case for name, case in ALGORITHMS.items() if not case.algorithm.no_newcomers}
KINDS = ("fedavg", "fedper", "ditto", "fedbn", "pfedhn", "fedfomo", "floco", "cfl", "centralized", "superfed-mm")
"""Methods that stand for all kinds of what a newcomer has."""


def pick(names: Any) -> Any:
    quick = [pytest.param(JOINING[name], id=name) for name in names if name in KINDS]
    slow = [pytest.param(JOINING[name], id=name, marks=pytest.mark.slow) for name in names if name not in KINDS]
    return pytest.mark.parametrize("case", quick + slow)


@pytest.mark.two_cases
@pick(JOINING)
def test_newcomers_are_scored_and_nobody_notices_them(case: Case) -> None:
    norm: dict[str, Any] = {}
    if case.algorithm.name == "fedbn":  # which needs two samples in every mini-batch
        norm = {"task": normalized_layers(), "train": TRAIN.model_copy(update={"batch_size": 3})}
    toy = with_newcomers(case, **norm)
    # the owner of everybody's samples has another number, and so other random ones; public samples are drawn last
    alone = None if case.pooled or case.public else toy_of(case, **norm)
    cohort = list(range(len(SIZES))) if case.everyone else [0, 1, 2]
    for _ in range(3):
        toy.step(cohort)
        if alone is not None:
            alone.step(cohort)
    if alone is not None:
        assert_equal(toy.server, alone.server)
    before = toy.states()
    assert set(before) <= {*range(len(SIZES)), len(SIZES) + len(LATE)}, "of newcomers there is no state"
    found = toy.scores(final=True, newcomers=True)
    assert list(found) == [5, 6]
    method = case.algorithm
    for rows in found.values():
        own = [row for row in rows if row == method.personalized or (method.sweep and row.startswith(method.sweep))]
        assert own, "a newcomer has the method's personalized row"
        assert all(np.isfinite(one.vector).all() for one in rows.values())
    assert_equal(toy.states(), before)
    assert plain(toy.scores(final=True, newcomers=True)) == plain(found), "what a newcomer learns is forgotten"


def fresh(algorithm: Algorithm, **options: Any) -> Toy:
    """The method after three rounds."""
    toy = with_newcomers(Case(algorithm), **options)
    for cohort in ([0, 1, 2], [2, 3, 4], [0, 3, 4]):
        toy.step(cohort)
    return toy


def training_losses(toy: Toy) -> np.ndarray:
    """The loss of each newcomer's personalized model on its training samples, which its test part repeats."""
    return np.array([rows["personalized"].loss for rows in toy.scores(newcomers=True).values()])


@pytest.mark.two_cases
@pytest.mark.parametrize(
    "algorithm",
    [
        FedPer(),
        Ditto(),
        FedRoD(),
        FedFomo(select_on="train"),
        PFedHN(hidden=8),
        METHODS["fedamp"](),
        METHODS["pfedgraph"](),
        METHODS["fedas"](),
    ],
)
def test_a_newcomer_that_joins_for_longer_fits_better_and_without_epochs_it_has_what_others_begin_with(
    algorithm: Algorithm,
) -> None:
    never, once, long = (training_losses(fresh(algorithm, unseen_epochs=epochs)) for epochs in (0, None, 40))
    assert (long < once).all() and (long < never).all()
    assert not np.allclose(never, once)


@pytest.mark.parametrize("method", [METHODS["l2gd"](), METHODS["pfedme"](local_iterations=4), Ditto(personal_epochs=2)])
def test_who_joins_for_as_long_as_the_method_says_joins_without_local_epochs_too(method: Algorithm) -> None:
    train = TRAIN.model_copy(update={"local_epochs": 0, "momentum": 0.0, "weight_decay": 0.0})
    toy = with_newcomers(Case(method), train=train)
    for _ in range(6):
        toy.step(range(len(SIZES)))
    for rows in toy.scores(newcomers=True).values():
        same = rows["personalized"].vector.tolist() == rows["global"].vector.tolist()
        assert same == (method.name == "l2gd")


@pytest.mark.parametrize("method", [METHODS["apfl"](), Ditto(), METHODS["fedphp"]()])
def test_own_models_of_newcomers_begin_with_the_servers(method: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = fresh(method)

    async def still(self: Client, start: Tree, *_: Any, **__: Any) -> Tree:
        return start

    monkeypatch.setattr(Client, "train", still)
    for rows in toy.scores(newcomers=True).values():
        assert rows[method.personalized].loss == pytest.approx(rows["global"].loss, rel=1e-12)


def test_a_newcomer_of_a_hypernetwork_has_a_head_and_statistics_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tree, Tree]] = []
    joined = PFedHN.join

    async def watched(self: PFedHN, client: Client, server: Tree) -> Tree:
        found = await joined(self, client, server)
        seen.append((dict(client.state), client.initial_model()))
        return found

    monkeypatch.setattr(PFedHN, "join", watched)
    train = TRAIN.model_copy(update={"batch_size": 3})
    fresh(PFedHN(hidden=8, private_head=True), task=normalized_layers(), train=train).scores(newcomers=True)
    assert len(seen) == len(LATE)
    for state, initial in seen:
        for kept in ("personal", "buffers"):
            assert any(bool((leaf != initial[name]).any()) for name, leaf in state[kept].items())


def test_before_it_joins_a_newcomer_of_a_hypernetwork_has_the_mean_embedding() -> None:
    toy = fresh(PFedHN(hidden=8), unseen_epochs=0)
    expected = training_losses(toy)
    toy.server["embeddings"] = toy.server["embeddings"].flip(0)
    np.testing.assert_allclose(training_losses(toy), expected, rtol=1e-9)
    toy.server["embeddings"] = toy.server["embeddings"] + 1
    assert not np.allclose(training_losses(toy), expected, rtol=1e-6)


def test_a_newcomer_of_fedfomo_has_a_model_before_it_is_sent_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool, int]] = []
    moved = FedFomo.moved

    async def watched(self: FedFomo, client: Client, peers: Tree) -> Any:
        seen.append((client.id, "personal" in client.state, len(peers)))
        return await moved(self, client, peers)

    toy = fresh(FedFomo(peers=3, evaluate="stored"))
    monkeypatch.setattr(FedFomo, "moved", watched)
    toy.scores(newcomers=True)
    assert sorted(seen) == [(5, False, 0), (5, True, 3), (6, False, 0), (6, True, 3)]


def test_the_head_is_fitted_to_a_body_that_stays_and_epochs_of_joining_are_not_those_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Tree, Tree, int]] = []
    joined = FedPer.join

    async def watched(self: FedPer, client: Client, server: Tree) -> Tree:
        before = self.assembled(client, server["shared"])
        found = await joined(self, client, server)
        seen.append((before, self.assembled(client, server["shared"]), client.context.train.local_epochs))
        return found

    monkeypatch.setattr(FedPer, "join", watched)
    toy = fresh(FedPer(), unseen_epochs=7)
    toy.scores(newcomers=True)
    assert len(seen) == len(LATE)
    for before, after, epochs in seen:
        assert epochs == 7 != toy.train.local_epochs
        for name in before:
            assert bool((before[name] != after[name]).any()) == name.startswith("head")


def test_the_owner_of_everybodys_samples_does_not_own_those_of_newcomers() -> None:
    toy = fresh(METHODS["centralized"]())
    assert toy.federation.pooled == len(SIZES) + len(LATE)
    assert toy.federation.num_samples([toy.federation.pooled]).tolist() == [sum(SIZES)]
    assert len(toy.client_hosts[0]._samples.of(toy.federation.pooled)["train"]) == sum(SIZES)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "pfedhn"])
def test_newcomers_join_in_stacks_as_they_do_one_by_one(name: str) -> None:
    looped, stacked = (fresh(JOINING[name].algorithm, mode=mode) for mode in ("looped", "vectorized"))
    first, second = (toy.scores(newcomers=True) for toy in (looped, stacked))
    for client, rows in first.items():
        for row, one in rows.items():
            np.testing.assert_allclose(one.vector, second[client][row].vector, atol=1e-5)


def test_of_clusters_a_newcomer_takes_the_one_that_fits_best() -> None:
    toy = with_newcomers(JOINING["cfl"])
    for _ in range(3):
        toy.step(range(len(SIZES)))
    assert len(toy.server["models"]) > 1
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert not common and own[5] == {"models": toy.server["models"]}
    found = toy.scores(newcomers=True)
    for client in toy.context.newcomers:
        losses = []
        for model in toy.server["models"].values():
            scores = toy.federation.evaluate({"model": model}, ("test",), False, None, [client], newcomers=True)
            losses.append(scores[client]["test"]["personalized"].loss)
        assert found[client]["personalized"].loss == pytest.approx(min(losses))


@pytest.mark.parametrize(
    ("method", "option"),
    [
        (FedAvg(), ""),
        (HypCluster(), ""),
        (FedPer(), "train.local_epochs"),
        (Ditto(), "train.local_epochs"),
        (Ditto(personal_epochs=2), "algorithm.personal_epochs"),
        (METHODS["pfedme"](local_iterations=4), "algorithm.local_iterations"),
        (METHODS["l2gd"](), ""),
        (METHODS["fedbabu"](), ""),
    ],
)
def test_a_method_says_for_how_long_newcomers_train(method: Algorithm, option: str) -> None:
    assert method.joins_for == option


def test_every_method_says_what_newcomers_have() -> None:
    for name, method in METHODS.items():
        assert method.newcomer and method.newcomer != Algorithm.newcomer, name
        assert (method.newcomer == "-") == bool(method.no_newcomers), name


def test_newcomers_have_the_same_bits_on_any_number_of_hosts() -> None:
    one, three = (fresh(Ditto(), hosts=hosts) for hosts in (1, 3))
    assert plain(one.scores(newcomers=True)) == plain(three.scores(newcomers=True))
