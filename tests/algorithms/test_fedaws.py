"""FedAwS: an oracle in plain PyTorch, single classes, spread embeddings, what a client does not read, refusals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedaws import FedAwS, spread
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from tests.support.fedetf_toys import SKEWED, TRAIN
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SIZES = [len(SKEWED.load(client)["train"]) for client in range(4)]
COHORTS = ([0, 2], [1], [1, 2, 3], [0, 1, 2, 3])


def toy_of(algorithm: FedAwS | None = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    settings = {"dataset": SKEWED, "task": two_layers(), **options}
    return Toy(algorithm or FedAwS(), train=train, **settings)


class Oracle(nn.Module):
    """The model in modules of PyTorch, from the paper's formulas."""

    def __init__(self, server: Tree) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7).double()
        self.inner.load_state_dict({name.partition(".")[2]: leaf for name, leaf in server["shared"].items()})
        self.w = nn.Parameter(server["embeddings"].clone())

    def cosines(self, x: Tensor) -> Tensor:
        f = self.inner(x).relu()
        found: Tensor = f @ self.w.T / f.norm(dim=1)[:, None] / self.w.norm(dim=1)
        return found


def regularizer(w: Tensor, margin: float) -> Tensor:
    """R(W), pair by pair."""
    total = torch.zeros((), dtype=torch.float64)
    for c in range(len(w)):
        for j in range(len(w)):
            if j != c:
                cosine = w[c] @ w[j] / w[c].norm() / w[j].norm()
                total = total + (margin - (1 - cosine)).clamp(min=0) ** 2
    return total


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "uniform", "spread_steps": 3, "spread_rate": 0.05},
        {"positive_margin": 0.4, "spread_margin": 1.4, "spread_steps": 2},
        {"spread_steps": 0},
    ],
)
def test_inv_aws_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = FedAwS(**options)
    toy = toy_of(method, mode=mode)
    server, samples = copy(toy.server), method.aggregation == "samples"
    for cohort in COHORTS:
        q = {k: SIZES[k] / sum(SIZES[j] for j in cohort) if samples else 1 / len(cohort) for k in cohort}
        shared = {name: torch.zeros_like(leaf) for name, leaf in server["shared"].items()}
        sums, counts = torch.zeros(3, 7).double(), torch.zeros(3).double()
        for k in cohort:
            model, data = Oracle(server), SKEWED.load(k)["train"]
            rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(
                SIZES[k], 4, 2 * -(-SIZES[k] // 4), toy.context.streams.generator("batches", toy.round, k)
            )
            for index in plan.batches(CPU):
                rule.zero_grad()
                right = model.cosines(data.x[index])[range(len(index)), data.y[index]]
                ((method.positive_margin - right).clamp(min=0) ** 2).mean().backward()
                rule.step()
            for name, leaf in model.inner.named_parameters():
                shared[f"inner.{name}"] += q[k] * leaf.detach()
            for c in set(data.y.tolist()):
                n = int((data.y == c).sum()) if samples else 1
                sums[c] += n * model.w[c].detach() / model.w[c].detach().norm()
                counts[c] += n
        w = torch.stack([sums[c] if counts[c] else server["embeddings"][c] for c in range(3)])
        w = w / w.norm(dim=1, keepdim=True)
        for _ in range(method.spread_steps):
            leaf = w.clone().requires_grad_()
            (slope,) = torch.autograd.grad(regularizer(leaf, method.spread_margin), leaf)
            w = w - method.spread_rate * slope
            w = w / w.norm(dim=1, keepdim=True)
        server = {"shared": shared, "embeddings": w}
        assert_close(toy.step(cohort), server, 1e-12)
    scores = toy.scores()
    for client in range(4):
        test, model = SKEWED.load(client)["test"], Oracle(server)
        expected = float(F.cross_entropy(model.cosines(test.x), test.y).detach())
        assert abs(scores[client]["global"].loss - expected) < 1e-12


def test_inv_aws_2_a_step_spreads_and_leaves_alone_what_is_far_apart() -> None:
    w = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    for margin in (0.7, 1.0, 1.5):
        leaf, values = w, [float(regularizer(w, margin))]
        for _ in range(30):
            leaf = spread(leaf, margin, 0.02)
            values.append(float(regularizer(leaf, margin)))
        assert all(after <= before for before, after in pairwise(values))
        assert values[-1] < 0.7 * values[0]
        assert_close(leaf.norm(dim=1), torch.ones(6).double(), 1e-14)
    apart = torch.eye(4, dtype=torch.float64)[:3]
    assert spread(apart, 1.0, 0.1) is apart
    alone = apart[:1]
    assert spread(alone, 2.0, 0.1) is alone
    collapsed = spread(apart[[0, 0]], 1.0, 0.1)
    assert_close(collapsed, apart[[0, 0]], 1e-15)  # equal embeddings have no direction to go


@MODES
def test_inv_aws_3_a_client_reads_and_moves_the_embeddings_of_its_own_classes_alone(mode: str) -> None:
    method = FedAwS(spread_steps=0)
    lone = next(k for k in range(4) if len(set(SKEWED.load(k)["train"].y.tolist())) < 3)
    absent = sorted(set(range(3)) - set(SKEWED.load(lone)["train"].y.tolist()))
    one, other = toy_of(method, mode=mode), toy_of(method, mode=mode)
    changed = one.server["embeddings"].clone()
    changed[absent] = F.normalize(torch.ones(len(absent), 7).double(), dim=-1)
    other.server = {**other.server, "embeddings": changed}
    before = one.server["embeddings"].clone()
    first, second = one.step([lone]), other.step([lone])
    assert_equal(first["shared"], second["shared"])
    assert torch.equal(first["embeddings"][absent], before[absent])
    assert torch.equal(second["embeddings"][absent], changed[absent])
    present = [c for c in range(3) if c not in absent]
    assert torch.equal(first["embeddings"][present], second["embeddings"][present])


def single_classes(clients: int = 6) -> ListDataset:
    """Clients with samples of one class each: three classes around three points."""
    generator = torch.Generator().manual_seed(1)
    points = 3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    found = [(points[k % 3] + torch.randn(20, 5, generator=generator, dtype=torch.float64)) for k in range(clients)]
    return ListDataset([(x, torch.full((20,), k % 3)) for k, x in enumerate(found)])


@pytest.mark.slow
def test_inv_aws_4_clients_of_one_class_learn_to_tell_classes_apart_by_the_spread_alone() -> None:
    """It makes them orthogonal; without it all come nearer."""
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.1)

    def run(method: Any) -> tuple[float, Toy]:
        toy = toy_of(method, train, dataset=single_classes())
        toy.run()
        return float(np.mean([one["global"].metrics()["top1"] for one in toy.scores().values()])), toy

    def pairs(toy: Toy) -> Tensor:
        w = toy.server["embeddings"]
        return (w @ w.T)[[0, 0, 1], [1, 2, 2]]

    (spread_out, kept), (collapsed, free) = run(FedAwS()), run(FedAwS(spread_steps=0))
    assert spread_out > 0.95 and spread_out >= collapsed
    start = pairs(toy_of(dataset=single_classes()))
    assert (pairs(kept).abs() < 0.05).all() and (pairs(free) > start + 0.2).all()


def test_first_embeddings_are_unit_vectors_of_the_seed() -> None:
    one, again, other = (toy_of(seed=seed).server["embeddings"] for seed in (0, 0, 1))
    assert_equal(one, again)
    assert (one != other).all()
    assert_close(one.norm(dim=1), torch.ones(3).double(), 1e-14)


@MODES
def test_single_samples_and_mini_batches_of_one_stay_finite(mode: str) -> None:
    data = single_classes(3)
    clients = [
        (one.x[:n], one.y[:n]) for n, one in zip((1, 20, 3), (data.load(k)["train"] for k in range(3)), strict=True)
    ]
    for task in (two_layers(), normalized_layers()):
        size = 1 if task.network.buffer_names == () else 3
        toy = toy_of(
            train=TRAIN.model_copy(update={"batch_size": size}), dataset=ListDataset(clients), task=task, mode=mode
        )
        for cohort in ([0, 1, 2], [0], [2]):
            server = toy.step(cohort)
            assert all(bool(leaf.isfinite().all()) for leaf in (*server["shared"].values(), server["embeddings"]))


def test_what_it_cannot_do_is_refused() -> None:
    toy = toy_of()
    FedAwS().check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"FedAwS trains all layers but the last.*choose a deeper model"):
        FedAwS().check(softmax_regression(), toy.context)
    for values in ({"positive_margin": 1.1}, {"spread_margin": 2.1}, {"spread_rate": 0.0}, {"spread_steps": -1}):
        with pytest.raises(ValueError, match=next(iter(values))):
            FedAwS(**values)  # type: ignore[arg-type]
