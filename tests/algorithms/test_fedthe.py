"""FedTHE: invariants THE, rounds against plain loops, and the weight of every test sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedthe import FedTHE
from algorithms.parts.head_mixtures import MixedHeads
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Predictor
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 1, 2], [1, 3], [0, 1, 3])
HEAD = ("head.weight", "head.bias")
THE = MixedHeads(first_weight=0.5, steps=20, lr=0.1, sample_share=0.3, history_rate=0.1)


def toy_of(algorithm: Any, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def after(algorithm: Any, **options: Any) -> Toy:
    toy = toy_of(algorithm, **options)
    for cohort in COHORTS:
        toy.step(cohort)
    return toy


def hidden(model: Tree, x: Tensor) -> Tensor:
    return torch.relu(x @ model["inner.weight"].T + model["inner.bias"])


def logits(model: Tree, x: Tensor) -> Tensor:
    return hidden(model, x) @ model["head.weight"].T + model["head.bias"]


def vectors(toy: Toy, row: str) -> dict[int, list[float]]:
    return {client: rows[row].vector.tolist() for client, rows in toy.scores().items()}


def plain_steps(
    toy: Toy, model: Tree, names: Any, client: int, round: int, stream: str, epochs: int, **how: Any
) -> Tree:
    """Plain SGD of some tensors; ``prior`` is added to the logits, ``lr`` is the rate."""
    samples = toy.dataset.load(client)["train"]
    generator = toy.context.streams.generator(f"batches{stream}", round, client)
    plan = plan_batches(len(samples.y), 4, epochs * -(-len(samples.y) // 4), generator)
    moved = {name: model[name].clone().requires_grad_() for name in names}
    optimizer = torch.optim.SGD(list(moved.values()), lr=how.get("lr", 0.1), momentum=0.5, weight_decay=0.01)
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        outputs = logits({**model, **moved}, samples.x[index]) + how.get("prior", 0)
        F.cross_entropy(outputs, samples.y[index]).backward()
        optimizer.step()
    return {**model, **{name: leaf.detach() for name, leaf in moved.items()}}


def mixed_by_autograd(method: FedTHE, model: Tree, head: Tree, own: Tensor, everybody: Tensor, x: Tensor) -> Tensor:
    """Log-probabilities: for each sample by itself Adam on the two numbers of which the weights are the softmax."""
    found, mean = [], None
    for one in x:
        f = hidden(model, one[None])[0].detach()
        mean = f if mean is None else method.history_rate * f + (1 - method.history_rate) * mean
        phi = method.sample_share * f + (1 - method.sample_share) * mean
        generic, personal = logits(model, one[None])[0].detach(), logits({**model, **head}, one[None])[0].detach()
        alike = F.cosine_similarity(generic.softmax(0), personal.softmax(0), dim=0, eps=1e-6)
        first = torch.tensor([method.first_weight, 1 - method.first_weight], dtype=torch.float64)
        numbers = first.log().requires_grad_()
        adam = torch.optim.Adam([numbers], lr=method.weight_lr)
        for _ in range(method.weight_steps):
            adam.zero_grad()
            e = numbers.softmax(0)
            p = (e[0] * generic + e[1] * personal).softmax(0)
            entropy = -(p * p.log()).sum()
            aligned = e[0] * (phi - everybody).norm() + e[1] * (phi - own).norm()
            (alike * entropy + (1 - alike) * aligned).backward()
            adam.step()
        e = numbers.detach().softmax(0)
        found.append((e[0] * generic + e[1] * personal).log_softmax(0))
    return torch.stack(found)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "exponent": {"balance_exponent": 0.5, "added_count": 0.25, "head_epochs": 2, "head_lr": 0.05},
    "uniform": {"aggregation": "uniform", "first_weight": 0.8, "weight_steps": 5, "weight_lr": 0.4, "sample_share": 1},
    "population": {"aggregation": "population", "balance_exponent": 0, "history_rate": 0.6, "sample_share": 0},
}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("name", SETTINGS)
def test_inv_the_1_rounds_are_those_of_plain_loops(name: str, mode: str) -> None:
    method = FedTHE(**SETTINGS[name])
    toy = toy_of(method, mode=mode)
    server: Tree = toy.server["model"]
    everybody = torch.zeros(server["head.weight"].shape[1], dtype=torch.float64)
    heads: dict[int, Tree] = {}
    means: dict[int, Tensor] = {}
    for round, cohort in enumerate(COHORTS):
        trained = {}
        for client in cohort:
            samples = toy.dataset.load(client)["train"]
            counts = torch.bincount(samples.y, minlength=3).double() + method.added_count
            prior = method.balance_exponent * counts.log()
            model = plain_steps(toy, server, server, client, round, "", 2, prior=prior)
            head = heads.get(client) or {
                name: toy.task.network.initialize(toy.context.streams.integer("init.global"))[name] for name in HEAD
            }
            fitted = plain_steps(
                toy, {**model, **head}, HEAD, client, round, ".1", method.head_epochs, lr=method.head_lr or 0.1
            )
            heads[client] = {name: fitted[name] for name in HEAD}
            means[client] = hidden(model, samples.x).mean(0)
            trained[client] = model
        weights = {client: 1 if method.aggregation == "uniform" else SIZES[client] for client in cohort}
        rest = sum(SIZES) - sum(weights.values()) if method.aggregation == "population" else 0
        total = sum(weights.values()) + rest
        everybody = (sum(weights[k] * means[k] for k in cohort) + rest * everybody) / total
        server = {
            name: (sum(weights[k] * trained[k][name] for k in cohort) + rest * leaf) / total
            for name, leaf in server.items()
        }
        toy.step(cohort)
        assert_close(toy.server, {"model": server, "features": everybody}, 1e-12)
        for client, state in toy.states().items():
            assert_close(state, {"head": heads[client], "features": means[client]}, 1e-12)
    scores = toy.scores()
    for client in heads:
        test = toy.dataset.load(client)["test"]
        expected = F.nll_loss(
            mixed_by_autograd(method, server, heads[client], means[client], everybody, test.x), test.y
        )
        assert scores[client]["personalized"].loss == pytest.approx(float(expected), rel=1e-9)
        personal = F.cross_entropy(logits({**server, **heads[client]}, test.x), test.y)
        assert scores[client]["personal"].loss == pytest.approx(float(personal), rel=1e-12)
        everyone = F.cross_entropy(logits(server, test.x), test.y)
        assert scores[client]["global"].loss == pytest.approx(float(everyone), rel=1e-12)


@pytest.mark.parametrize(("weight", "row"), [(1.0, "global"), (0.0, "personal")])
@pytest.mark.parametrize("steps", [0, 20])
def test_inv_the_2_at_the_ends_it_is_one_of_the_heads(weight: float, row: str, steps: int) -> None:
    toy = after(FedTHE(first_weight=weight, weight_steps=steps))
    mixed, alone = vectors(toy, "personalized"), vectors(toy, row)
    for client in alone:
        np.testing.assert_allclose(mixed[client], alone[client], rtol=1e-12)
    assert any(
        not np.allclose(alone[client], one) for client, one in vectors(toy, "personal" if weight else "global").items()
    )


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_the_3_without_balance_the_model_is_that_of_federated_averaging(policy: Any, mode: str) -> None:
    toy = after(FedTHE(balance_exponent=0, aggregation=policy), mode=mode)
    plain = after(FedAvg(aggregation=policy), mode=mode)
    assert_equal(toy.server["model"], plain.server["model"])
    assert vectors(toy, "global") == vectors(plain, "global")


def test_inv_the_4_the_head_and_the_weights_never_reach_the_server() -> None:
    toy = after(FedTHE())
    other = after(FedTHE(head_epochs=3, head_lr=0.3, weight_steps=2, sample_share=1))
    assert_equal(toy.server, other.server)
    assert any(not torch.equal(toy.states()[0]["head"][name], other.states()[0]["head"][name]) for name in HEAD)


def example(rows: int = 12) -> tuple[Any, Tree, Tree, Mapping[str, Tensor], Tensor]:
    """A task, a model, another head, mean features, and samples."""
    task, x = two_layers(), random_clients([rows], seed=4).load(0)["train"].x
    model, other = task.network.initialize(0), task.network.initialize(1)
    features = hidden(model, x)
    means = {"global": features[:5].mean(0), "personal": features[5:].mean(0)}
    return task, model, {name: 3 * other[name] for name in HEAD}, means, x


def predicted(heads: MixedHeads, x: Tensor, cuts: tuple[int, ...] = ()) -> Tensor:
    """The predictions for samples that come in pieces."""
    task, model, head, means, _ = example()
    predictor = Predictor.of(model, head, means, dict, combine=heads.predictions)
    models, bounds = predictor.built(), [0, *cuts, len(x)]
    return torch.cat([predictor.predictions(models, x[a:b], task) for a, b in pairwise(bounds)])


def test_inv_the_5_the_size_of_batches_does_not_matter() -> None:
    x = example()[-1]
    whole = predicted(THE, x)
    for cuts in ((5,), (1, 2, 9), tuple(range(1, 12))):
        assert_close(predicted(THE, x, cuts), whole, 1e-12)
    assert_equal(predicted(THE, x), whole)  # each scoring begins again


def test_inv_the_6_with_beta_1_no_sample_counts_for_another() -> None:
    x, order = example()[-1], torch.randperm(12, generator=torch.Generator().manual_seed(0))
    alone = replace(THE, sample_share=1.0)
    assert_close(predicted(alone, x[order]), predicted(alone, x)[order], 1e-12)
    assert (predicted(THE, x[order]) - predicted(THE, x)[order]).abs().max() > 1e-3


def test_inv_the_7_equal_heads_predict_what_each_of_them_does() -> None:
    task, model, _, means, x = example()
    same = {name: model[name] for name in HEAD}
    found = THE.predictions([model, same, means, {}], x, task)
    assert_close(found, logits(model, x).log_softmax(-1), 1e-12)


def test_inv_the_8_heads_that_disagree_are_chosen_by_the_nearer_features() -> None:
    generic, own = torch.tensor([[40.0, 0.0]]).repeat(2, 1).double(), torch.tensor([[0.0, 40.0]]).repeat(2, 1).double()
    nearer = THE.weights(generic, own, torch.tensor([-1.0, 1.0], dtype=torch.float64))
    assert float(nearer[0]) > 0.95 and float(nearer[1]) < 0.05
    assert_close(nearer.sum(), torch.tensor(1.0, dtype=torch.float64), 1e-9)


def test_inv_the_9_heads_that_agree_are_chosen_by_certainty() -> None:
    certain, doubtful = torch.tensor([[6.0, 0.0, 0.0]]).double(), torch.tensor([[3.0, 0.0, 0.0]]).double()
    none = torch.zeros(1, dtype=torch.float64)
    assert float(THE.weights(certain, doubtful, none)) > 0.9
    assert float(THE.weights(doubtful, certain, none)) < 0.1


def test_the_moving_mean_of_known_samples() -> None:
    heads, seen = replace(THE, sample_share=0.5, history_rate=0.25), {}
    found = heads.compared(torch.tensor([[4.0], [8.0], [0.0]]), seen)
    assert_close(found, torch.tensor([[4.0], [6.5], [1.875]]), 1e-6)
    assert_close(seen["mean"], torch.tensor([3.75]), 1e-6)
    assert_close(heads.compared(torch.tensor([[3.75]]), seen), torch.tensor([[3.75]]), 1e-6)


def test_batches_of_evaluation_give_the_same_scores() -> None:
    toy = after(FedTHE())
    examples = toy.dataset.load(0)["test"]
    rows = toy.algorithm.rows(  # type: ignore[attr-defined]
        toy.server["model"], toy.states()[0], toy.server["features"]
    )
    whole, pieces = (evaluate(rows, examples, toy.task, size) for size in (100, 3))
    assert pieces["personalized"].loss == pytest.approx(whole["personalized"].loss, rel=1e-12)


def test_who_never_took_part_has_the_mean() -> None:
    toy = toy_of(FedTHE())
    toy.step([0, 1])
    rows = toy.scores()[3]
    assert set(rows) == {"global", "personal", "personalized"}
    assert len({tuple(found.vector.tolist()) for found in rows.values()}) == 1


def test_a_newcomer_trains_a_head_and_has_mean_features() -> None:
    toy = toy_of(FedTHE(), unseen=1)
    toy.step([0, 1, 2])
    (rows,) = toy.scores(newcomers=True).values()
    assert rows["personalized"].vector.tolist() != rows["global"].vector.tolist()


def test_mean_features_travel_with_the_model() -> None:
    toy = toy_of(FedTHE())
    toy.step([0, 1, 2])
    size = num_bytes(toy.server["model"]) + num_bytes({"features": toy.server["features"]})
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (3 * size, 3 * size)


def test_looped_and_vectorised_agree_with_batch_normalization() -> None:
    looped, vectorized = (after(FedTHE(), task=normalized_layers(), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.server, vectorized.server, 1e-10)
    states = [{str(client): state for client, state in toy.states().items()} for toy in (looped, vectorized)]
    assert_close(*states, 1e-10)
    for client, losses in looped.scores().items():
        other = vectorized.scores()[client]["personalized"].loss
        assert losses["personalized"].loss == pytest.approx(other, rel=1e-6)
