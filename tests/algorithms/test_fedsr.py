"""FedSR: an oracle in plain PyTorch, federated averaging, the divergence, drawn predictions, messages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from algorithms.fedavg import FedAvg
from algorithms.fedsr import FedSR, first_reference, information
from rayfl.engine.gradients.counted_normals import keyed_normals
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, leaves, num_bytes
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01, momentum=0.5
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
STRONG = {"length_weight": 0.3, "information_weight": 0.2}
HIDDEN, CLASSES = 7, 3


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), options.pop("task", None) or two_layers(), train, **options)


def represent(tree: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma, by the paths of the tensors."""
    hidden = torch.relu(x @ tree["model/inner.weight"].T + tree["model/inner.bias"])
    both = hidden @ tree["encoder/matrix"].T + tree["encoder/offset"]
    return both[:, :HIDDEN], (1 + both[:, HIDDEN:].exp()).log()


def loss_of(tree: dict[str, Tensor], x: Tensor, y: Tensor, eps: Tensor, alpha: float, beta: float) -> Tensor:
    """The objective sample by sample, with PyTorch's own Gaussians."""
    mu, sigma = represent(tree, x)
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(y)):
        z = mu[i] + sigma[i] * eps[i]
        total = total + F.cross_entropy(tree["model/head.weight"] @ z + tree["model/head.bias"], y[i])
        total = total + alpha * z.square().sum().sqrt()
        if beta:
            kappa = tree["reference/factor"]
            own = Normal(kappa * mu[i], kappa.abs() * sigma[i])
            spread = (1 + tree["reference/spread"][y[i]].exp()).log()
            total = total + beta * kl_divergence(own, Normal(tree["reference/mean"][y[i]], spread)).sum()
    return total / len(y)


VERSIONS: list[dict[str, Any]] = [
    {**STRONG},
    {**STRONG, "aggregation": "samples"},
    {**STRONG, "aggregation": "population", "reference": "own"},
    {"length_weight": 0.0, "information_weight": 0.2, "reference": "own"},
    {"length_weight": 0.3, "information_weight": 0.0},
]


@pytest.mark.parametrize("options", VERSIONS)
def test_inv_sr_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: dict[str, Any]) -> None:
    toy = toy_of(FedSR(**options))
    method, streams = toy.algorithm, toy.context.streams
    alpha, beta = options["length_weight"], options["information_weight"]
    own_reference = options.get("reference") == "own"
    server = {path: leaf.clone() for path, leaf in leaves(toy.server)}
    first = {f"reference/{name}": leaf for name, leaf in first_reference(server["model/head.weight"]).items()}
    kept: dict[int, dict[str, Tensor]] = {}
    for round, cohort in enumerate(COHORTS):
        weights = options.get("aggregation", "uniform")
        counted = cohort if weights == "samples" else range(len(SIZES))
        q = [1 / len(cohort) if weights == "uniform" else SIZES[i] / sum(SIZES[j] for j in counted) for i in cohort]
        mean = {path: (1 - sum(q)) * leaf for path, leaf in server.items()}
        for share, i in zip(q, cohort, strict=True):
            part, k = toy.dataset.load(i)["train"], 2 * -(-SIZES[i] // 4)
            tree = {**server, **(kept.get(i, first) if own_reference and beta else {})}
            tree = {path: leaf.clone().requires_grad_() for path, leaf in tree.items()}
            optimizer = torch.optim.SGD(list(tree.values()), lr=0.1, momentum=0.5, weight_decay=0.01)
            plan = plan_batches(SIZES[i], 4, k, streams.generator("batches", round, i))
            drawn = streams.generator("mix", round, i).standard_normal((k, 4, HIDDEN), dtype="float32")
            for step, index in enumerate(plan.batches(CPU)):
                optimizer.zero_grad()
                eps = torch.from_numpy(drawn[step]).double()
                loss_of(tree, part.x[index], part.y[index], eps, alpha, beta).backward()
                optimizer.step()
            if own_reference:
                kept[i] = {path: tree[path].detach() for path in first if beta}
            for path in mean:
                mean[path] = mean[path] + share * tree[path].detach()
        server = mean
        toy.step(cohort)
        assert_close(dict(leaves(toy.server)), server, 1e-12)
    states = {client: dict(leaves(state)) for client, state in toy.states().items() if state}
    assert_close(states, kept if own_reference else {}, 1e-12)
    assert method.name == "fedsr" and ("reference" in toy.server) == (beta > 0 and not own_reference)


def exact_encoder(width: int) -> Tree:
    """An encoder whose representations are the features themselves, with no spread to speak of."""
    matrix = torch.cat([torch.eye(width), torch.zeros(width, width)]).double()
    return {"matrix": matrix, "offset": torch.cat([torch.zeros(width), torch.full((width,), -60.0)]).double()}


def test_inv_sr_2_where_representations_are_the_features_it_has_the_gradient_of_federated_averaging() -> None:
    task, part = two_layers(), random_clients((6,)).load(0)["train"]
    model = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(3).items()}
    batch, draw = Batch(part.x, part.y), {"noise": torch.ones(6, HIDDEN, dtype=torch.float64)}
    method = FedSR(length_weight=0, information_weight=0)
    trained = {"model": model, "encoder": exact_encoder(HIDDEN)}
    found = torch.autograd.grad(method.objective(trained, batch, task, None, draw), list(model.values()))
    plain = torch.autograd.grad(FedAvg().objective(model, batch, task), list(model.values()))
    assert_close(dict(zip(model, found, strict=True)), dict(zip(model, plain, strict=True)), 1e-12)
    for count in (0, 3):
        predictor = FedSR(evaluation_samples=count).global_predictors({**trained, "reference": {}}, task)["global"]
        got = predictor.predictions(predictor.built(), part.x, task)
        assert_close(got.detach(), task.predictions([model], part.x).detach(), 1e-12)


@pytest.mark.parametrize("factor", [0.7, -1.3])
def test_inv_sr_3_cmi_is_the_divergence_of_gaussians_and_is_0_at_the_reference(factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    mu, raw, mean, spread = torch.randn(4, 5, HIDDEN, generator=generator, dtype=torch.float64)
    y, scale = torch.tensor([0, 2, 2, 4, 1]), torch.tensor(factor, dtype=torch.float64)
    sigma, reference = F.softplus(raw), {"mean": mean, "spread": spread, "factor": scale}
    own = Independent(Normal(scale * mu, scale.abs() * sigma), 1)
    other = Independent(Normal(mean[y], F.softplus(spread)[y]), 1)
    assert_close(information(mu, sigma, reference, y), kl_divergence(own, other), 1e-12)
    at = information(mean[y] / factor, F.softplus(spread)[y] / abs(factor), reference, y)
    assert_close(at, torch.zeros(5, dtype=torch.float64), 1e-12)


def test_inv_sr_4_predictions_are_the_mean_probability_of_drawn_representations() -> None:
    toy = toy_of(FedSR(**STRONG, evaluation_samples=4))
    toy.step([0, 1])
    x = random_clients((5,)).load(0)["train"].x
    tree = dict(leaves(toy.server))
    mu, sigma = represent(tree, x)
    eps = keyed_normals(torch.arange(4), HIDDEN, torch.float32).double()
    places = (mu[:, None] + sigma[:, None] * eps) @ tree["model/head.weight"].T + tree["model/head.bias"]
    predictor = toy.algorithm.global_predictors(toy.server, toy.task)["global"]
    found = predictor.predictions(predictor.built(), x, toy.task)
    assert_close(found, places.softmax(-1).mean(1).log(), 1e-12)
    # a sample's prediction does not depend on the others
    assert_close(predictor.predictions(predictor.built(), x[3:4], toy.task), found[3:4], 1e-12)


@pytest.mark.slow
def test_inv_sr_5_a_strong_cmi_draws_the_representations_of_a_class_to_its_reference() -> None:
    apart = {}
    for beta in (0.0005, 1.0):
        toy = toy_of(FedSR(length_weight=0, information_weight=beta), TRAIN.model_copy(update={"local_epochs": 20}))
        for _ in range(6):
            toy.step([0, 1, 3])
        tree, part = dict(leaves(toy.server)), toy.dataset.load(1)["train"]
        apart[beta] = float(information(*represent(tree, part.x), toy.server["reference"], part.y).mean())
    assert apart[1.0] < 0.2 * apart[0.0005]


@pytest.mark.parametrize("options", [{}, {"reference": "own"}, {"information_weight": 0.0}])
@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    algorithm = FedSR(**{**STRONG, **options})
    assert_modes_agree(algorithm, (8, 12, 6, 10), TRAIN, double, 1e-10 if double else 1e-5)


def test_a_whole_batch_of_clients_of_different_sizes_agrees_in_both_modes() -> None:
    train = TRAIN.model_copy(update={"batch_size": None})
    assert_modes_agree(FedSR(**STRONG), SIZES, train, True, 1e-10)


def test_what_travels() -> None:
    for options, shared in (({}, True), ({"reference": "own"}, False), ({"information_weight": 0.0}, False)):
        toy = toy_of(FedSR(**{**STRONG, **options}))
        size = num_bytes(toy.server["model"]) + 8 * 2 * HIDDEN * (HIDDEN + 1)
        size += 8 * (2 * CLASSES * HIDDEN + 1) if shared else 0
        toy.step([0, 3])
        assert toy.federation.traffic.by_client == dict.fromkeys((0, 3), (size, size))
        assert any(toy.states().values()) == (options.get("reference") == "own")


def test_running_statistics_are_averaged() -> None:
    toys = [toy_of(method, task=normalized_layers()) for method in (FedSR(**STRONG), FedAvg(aggregation="uniform"))]
    servers = [toy.step([0, 1]) for toy in toys]
    for name in toys[0].task.network.buffer_names:
        assert servers[0]["model"][name].shape == servers[1]["model"][name].shape
        assert not torch.equal(servers[0]["model"][name], toys[0].task.network.initialize(0)[name])


def test_what_is_refused() -> None:
    assert "classes" in FedSR().needed() and "classes" not in FedSR(information_weight=0).needed()
    toy = toy_of(FedSR())
    FedSR().check(toy.task, toy.context)
    for options in ({"length_weight": -1}, {"information_weight": -1}, {"evaluation_samples": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            FedSR(**options)  # type: ignore[arg-type]
    (said,) = FedSR(information_weight=0, reference="own").idle_settings()
    assert "reference" in said
