"""FedProx: invariants PROX and PROXLU, all forms of the penalty, fixture G7."""

from __future__ import annotations

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, from_leaves, leaves, map_leaves
from rayfl.tasks.base import Batch
from tests.support.toy_networks import Quadratic, normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, distance, quadratic_clients, random_clients

FORMS = ("half_squared", "squared", "norm_per_layer", "smooth_l1_mean")
SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)


def random_model(seed: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return map_leaves(
        lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=torch.float64),
        two_layers().network.initialize(0),
    )


def gradient(form: str, model: Tree, anchor: Tree) -> Tree:
    """The gradient of the penalty with respect to the model."""
    moved = map_leaves(lambda leaf: leaf.clone().requires_grad_(), model)
    pairs = list(leaves(moved))
    parts = torch.autograd.grad(distance(form, moved, anchor), [leaf for _, leaf in pairs], allow_unused=True)
    return from_leaves(
        {
            path: torch.zeros_like(leaf) if part is None else part
            for (path, leaf), part in zip(pairs, parts, strict=True)
        }
    )


@pytest.mark.parametrize("form", FORMS)
def test_inv_prox_1_weight_zero_is_fedavg(form: str) -> None:
    prox, plain = (
        Toy(algorithm, random_clients(SIZES), two_layers(), TRAIN)
        for algorithm in (FedProx(proximal_weight=0, proximal_form=form), FedAvg())  # type: ignore[arg-type]
    )
    for _ in range(TRAIN.rounds):
        assert_equal(prox.step(), plain.step())


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("form", FORMS)
def test_inv_prox_2_a_single_step_is_fedavg(form: str, mode: str) -> None:
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None, "momentum": 0.0})
    prox, plain = (
        Toy(algorithm, random_clients(SIZES), two_layers(), train, mode=mode)
        for algorithm in (FedProx(proximal_weight=50.0, proximal_form=form), FedAvg())  # type: ignore[arg-type]
    )
    for _ in range(train.rounds):
        assert_close(prox.step(), plain.step(), 1e-12)


@pytest.mark.parametrize(("form", "pull"), [("half_squared", 0.5), ("squared", 1.0)])
def test_inv_prox_3_quadratic_closed_form(form: str, pull: float) -> None:
    points, eta, tau, start = [0.0, 4.0], 0.1, 5, 1.0
    for client, point in enumerate(points):
        toy = Toy(
            FedProx(proximal_weight=0.5, proximal_form=form),  # type: ignore[arg-type]
            quadratic_clients(points, [1, 3]),
            Quadratic(start=start),
            TrainConfig(rounds=1, local_epochs=tau, batch_size=None, lr=eta),
        )
        optimum = (point + pull * start) / (1 + pull)
        expected = optimum + (1 - eta * (1 + pull)) ** tau * (start - optimum)
        assert abs(float(toy.step([client])["model"]["theta"]) - expected) < 1e-12


def test_inv_prox_4_forms_of_the_pull() -> None:
    model, anchor = random_model(1), random_model(2)
    difference = map_leaves(torch.sub, model, anchor)
    twice = map_leaves(lambda a, d: a + 2 * d, anchor, difference)
    assert_close(gradient("half_squared", model, anchor), difference, 1e-12)
    assert_close(gradient("half_squared", twice, anchor), map_leaves(lambda d: 2 * d, difference), 1e-12)
    assert_close(gradient("squared", model, anchor), map_leaves(lambda d: 2 * d, difference), 1e-12)
    for point in (model, twice):
        for name, pull in gradient("norm_per_layer", point, anchor).items():
            length = 1.0 if name.endswith("weight") else 0.0
            assert abs(float(pull.norm()) - length) < 1e-12, name
    # smooth L1 is quadratic up to a distance of 1 and linear beyond: the gradient is clipped at length 1 an element
    tensors = len(difference)
    clipped = map_leaves(lambda d: d.clamp(-1, 1) / (d.numel() * tensors), difference)
    assert_close(gradient("smooth_l1_mean", model, anchor), clipped, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_prox_no_pull_at_the_received_model(form: str) -> None:
    model = random_model(1)
    assert float(distance(form, model, model)) == 0
    assert_equal(gradient(form, model, model), map_leaves(torch.zeros_like, model))


def test_prox_squared_is_half_squared_with_twice_the_weight() -> None:
    squared, halved = (
        Toy(FedProx(proximal_weight=weight, proximal_form=form), random_clients(SIZES), two_layers(), TRAIN)  # type: ignore[arg-type]
        for weight, form in ((0.7, "squared"), (1.4, "half_squared"))
    )
    assert_close(squared.run(), halved.run(), 1e-12)


def test_prox_momentum_sees_the_proximal_term() -> None:
    point, start, eta, momentum, weight = 4.0, 1.0, 0.1, 0.5, 0.5
    toy = Toy(
        FedProx(proximal_weight=weight),
        quadratic_clients([point], [1]),
        Quadratic(start=start),
        TrainConfig(rounds=1, local_epochs=4, batch_size=None, lr=eta, momentum=momentum),
    )
    theta, velocity = start, 0.0
    for _ in range(4):
        velocity = momentum * velocity + (theta - point) + weight * (theta - start)
        theta -= eta * velocity
    assert abs(float(toy.step([0])["model"]["theta"]) - theta) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_prox_pulls_towards_the_received_model(form: str) -> None:
    def drift(weight: float) -> float:
        toy = Toy(FedProx(proximal_weight=weight, proximal_form=form), random_clients(SIZES), two_layers(), TRAIN)  # type: ignore[arg-type]
        start = copy(toy.server["model"])
        return float(distance("squared", toy.step()["model"], start))

    assert drift(0.5) < drift(0.0)


@pytest.mark.parametrize("form", FORMS)
def test_prox_vectorized_agrees_with_looped(form: str) -> None:
    looped, stacked = (
        Toy(FedProx(proximal_weight=0.3, proximal_form=form), random_clients(SIZES), two_layers(), TRAIN, mode=mode)  # type: ignore[arg-type]
        for mode in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run())


@pytest.mark.parametrize("form", FORMS)
def test_prox_buffers_are_not_penalised(form: str) -> None:
    task = normalized_layers()
    model = task.network.initialize(0)
    part = random_clients((6,)).load(0)["train"]
    batch = Batch(part.x, part.y)
    elsewhere = {name: leaf + 10 if name in task.network.buffer_names else leaf for name, leaf in model.items()}
    algorithm = FedProx(proximal_weight=1.0, proximal_form=form)  # type: ignore[arg-type]
    loss = algorithm.objective(copy(model), batch, task, {"received": elsewhere}, None)
    assert len(task.network.buffer_names) == 2
    assert torch.equal(loss, task.loss(copy(model), batch))


def test_inv_proxlu_1_global_metrics_are_those_of_fedprox() -> None:
    plain, tuning = (
        Toy(algorithm, random_clients(SIZES), two_layers(), TRAIN)
        for algorithm in (FedProx(proximal_weight=0.3), FedProx(proximal_weight=0.3, finetune_epochs=2))
    )
    assert_equal(tuning.run(), plain.run())
    expected, found = plain.scores(final=True), tuning.scores(final=True)
    for client, rows in found.items():
        assert rows["global"].vector.tolist() == expected[client]["global"].vector.tolist()
        assert "finetuned" in rows
        assert "finetuned" not in expected[client]


def test_proxlu_finetuning_has_no_proximal_term() -> None:
    points, tau, eta = [0.0, 4.0], 3, 0.1
    algorithm = FedProx(proximal_weight=0.5, finetune_epochs=tau)
    train = TrainConfig(rounds=2, clients_per_round=2, local_epochs=2, batch_size=None, lr=eta)
    toy = Toy(algorithm, quadratic_clients(points, [1, 3]), Quadratic(), train)
    final = float(toy.run()["model"]["theta"])
    tuned = toy.federation.map(algorithm.finetune, [0, 1], {"model": toy.server["model"]})
    for client, point in enumerate(points):
        assert abs(float(tuned[client]["theta"]) - (point + (1 - eta) ** tau * (final - point))) < 1e-12


@pytest.mark.parametrize(("form", "pull"), [("half_squared", 0.5), ("squared", 1.0)])
def test_proxlu_may_keep_the_proximal_term(form: str, pull: float) -> None:
    """Fine-tuning then is the local update of one more round, held near the final model."""
    points, tau, eta = [0.0, 4.0], 3, 0.1
    algorithm = FedProx(proximal_weight=0.5, proximal_form=form, finetune_epochs=tau, finetune_proximal=True)  # type: ignore[arg-type]
    train = TrainConfig(rounds=2, clients_per_round=2, local_epochs=2, batch_size=None, lr=eta)
    toy = Toy(algorithm, quadratic_clients(points, [1, 3]), Quadratic(), train)
    final = float(toy.run()["model"]["theta"])
    tuned = toy.federation.map(algorithm.finetune, [0, 1], {"model": toy.server["model"]})
    for client, point in enumerate(points):
        optimum = (point + pull * final) / (1 + pull)
        expected = optimum + (1 - eta * (1 + pull)) ** tau * (final - optimum)
        assert abs(float(tuned[client]["theta"]) - expected) < 1e-12


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", ["full", "head", "body"])
def test_proxlu_proximal_term_holds_the_part_that_moves(form: str, scope: str) -> None:
    toys = {
        keep: Toy(
            FedProx(
                proximal_weight=2.0, proximal_form=form, finetune_epochs=4, finetune_scope=scope, finetune_proximal=keep
            ),  # type: ignore[arg-type]
            random_clients(SIZES),
            two_layers(),
            TRAIN,
        )
        for keep in (True, False)
    }
    far = {}
    for keep, toy in toys.items():
        toy.run()
        tuned = toy.federation.map(toy.algorithm.finetune, range(4), {"model": toy.server["model"]})  # type: ignore[attr-defined]
        far[keep] = sum(float(distance("squared", model, toy.server["model"])) for model in tuned.values())
    assert 0 < far[True] < far[False]


def test_proxlu_options_without_epochs_are_refused() -> None:
    toy = Toy(FedProx(), random_clients(SIZES), two_layers(), TRAIN)
    with pytest.raises(ConfigError, match=r"finetune_proximal without algorithm\.finetune_epochs"):
        FedProx(finetune_proximal=True).check(toy.task, toy.context)


def test_proxlu_without_epochs_is_the_global_model() -> None:
    algorithm = FedProx(finetune_epochs=0)
    toy = Toy(algorithm, random_clients(SIZES), two_layers(), TRAIN)
    toy.run()
    for tuned in toy.federation.map(algorithm.finetune, range(4), {"model": toy.server["model"]}).values():
        assert_equal(tuned, toy.server["model"])


def test_g7_fedprox() -> None:
    train = TrainConfig(rounds=1, local_epochs=2, batch_size=None, lr=0.1)
    for client, reply in ((0, 0.815), (1, 1.555)):
        toy = Toy(FedProx(proximal_weight=0.5), quadratic_clients([0.0, 4.0], [1, 3]), Quadratic(), train)
        assert abs(float(toy.step([client])["model"]["theta"]) - reply) < 1e-9
