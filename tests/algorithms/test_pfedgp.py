"""pFedGP: invariants GP of training, predictions, classes and newcomers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.parts.binary_gaussian_processes import JITTER, NORMALS, polya_gamma
from algorithms.parts.class_tree import class_tree
from algorithms.pfedgp import PFedGP
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.updates.batches import num_steps, plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import held_out_accuracy, labelled, planted_clients
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 1, 2], [1, 3])
TRAIN = TrainConfig(rounds=4, clients_per_round=3, local_epochs=1, batch_size=6, lr=0.1, momentum=0.5)
BODY = ("inner.weight", "inner.bias")
SMALL = {"chains": 3, "gibbs_steps": 2, "evaluation_chains": 4}


def toy_of(algorithm: PFedGP, train: TrainConfig = TRAIN, data: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, data or random_clients(SIZES), two_layers(), train, **options)


def features(body: Any, x: Tensor) -> Tensor:
    return torch.relu(x @ body[0].T + body[1])


def covariance(method: Any, left: Tensor, right: Tensor) -> Tensor:
    rows = []
    for u in left / left.norm(dim=1, keepdim=True).clamp(min=1e-12):
        apart = u - right / right.norm(dim=1, keepdim=True).clamp(min=1e-12)
        rows.append(method.kernel_scale * (-apart.square().sum(1) / (2 * method.kernel_length**2)).exp())
    return torch.stack(rows)


def jitter(n: int) -> Tensor:
    return JITTER * torch.eye(n, dtype=torch.float64)


def tree_of(toy: Toy, body: Any, client: int) -> np.ndarray:
    """The tree of a client at a body."""
    part = toy.dataset.load(client)["train"]
    f, y = features(body, part.x).numpy(), part.y.numpy()
    means = np.stack([f[y == c].mean(0) if (y == c).any() else np.zeros(7) for c in range(3)])
    generator = toy.context.streams.generator("kmeans", client=client)
    return class_tree(means, np.array([(y == c).any() for c in range(3)]), generator)


def chain(K: Tensor, signs: Tensor, numbers: list[Tensor]) -> Tensor:
    """omega of one chain, with dense inverses."""
    lower = torch.linalg.cholesky(K)
    omega = None
    for step in numbers:
        f = lower @ step[:, 0]
        if omega is not None:
            # S = (K^-1 + diag(omega))^-1 by Woodbury's identity, and Matheron's rule
            apart = f + step[:, 1] / omega.sqrt() - signs / 2 / omega
            f = f - K @ torch.linalg.solve(K + torch.diag(1 / omega), apart)
        omega = polya_gamma(f, step[:, 2:])
    assert omega is not None
    return omega


def probability(mean: Tensor, variance: Tensor) -> Tensor:
    """E sigmoid(f) of a Gaussian, by a quadrature of 20 places."""
    places, weights = np.polynomial.hermite.hermgauss(20)
    total = torch.zeros_like(mean)
    for t, w in zip(places, weights, strict=True):
        total = total + w / math.sqrt(math.pi) * torch.sigmoid(mean + (2 * variance).sqrt() * t)
    return total


def predicted(method: Any, known: Tensor, signs: Tensor, new: Tensor, omegas: list[Tensor]) -> Tensor:
    """p of side 1 at new features, from features with known sides."""
    found: Tensor = torch.zeros(len(new), dtype=torch.float64)
    K, cross = (
        covariance(method, known, known) + jitter(len(known)),
        covariance(method, known, new),
    )
    for omega in omegas:
        inverse = torch.linalg.inv(K + torch.diag(1 / omega))
        mean = cross.T @ inverse @ (signs / 2 / omega)
        variance = method.kernel_scale + JITTER - (cross * (inverse @ cross)).sum(0)
        found = found + probability(mean, variance) / len(omegas)
    return found


def objective(method: Any, body: Any, x: Tensor, y: Tensor, tree: np.ndarray, order: Any, keys: Any) -> Tensor:
    """The loss of a mini-batch, node by node and chain by chain."""
    f, nodes = features(body, x), len(tree)
    total = torch.zeros((), dtype=torch.float64)
    steps = [normals(torch.from_numpy(one), nodes * method.chains * NORMALS).view(-1, nodes, method.chains, NORMALS)
             for one in keys]  # fmt: skip
    # what is not in the node, or predicted, has a place in the prior's draws, and no label
    lower = torch.linalg.cholesky(covariance(method, f, f).detach() + jitter(len(y)))
    for v, row in enumerate(tree):
        side = torch.from_numpy(row)[y]
        held: list[int] = []
        for s in (1, -1):
            inside = [i for i in range(len(y)) if side[i] == s]
            inside.sort(key=lambda i: order[i, v])
            held += inside[: math.floor(method.predict_share * len(inside))]
        if not held:
            continue
        known = [i for i in range(len(y)) if side[i] != 0 and i not in held]
        K = covariance(method, f[known], f[known]).detach() + jitter(len(known))
        omegas = []
        for c in range(method.chains):
            numbers = []
            for step in steps:
                one = step[:, v, c].clone()
                # the prior's draws at the known samples come from all samples' numbers
                one[known, 0] = torch.linalg.solve_triangular(
                    torch.linalg.cholesky(K), (lower @ one[:, 0])[known][:, None], upper=False
                )[:, 0]
                numbers.append(one[known])
            omegas.append(chain(K, side[known], numbers))
        p = predicted(method, f[known], side[known], f[held], omegas)
        total = total - torch.where(side[held] > 0, p, 1 - p).log().mean()
    return total


def local_update(toy: Toy, body: list[Tensor], client: int, round: int) -> list[Tensor]:
    method: Any = toy.algorithm
    part, streams = toy.dataset.load(client)["train"], toy.context.streams
    tree = tree_of(toy, body, client)
    own = [leaf.clone().requires_grad_() for leaf in body]
    size = len(part.y)
    plan = plan_batches(size, 6, num_steps(size, 6, 1, False), streams.generator("batches", round, client))
    generator = streams.generator("mix", round, client)
    keys = drawn_keys(generator, plan.steps, method.gibbs_steps + 1, 6)
    order = generator.random((plan.steps, 6, len(tree)))
    sgd = torch.optim.SGD(own, lr=0.1, momentum=0.5)
    for step, index in enumerate(plan.batches(CPU)):
        sgd.zero_grad()
        rows = len(index)
        loss = objective(method, own, part.x[index], part.y[index], tree, order[step], keys[step, :, :rows])
        if loss.requires_grad:
            loss.backward()
        else:
            for leaf in own:
                leaf.grad = torch.zeros_like(leaf)
        sgd.step()
    return [leaf.detach() for leaf in own]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"predict_share": 0.4, "kernel_scale": 3.0, "kernel_length": 0.5, "gibbs_steps": 1, "aggregation": "samples"},
    ],
)
def test_inv_gp_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any]) -> None:
    toy = toy_of(PFedGP(**{**SMALL, **options}))
    body = [toy.server["shared"][name] for name in BODY]
    for round, cohort in enumerate(COHORTS):
        found = [local_update(toy, body, client, round) for client in cohort]
        weights = [SIZES[i] if "aggregation" in options else 1 for i in cohort]
        body = [sum(n * one[k] for n, one in zip(weights, found, strict=True)) / sum(weights) for k in (0, 1)]
        toy.step(cohort)
        assert_close(toy.server["shared"], dict(zip(BODY, body, strict=True)), 1e-12)
    assert toy.states() == {i: {} for i in toy.states()}


def test_inv_gp_2_predictions_are_those_of_an_oracle_in_plain_pytorch() -> None:
    toy = toy_of(PFedGP(**SMALL))
    toy.step([0, 1, 2])
    method: Any = toy.algorithm
    body, scores = [toy.server["shared"][name] for name in BODY], toy.scores()
    for client in range(4):
        part = toy.dataset.load(client)["train"]  # the test part repeats it
        f, tree = features(body, part.x), tree_of(toy, body, client)
        keys = drawn_keys(toy.context.streams.generator("posterior", client=client), 3, len(part.y))
        logs = torch.zeros(len(part.y), 3, dtype=torch.float64)
        for row in tree:
            side = torch.from_numpy(row)[part.y]
            known = side != 0
            K = covariance(method, f[known], f[known]) + jitter(int(known.sum()))
            numbers = [normals(torch.from_numpy(one)[known], 4 * NORMALS).view(-1, 4, NORMALS) for one in keys]
            omegas = [chain(K, side[known], [step[:, c] for step in numbers]) for c in range(4)]
            p = predicted(method, f[known], side[known], f, omegas)
            for c in range(3):
                if row[c] != 0:
                    logs[:, c] += (p if row[c] > 0 else 1 - p).log()
        loss = -logs[torch.arange(len(part.y)), part.y].mean()
        assert scores[client]["personalized"].loss == pytest.approx(float(loss), abs=1e-10)


def test_inv_gp_3_a_client_of_one_class_trains_nothing_and_predicts_it() -> None:
    toy = toy_of(PFedGP(**SMALL), data=labelled([1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 0, 1]))
    before = toy.server["shared"]
    toy.step([0])
    assert_equal(toy.server["shared"], before)
    score = toy.scores()[0]["personalized"]
    assert score.loss == 0 and score.top1 == 1
    toy.step([1])
    assert not torch.equal(toy.server["shared"]["inner.weight"], before["inner.weight"])


def test_a_class_that_a_client_lacks_is_not_predicted() -> None:
    data = labelled([0, 2, 0, 2, 0, 2, 2], [0, 1, 2, 0, 1])
    toy = toy_of(PFedGP(**SMALL), data=data)
    toy.step([0, 1])
    host = toy.client_hosts[0]
    assert host is not None
    scores = toy.scores()
    assert np.isfinite([scores[i]["personalized"].loss for i in (0, 1)]).all()
    method: Any = toy.algorithm
    part = data.load(0)["train"]
    body = [toy.server["shared"][name] for name in BODY]
    f, tree = features(body, part.x), torch.from_numpy(tree_of(toy, body, 0))
    keys = torch.from_numpy(drawn_keys(np.random.default_rng(0), 3, 7))
    own = method.processes(f, part.y, tree, keys)
    model = toy.task.network.initialize(0)
    logs = method.predictions([{**model, **toy.server["shared"]}, own], part.x, toy.task)
    assert (logs[:, 1] == math.log(1e-12)).all()
    assert (logs[:, [0, 2]].exp().sum(1) - 1).abs().max() < 1e-12
    nobody = method.processes(f[:0], part.y[:0], tree[:0], keys[:, :0])
    logs = method.predictions([{**model, **toy.server["shared"]}, nobody], part.x, toy.task)
    assert (logs == -math.log(3)).all()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_inv_gp_4_of_each_side_the_share_is_predicted(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    side = torch.randint(-1, 2, (4, 30), generator=generator).double()
    held = PFedGP(predict_share=share).held(side, torch.rand(4, 30, generator=generator, dtype=torch.float64))
    for row, chosen in zip(side, held, strict=True):
        assert not chosen[row == 0].any()
        for s in (1, -1):
            assert int(chosen[row == s].sum()) == math.floor(share * int((row == s).sum()))


def test_mini_batches_of_one_sample_move_nothing() -> None:
    train = TRAIN.model_copy(update={"batch_size": 1})
    toy = toy_of(PFedGP(**SMALL), train)
    before = toy.server["shared"]
    toy.step([0, 1])
    assert_equal(toy.server["shared"], before)


@pytest.mark.slow
def test_inv_gp_5_a_shared_body_helps_clients_that_name_classes_differently() -> None:
    train = TrainConfig(rounds=8, clients_per_round=8, local_epochs=2, batch_size=None, lr=0.2)
    method = PFedGP(chains=4, gibbs_steps=2, evaluation_chains=8)
    toy = Toy(method, planted_clients("head"), two_layers(12, 8, 3), train)
    before = held_out_accuracy(toy, "personalized")
    for _ in range(8):
        toy.step(range(8))
    assert held_out_accuracy(toy, "personalized") > before + 0.05


def test_a_model_without_a_layer_before_the_last_is_refused() -> None:
    toy = toy_of(PFedGP())
    with pytest.raises(ConfigError, match="this model trains none: choose a deeper model"):
        toy.algorithm.check(softmax_regression(), toy.context)


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-4)])
@pytest.mark.parametrize("rows", [6, None])
@pytest.mark.first_case
def test_vectorized_agrees_with_looped(double: bool, tolerance: float, rows: int | None) -> None:
    train = TRAIN.model_copy(update={"batch_size": rows})
    assert_modes_agree(PFedGP(**SMALL), SIZES, train, double, tolerance)
