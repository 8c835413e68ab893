"""pFedFDA: invariants FDA of the rounds, whole rounds by an oracle in plain PyTorch, messages, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedbabu import FedBABU
from algorithms.pfedfda import PRIOR_FLOOR, PFedFDA
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import COHORTS, TRAIN, initial, labelled, planted_clients, three_layers
from tests.support.toy_networks import DoubleNetwork, TwoLayers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2, 0, 0], [1, 1, 1], [2, 0, 2, 2, 0], [0, 0, 1, 0, 1, 1])


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def priors(y: Tensor) -> np.ndarray:
    shares = np.bincount(y.numpy(), minlength=3) / len(y) + PRIOR_FLOOR
    found: np.ndarray = shares / shares.sum()
    return found


def posterior_layer(
    means: Tensor, covariance: Tensor, pi: np.ndarray, shrinkage: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """The classifier by NumPy's inverse."""
    mu, sigma = means.numpy(), covariance.numpy()
    inverse = np.linalg.inv((1 - shrinkage) * sigma + shrinkage * np.trace(sigma) / len(sigma) * np.eye(len(sigma)))
    bias = np.log(pi) - 0.5 * np.einsum("cd,de,ce->c", mu, inverse, mu)
    return torch.from_numpy(mu @ inverse), torch.from_numpy(bias)


def estimates(f: Tensor, y: Tensor, known: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Means and covariance, with 1 on the diagonal."""
    means = torch.stack([f[y == c].mean(0) if (y == c).sum() >= least else known[c] for c in range(3)])
    scatter = sum(
        (torch.outer(a - means[c], a - means[c]) for a, c in zip(f, y, strict=True)), torch.zeros(7, 7).double()
    )
    return means, scatter / (len(y) - 1) + torch.eye(7).double()


def test_inv_fda_1_with_the_global_gaussians_alone_it_is_fedbabu_whose_initial_head_is_the_classifier() -> None:
    """With beta = 0 and clients that have equally many of each class."""
    data = labelled(*[[0, 1, 2, 0, 1, 2]] * 4)
    toy = Toy(PFedFDA(interpolation="fixed", fixed_beta=0.0), data, two_layers(), TRAIN)
    gaussians = toy.server["gaussians"]
    layer = posterior_layer(gaussians["means"], gaussians["covariance"], np.full(3, 1 / 3))

    class Headed(DoubleNetwork):
        """A network whose head begins as the classifier."""

        def initialize(self, seed: int) -> dict[str, Tensor]:
            return {**super().initialize(seed), "head.weight": layer[0], "head.bias": layer[1]}

    plain = Toy(FedBABU(), data, Classification(Headed(TwoLayers)), TRAIN)
    assert_equal(plain.server["shared"], toy.server["shared"])
    for cohort in COHORTS:
        assert_close(toy.step(cohort)["shared"], plain.step(cohort)["shared"], 1e-12)
        assert_equal(toy.server["gaussians"], gaussians)


@pytest.mark.parametrize(("least", "shrinkage"), [(3, 1e-4), (1, 0.1)])
def test_inv_fda_2_rounds_are_those_of_an_oracle_in_plain_pytorch(least: int, shrinkage: float) -> None:
    beta = 0.3
    toy = several(PFedFDA(interpolation="fixed", fixed_beta=beta, least_samples=least, shrinkage=shrinkage))
    network, streams = toy.task.network, toy.context.streams
    start, gaussians = initial(toy), toy.server["gaussians"]
    shared = {name: start[name] for name in ("inner.weight", "inner.bias")}
    means, covariance = gaussians["means"], gaussians["covariance"]
    assert torch.equal(covariance, torch.eye(7).double()) and (means >= 0).all() and (means < 1).all()
    for round, cohort in enumerate(([0, 1, 2, 3], [0, 2], [1, 3])):
        replies, sizes = [], []
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            weight, bias = posterior_layer(means, covariance, priors(part.y), shrinkage)
            model = {name: leaf.clone().requires_grad_() for name, leaf in shared.items()}
            optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            steps = 2 * -(-len(part.y) // 4)
            for index in plan_batches(len(part.y), 4, steps, streams.generator("batches", round, client)).batches(CPU):
                f = network.head_inputs_and_logits({**start, **model}, part.x[index])[0]
                optimizer.zero_grad()
                F.cross_entropy(f @ weight.T + bias, part.y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            body = {name: leaf.detach() for name, leaf in model.items()}
            f = network.head_inputs_and_logits({**start, **body}, part.x)[0]
            own = estimates(f, part.y, means, least)
            replies.append(
                [*body.values(), *(beta * a + (1 - beta) * b for a, b in zip(own, (means, covariance), strict=True))]
            )
            sizes.append(len(part.y))
        *bodies, means, covariance = (
            sum(n * leaf for n, leaf in zip(sizes, leaves, strict=True)) / sum(sizes)
            for leaves in zip(*replies, strict=True)
        )
        shared = dict(zip(shared, bodies, strict=True))
        server = toy.step(cohort)
        assert_close(server["shared"], shared, 1e-10)
        assert_close(server["gaussians"], {"means": means, "covariance": covariance}, 1e-10)


@pytest.mark.parametrize("interpolation", ["single", "separate"])
def test_inv_fda_3_mixing_lies_between_local_and_global_estimates(interpolation: Any) -> None:
    trees = {}
    for kind, beta in (("fixed", 0.0), ("fixed", 1.0), (interpolation, 1.0)):
        toy = several(PFedFDA(interpolation=kind, fixed_beta=beta))
        trees[kind, beta] = toy.step([0])["gaussians"]
    shares = {}
    for name, mixed in trees[interpolation, 1.0].items():
        far = trees["fixed", 1.0][name] - trees["fixed", 0.0][name]
        near = mixed - trees["fixed", 0.0][name]
        share = float((near * far).sum() / far.square().sum())
        assert_close(near, share * far, 1e-10)
        assert -1e-12 <= share <= 1 + 1e-12
        shares[name] = share
    assert (abs(shares["means"] - shares["covariance"]) < 1e-10) == (interpolation == "single")


def test_where_no_class_has_a_sample_for_each_fold_the_gaussians_stay() -> None:
    received = several(PFedFDA()).server["gaussians"]
    two, three, four = (several(PFedFDA(folds=count)).step([1])["gaussians"] for count in (2, 3, 4))  # three samples
    assert_equal(four, received)
    for found in (two, three):
        assert not torch.equal(found["covariance"], received["covariance"])


def test_inv_fda_4_of_equal_clients_the_server_has_the_gaussians_of_one() -> None:
    part = labelled(SEVERAL[0]).load(0)["train"]
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.1)
    one, three = (
        Toy(PFedFDA(interpolation="fixed"), ListDataset([(part.x, part.y)] * n), two_layers(), train) for n in (1, 3)
    )
    for _ in range(2):
        assert_close(one.step([0]), three.step([0, 1, 2]), 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_fda_5_personalized_models_are_of_the_servers_body_also_of_clients_never_sampled(make: Any) -> None:
    toy = several(PFedFDA(interpolation="fixed", fixed_beta=0.4), task=make())
    toy.step([0, 1])
    assert all(not state for state in toy.states().values())
    scores, network = toy.scores(), toy.task.network
    known = toy.server["gaussians"]
    for client in range(4):
        part = toy.dataset.load(client)["test"]
        model = {**initial(toy), **toy.server["shared"]}
        f = network.head_inputs_and_logits(model, part.x, training=False)[0]
        if make is two_layers:
            own = estimates(f, part.y, known["means"], 3)
            mixed = [0.4 * a + 0.6 * b for a, b in zip(own, known.values(), strict=True)]
            weight, bias = posterior_layer(mixed[0], mixed[1], priors(part.y))
            assert (
                abs(scores[client]["personalized"].loss - float(F.cross_entropy(f @ weight.T + bias, part.y))) < 1e-10
            )
        weight, bias = posterior_layer(known["means"], known["covariance"], np.full(3, 1 / 3))
        assert abs(scores[client]["global"].loss - float(F.cross_entropy(f @ weight.T + bias, part.y))) < 1e-10


def test_inv_fda_6_messages_are_the_body_the_means_and_the_covariance() -> None:
    for hidden in (7, 20):
        toy = several(PFedFDA(), task=two_layers(hidden=hidden))
        size = 8 * (6 * hidden + 3 * hidden + hidden**2)
        for cohort in ([0, 1], [2, 3]):
            toy.step(cohort)
            assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
        assert set(toy.server) == {"shared", "gaussians"}


def test_inv_fda_7_the_classifiers_accuracy_is_high_where_features_are_gaussian() -> None:
    train = TrainConfig(rounds=6, clients_per_round="all", local_epochs=2, batch_size=None, lr=0.3)
    toy = Toy(PFedFDA(), planted_clients("classes", clients=5), two_layers(inputs=12), train)
    toy.run()
    found = toy.scores(split="validation")
    own = np.mean([rows["personalized"].top1 for rows in found.values()])
    everybodys = np.mean([rows["global"].top1 for rows in found.values()])
    assert own > everybodys > 0.5, (own, everybodys)


class Bare(TwoLayers):
    """MLP2 whose head has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3, bias=False)


def test_a_last_layer_without_bias_or_fixed_and_a_model_without_body_are_refused() -> None:
    toy = several(PFedFDA())

    def still(name: str) -> Classification:
        def make() -> TwoLayers:
            model = TwoLayers()
            for parameter in model.get_submodule(name).parameters():
                parameter.requires_grad_(False)
            return model

        return Classification(DoubleNetwork(make))

    for task, named in (
        (Classification(DoubleNetwork(Bare)), "has no bias"),
        (still("head"), "needs the last layer's weight"),
        (still("inner"), "trains all layers but the last"),
    ):
        with pytest.raises(ConfigError, match=rf"pFedFDA.*{named}"):
            PFedFDA().check(task, toy.context)


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped_also_where_classes_are_missing(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (several(PFedFDA(), train=train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3]):
        found: list[Tree] = [toy.step(cohort) for toy in (looped, stacked)]
        assert_close(found[0], found[1], 1e-6)
    assert "failed together" not in caplog.text
