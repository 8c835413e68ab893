"""pFedVEM: invariants VEM of rounds, confidence, the heads' prior, drawn heads, messages and newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from algorithms.pfedvem import PFedVEM
from rayfl.engine.gradients.counted_normals import drawn_keys, normals
from rayfl.engine.updates.batches import num_steps, plan_batches
from rayfl.engine.updates.settings import TrainConfig
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 2, 3], [2])
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, momentum=0.5, weight_decay=0.01
)
HEAD = ("head.weight", "head.bias")
BODY = ("inner.weight", "inner.bias")
Pair = list[Tensor]
"""mu and rho, each as a vector."""


def toy_of(algorithm: PFedVEM, train: TrainConfig = TRAIN, data: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, data or random_clients(SIZES), two_layers(), train, **options)


def vector(model: Any) -> Tensor:
    return torch.cat([model[name].flatten() for name in HEAD])


def logits(body: Pair, head: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x @ body[0].T + body[1]) @ head[:21].view(3, 7).T + head[21:]


def gaussian(mu: Tensor, rho: Tensor) -> Normal:
    return Normal(mu, (1 + rho.exp()).log())


def local_update(toy: Toy, posterior: Pair, body: Pair, center: Tensor, client: int, round: int) -> Any:
    """A client's part of a round in plain PyTorch: q_k, G_k and delta_k^2."""
    method: Any = toy.algorithm
    part, streams = toy.dataset.load(client)["train"], toy.context.streams
    size, rate = len(part.y), 0.1 * 0.9**round
    mu, rho = (leaf.clone().requires_grad_() for leaf in posterior)
    with torch.no_grad():
        sigma = (1 + rho.exp()).log()
        width = (float((sigma**2).sum()) + float(((mu - center) ** 2).sum())) / len(mu)
    prior = Normal(center, torch.full_like(center, width**0.5))
    rows = method.head_batch_size or size
    plan = plan_batches(size, rows, method.head_epochs * -(-size // rows), streams.generator("batches", round, client))
    keys = drawn_keys(streams.generator("mix", round, client), plan.steps, method.weight_samples)

    def drawn_loss(spread: Tensor, own: Pair, index: Tensor, drawn: Any) -> Tensor:
        heads = [mu + spread * normals(torch.from_numpy(key), len(mu)) for key in drawn]
        return sum(F.cross_entropy(logits(own, head, part.x[index]), part.y[index]) for head in heads) / len(heads)  # type: ignore[return-value]

    sgd = torch.optim.SGD([mu, rho], lr=rate if method.head_lr is None else method.head_lr * 0.9**round, momentum=0.5)
    for index, drawn in zip(plan.batches(CPU), keys, strict=True):
        sgd.zero_grad()
        loss = drawn_loss((1 + rho.exp()).log(), body, index, drawn)
        (loss + kl_divergence(gaussian(mu, rho), prior).sum() / size).backward()
        sgd.step()
    mu, rho = mu.detach(), rho.detach()
    own = [leaf.clone().requires_grad_() for leaf in body]
    plan = plan_batches(size, 4, num_steps(size, 4, 2, False), streams.generator("batches.1", round, client))
    keys = drawn_keys(streams.generator("mix.1", round, client), plan.steps, method.weight_samples)
    sgd = torch.optim.SGD(own, lr=rate, momentum=0.5, weight_decay=0.01)
    for index, drawn in zip(plan.batches(CPU), keys, strict=True):
        sgd.zero_grad()
        if method.body_noise:
            drawn_loss((1 + rho.exp()).log(), own, index, drawn).backward()
        else:
            F.cross_entropy(logits(own, mu, part.x[index]), part.y[index]).backward()
        sgd.step()
    return [mu, rho], [leaf.detach() for leaf in own], width


@pytest.mark.parametrize(
    "options",
    [
        {"head_epochs": 3},
        {
            "head_epochs": 2,
            "head_batch_size": 5,
            "head_lr": 0.05,
            "weight_samples": 2,
            "initial_sigma": 0.7,
            "body_noise": False,
            "aggregation": "uniform",
        },
    ],
)
def test_inv_vem_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any]) -> None:
    toy = toy_of(PFedVEM(**options))
    body, center = [toy.server["shared"][name] for name in BODY], vector(toy.server["head"])
    first = float(np.log(np.expm1(options.get("initial_sigma", 0.1))))
    q: dict[int, Pair] = {}
    for round, cohort in enumerate(COHORTS):
        fresh = [center, torch.full_like(center, first)]
        found = {i: local_update(toy, q.get(i, fresh), body, center, i, round) for i in cohort}
        q |= {i: one[0] for i, one in found.items()}
        weights = [1 if "aggregation" in options else SIZES[i] for i in cohort]
        body = [sum(n * found[i][1][k] for n, i in zip(weights, cohort, strict=True)) / sum(weights) for k in (0, 1)]
        confidence = [1 / found[i][2] for i in cohort]
        center = sum(c * q[i][0] for c, i in zip(confidence, cohort, strict=True)) / sum(confidence)
        toy.step(cohort)
        assert_close(toy.server["shared"], dict(zip(BODY, body, strict=True)), 1e-12)
        assert_close(vector(toy.server["head"]), center, 1e-12)
        for i, (mu, rho) in q.items():
            assert_close(vector(toy.states()[i]["posterior"]["mu"]), mu, 1e-12)
            assert_close(vector(toy.states()[i]["posterior"]["rho"]), rho, 1e-12)
    scores = toy.scores()
    for i in range(4):
        part = toy.dataset.load(i)["test"]
        for row, head in (("global", center), ("personalized", q[i][0])):
            assert scores[i][row].loss == pytest.approx(float(F.cross_entropy(logits(body, head, part.x), part.y)))


def test_inv_vem_2_clients_that_are_as_sure_as_each_other_have_the_mean_of_their_heads_for_centre() -> None:
    """In the first round all are: their means are the centre, and their spreads the initial one."""
    toy = toy_of(PFedVEM(head_epochs=2))
    toy.step([0, 1, 2])
    heads = [vector(toy.states()[i]["posterior"]["mu"]) for i in (0, 1, 2)]
    assert_close(vector(toy.server["head"]), sum(heads) / 3, 1e-12)


def test_inv_vem_3_who_is_far_from_the_centre_or_unsure_counts_less() -> None:
    method = PFedVEM()
    center = {"a": torch.zeros(4, dtype=torch.float64)}
    spread = {"a": torch.full((4,), 0.5, dtype=torch.float64)}
    wider = {"a": torch.full((4,), 1.0, dtype=torch.float64)}
    away = {"a": torch.ones(4, dtype=torch.float64)}
    near = method.deviation({"mu": center, "rho": spread}, center, ("a",))
    assert near == pytest.approx(float(F.softplus(torch.tensor(0.5))))
    assert method.deviation({"mu": away, "rho": spread}, center, ("a",)) == pytest.approx(float(near**2 + 1) ** 0.5)
    assert method.deviation({"mu": center, "rho": wider}, center, ("a",)) > near


def test_inv_vem_4_delta_is_the_width_of_the_prior_that_the_head_is_nearest_to() -> None:
    """The M-step: no other width has a smaller divergence."""
    generator = torch.Generator().manual_seed(0)
    mu, rho, center = ({"a": torch.randn(6, generator=generator, dtype=torch.float64)} for _ in range(3))
    best = PFedVEM().deviation({"mu": mu, "rho": rho}, center, ("a",)).clone().requires_grad_()
    kl_divergence(gaussian(mu["a"], rho["a"]), Normal(center["a"], best)).sum().backward()
    assert best.grad is not None and abs(float(best.grad)) < 1e-12


def test_inv_vem_5_data_that_say_nothing_leave_the_head_at_the_centre() -> None:
    """The bias of classes aside: inputs of 0 through a body without bias."""
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.zeros(n, 5, dtype=torch.float64), torch.randint(3, (n,), generator=generator)) for n in SIZES]
    toy = toy_of(PFedVEM(head_epochs=20, initial_sigma=0.3), TRAIN, ListDataset(clients))
    toy.server = {**toy.server, "shared": {name: torch.zeros_like(toy.server["shared"][name]) for name in BODY}}
    before = toy.server["head"]["head.weight"]
    toy.step([0, 1])
    for i in (0, 1):
        mean = toy.states()[i]["posterior"]["mu"]
        assert_close(mean["head.weight"], before, 1e-12)
        assert not torch.allclose(mean["head.bias"], toy.task.network.initialize(0)["head.bias"])


@pytest.mark.parametrize("samples", [1, 3])
def test_inv_vem_6_drawn_heads_predict_by_their_mean(samples: int) -> None:
    toy = toy_of(PFedVEM(head_epochs=2, evaluation_samples=samples, initial_sigma=0.5))
    toy.step([0, 1])
    scores = toy.scores()
    body = [toy.server["shared"][name] for name in BODY]
    for client in (0, 2):  # the latter has not trained
        keys = drawn_keys(toy.context.streams.generator("posterior", client=client), samples)
        part = toy.dataset.load(client)["test"]
        mu, spread = vector(toy.server["head"]), torch.full((24,), 0.5, dtype=torch.float64)
        if client == 0:
            own = toy.states()[0]["posterior"]
            mu, spread = vector(own["mu"]), F.softplus(vector(own["rho"]))
        heads = [mu + spread * normals(torch.from_numpy(key), 24) for key in keys]
        mean = torch.stack([logits(body, head, part.x).softmax(1) for head in heads]).mean(0)
        assert scores[client]["personalized"].loss == pytest.approx(float(F.nll_loss(mean.log(), part.y)))


def test_inv_vem_7_means_travel_and_spreads_stay() -> None:
    toy = toy_of(PFedVEM(head_epochs=1))
    size = 8 * toy.task.network.num_parameters
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size + 8))
    assert all(set(state) == {"posterior"} for state in toy.states().values())


def test_under_population_the_body_stays_partly_and_the_centre_does_not() -> None:
    one, other = (toy_of(PFedVEM(head_epochs=1, aggregation=rule)) for rule in ("samples", "population"))
    start = one.server["shared"]
    one.step([0, 2])
    other.step([0, 2])
    share = (SIZES[0] + SIZES[2]) / sum(SIZES)
    expected = {name: share * one.server["shared"][name] + (1 - share) * start[name] for name in BODY}
    assert_close(other.server["shared"], expected, 1e-12)
    assert_close(other.server["head"], one.server["head"], 1e-12)


def test_a_large_spread_at_first_is_exact() -> None:
    head = {"head.weight": torch.zeros(2, dtype=torch.float64)}
    for sigma in (1e-3, 0.1, 1.0, 800.0):
        client: Any = type("Fresh", (), {"state": {}})()
        rho = PFedVEM(initial_sigma=sigma).posterior(client, head)["rho"]
        assert_close(F.softplus(rho["head.weight"]), torch.full((2,), sigma, dtype=torch.float64), 1e-12 * sigma)


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-4)])
@pytest.mark.parametrize("options", [{}, {"head_batch_size": 5, "body_noise": False, "head_lr": 0.05}])
def test_vectorized_agrees_with_looped(double: bool, tolerance: float, options: Any) -> None:
    assert_modes_agree(PFedVEM(head_epochs=2, weight_samples=2, **options), SIZES, TRAIN, double, tolerance)


def test_a_client_that_is_not_sampled_keeps_its_head() -> None:
    toy = toy_of(PFedVEM(head_epochs=1))
    toy.step([0, 1])
    kept = toy.states()[0]
    toy.step([1])
    assert_equal(toy.states()[0], kept)
