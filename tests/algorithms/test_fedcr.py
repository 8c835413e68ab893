"""FedCR: an oracle in plain PyTorch, products of Gaussians, FedPer, drawn predictions, messages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from algorithms.fedcr import FedCR, class_sums, product
from algorithms.fedper import FedPer
from rayfl.engine.gradients.counted_normals import drawn_keys, keyed_normals, normals
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, leaves, num_bytes
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, labelled, three_layers, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

HIDDEN, CLASSES = 7, 3
HEAD = ("model/head.weight", "model/head.bias")


def represent(tree: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma, by the paths of the tensors."""
    hidden = torch.relu(x @ tree["model/inner.weight"].T + tree["model/inner.bias"])
    both = hidden @ tree["encoder/matrix"].T + tree["encoder/offset"]
    return both[:, :HIDDEN], (1 + both[:, HIDDEN:].exp()).log()


def loss_of(
    tree: dict[str, Tensor], known: dict[int, Normal], x: Tensor, y: Tensor, eps: Tensor, method: FedCR
) -> Tensor:
    """The objective sample by sample, with PyTorch's own Gaussians; eps has shape (b, L, d)."""
    mu, sigma = represent(tree, x)
    total = torch.zeros((), dtype=x.dtype)
    for i, label in enumerate(y.tolist()):
        for one in eps[i]:
            logits = tree[HEAD[0]] @ (mu[i] + sigma[i] * one) + tree[HEAD[1]]
            total = total + F.cross_entropy(logits, y[i]) / len(eps[i])
        if method.information_weight:
            total = total + method.information_weight * kl_divergence(known[label], Normal(mu[i], sigma[i])).sum()
    return total / len(y)


def shares(method: FedCR, cohort: list[int]) -> list[float]:
    """The clients' weights in the mean."""
    if method.aggregation == "uniform":
        return [1 / len(cohort)] * len(cohort)
    counted = cohort if method.aggregation == "samples" else range(len(SIZES))
    return [SIZES[i] / sum(SIZES[j] for j in counted) for i in cohort]


VERSIONS: list[dict[str, Any]] = [
    {"information_weight": 0.2, "train_samples": 2},
    {"information_weight": 0.2, "train_samples": 1, "aggregation": "samples"},
    {"information_weight": 0.1, "train_samples": 1, "aggregation": "population"},
    {"information_weight": 0.0, "train_samples": 3},
]


@pytest.mark.parametrize("options", VERSIONS)
def test_inv_cr_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any]) -> None:
    method = FedCR(**options)
    toy = toy_of(method, task=two_layers())
    streams, count = toy.context.streams, options["train_samples"]
    first = toy.task.network.initialize(streams.integer("init.global"))
    server = {f"model/{name}": leaf.clone() for name, leaf in first.items()}
    server |= {f"encoder/{name}": leaf.clone() for name, leaf in toy.server["encoder"].items()}
    standard = torch.zeros(HIDDEN, dtype=torch.float64)
    known = {label: Normal(standard, standard + 1) for label in range(CLASSES)}
    kept = {i: {path: server[path] for path in HEAD} for i in range(len(SIZES))}
    for round, cohort in enumerate(COHORTS):
        q = shares(method, cohort)
        mean = {path: (1 - sum(q)) * leaf for path, leaf in server.items() if path not in HEAD}
        seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for share, i in zip(q, cohort, strict=True):
            part, k = toy.dataset.load(i)["train"], 2 * -(-SIZES[i] // 4)
            tree = {path: leaf.clone().requires_grad_() for path, leaf in {**server, **kept[i]}.items()}
            optimizer = torch.optim.SGD(list(tree.values()), lr=0.1, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(SIZES[i], 4, k, streams.generator("batches", round, i))
            keys = torch.from_numpy(drawn_keys(streams.generator("mix", round, i), k, 4))
            for step, index in enumerate(plan.batches(CPU)):
                optimizer.zero_grad()
                eps = normals(keys[step], count * HIDDEN)[: len(index)].reshape(len(index), count, HIDDEN)
                loss = loss_of(tree, known, part.x[index], part.y[index], eps, method)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            kept[i] = {path: tree[path].detach() for path in HEAD}
            mean = {path: leaf + share * tree[path].detach() for path, leaf in mean.items()}
            mu, sigma = (leaf.detach() for leaf in represent(tree, part.x))
            for place, label in enumerate(part.y.tolist()):
                seen.setdefault(label, []).append((mu[place], sigma[place]))
        server = {**server, **mean}
        for label, experts in seen.items():
            precision = 1 + sum(sigma**-2 for _, sigma in experts)
            centre = sum(mu * sigma**-2 for mu, sigma in experts) / precision
            known[label] = Normal(centre, precision**-0.5)
        found = toy.step(cohort)
        expected = {path: leaf for path, leaf in server.items() if path not in HEAD}
        got = {path.replace("shared/", "model/"): leaf for path, leaf in leaves(found)}
        common = {path: got.pop(path) for path in list(got) if path.startswith("common/")}
        assert_close(got, expected, 1e-12)
        if method.information_weight:
            assert_close(common["common/mean"], torch.stack([known[c].mean for c in range(CLASSES)]), 1e-12)
            assert_close(common["common/spread"], torch.stack([known[c].stddev for c in range(CLASSES)]), 1e-12)
        else:
            assert not common
    states = {i: {f"model/{name}": leaf for name, leaf in s["personal"].items()} for i, s in toy.states().items() if s}
    assert_close(states, {i: kept[i] for i in (0, 1, 2)}, 1e-12)


def exact_encoder() -> Tree:
    """An encoder whose representations are the features themselves, with no spread to speak of."""
    matrix = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)]).double()
    return {"matrix": matrix, "offset": torch.cat([torch.zeros(HIDDEN), torch.full((HIDDEN,), -60.0)]).double()}


def test_inv_cr_2_where_representations_are_the_features_it_has_the_gradient_of_fedper() -> None:
    task, part = two_layers(), random_clients((6,)).load(0)["train"]
    model = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(3).items()}
    batch, draw = Batch(part.x, part.y), {"keys": torch.ones(6, 7, dtype=torch.float64)}
    method = FedCR(information_weight=0, train_samples=3)
    trained = {"model": model, "encoder": exact_encoder()}
    found = torch.autograd.grad(method.objective(trained, batch, task, None, draw), list(model.values()))
    plain = torch.autograd.grad(FedPer().objective(model, batch, task), list(model.values()))
    assert_close(dict(zip(model, found, strict=True)), dict(zip(model, plain, strict=True)), 1e-12)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_inv_cr_3_a_class_is_the_same_product_however_its_samples_are_divided(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.randn(10, 2 * HIDDEN, generator=generator, dtype=torch.float64)
    places[:, HIDDEN:] = F.softplus(places[:, HIDDEN:])
    labels = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1, 0])
    known = {"mean": torch.full((3, HIDDEN), 5.0).double(), "spread": torch.full((3, HIDDEN), 2.0).double()}
    pieces = [class_sums(places[i::parts], labels[i::parts], 3) for i in range(parts)]
    mean = {name: sum(piece[name] for piece in pieces) / parts for name in pieces[0]}
    found = product(mean, parts, known)
    for label in (0, 1):
        mu, sigma = places[labels == label].chunk(2, 1)
        # the density of the product is that of a Gaussian up to a factor: its logarithm's derivatives
        at = torch.full((HIDDEN,), 0.3, dtype=torch.float64, requires_grad=True)
        factors = [(torch.zeros(1), torch.ones(1)), (mu, sigma)]
        slope = sum(torch.autograd.grad(-(((at - m) / s) ** 2).sum() / 2, at)[0] for m, s in factors)
        apart = (at - found["mean"][label]) / found["spread"][label]
        assert_close(torch.autograd.grad(-apart.square().sum() / 2, at)[0], slope, 1e-10)
    assert torch.equal(found["mean"][2], known["mean"][2]) and torch.equal(found["spread"][2], known["spread"][2])


def test_inv_cr_4_a_class_that_the_cohort_lacks_keeps_its_gaussian() -> None:
    toy = Toy(FedCR(information_weight=0.1), labelled([0, 0, 1, 1], [1, 2, 2, 2]), two_layers(), TRAIN)
    for cohort, absent in (([0], [2]), ([1], [0]), ([0], [2])):
        before = toy.server["common"]
        after = toy.step(cohort)["common"]
        for name, leaf in after.items():
            assert torch.equal(leaf[absent], before[name][absent])
            assert not any(torch.equal(leaf[c], before[name][c]) for c in set(range(CLASSES)) - set(absent))


@pytest.mark.parametrize("count", [0, 4])
def test_inv_cr_5_predictions_are_those_at_mu_or_the_mean_probability_of_drawn_ones(count: int) -> None:
    toy = toy_of(FedCR(evaluation_samples=count, train_samples=1), task=two_layers())
    toy.step([0, 1])
    x = random_clients((5,)).load(0)["train"].x
    head = toy.states()[1]["personal"]
    tree = {path.replace("shared/", "model/"): leaf for path, leaf in leaves(toy.server)}
    mu, sigma = represent(tree, x)
    eps = keyed_normals(torch.arange(count), HIDDEN, torch.float32).double() if count else torch.zeros(1, HIDDEN)
    logits = (mu[:, None] + sigma[:, None] * eps) @ head["head.weight"].T + head["head.bias"]
    expected = logits.softmax(-1).mean(1).log()
    found: list[Tensor] = []

    class Asking(FedCR):
        async def ask(self, client: Any, server: Tree) -> Tree:
            predictor = (await self.predictors(client, server))["personalized"]
            found.append(predictor.predictions(predictor.built(), x, client.task))
            return {}

    asking = Toy(Asking(**toy.algorithm.model_dump()), toy.dataset, toy.task, toy.train)
    asking.client_hosts[0].states.replace(1, toy.states()[1], 0)
    asking.federation.map(asking.algorithm.ask, [1], {"server": toy.server})  # type: ignore[attr-defined]
    assert_close(found[0], expected, 1e-12)


@pytest.mark.slow
def test_inv_cr_6_a_strong_divergence_draws_clients_to_one_distribution_of_each_class() -> None:
    apart = {}
    for weight in (1e-4, 0.3):
        train = TRAIN.model_copy(update={"local_epochs": 10, "lr": 0.02})
        toy = toy_of(FedCR(information_weight=weight, train_samples=2), train, two_layers())
        for _ in range(8):
            toy.step([0, 1, 3])
        tree = {path.replace("shared/", "model/"): leaf for path, leaf in leaves(toy.server)}
        part = toy.dataset.load(1)["train"]
        mu = represent(tree, part.x)[0]
        within = [(mu[part.y == label] - mu[part.y == label].mean(0)) for label in range(CLASSES)]
        apart[weight] = float(torch.cat(within).square().mean() / mu.square().mean())
    assert apart[0.3] < 0.7 * apart[1e-4]


@pytest.mark.parametrize("options", [{}, {"aggregation": "samples"}])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    algorithm = FedCR(**{"information_weight": 0.1, "train_samples": 2, **options})
    assert_modes_agree(algorithm, SIZES, TRAIN, double, 1e-10 if double else 1e-4)


def test_a_whole_batch_of_clients_of_different_sizes_agrees_in_both_modes() -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "batch_size": None})
    assert_modes_agree(FedCR(information_weight=0.1, train_samples=2), (9, 12, 1, 10), train, True, 1e-10)


def test_what_travels_and_stays() -> None:
    for weight in (0.1, 0.0):
        toy = toy_of(FedCR(information_weight=weight, train_samples=1), task=two_layers())
        size = num_bytes(toy.server["shared"]) + 8 * 2 * HIDDEN * (HIDDEN + 1)
        size += 8 * 2 * CLASSES * HIDDEN if weight else 0
        toy.step([0, 3])
        assert toy.federation.traffic.by_client == dict.fromkeys((0, 3), (size, size))
        assert {key for state in toy.states().values() for key in state} == {"personal"}


def test_running_statistics_are_part_of_the_body() -> None:
    toy = toy_of(FedCR(train_samples=1), task=three_layers())
    before = {name: toy.server["shared"][name].clone() for name in toy.task.network.buffer_names}
    after = toy.step([0, 1])["shared"]
    assert before and not any(torch.equal(after[name], leaf) for name, leaf in before.items())
    normalized = toy_of(FedCR(train_samples=1), task=normalized_layers())
    assert set(normalized.task.network.buffer_names) < set(normalized.server["shared"])


def test_what_is_refused() -> None:
    assert "classes" in FedCR().needed() and "classes" not in FedCR(information_weight=0).needed()
    toy = toy_of(FedCR())
    FedCR().check(toy.task, toy.context)
    for options in ({"information_weight": -1}, {"train_samples": 0}, {"evaluation_samples": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            FedCR(**options)
