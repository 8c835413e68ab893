"""pFedBayes: invariants BAYES of rounds, the divergence, drawn models, turns, messages, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from algorithms.pfedbayes import PFedBayes, divergence, drawn_model
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 2, 3], [2])
TRAIN = TrainConfig(rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9)
MILD = {"kl_weight": 1.0, "initial_rho": -1.0}
ADAM = {"optimizer": "adam", "lr": 0.01}


def toy_of(algorithm: PFedBayes, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def logits(vector: Tensor, x: Tensor, like: Tree) -> Tensor:
    """The outputs of a model that is given as one vector."""
    model, place = {}, 0
    for name, leaf in like.items():
        model[name] = vector[place : place + leaf.numel()].view(leaf.shape)
        place += leaf.numel()
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden @ model["head.weight"].T + model["head.bias"]


def vector(model: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in model.values()])


def gaussian(mu: Tensor, rho: Tensor) -> Normal:
    return Normal(mu, (1 + rho.exp()).log())


Pair = list[Tensor]
"""mu and rho, as vectors."""


def local_update(toy: Toy, posterior: Pair, prior: Pair, client: int, round: int) -> tuple[Pair, Pair]:
    """Algorithm 1 on a client, for both orders, in plain PyTorch."""
    method: Any = toy.algorithm
    part, like, train = toy.dataset.load(client)["train"], toy.server["model"], toy.train
    size, streams = len(part.y), toy.context.streams
    together = method.order == "together"
    repeats = 1 if together else method.personal_steps + 1
    plan = plan_batches(size, 4, 2 * -(-size // 4), streams.generator("batches", round, client))
    keys = drawn_keys(streams.generator("mix", round, client), plan.steps * repeats, method.weight_samples)
    q, w = ([leaf.clone().requires_grad_() for leaf in pair] for pair in (posterior, prior))
    kind = torch.optim.SGD if train.optimizer == "sgd" else torch.optim.Adam
    rate = train.lr * 0.9**round
    options = {"momentum": train.momentum} if train.optimizer == "sgd" else {}
    own = kind(q, lr=rate, **options)  # type: ignore[arg-type]
    common = kind(w, lr=rate if method.global_lr is None else method.global_lr * 0.9**round, **options)  # type: ignore[arg-type]

    def omega(index: Tensor, key: Any) -> Tensor:
        losses = [
            F.cross_entropy(
                logits(q[0] + (1 + q[1].exp()).log() * normals(torch.from_numpy(one), len(q[0])), part.x[index], like),
                part.y[index],
            )
            for one in key
        ]
        return torch.stack(losses).mean() + apart()

    def apart() -> Tensor:
        found: Tensor = method.kl_weight / size * kl_divergence(gaussian(*q), gaussian(*w)).sum()
        return found

    step = 0
    for index in plan.batches(CPU):
        for turn in range(repeats):
            for leaf in (*q, *w):
                leaf.grad = None
            if together:
                omega(index, keys[step]).backward()
                own.step()
                common.step()
            elif turn < method.personal_steps:
                omega(index, keys[step]).backward()
                own.step()
            else:
                apart().backward()
                common.step()
            step += 1
    return [leaf.detach() for leaf in q], [leaf.detach() for leaf in w]


VERSIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"personal_steps": 3, "weight_samples": 2, "server_mix": 0.6, "global_lr": 0.03}, {}),
    ({"order": "together", "aggregation": "samples"}, {"momentum": 0.5}),
    ({"order": "together", "global_lr": 0.02}, ADAM),
]


@pytest.mark.parametrize(("options", "train"), VERSIONS)
def test_inv_bayes_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    options: dict[str, Any], train: dict[str, Any]
) -> None:
    toy = toy_of(PFedBayes(**MILD, **options), TRAIN.model_copy(update=train))
    method: Any = toy.algorithm
    start = vector(toy.server["model"])
    w: Pair = [start, torch.full_like(start, -1.0)]
    q: dict[int, Pair] = {}
    for round, cohort in enumerate(COHORTS):
        found = {i: local_update(toy, q.get(i, w), w, i, round) for i in cohort}
        q |= {i: own for i, (own, _) in found.items()}
        weights = np.array([float(SIZES[i]) if method.aggregation == "samples" else 1.0 for i in cohort])
        weights /= weights.sum()
        mean = [sum(a * found[i][1][part] for a, i in zip(weights, cohort, strict=True)) for part in (0, 1)]
        w = [(1 - method.server_mix) * old + method.server_mix * new for old, new in zip(w, mean, strict=True)]
        toy.step(cohort)
        assert_close(vector(toy.server["model"]), w[0], 1e-12)
        assert_close(vector(toy.server["rho"]), w[1], 1e-12)
        for i, (mu, rho) in q.items():
            assert_close(vector(toy.states()[i]["posterior"]["mu"]), mu, 1e-12)
            assert_close(vector(toy.states()[i]["posterior"]["rho"]), rho, 1e-12)
    scores, like = toy.scores(), toy.server["model"]
    for i in range(4):
        part = toy.dataset.load(i)["test"]
        for row, model in (("global", w[0]), ("personalized", q[i][0])):
            expected = float(F.cross_entropy(logits(model, part.x, like), part.y))
            assert scores[i][row].loss == pytest.approx(expected)


def test_inv_bayes_2_the_divergence_is_that_of_gaussians_and_0_for_equal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    mu, rho, known, spread = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    found = divergence(mu, F.softplus(rho), known, spread)
    assert_close(found, kl_divergence(gaussian(mu, rho), gaussian(known, spread)).sum(), 1e-12)
    assert abs(divergence(mu, F.softplus(rho), mu, rho)) < 1e-15


def test_inv_bayes_3_without_a_step_of_its_own_nobody_moves_w() -> None:
    """w_i moves towards q_i alone, which is w at first: with a rate of 0 both stay."""
    toy = toy_of(PFedBayes(**MILD), TRAIN.model_copy(update={"lr": 0.0}))
    before = toy.server
    for cohort in COHORTS:
        assert_equal(toy.step(cohort), before)
    for state in toy.states().values():
        assert_equal(state["posterior"]["mu"], before["model"])


def test_inv_bayes_4_with_little_spread_q_follows_sgd_on_the_loss_and_the_pull_of_w() -> None:
    """One step from q = w: the divergence has no slope in mu there, so it is a step on the loss alone."""
    train = TRAIN.model_copy(update={"batch_size": None, "local_epochs": 1})
    toy = toy_of(PFedBayes(kl_weight=1e-12, initial_rho=-40.0), train)
    model = {name: leaf.clone().requires_grad_() for name, leaf in toy.server["model"].items()}
    part = toy.dataset.load(0)["train"]
    F.cross_entropy(logits(vector(model), part.x, model), part.y).backward()
    toy.step([0])
    moved = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in model.items()}
    assert_close(toy.states()[0]["posterior"]["mu"], moved, 1e-12)


@pytest.mark.slow
def test_inv_bayes_5_uncertainty_grows_where_data_say_nothing() -> None:
    """Without a slope of the loss, the divergence leads sigma of q to that of w."""
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=300, batch_size=None, lr=0.1)
    toy = toy_of(PFedBayes(kl_weight=2.0, initial_rho=-1.0, global_lr=1e-300), train)
    network, state = toy.task.network, toy.server
    data = toy.dataset.load(0)["train"].x
    data[:, 2] = 0  # an input that is always 0
    toy.step([0])
    rho = toy.states()[0]["posterior"]["rho"]["inner.weight"]
    assert_close(rho[:, 2], state["rho"]["inner.weight"][:, 2], 1e-9)
    assert not torch.allclose(rho[:, 0], rho[:, 2], atol=1e-3)
    assert network.parameter_names


@pytest.mark.parametrize("samples", [1, 3])
def test_inv_bayes_6_drawn_models_predict_by_their_mean(samples: int) -> None:
    toy = toy_of(PFedBayes(**MILD, evaluation_samples=samples))
    toy.step([0, 1])
    scores = toy.scores()
    assert scores[0]["personalized"].loss == toy.scores()[0]["personalized"].loss
    for client in (0, 1, 2):  # the last has not trained
        keys = drawn_keys(toy.context.streams.generator("posterior", client=client), samples)
        known = {"mu": toy.server["model"], "rho": toy.server["rho"]}
        q = toy.states()[client]["posterior"] if client < 2 else known
        part, spread = toy.dataset.load(client)["test"], (1 + vector(q["rho"]).exp()).log()
        drawn = [vector(q["mu"]) + spread * normals(torch.from_numpy(key), len(spread)) for key in keys]
        mean = torch.stack([logits(one, part.x, q["mu"]).softmax(1) for one in drawn]).mean(0)
        assert scores[client]["personalized"].loss == pytest.approx(float(F.nll_loss(mean.log(), part.y)))
        built = drawn_model(q, torch.from_numpy(keys[0]), toy.task.network.parameter_names)
        assert_close(vector(built), drawn[0], 1e-15)


def test_inv_bayes_7_two_gaussians_travel_and_the_posterior_stays() -> None:
    toy = toy_of(PFedBayes(**MILD))
    size = 8 * toy.task.network.num_parameters
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (2 * size, 2 * size))
    assert all(set(state) == {"posterior"} for state in toy.states().values())


def test_running_statistics_are_those_of_drawn_models_and_are_averaged() -> None:
    toy = toy_of(PFedBayes(**MILD, server_mix=0.5), task=normalized_layers())
    toy.step([0, 1])
    statistics = [toy.states()[client]["posterior"]["mu"]["norm.running_mean"] for client in (0, 1)]
    assert (statistics[0] != statistics[1]).all()
    assert_close(toy.server["model"]["norm.running_mean"], (statistics[0] + statistics[1]) / 2, 1e-12)
    assert set(toy.server["rho"]) == set(toy.task.network.parameter_names)


@pytest.mark.parametrize(
    ("options", "train", "message"),
    [
        ({}, {"momentum": 0.5}, r"needs train\.momentum=0, not 0\.5: .* algorithm\.order=together"),
        ({}, {"optimizer": "adam"}, r"needs train\.optimizer=sgd, not adam: .* algorithm\.order=together"),
        ({}, {"weight_decay": 0.01}, r"Set train\.weight_decay=0, not 0\.01"),
        ({"order": "together"}, {"weight_decay": 0.01}, r"Set train\.weight_decay=0"),
    ],
)
def test_what_moves_parameters_without_a_gradient_is_refused(options: Any, train: Any, message: str) -> None:
    toy = toy_of(PFedBayes(**options), TRAIN.model_copy(update=train))
    with pytest.raises(ConfigError, match=message):
        toy.algorithm.check(toy.task, toy.context)


def test_clipping_couples_both_where_they_step_together() -> None:
    train = TRAIN.model_copy(update={"max_grad_norm": 1.0})
    assert "q_i and w_i together" in PFedBayes(order="together").remarks(toy_of(PFedBayes(), train).context)[0]
    assert not PFedBayes().remarks(toy_of(PFedBayes(), train).context)


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
@pytest.mark.parametrize(("options", "train"), [({}, {}), ({"order": "together", "weight_samples": 2}, ADAM)])
def test_vectorized_agrees_with_looped(double: bool, tolerance: float, options: Any, train: Any) -> None:
    assert_modes_agree(PFedBayes(**MILD, **options), SIZES, TRAIN.model_copy(update=train), double, tolerance)
