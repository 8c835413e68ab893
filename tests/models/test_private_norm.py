"""Normalization layers that stay with the client: one mechanism for all methods."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.hosting import procedures
from actors.hosting.equipment import Equipment
from actors.hosting.job import ClientResult, Job
from actors.hosting.replies import found_of
from algorithms.base import Averaging
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ClientError, MethodError
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.layers.normalization import normalize_by
from rayfl.models.private_norm import STATE, PrivateNorm, private_names
from rayfl.params import Tree, copy, leaves, num_bytes
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.cases import ALGORITHMS, TRAIN, toy_of
from tests.support.cases.base import Case
from tests.support.experiments import KINDS
from tests.support.toy_networks import DoubleNetwork, normalized_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

STATISTICS = {"norm.running_mean", "norm.running_var"}
EVERYTHING = STATISTICS | {"norm.weight", "norm.bias"}
NAMES = {"statistics": STATISTICS, "all": EVERYTHING}
POLICIES = pytest.mark.parametrize("policy", ["statistics", "all"])
# nothing of the layer travels (local, lg-fedavg, apple), or the method says why it cannot
APPLES = {"apple", "apple-limited"}
IMPOSSIBLE = {"local", "local-all", "lg-fedavg", "pfl-da", "fedgh", "feddistill", "centralized", "fedme"} | APPLES
POSSIBLE = {
    f"{name}-{policy}": (case, policy)
    for name, case in ALGORITHMS.items()
    for policy in ("statistics", "all")
    if name not in IMPOSSIBLE and policy not in case.algorithm.no_private_norm
}
CASES = pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(*found, id=name, marks=() if name.removesuffix("-all") in {*KINDS, "fedper"} else pytest.mark.slow)
        for name, found in POSSIBLE.items()
    ],
)


class Grouped(ClassificationModel):
    """Group normalization, which has scales and shifts only and can be vectorised."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 8)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.inner(x)))  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def private_toy(case: Case, policy: str, task: Any = None, **options: Any) -> Toy:
    train = TRAIN.model_copy(update={"private_norm": policy})
    dataset = random_clients((8, 12, 6, 10, 7), public=8 if case.public else 0)
    return toy_of(case, train=train, dataset=dataset, task=task or normalized_layers(), **options)


def private_leaves(tree: Any, policy: str) -> list[Tensor]:
    names = NAMES[policy]
    return [leaf for path, leaf in leaves({"": tree}) if path.rpartition("/")[2] in names]


def without_placeholders(tree: Tree) -> Tree:
    return {path: leaf for path, leaf in leaves(tree) if not isinstance(leaf, Tensor) or leaf.numel()}


class Convolved(ClassificationModel):
    """Two normalizations of maps by name, with a plain linear layer between and after."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        )
        normalize_by(self.body, norm)
        self.head = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def test_which_tensors_belong_to_normalization_layers() -> None:
    affine = {f"body.{place}.{name}" for place in (1, 4) for name in ("weight", "bias")}
    running = {f"body.{place}.running_{name}" for place in (1, 4) for name in ("mean", "var")}
    expected = {
        "batch": (running, affine | running),
        "frozen": (running, affine | running),
        "batch_no_stats": (set(), affine),
        "group": (set(), affine),
        "none": (set(), set()),
    }
    for norm, (statistics, everything) in expected.items():
        network = Network(partial(Convolved, norm))
        assert private_names(network, "statistics") == statistics
        assert private_names(network, "all") == everything
        assert private_names(network, "none") == set()


@POLICIES
def test_what_leaves_a_client_and_what_comes_in(policy: Any) -> None:
    network = normalized_layers().network
    norm = PrivateNorm(network, policy, RandomStreams(0))
    model = network.initialize(5)
    message: Tree = {"model": model, "extra": {"other": torch.ones(2)}, "count": 3}
    state: Tree = {}
    sent = norm.kept_back(message, state)
    assert set(state[STATE]) == NAMES[policy] and sent["count"] == 3
    for name, leaf in sent["model"].items():
        assert leaf.numel() == (0 if name in NAMES[policy] else model[name].numel())
    assert num_bytes(sent) == num_bytes(message) - num_bytes(state[STATE])
    received = norm.joined(sent, state, torch.device("cpu"))
    assert_equal(received, message)
    received["model"]["norm.running_mean"].add_(1)
    assert_equal(state[STATE]["norm.running_mean"], model["norm.running_mean"])
    fresh = norm.joined(sent, {}, torch.device("cpu"))
    initial = network.initialize(RandomStreams(0).integer("init.global"))
    for name in NAMES[policy]:
        assert_equal(fresh["model"][name], initial[name])
    assert norm.kept_back({"count": 1}, state) == {"count": 1}
    with pytest.raises(ValueError, match="of more than one model"):
        norm.kept_back({"a": model, "b": model}, {})


@pytest.mark.two_cases
@pytest.mark.filterwarnings("ignore::UserWarning")
@CASES
def test_for_every_method_nothing_private_is_at_the_server(
    case: Case, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def recording(own: Equipment, job: Job, client: Client, outcome: Any, *others: Any) -> ClientResult:
        if job.kind != "evaluate":
            sent.append(outcome.tree if isinstance(outcome, Weighted) else outcome)
        return found_of(own, job, client, outcome, *others)

    monkeypatch.setattr(procedures, "found_of", recording)
    one, three = private_toy(case, policy), private_toy(case, policy, hosts=3)
    for cohort in case.cohorts():
        one.step(cohort)
        three.step(cohort)
    has_model = case.algorithm.name not in {"adcol", "dispfl", "fedhp", "fedpcl", "fedproto", "fedtgp"}
    assert has_model == bool(private_leaves(one.server, policy)), "the server's models have places for private tensors"
    for leaf in private_leaves(one.server, policy) + [leaf for tree in sent for leaf in private_leaves(tree, policy)]:
        assert leaf.numel() == 0
    assert_equal(one.server, three.server)
    assert_equal(
        {str(client): state for client, state in one.states().items()},
        {str(client): state for client, state in three.states().items()},
    )
    for final in (False, True):
        for rows in one.scores(final).values():
            for statistics in rows.values():
                assert statistics.n and torch.isfinite(torch.tensor(statistics.loss))


@POLICIES
def test_clients_keep_what_they_trained_and_get_it_back(policy: str) -> None:
    toy = private_toy(Case(FedAvg()), policy)
    toy.step([0, 2])
    states = copy({str(client): state for client, state in toy.states().items()})
    assert set(states) == {"0", "2"} and all(set(state) == {STATE} for state in states.values())
    assert set(states["0"][STATE]) == NAMES[policy]
    apart = [(states["0"][STATE][name] - states["2"][STATE][name]).abs().max() for name in NAMES[policy]]
    assert min(apart) > 1e-6
    toy.step([1, 2])
    after = toy.states()
    assert_equal(after[0], states["0"])
    assert any((after[2][STATE][name] - states["2"][STATE][name]).abs().max() > 1e-6 for name in NAMES[policy])


def test_alone_a_client_trains_as_if_everything_travelled() -> None:
    """With one client in every round the same tensors come back, private or not."""
    dataset = random_clients((12,))
    train = TRAIN.model_copy(update={"clients_per_round": 1})
    plain = Toy(FedAvg(), dataset, normalized_layers(), train)
    private = Toy(FedAvg(), dataset, normalized_layers(), train.model_copy(update={"private_norm": "all"}))
    plain.run()
    private.run()
    whole = {**private.server["model"], **private.states()[0][STATE]}
    assert_equal(whole, plain.server["model"])
    assert plain.scores()[0]["global"].vector.tolist() == private.scores()[0]["global"].vector.tolist()


def test_a_client_never_sampled_has_the_initial_layers() -> None:
    toy = private_toy(Case(FedAvg()), "all")
    toy.step([0, 1])
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    model = {**toy.server["model"], **{name: initial[name] for name in EVERYTHING}}
    x, y = toy.dataset.load(4)["test"].x, toy.dataset.load(4)["test"].y
    logits = toy.task.network.logits(model, x)
    assert toy.scores()[4]["global"].top1 == pytest.approx((logits.argmax(1) == y).double().mean().item())


def test_traffic_is_without_the_private_tensors() -> None:
    shared, private = private_toy(Case(FedAvg()), "none"), private_toy(Case(FedAvg()), "all")
    model = copy(shared.server["model"])
    saved = num_bytes({name: model[name] for name in EVERYTHING})
    for toy in (shared, private):
        toy.step([0, 1])
    assert shared.federation.traffic.down - private.federation.traffic.down == 2 * saved
    assert shared.federation.traffic.up - private.federation.traffic.up == 2 * saved


@pytest.mark.parametrize("name", ["fedavg", "superfed-mm", "ditto", "fedper"])
def test_looped_and_vectorised_agree(name: str) -> None:
    task = Classification(DoubleNetwork(Grouped))
    looped, vectorized = (private_toy(ALGORITHMS[name], "all", task, mode=mode) for mode in ("looped", "vectorized"))
    assert_close(without_placeholders(looped.run()), without_placeholders(vectorized.run()), 1e-10)
    states = [{str(client): state for client, state in toy.states().items()} for toy in (looped, vectorized)]
    assert set(states[0]["0"][STATE]) == {"norm.weight", "norm.bias"}
    assert_close(*states, 1e-10)


class Twice(Averaging):
    """A method of a user's own that sends two models."""

    name: str = "twice"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective)
        return Weighted({"a": trained, "b": trained})


def test_a_method_that_sends_two_models_is_told_so() -> None:
    toy = private_toy(Case(Twice()), "all")
    with pytest.raises(ClientError, match=r"local_update sends norm\.\w+ of more than one model") as caught:
        toy.step([0, 1])
    assert isinstance(caught.value.__cause__, MethodError)
