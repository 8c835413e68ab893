"""FedLoGe: invariants LOGE of the sparse frame, of the three losses and of realigned heads; whole runs by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedloge import FedLoGe, personal_head, rows_of_length
from algorithms.parts.replaced_heads import simplex_etf
from algorithms.parts.sparse_simplex import kept_elements, sparse_simplex
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy
from rayfl.randomness import RandomStreams
from tests.support.partial_toys import labelled, partly_fixed, take, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SKEWED = labelled([0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 9 + [1], [0, 1, 2, 2, 2, 1, 1])
"""The second client and the third lack a class; the fourth is never sampled."""
COHORTS = ([0, 1], [1, 2], [0, 2])
HEAD, BODY = ("head.weight", "head.bias"), ("inner.weight", "inner.bias")
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
FEW: dict[str, Any] = {"classifier_steps": 20}


def toy_of(algorithm: FedLoGe, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


def cosines(weight: Tensor) -> Tensor:
    directions = F.normalize(weight, dim=1)
    return (directions @ directions.T)[~torch.eye(len(weight), dtype=torch.bool)]


@pytest.mark.parametrize(("classes", "dim", "sparsity"), [(3, 7, 0.3), (10, 64, 0.6), (5, 5, 0.2)])
def test_inv_loge_1_the_frame_has_its_zeros_its_length_and_nearly_the_angles_of_a_simplex(
    classes: int, dim: int, sparsity: float
) -> None:
    streams = RandomStreams(2)
    found = sparse_simplex(classes, dim, sparsity, 0.1, 400, streams)
    kept = torch.from_numpy(kept_elements(classes, dim, sparsity, streams))
    assert int((~kept).sum()) == int(sparsity * classes * dim) and not found[~kept].any() and found[kept].all()
    cut = simplex_etf(classes, dim, streams.generator("init.classifier")) * kept
    assert cosines(found).max() < cosines(cut).max()
    assert (found.norm(dim=1) - 0.1).abs().max() < 0.3 * (cut.norm(dim=1) - 0.1).min()
    # no vectors have a smaller largest cosine than those of a simplex
    assert -1 / (classes - 1) - 1e-9 <= cosines(found).max() < -1 / (classes - 1) + (0.06 if dim > classes else 0.3)


def test_inv_loge_2_the_frame_is_the_seeds() -> None:
    assert torch.equal(toy_of(FedLoGe(**FEW)).server["classifier"], toy_of(FedLoGe(**FEW)).server["classifier"])
    assert (toy_of(FedLoGe(**FEW), seed=1).server["classifier"] != toy_of(FedLoGe(**FEW)).server["classifier"]).any()


def by_hand(steps: int) -> Tensor:
    """The frame from the formula, with Adam written out and slopes by finite arithmetic of autograd."""
    streams = RandomStreams(5)
    mask = torch.from_numpy(kept_elements(3, 6, 0.4, streams)).double()
    w = simplex_etf(3, 6, streams.generator("init.classifier")) * mask
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    for t in range(1, steps + 1):
        moving = w.clone().requires_grad_()
        lengths = [row.square().sum().sqrt() for row in moving]
        angles = [
            torch.stack(
                [torch.acos((moving[c] @ moving[j]) / (lengths[c] * lengths[j])) for j in range(3) if j != c]
            ).min()
            for c in range(3)
        ]
        loss = sum((length - 0.2) ** 2 for length in lengths) - torch.stack(angles).mean()
        slope = torch.autograd.grad(loss, moving)[0] * mask
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
        w = w - 1 / steps * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    return w


def test_the_frame_is_that_of_the_formula() -> None:
    assert_close(sparse_simplex(3, 6, 0.4, 0.2, 15, RandomStreams(5)), by_hand(15), 1e-12)


def test_inv_loge_3_each_loss_reaches_its_own_tensors_alone() -> None:
    toy, generator = toy_of(FedLoGe(**FEW)), torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.arange(8) % 3
    model, classifier = toy.server["model"], toy.server["classifier"]
    own = {name: leaf + 0.5 for name, leaf in take(model, HEAD).items()}
    moved = {"model": copy(model), "personal": copy(own)}
    tensors = {f"{key}/{name}": leaf.requires_grad_() for key in moved for name, leaf in moved[key].items()}
    from rayfl.tasks.base import Batch

    loss = FedLoGe()._under_three_heads(moved, Batch(x, y), toy.task, {"classifier": classifier}, None)
    found = dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))
    for name, weights in (("body", None), ("model", model), ("personal", own)):
        alone = {key: leaf.clone().requires_grad_() for key, leaf in (weights or model).items()}
        features = torch.relu(x @ (alone if weights is None else model)["inner.weight"].T
                              + (alone if weights is None else model)["inner.bias"])  # fmt: skip
        logits = features @ classifier.T if weights is None else features @ alone[HEAD[0]].T + alone[HEAD[1]]
        names = BODY if weights is None else HEAD
        slopes = torch.autograd.grad(F.cross_entropy(logits, y), [alone[key] for key in names])
        for key, slope in zip(names, slopes, strict=True):
            assert_close(found[f"{'model' if weights is None else name}/{key}"], slope, 1e-12)


class Oracle:
    """Clients in modules and optimizers of PyTorch: the three passes of the authors' code one after the other."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.model, self.classifier = toy, copy(toy.server["model"]), toy.server["classifier"].clone()
        self.own = [take(self.model, HEAD) for _ in range(4)]

    def train(self, client: int, round: int) -> Tree:
        body, psi, phi = nn.Linear(5, 7).double(), nn.Linear(7, 3).double(), nn.Linear(7, 3).double()
        for module, tree, names in ((body, self.model, BODY), (psi, self.model, HEAD), (phi, self.own[client], HEAD)):
            module.load_state_dict({name.partition(".")[2]: tree[name] for name in names})
        rules = {"lr": TRAIN.lr, "momentum": TRAIN.momentum, "weight_decay": TRAIN.weight_decay}
        optimizers = [torch.optim.SGD(module.parameters(), **rules) for module in (body, psi, phi)]
        part = self.toy.dataset.load(client)["train"]
        plan = plan_batches(len(part.y), 4, TRAIN.local_epochs * -(-len(part.y) // 4),
                            self.toy.context.streams.generator("batches", round, client))  # fmt: skip
        for index in plan.batches(CPU):
            x, y = part.x[index], part.y[index]
            features = body(x).relu()
            seen = features.detach()
            losses = [F.cross_entropy(z, y) for z in (features @ self.classifier.T, psi(seen), phi(seen))]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.own[client] = dict(zip(HEAD, (leaf.detach() for leaf in phi.parameters()), strict=True))
        trained = [*body.parameters(), *psi.parameters()]
        return dict(zip(BODY + HEAD, (leaf.detach() for leaf in trained), strict=True))

    def round(self, cohort: list[int], number: int) -> None:
        sizes = {client: len(self.toy.dataset.load(client)["train"].y) for client in cohort}
        found = {client: self.train(client, number) for client in cohort}
        total = sum(sizes.values())
        self.model = {
            name: sum(sizes[client] / total * found[client][name] for client in cohort) for name in BODY + HEAD
        }


@MODES
def test_whole_runs_are_those_of_three_optimizers(mode: str) -> None:
    toy = toy_of(FedLoGe(**FEW, classifier_norm=0.7), mode=mode)
    oracle = Oracle(toy)
    for number, cohort in enumerate(COHORTS):
        toy.step(cohort)
        oracle.round(cohort, number)
        assert_close(toy.server["model"], oracle.model, 1e-12)
        assert torch.equal(toy.server["classifier"], oracle.classifier)
    for client in range(3):
        assert_close(toy.states()[client]["personal"], oracle.own[client], 1e-12)
    assert 3 not in toy.states()


@pytest.mark.parametrize("heads", ["auxiliary", "both"])
@pytest.mark.parametrize("absent", ["left_out", "kept"])
def test_models_that_are_scored_are_realigned(heads: Any, absent: Any) -> None:
    toy = toy_of(FedLoGe(**FEW, personal_heads=heads, absent_classes=absent, head_norm=1.7))
    for cohort in COHORTS:
        toy.step(cohort)
    model, scores = toy.server["model"], toy.scores()
    psi, b = model["head.weight"], model["head.bias"]
    for client in range(4):
        part = toy.dataset.load(client)
        x, y, labels = part["test"].x, part["test"].y, part["train"].y
        f = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
        own = toy.states()[client]["personal"] if client < 3 else take(toy.task.network.initialize(
            toy.context.streams.integer("init.global")), HEAD)  # fmt: skip
        lengths = own["head.weight"].square().sum(1).sqrt()
        z = f @ psi.T * lengths + b + own["head.bias"] + f @ (own["head.weight"] if heads == "both" else psi).T
        if absent == "left_out":
            z[:, torch.bincount(labels, minlength=3) == 0] -= 1e4
        expected = {
            "global": 1.7 * (f @ psi.T) / psi.square().sum(1).sqrt() + b,
            "sparse": f @ toy.server["classifier"].T,
            "personalized": z,
        }
        assert set(scores[client]) == set(expected)
        for row, logits in expected.items():
            assert scores[client][row].loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-12), row


def test_inv_loge_4_realigned_rows_have_one_length_and_their_directions() -> None:
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for length in (None, 1.7):
        found = rows_of_length(weight, length)
        wanted = weight.norm(dim=1).mean() if length is None else torch.tensor(1.7, dtype=torch.float64)
        assert_close(found.norm(dim=1), wanted.expand(4), 1e-12)
        assert_close(F.normalize(found, dim=1), F.normalize(weight, dim=1), 1e-12)
    weight[2] = 0
    assert not rows_of_length(weight, None)[2].any()


def test_inv_loge_5_an_own_head_without_length_is_the_auxiliary_one_alone() -> None:
    network = two_layers().network
    auxiliary = network.initialize(0)
    nothing = {name: torch.zeros_like(auxiliary[name]) for name in HEAD}
    assert_equal(personal_head(network, auxiliary, nothing, False), take(auxiliary, HEAD))


@MODES
def test_inv_loge_6_what_is_sent_depends_on_no_realignment(mode: str) -> None:
    methods = [FedLoGe(**FEW), FedLoGe(**FEW, head_norm=9.0, personal_heads="both", absent_classes="kept")]
    toys = [toy_of(method, mode=mode) for method in methods]
    for cohort in COHORTS:
        one, other = (toy.step(cohort) for toy in toys)
        assert_equal(one, other)
    assert vectors(toys[0].scores(), "sparse") == vectors(toys[1].scores(), "sparse")


def test_inv_loge_7_what_travels_and_what_stays() -> None:
    toy = toy_of(FedLoGe(**FEW))
    size = sum(leaf.numel() for leaf in toy.server["model"].values())
    for cohort in COHORTS:
        assert set(toy.step(cohort)["model"]) == {*BODY, *HEAD}
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * (size + 21), 8 * size))
    assert {name for state in toy.states().values() for name in state["personal"]} == set(HEAD)


@pytest.mark.parametrize(
    ("options", "task", "message"),
    [
        ({}, two_layers(5, 2), "as many as the last layer has inputs \\(2\\), but there are 3"),
        ({"sparsity": 0.95}, two_layers(), "sparsity is 0.95, with which class . has no element"),
        ({}, partly_fixed("inner.weight", "inner.bias"), "trains none of these"),
        ({}, partly_fixed("head.bias"), "'head.bias' has requires_grad=False"),
    ],
)
def test_what_it_cannot_have_is_refused(options: dict[str, Any], task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedLoGe(**options).check(task, toy_of(FedLoGe(**FEW)).context)


def test_running_statistics_are_averaged_with_the_body() -> None:
    toy = toy_of(FedLoGe(**FEW), task=normalized_layers())
    before = copy(toy.server["model"])
    toy.step([0, 3])
    assert (toy.server["model"]["norm.running_mean"] != before["norm.running_mean"]).all()
    assert np.isfinite(toy.scores()[0]["personalized"].loss)
