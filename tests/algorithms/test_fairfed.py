"""FairFed: an oracle in plain PyTorch, gaps by hand, weights under which group and label are independent, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fairfed import FairFed, gaps, reweighed
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import RayflError
from rayfl.examples import Examples
from rayfl.experiment.parts import Parts
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
COHORTS = ([0, 1, 3], [1, 2], [0, 1, 2, 3], [0, 3])


def toy_of(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), **{"train": TRAIN, **options})


def favour(said: Tensor, y: Tensor, group: Tensor, metric: str) -> float | None:
    """P(1 | A=0, ...) - P(1 | A=1, ...), by definition."""
    among = (y == 1) if metric == "equal_opportunity" else torch.ones(len(y), dtype=torch.bool)
    parts = [said[among & (group == a)] for a in (0, 1)]
    return None if any(len(part) == 0 for part in parts) else float(parts[0].mean() - parts[1].mean())


@pytest.mark.parametrize("metric", ["equal_opportunity", "statistical_parity"])
@pytest.mark.parametrize("reweighing", [True, False])
def test_inv_oracle_rounds_are_those_of_plain_pytorch(metric: Any, reweighing: bool) -> None:
    """Weights kept from round to round, moved by the gaps; the client with one sample has a gap of accuracies."""
    beta = 0.02
    toy = toy_of(FairFed(beta=beta, metric=metric, reweighing=reweighing))
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    omega = {client: size / sum(SIZES) for client, size in enumerate(SIZES)}
    undefined = 0
    for round, cohort in enumerate(COHORTS):
        parts = {client: toy.dataset.load(client)["train"] for client in cohort}
        said = {k: (network.head_inputs_and_logits(w, p.x)[1].argmax(1) == 1).double() for k, p in parts.items()}
        y = {client: (part.y == 1).long() for client, part in parts.items()}
        group = {client: torch.arange(len(part.y)) % 2 for client, part in parts.items()}
        together = [torch.cat([one[client] for client in cohort]) for one in (said, y, group)]
        overall, right = favour(*together, metric), float((together[0] == together[1]).double().mean())
        delta = {}
        for client in cohort:
            own = favour(said[client], y[client], group[client], metric)
            undefined += own is None
            accuracy = float((said[client] == y[client]).double().mean())
            delta[client] = abs(accuracy - right) if own is None or overall is None else abs(own - overall)
        for client in cohort:
            omega[client] -= beta * (delta[client] - sum(delta.values()) / len(cohort))
        assert min(omega.values()) > 0
        above = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client in cohort:
            part, n = parts[client], len(parts[client].y)
            cost = torch.ones(n, dtype=torch.float64)
            if reweighing:
                for i in range(n):
                    of_group, of_label = group[client] == group[client][i], part.y == part.y[i]
                    cost[i] = int(of_group.sum()) * int(of_label.sum()) / (n * int((of_group & of_label).sum()))
            model = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.5)
            steps = 2 * -(-n // 4)
            for index in plan_batches(n, 4, steps, streams.generator("batches", round, client)).batches(CPU):
                optimizer.zero_grad()
                logits = network.head_inputs_and_logits(model, part.x[index])[1]
                (cost[index] * F.cross_entropy(logits, part.y[index], reduction="none")).mean().backward()
                optimizer.step()
            share = omega[client] / sum(omega[one] for one in cohort)
            for name, leaf in model.items():
                above[name] += share * leaf.detach()
        w = above
        assert_close(toy.step(cohort)["model"], w, 1e-12)
    assert undefined


def test_inv_fairfed_1_without_steps_and_weights_of_samples_it_is_federated_averaging() -> None:
    fair, plain = toy_of(FairFed(beta=0, reweighing=False)), toy_of(FedAvg())
    for cohort in COHORTS:
        assert_close(fair.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


def test_inv_fairfed_2_a_client_far_from_the_others_stops_counting() -> None:
    toy, cohort = toy_of(FairFed(beta=50.0)), [0, 1, 3]
    toy.step(cohort)
    moved = toy.server["moved"]
    assert float(moved.sum()) == pytest.approx(0, abs=1e-12) and float(moved[2]) == 0
    weights = (torch.tensor(SIZES) / sum(SIZES) + moved)[cohort]
    trained = {client: toy_of(FairFed(beta=0)).step([client])["model"] for client in cohort}
    assert 0 < int((weights > 0).sum()) < 3
    shares = [float(weight.clamp(min=0) / weights.clamp(min=0).sum()) for weight in weights]
    for name, leaf in toy.server["model"].items():
        expected = sum(share * trained[client][name] for share, client in zip(shares, cohort, strict=True))
        assert_close(leaf, expected, 1e-12, name)


def test_gaps_are_signed_differences_or_accuracies() -> None:
    favoured = [[[0, 0], [0, 4]], [[0, 0], [4, 0]]]  # group 0 has all its good outcomes, group 1 none
    other = [[[0, 0], [4, 0]], [[0, 0], [0, 4]]]
    alone = [[[3, 1], [0, 0]], [[0, 0], [0, 0]]]
    counts = np.array([favoured, other, alone], dtype=np.float64)
    # together both have half of theirs; 8 + 3 of 20 samples are right, and 3 of the 4 of a client with one group
    np.testing.assert_allclose(gaps(counts, "equal_opportunity"), [1, 1, abs(3 / 4 - 11 / 20)])


def test_inv_reweighed_1_group_and_label_are_independent_under_the_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    group = torch.randint(2, (60,), generator=generator)
    y = (torch.rand(60, generator=generator) < 0.2 + 0.5 * group).long()
    weights = reweighed(Examples(torch.zeros(60, 1), y, group))
    assert weights.sum() == pytest.approx(60)
    shares = [np.average(y.numpy()[own], weights=weights[own]) for own in (group.numpy() == 0, group.numpy() == 1)]
    np.testing.assert_allclose(shares, float(y.double().mean()))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataset": "breast_cancer"}, r"FairFed compares groups of people.*dataset\.group"),
        (
            {"dataset": "tests.metrics.test_people:three_classes"},
            "the data have 2 groups and 3 classes",
        ),
        ({"algorithm": {"name": "fairfed", "aggregation": "uniform"}}, r"algorithm\.aggregation"),
        ({"aggregator": "median"}, "its clients say how a model treats groups"),
    ],
)
def test_what_it_cannot_have_is_refused(sections: dict[str, Any], message: str) -> None:
    content = {
        "dataset": {"name": "synthetic_groups", "samples": 100},
        "partition": {"name": "iid", "num_clients": 3},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fairfed",
        "train": {"clients_per_round": "all"},
        **sections,
    }
    with pytest.raises(RayflError, match=message):
        Parts(load_config(Experiment, content, [])).check()
