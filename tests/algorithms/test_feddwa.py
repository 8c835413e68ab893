"""FedDWA: invariants DWA of rounds, weights, who is mixed, what stays local, and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.feddwa import FedDWA
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10, 9)
COHORTS = ([0, 1, 2, 4], [1, 3], [0, 1, 3, 4], [2])
TRAIN = TrainConfig(
    rounds=4, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, sizes: Any = SIZES, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(sizes), task or two_layers(), train, **options)


def mixture(toy: Toy, client: int) -> Tree:
    """u_i of a client that has trained."""
    found: Tree = toy.server["own"][str(client)]
    return {**found["parameters"], **found.get("buffers", {})}


def logits(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    found: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def steps(toy: Toy, model: Tree, client: int, round: int, stream: str, count: int | None) -> Tree:
    """A pass of plain SGD from a model."""
    part, train = toy.dataset.load(client)["train"], toy.train
    size = len(part.y)
    generator = toy.context.streams.generator(f"batches{stream}", round, client)
    plan = plan_batches(size, 4, count or 2 * -(-size // 4), generator)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.1 * 0.9**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        F.cross_entropy(logits(leaves, part.x[index]), part.y[index]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def vector(model: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


@pytest.mark.parametrize(("top", "guidance"), [(2, 1), (3, None), (None, 2)])
def test_inv_dwa_1_rounds_are_those_of_an_oracle_in_plain_pytorch(top: int | None, guidance: int | None) -> None:
    toy = toy_of(FedDWA(top_k=top, guidance_steps=guidance))
    initial: Tree = toy.server["model"]
    mixed: dict[int, Tree] = {}
    for round, cohort in enumerate(COHORTS):
        trained = {i: steps(toy, mixed.get(i, initial), i, round, "", None) for i in cohort}
        ahead = {i: steps(toy, trained[i], i, round, ".guidance", guidance) for i in cohort}
        for i in cohort:
            nearness = {j: 1 / float((vector(ahead[i]) - vector(trained[j])).square().sum()) for j in cohort}
            kept = sorted(cohort, key=nearness.__getitem__, reverse=True)[:top]
            total = sum(nearness[j] for j in kept)
            mixed[i] = {name: sum(nearness[j] / total * trained[j][name] for j in kept) for name in initial}
        toy.step(cohort)
        for i, model in mixed.items():
            assert_close(mixture(toy, i), model, 1e-12)
    scores = toy.scores()
    for i in range(len(SIZES)):
        part, model = toy.dataset.load(i)["test"], mixed.get(i, initial)
        assert scores[i]["personalized"].loss == pytest.approx(float(F.cross_entropy(logits(model, part.x), part.y)))


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
def test_inv_dwa_2_nearest_to_themselves_and_alone_in_their_mixture_clients_train_locally(task: Any) -> None:
    """A guidance model that is one small step away is nearest to its own client's."""
    train = TRAIN.model_copy(update={"lr": 0.02})
    mixing, local = toy_of(FedDWA(top_k=1), train, task()), toy_of(Local(), train, task())
    for cohort in COHORTS:
        mixing.step(cohort)
        local.step(cohort)
    for client, state in local.states().items():
        assert_equal(mixture(mixing, client), {name: state["local"][name] for name in mixture(mixing, client)})


def test_inv_dwa_3_a_cohort_of_one_is_local_training() -> None:
    mixing, local = toy_of(FedDWA()), toy_of(Local())
    for client in (0, 2, 0):
        mixing.step([client])
        local.step([client])
        assert_equal(mixture(mixing, client), local.states()[client]["local"])


def test_inv_dwa_4_clients_that_are_not_sampled_keep_their_mixtures() -> None:
    toy = toy_of(FedDWA(top_k=2))
    toy.step([0, 1, 2])
    before = dict(toy.server["own"])
    toy.step([2, 3])
    assert set(toy.server["own"]) == {"0", "1", "2", "3"}
    for client in ("0", "1"):
        assert_equal(toy.server["own"][client], before[client])
    assert not toy.states()


def test_inv_dwa_5_with_a_rate_of_0_all_models_are_equal_and_so_are_weights() -> None:
    toy = toy_of(FedDWA(top_k=None), TRAIN.model_copy(update={"lr": 0.0}))
    initial = toy.server["model"]
    toy.step([0, 1, 2])
    for client in range(3):
        assert_close(mixture(toy, client), initial, 1e-15)


def test_inv_dwa_6_the_server_gets_two_models_and_sends_one() -> None:
    toy = toy_of(FedDWA(), task=normalized_layers())
    network = toy.task.network
    trained, buffers = network.parameter_names, network.buffer_names
    size = {name: leaf.nbytes for name, leaf in toy.server["model"].items()}
    parameters, whole = sum(size[name] for name in trained), sum(size[name] for name in (*trained, *buffers))
    toy.step([0, 1])
    assert buffers
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 1), (whole, whole + parameters))


def test_running_statistics_are_mixed_with_the_weights_of_the_models() -> None:
    toy = toy_of(FedDWA(top_k=None), task=normalized_layers())
    toy.step([0, 1, 2])
    statistics = [toy.server["own"][str(client)]["buffers"]["norm.running_mean"] for client in range(3)]
    assert all((one != 0).any() for one in statistics)
    assert not torch.equal(statistics[0], statistics[1])


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_is_in_no_message(policy: Any) -> None:
    toy = toy_of(FedDWA(), TRAIN.model_copy(update={"private_norm": policy}), normalized_layers())
    for cohort in COHORTS:
        toy.step(cohort)
    for found in toy.server["own"].values():
        assert found["buffers"]["norm.running_mean"].numel() == 0
        assert (found["parameters"]["norm.weight"].numel() == 0) == (policy == "all")
    assert all(score["personalized"].loss > 0 for score in toy.scores().values())


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_vectorized_agrees_with_looped(double: bool, tolerance: float) -> None:
    assert_modes_agree(FedDWA(top_k=2), (8, 12, 6, 10), TRAIN, double, tolerance)


def test_a_newcomer_has_a_model_that_it_trained_alone() -> None:
    toy = toy_of(FedDWA(), unseen=1)
    toy.step([0, 1])
    part, initial = toy.dataset.load(4)["test"], toy.server["model"]
    loss = toy.scores(final=True, newcomers=True)[4]["personalized"].loss
    alone = steps(toy, initial, 4, toy.context.round, "", None)
    assert loss == pytest.approx(float(F.cross_entropy(logits(alone, part.x), part.y)))
