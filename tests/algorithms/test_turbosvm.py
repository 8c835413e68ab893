"""TurboSVM-FL: an oracle with scikit-learn and PyTorch, federated averaging, support vectors, spreading, refusals."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.svm import SVC
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.turbosvm import TurboSVM, drawn_classes, embeddings, split, support_vectors
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, partly_fixed, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

CLASSES = 3
ROUNDS = [[0, 1, 2, 3], [1, 2], [0, 1, 3], [2, 3]]


def rows_of(model: Tree) -> Tensor:
    return torch.cat([model["head.weight"], model["head.bias"][:, None]], 1)


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "uniform": {"aggregation": "uniform", "penalty": 3.0, "spread_lr": 0.1},
    "all": {"selective": False, "spread_lr": 0.1},
    "still": {"spread_lr": 0.0},
    "some": {"class_share": 0.7},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_svm_1_rounds_are_those_of_an_oracle_with_scikit_learn(name: str) -> None:
    method = TurboSVM(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model = initial(toy)
    moving = rows_of(model).clone().requires_grad_()
    adam = torch.optim.Adam([moving], lr=method.spread_lr or 1.0, eps=1e-5)
    for round, cohort in enumerate(ROUNDS):
        trained: list[Tree] = []
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
                logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
                F.cross_entropy(logits, part.y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained.append({key: leaf.detach() for key, leaf in leaves.items()})
        sizes = [1.0 if method.aggregation == "uniform" else float(SIZES[k]) for k in cohort]
        total = sum(sizes)
        model = {
            key: torch.stack([n / total * one[key] for n, one in zip(sizes, trained, strict=True)]).sum(0)
            for key in model
        }
        chosen = list(range(CLASSES))
        if method.class_share < 1:
            chosen = sorted(toy.context.streams.generator("classes", round).choice(3, 2, replace=False).tolist())
        x = [rows_of(one)[c].tolist() for one in trained for c in chosen]
        y = [c for _ in trained for c in chosen]
        machine = SVC(kernel="linear", C=method.penalty or (4 - round) / 4, max_iter=50)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            machine.fit(x, y)
        rows = rows_of(model)
        for c in chosen if method.selective else []:
            owners = [place // len(chosen) for place in machine.support_ if y[place] == c]
            if owners:
                weight = sum(sizes[k] for k in owners)
                rows[c] = torch.stack([sizes[k] / weight * rows_of(trained[k])[c] for k in owners]).sum(0)
        if method.spread_lr:
            moving.data.copy_(rows)
            value, normals = torch.zeros(()).double(), iter(torch.from_numpy(np.array(machine.coef_)))
            for i, a in enumerate(chosen):
                for b in chosen[i + 1 :]:
                    normal = next(normals)
                    value = value + torch.exp(-((normal @ (moving[a] - moving[b]) / normal.norm()) ** 2) / 2)
            moving.grad = torch.autograd.grad(value, moving)[0]
            adam.step()
            rows = moving.detach().clone()
        model = {**model, "head.weight": rows[:, :-1].contiguous(), "head.bias": rows[:, -1].contiguous()}
        assert_close(toy.step(cohort)["model"], model, 1e-9)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_svm_2_of_all_embeddings_that_are_not_spread_it_is_federated_averaging(make: Any, aggregation: Any) -> None:
    ours = toy_of(TurboSVM(selective=False, spread_lr=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_svm_3_the_body_is_federated_averagings() -> None:
    """In the first round."""
    ours, theirs = (toy_of(method, task=three_layers()) for method in (TurboSVM(), FedAvg()))
    left, right = (toy.step([0, 1, 2, 3])["model"] for toy in (ours, theirs))
    for name in left:
        if not name.startswith("head"):
            assert_close(left[name], right[name], 1e-12)
    assert (left["head.weight"] - right["head.weight"]).abs().max() > 1e-4


def test_inv_svm_4_with_a_small_penalty_all_embeddings_are_support_vectors() -> None:
    ours = toy_of(TurboSVM(penalty=1e-9, spread_lr=0), task=two_layers())
    theirs = toy_of(FedAvg(), task=two_layers())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_svm_5_support_vectors_are_those_nearest_to_the_other_class() -> None:
    """On a line: -1 and -3 are one class, 1 and 4 the other."""
    rows = np.array([[[-1.0, 0.0], [1.0, 0.0]], [[-3.0, 0.0], [4.0, 0.0]]])
    chosen, normals = support_vectors(rows, 100.0)
    assert chosen.tolist() == [[True, True], [False, False]]
    assert normals.shape == (1, 2) and abs(normals[0, 1]) < 1e-9 < abs(normals[0, 0])


def test_inv_svm_6_a_step_that_spreads_moves_rows_apart_along_the_normals() -> None:
    toy = toy_of(TurboSVM(), task=two_layers())
    normals = torch.tensor([[1.0, 0.0]]).double()
    rows = torch.tensor([[0.5, 3.0], [-0.5, 1.0], [9.0, 9.0]]).double()
    given = {"rows": rows, "normals": normals, "classes": torch.tensor([0, 1])}
    found = toy.federation.on_server(toy.algorithm.spread, given)["rows"]  # type: ignore[attr-defined]
    assert_close(found - rows, torch.tensor([[0.01, 0.0], [-0.01, 0.0], [0.0, 0.0]]).double(), 1e-5)


def test_embeddings_are_the_last_layer_and_back() -> None:
    network = two_layers().network
    model = network.initialize(3)
    rows = embeddings(network, model)
    assert torch.equal(rows, rows_of(model))
    assert all(torch.equal(leaf, model[name]) for name, leaf in split(network, rows).items())
    generator = np.random.default_rng(0)
    assert drawn_classes(10, 0.35, generator).shape == (3,) and drawn_classes(10, 0.01, generator).shape == (2,)
    assert drawn_classes(4, 1.0, generator).tolist() == [0, 1, 2, 3]


def test_only_models_travel() -> None:
    toy = toy_of(TurboSVM(), task=two_layers())
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_the_penalty_falls_over_the_rounds_and_is_the_course() -> None:
    assert [TurboSVM().course(t, 4) for t in range(4)] == [1, 0.75, 0.5, 0.25]
    assert TurboSVM(penalty=2.0).course(1, 4) is None


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(TurboSVM(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-7)


def test_a_fixed_last_layer_is_refused() -> None:
    toy = Toy(FedAvg(), random_clients(SIZES), two_layers(), TRAIN)
    for names, named in ((("head.weight",), "head.weight"), (("head.bias",), "head.bias")):
        with pytest.raises(ConfigError, match=named):
            TurboSVM().check(partly_fixed(*names), toy.context)
