"""FedHP: an oracle in plain PyTorch, anchors that are spread, what a lacking class keeps, architectures, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedhp import FedHP, distances, spread
from algorithms.parts.replaced_heads import simplex_etf
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, leaves
from rayfl.tasks.classification import Classification
from tests.support.fedetf_toys import SKEWED, TRAIN
from tests.support.toy_networks import DoubleNetwork, TwoLayers, softmax_regression, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SIZES = [len(SKEWED.load(client)["train"]) for client in range(4)]
COHORTS = ([0, 2], [1], [1, 2, 3], [0, 1, 2, 3])


def toy_of(algorithm: FedHP | None = None, **options: Any) -> Toy:
    settings = {"dataset": SKEWED, "task": two_layers(), "train": TRAIN, **options}
    return Toy(algorithm or FedHP(spread_steps=50), **settings)


class Oracle(nn.Module):
    """A client's body and prototypes in modules of PyTorch."""

    def __init__(self, inner: Tree, prototypes: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7).double()
        self.inner.load_state_dict(inner)
        self.p = nn.Parameter(prototypes.clone())

    def logits(self, x: Tensor) -> Tensor:
        f = self.inner(x).relu()
        return torch.stack([-(f - p).square().sum(1).sqrt() for p in self.p], 1)


@MODES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prototype_weights": "samples", "anchor_weight": 2.0, "inference": "shared"},
        {"prototype_weights": "uniform", "prototype_lr": 0.02, "anchors": "simplex", "anchor_weight": 0.0},
    ],
)
def test_inv_fedhp_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any], mode: str) -> None:
    method = FedHP(spread_steps=50, **options)
    toy = toy_of(method, mode=mode)
    anchors, shared = toy.server["anchors"], toy.server["prototypes"].clone()
    first = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    bodies = {k: {name: first[f"inner.{name}"] for name in ("weight", "bias")} for k in range(4)}
    own: dict[int, Tensor] = {}
    for cohort in COHORTS:
        sums, total = torch.zeros(3, 7).double(), torch.zeros(3).double()
        for k in cohort:
            model, data = Oracle(bodies[k], shared), SKEWED.load(k)["train"]
            rates = [
                {"params": list(model.inner.parameters())},
                {"params": [model.p], "lr": 0.1 if method.prototype_lr is None else method.prototype_lr},
            ]
            rule = torch.optim.SGD(rates, lr=0.1, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(
                SIZES[k], 4, 2 * -(-SIZES[k] // 4), toy.context.streams.generator("batches", toy.round, k)
            )
            for index in plan.batches(CPU):
                rule.zero_grad()
                value = F.cross_entropy(model.logits(data.x[index]), data.y[index])
                for c in range(3):
                    cosine = model.p[c] @ anchors[c] / model.p[c].norm() / anchors[c].norm()
                    value = value + method.anchor_weight * (1 - cosine) / 3
                value.backward()
                rule.step()
            bodies[k] = {name: leaf.detach() for name, leaf in model.inner.named_parameters()}
            own[k] = model.p.detach()
            for c in range(3):
                n = int((data.y == c).sum())
                q = {"shares": n / SIZES[k], "samples": n, "uniform": 1}[method.prototype_weights]
                sums[c] += q * own[k][c]
                total[c] += q
        shared = torch.stack([sums[c] / total[c] if total[c] else shared[c] for c in range(3)])
        toy.step(cohort)
        assert_close(toy.server, {"anchors": anchors, "prototypes": shared}, 1e-12)
    scores = toy.scores()
    for k in range(4):
        test = SKEWED.load(k)["test"]
        losses = [
            float(F.cross_entropy(Oracle(bodies[k], p).logits(test.x), test.y).detach()) for p in (own[k], shared)
        ]
        rows = ("personalized", "shared") if method.inference == "own" else ("own", "personalized")
        assert [scores[k][row].loss for row in rows] == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize(("classes", "dim"), [(3, 7), (5, 4), (10, 32)])
def test_inv_fedhp_2_anchors_come_near_to_a_simplex(classes: int, dim: int) -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((classes, dim)))

    def largest(vectors: Tensor) -> float:
        return float((vectors @ vectors.T).fill_diagonal_(-2).max())

    found = spread(drawn, 1000)
    assert_close(found.norm(dim=1), torch.ones(classes).double(), 1e-12)
    assert -1 / (classes - 1) - 1e-12 <= largest(found) < -1 / (classes - 1) + 0.1
    assert largest(found) < largest(F.normalize(drawn, dim=1)) - 0.2
    assert_equal(spread(drawn, 0), F.normalize(drawn, dim=1))


def test_inv_fedhp_3_a_step_of_spreading_is_that_of_autograd() -> None:
    drawn = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    leaf, velocity = drawn, torch.zeros_like(drawn)
    for _ in range(5):
        leaf = leaf.detach().requires_grad_()
        value = torch.stack([max(leaf[c] @ leaf[j] for j in range(6) if j != c) for c in range(6)]).mean()
        (slope,) = torch.autograd.grad(value, leaf)
        velocity = 0.9 * velocity + slope
        leaf = F.normalize(leaf.detach() - 0.1 * velocity, dim=1)
    assert_close(spread(drawn, 5), leaf, 1e-12)


def test_a_single_class_stays_where_it_was_drawn() -> None:
    assert_equal(spread(torch.tensor([[3.0, 4.0]]), 7), torch.tensor([[0.6, 0.8]]))


def test_inv_fedhp_4_a_class_that_nobody_has_keeps_its_prototype() -> None:
    toy = toy_of()
    before = toy.server["prototypes"]
    after = toy.step([1])["prototypes"]
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert_close(after[1], toy.states()[1]["prototypes"][1], 1e-12)


def test_inv_fedhp_5_with_a_large_weight_prototypes_keep_the_anchors_directions() -> None:
    apart = []
    for weight in (0.0, 5.0):
        toy = toy_of(FedHP(spread_steps=50, anchor_weight=weight))
        for cohort in COHORTS:
            toy.step(cohort)
        apart.append(float((1 - F.cosine_similarity(toy.server["prototypes"], toy.server["anchors"])).mean()))
    assert apart[1] < 0.2 * apart[0]


def test_inv_fedhp_6_messages_have_the_size_of_prototypes_and_no_last_layer_is_trained() -> None:
    toy = toy_of()
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == {0: (8 * 42, 8 * 24), 2: (8 * 42, 8 * 24)}
    assert {path for path, _ in leaves(toy.server)} == {"anchors", "prototypes"}
    first = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    for name in ("head.weight", "head.bias"):
        assert torch.equal(toy.states()[0]["local"][name], first[name])


def test_distances_at_a_prototype_have_a_finite_slope() -> None:
    features = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(distances(features, torch.ones(1, 2, dtype=torch.float64)).sum(), features)
    assert torch.isfinite(slope).all()


def test_simplex_anchors_are_those_of_the_frame() -> None:
    toy = toy_of(FedHP(anchors="simplex"))
    expected = simplex_etf(3, 7, toy.context.streams.generator("init.prototypes"))
    assert_close(toy.server["anchors"], expected, 1e-12)


@pytest.mark.parametrize(
    ("method", "task", "said"),
    [
        (FedHP(), softmax_regression(), "FedHP trains what is before the last layer"),
        (FedHP(anchors="simplex"), two_layers(hidden=2), r"algorithm.anchors is simplex, .* \(2\), but there are 3"),
    ],
)
def test_what_cannot_be_is_refused(method: FedHP, task: Classification, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method.check(task, toy_of().context)


def test_clients_of_several_architectures_share_prototypes() -> None:
    def candidates(widths: tuple[int, ...]) -> Classification:
        found = [Classification(DoubleNetwork(lambda width=width: TwoLayers(hidden=width))) for width in widths]
        return Classification(found[0].network, candidates=found)

    toy = toy_of(task=candidates((7, 7)))
    for cohort in COHORTS:
        toy.step(cohort)
    assert set(toy.scores()[0]) == {"personalized", "shared"}
    with pytest.raises(ConfigError, match=r"FedHP's clients share features, .* read \[7, 9\]"):
        FedHP().check(candidates((7, 9)), toy.context)
