"""FLUTE: invariants FLU, whole rounds by an oracle in plain PyTorch, messages, newcomers, what is refused, learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.fedrep import FedRep
from algorithms.flute import FLUTE, collapse
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    partly_fixed,
    planted_clients,
    three_layers,
)
from tests.support.toy_networks import SoftmaxRegression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2, 0, 0, 2], [1, 1, 1], [2, 0, 2, 2, 0], [0, 0, 1, 0, 1, 1])
PLAIN: dict[str, Any] = {"collapse_weight": 0, "head_decay": 0, "feature_weight": 0, "server_lr": 0}


def several(algorithm: Any, **options: Any) -> Toy:
    """Clients with all, one and two of three classes."""
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def distance(weight: Tensor, labels: Tensor) -> Tensor:
    """NC by loops over pairs of classes."""
    products = torch.stack([torch.stack([a @ b for b in weight]) for a in weight])
    have, count = set(labels.tolist()), len(weight)
    rows = []
    for i in range(count):
        both = [float(i in have and j in have) * (float(i == j) - 1 / count) for j in range(count)]
        rows.append(both)
    wanted = torch.tensor(rows, dtype=torch.float64) / (count - 1) ** 0.5
    return torch.linalg.matrix_norm(products / torch.linalg.matrix_norm(products) - wanted)


def descend(parameters: list[Tensor], loss: Any, n: int, epochs: int, generator: np.random.Generator) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.01)
    for index in plan_batches(n, 4, epochs * -(-n // 4), generator).batches(CPU):
        optimizer.zero_grad()
        loss(index).backward()
        optimizer.step()


def test_inv_flu_1_rounds_are_those_of_an_oracle_in_plain_pytorch() -> None:
    algorithm = FLUTE(
        collapse_weight=0.7, head_decay=0.05, feature_weight=0.03, head_epochs=3, joint_epochs=2, server_lr=0.8
    )
    toy = several(algorithm)
    streams, start = toy.context.streams, initial(toy)
    body = {name: start[name] for name in ("inner.weight", "inner.bias")}
    heads: dict[int, Tree] = {}
    for round, cohort in enumerate(([0, 1, 2, 3], [0, 2], [1, 3], [2])):
        bodies, sizes = [], []
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            own = heads.get(client, {name: start[name] for name in ("head.weight", "head.bias")})
            model = {name: leaf.clone().requires_grad_() for name, leaf in {**body, **own}.items()}

            def loss(index: Tensor, joint: bool, model: Any = model, part: Any = part) -> Tensor:
                f = torch.relu(part.x[index] @ model["inner.weight"].T + model["inner.bias"])
                z = f @ model["head.weight"].T + model["head.bias"]
                value = F.cross_entropy(z, part.y[index]) + 0.7 * distance(model["head.weight"], part.y)
                value = value + 0.05 * (model["head.weight"] ** 2).sum()
                return value + 0.03 * (f**2).sum() / len(f) if joint else value

            head = [model["head.weight"], model["head.bias"]]
            generators = (streams.generator(name, round, client) for name in ("batches", "batches.1"))
            descend(head, lambda index, loss=loss: loss(index, False), len(part.y), 3, next(generators))
            descend(list(model.values()), lambda index, loss=loss: loss(index, True), len(part.y), 2, next(generators))
            trained = {name: leaf.detach() for name, leaf in model.items()}
            bodies.append({name: trained[name] for name in body})
            sizes.append(len(part.y))
            heads[client] = {name: trained[name] for name in ("head.weight", "head.bias")}
        body = {
            name: sum(n * one[name] for n, one in zip(sizes, bodies, strict=True)) / sum(sizes)  # type: ignore[misc]
            for name in body
        }
        weights = {client: heads[client]["head.weight"].clone().requires_grad_() for client in cohort}
        apart = [distance(weights[client], toy.dataset.load(client)["train"].y) for client in cohort]
        (sum(apart) / len(cohort)).backward()  # type: ignore[union-attr]
        for client, weight in weights.items():
            assert weight.grad is not None
            heads[client] = {**heads[client], "head.weight": weight.detach() - 0.8 * weight.grad}
        toy.step(cohort)
        assert_close(toy.server, {"shared": body}, 1e-12)
        for client, own in heads.items():
            assert_close(toy.states()[client]["personal"], own, 1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("task", [two_layers(), three_layers()], ids=["plain", "buffers"])
def test_inv_flu_2_without_regularisers_and_the_heads_pass_it_is_fedper(task: Any, mode: str) -> None:
    ours = several(FLUTE(**PLAIN, head_epochs=0, joint_epochs=None), task=task, mode=mode)
    theirs = several(FedPer(), task=task, mode=mode)
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_equal(ours.states(), theirs.states())


def test_inv_flu_3_without_regularisers_the_heads_pass_is_fedreps() -> None:
    ours, theirs = several(FLUTE(**PLAIN, head_epochs=3, joint_epochs=0)), several(FedRep(head_epochs=3, body_epochs=0))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    assert_equal(ours.states(), theirs.states())


def test_inv_flu_4_collapsed_heads_are_at_distance_0_of_any_length_and_stay() -> None:
    simplex = torch.eye(4).double() - 0.25
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double())[0]
    everything = torch.ones(4).double()
    for length in (1e-3, 1.0, 50.0):
        weight = length * simplex @ rotation[:4]
        assert float(collapse(weight, everything)) < 1e-12
        slope = torch.func.grad(collapse)(weight, everything)
        assert slope.isfinite().all()
    exact = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()
    assert float(collapse(exact, torch.ones(2).double())) < 1e-15


def test_inv_flu_5_the_distance_does_not_depend_on_length_or_rotation_and_a_step_lowers_it() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 8, generator=generator).double()
    seen = torch.tensor([1, 1, 0, 1, 0]).double()
    labels = torch.tensor([0, 1, 3])
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator).double())[0]
    found = collapse(weight, seen)
    assert_close(found, distance(weight, labels), 1e-14)
    assert_close(collapse(3.7 * weight @ rotation, seen), found, 1e-13)
    slope = torch.func.grad(collapse)(weight, seen)
    assert abs(float((slope * weight).sum())) < 1e-13  # lengths do not matter
    assert float(collapse(weight - 0.5 * slope, seen)) < float(found)


def test_a_head_of_zeros_has_a_finite_slope() -> None:
    weight = torch.zeros(3, 4).double()
    assert torch.equal(torch.func.grad(collapse)(weight, torch.ones(3).double()), weight)


def test_inv_flu_6_the_servers_step_moves_weights_alone_and_travels() -> None:
    still, moved = (several(FLUTE(head_epochs=1, server_lr=rate)) for rate in (0.0, 0.4))
    cohort, names = [0, 1, 3], ("head.weight", "head.bias")
    assert_equal(still.step(cohort), moved.step(cohort))
    for client in cohort:
        (before, bias), (after, same) = (
            [toy.states()[client]["personal"][name] for name in names] for toy in (still, moved)
        )
        seen = torch.zeros(3).double()
        seen[toy_labels(moved, client)] = 1
        assert_close(after, before - 0.4 / 3 * torch.func.grad(collapse)(before, seen), 1e-14)
        assert torch.equal(bias, same) and not torch.equal(before, after)
    body, head = 7 * 5 + 7, 3 * 7
    assert still.federation.traffic.by_client == dict.fromkeys(cohort, (8 * body, 8 * body))
    assert moved.federation.traffic.by_client == dict.fromkeys(cohort, (8 * (body + head), 8 * (body + head + 3)))


def toy_labels(toy: Toy, client: int) -> Tensor:
    """The classes that a client has."""
    return toy.dataset.load(client)["train"].y.unique()


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    algorithm = FLUTE(head_epochs=2, feature_weight=0.05)
    assert_modes_agree(algorithm, (8, 12, 3, 10), TRAIN, double, 1e-10 if double else 1e-5)


def test_rows_are_those_of_the_stepped_head_and_a_newcomer_fits_its_own() -> None:
    toy = several(FLUTE(head_epochs=2), unseen=1)
    toy.step([0, 2])
    for client, rows in toy.scores().items():
        part, own = toy.dataset.load(client)["test"], toy.states().get(client, {}).get("personal")
        model = {**initial(toy), **toy.server["shared"], **(own or {})}
        assert (
            abs(rows["personalized"].loss - float(F.cross_entropy(toy.task.network.logits(model, part.x), part.y)))
            < 1e-12
        )
    found = toy.scores(newcomers=True)[3]["personalized"].loss
    part, start = toy.dataset.load(3)["train"], {**initial(toy), **toy.server["shared"]}
    head = [start[name].clone().requires_grad_() for name in ("head.weight", "head.bias")]
    f = torch.relu(part.x @ start["inner.weight"].T + start["inner.bias"])

    def loss(index: Tensor) -> Tensor:
        value = F.cross_entropy(f[index] @ head[0].T + head[1], part.y[index])
        return value + 0.25 * distance(head[0], part.y) + 0.0025 * (head[0] ** 2).sum()

    descend(head, loss, len(part.y), 2, toy.context.streams.generator("batches.join", 0, 3))
    assert abs(found - float(F.cross_entropy(f @ head[0].T + head[1], part.y).detach())) < 1e-12


def test_what_is_undefined_is_refused() -> None:
    context = several(FLUTE()).context
    with pytest.raises(ConfigError, match=r"FLUTE needs the last layer's weight to be trained"):
        FLUTE().check(partly_fixed("head.weight"), context)
    with pytest.raises(ConfigError, match=r"no body is left"):
        FLUTE().check(Classification(Network(SoftmaxRegression)), context)
    for option in ("collapse_weight", "head_decay", "feature_weight", "server_lr", "head_epochs"):
        with pytest.raises(ValueError, match=option):
            FLUTE(**{option: -1})  # type: ignore[arg-type]


@pytest.mark.slow
def test_learning() -> None:
    """The rule of the labels is the client's own; what the inputs are projected to is common."""
    train = TRAIN.model_copy(update={"rounds": 30, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((FLUTE(), "personalized"), (FedAvg(), "global"), (Local(), "personalized")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["flute"] > accuracy["local"] + 0.05, accuracy
    assert accuracy["local"] > accuracy["fedavg"] + 0.1, accuracy
