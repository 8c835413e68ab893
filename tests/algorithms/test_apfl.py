"""APFL: invariants APFL, its rows of the equivalence matrix, adaptive mixing, buffers and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from algorithms.apfl import APFL
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, inner_product, interpolate, subtract
from rayfl.tasks.base import Batch
from tests.support.planted import accuracies, related_clients
from tests.support.toy_networks import Quadratic, normalized_layers, softmax_regression, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 2], [1, 2, 3], [0, 1])
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
PLAIN = TRAIN.model_copy(update={"momentum": 0.0, "weight_decay": 0.0})
MIXES = pytest.mark.parametrize("mix", ["weights", "logits"])
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def some_models(task: Any) -> tuple[Tree, Tree, Batch]:
    part = random_clients((7,), seed=4).load(0)["train"]
    return task.network.initialize(1), task.network.initialize(2), Batch(part.x, part.y)


@MIXES
def test_after_training_the_mixture_is_that_of_both_trained_models(mix: Any) -> None:
    toy = toy_of(APFL(alpha=0.4, mix=mix))
    toy.step([2])
    trained = toy.federation.trained_scores[2]["test"]
    # the model of the only client of the round is the server's from now on
    later = toy.scores()[2]
    assert trained["personalized"].vector.tolist() == later["personalized"].vector.tolist()
    assert trained["local"].vector.tolist() == later["global"].vector.tolist()


@MODES
@MIXES
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_inv_apfl_1_the_server_is_that_of_fedavg(adaptive: bool, alpha: float, mix: Any, mode: str) -> None:
    mixing = toy_of(APFL(alpha=alpha, adaptive=adaptive, mix=mix), mode=mode)
    averaging = toy_of(FedAvg(), mode=mode)
    for cohort in COHORTS:
        assert_equal(mixing.step(cohort), averaging.step(cohort))


@MIXES
def test_inv_apfl_1_holds_with_running_statistics(mix: Any) -> None:
    mixing, averaging = (toy_of(a, task=normalized_layers()) for a in (APFL(adaptive=True, mix=mix), FedAvg()))
    for cohort in COHORTS:
        assert_equal(mixing.step(cohort), averaging.step(cohort))


@MODES
@MIXES
def test_inv_apfl_2_with_alpha_1_clients_train_alone(mix: Any, mode: str) -> None:
    mixing, alone = (toy_of(algorithm, mode=mode) for algorithm in (APFL(alpha=1, mix=mix), Local()))
    for cohort in COHORTS:
        mixing.step(cohort)
        alone.step(cohort)
        assert_equal(mixing.states(), alone.states())
    found, expected = mixing.scores(), alone.scores()
    for client in range(len(SIZES)):
        assert np.allclose(found[client]["personalized"].vector, expected[client]["personalized"].vector, atol=1e-10)


@MIXES
def test_inv_apfl_3_with_alpha_0_the_local_model_rests_and_the_rows_are_those_of_fedavg(mix: Any) -> None:
    mixing, averaging = (toy_of(algorithm, PLAIN) for algorithm in (APFL(alpha=0, mix=mix), FedAvg()))
    start = copy(mixing.server["model"])
    for cohort in COHORTS:
        mixing.step(cohort)
        averaging.step(cohort)
    for state in mixing.states().values():
        assert_equal(state["local"], start)
    expected = averaging.scores()
    for client, rows in mixing.scores().items():
        for row in ("global", "personalized"):
            assert rows[row].vector.tolist() == expected[client]["global"].vector.tolist()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_inv_apfl_4_gradient_of_alpha(alpha: float) -> None:
    task = two_layers()
    federated, local, batch = some_models(task)

    def mixture_loss(at: float) -> float:
        return float(task.loss(interpolate(federated, local, at), batch))

    mixed = {name: leaf.requires_grad_() for name, leaf in interpolate(federated, local, alpha).items()}
    parts = torch.autograd.grad(task.loss(mixed, batch), list(mixed.values()))
    expected = float(inner_product(subtract(local, federated), dict(zip(mixed, parts, strict=True))))
    differences = (mixture_loss(alpha + 1e-5) - mixture_loss(alpha - 1e-5)) / 2e-5
    trained = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    model = {"federated": federated, "local": local, "alpha": trained}
    (found,) = torch.autograd.grad(APFL(adaptive=True).objective(model, batch, task, None, None), trained)
    assert abs(differences - expected) < 1e-8
    assert abs(float(found) - expected) < 1e-12


@pytest.mark.parametrize("adaptive", [False, True])
def test_inv_apfl_5_mixing_a_linear_model_or_its_logits_is_the_same(adaptive: bool) -> None:
    weights, logits = (
        toy_of(APFL(alpha=0.4, adaptive=adaptive, mix=mix), task=softmax_regression())  # type: ignore[arg-type]
        for mix in ("weights", "logits")
    )
    for cohort in COHORTS:
        assert_equal(weights.step(cohort), logits.step(cohort))
        assert_close(weights.states(), logits.states(), 1e-12)
    expected = logits.scores()
    for client, rows in weights.scores().items():
        assert np.allclose(rows["personalized"].vector, expected[client]["personalized"].vector, atol=1e-10)


@MODES
def test_apfl_takes_all_gradients_before_any_update(mode: str) -> None:
    """On QUAD, by hand; momentum is that of w and v apart, and alpha has neither momentum nor decay."""
    point, eta, momentum, decay, steps = 4.0, 0.1, 0.5, 0.01, 3
    train = TrainConfig(rounds=2, local_epochs=steps, batch_size=None, lr=eta, momentum=momentum, weight_decay=decay)
    toy = Toy(APFL(alpha=0.4, adaptive=True), quadratic_clients([point], [2]), Quadratic(), train, mode=mode)
    w, v, alpha, reached = 1.0, 1.0, 0.4, []
    for _ in range(train.rounds):
        w_velocity = v_velocity = 0.0
        for _ in range(steps):
            mixed = alpha * v + (1 - alpha) * w - point
            w_velocity = momentum * w_velocity + (w - point) + decay * w
            v_velocity = momentum * v_velocity + alpha * mixed + decay * v
            alpha = min(max(alpha - eta * (v - w) * mixed, 0.0), 1.0)
            w, v = w - eta * w_velocity, v - eta * v_velocity
        toy.step([0])
        state = toy.states()[0]
        assert abs(float(toy.server["model"]["theta"]) - w) < 1e-12
        assert abs(float(state["local"]["theta"]) - v) < 1e-12
        assert abs(float(state["alpha"]) - alpha) < 1e-12
        reached.append(alpha)
    assert 0 < reached[0] < 0.4 and reached[1] == 0


def test_alpha_stays_between_0_and_1_and_persists() -> None:
    toy = toy_of(APFL(alpha=0.5, adaptive=True), TRAIN.model_copy(update={"lr": 1.0}))
    for cohort in COHORTS:
        before = toy.states()
        toy.step(cohort)
        after = {client: float(state["alpha"]) for client, state in toy.states().items()}
        assert all(0 <= alpha <= 1 for alpha in after.values())
        for client in set(before) - set(cohort):
            assert after[client] == float(before[client]["alpha"])
    assert len(set(after.values())) > 1


def test_an_alpha_that_adapts_no_more_is_the_configured_one() -> None:
    """As in a fork of a run in which it did."""
    toy = toy_of(APFL(alpha=0.5, adaptive=True))
    toy.step(COHORTS[0])
    for host in toy.client_hosts:
        host.algorithm = APFL(alpha=0.0)
    for rows in toy.scores().values():
        assert rows["personalized"].vector.tolist() == rows["global"].vector.tolist()


@MIXES
def test_apfl_personal_row_is_the_mixture_with_the_latest_server_model(mix: Any) -> None:
    toy = toy_of(APFL(alpha=0.3, mix=mix))
    start = copy(toy.server["model"])
    toy.step([0, 1])
    toy.step([1, 2])
    network = toy.task.network
    rows = toy.scores()
    for client in range(len(SIZES)):
        own = toy.states()[client]["local"] if client < 3 else start
        part = toy.dataset.load(client)["test"]
        federated, local = (network.logits(model, part.x) for model in (toy.server["model"], own))
        mixed = network.logits(interpolate(toy.server["model"], own, 0.3), part.x)
        logits = mixed if mix == "weights" else 0.7 * federated + 0.3 * local
        loss = float(toy.task.cross_entropy(logits, Batch(part.x, part.y)))
        assert abs(rows[client]["personalized"].loss - loss) < 1e-10


@MIXES
@pytest.mark.parametrize("adaptive", [False, True])
def test_vectorized_agrees_with_looped_and_others_keep_their_states(adaptive: bool, mix: Any) -> None:
    looped, stacked = (toy_of(APFL(alpha=0.5, adaptive=adaptive, mix=mix), mode=m) for m in ("looped", "vectorized"))
    for cohort in COHORTS:
        before = looped.states()
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
        for client in set(before) - set(cohort):
            assert_equal(looped.states()[client], before[client])


def test_buffers_of_the_mixture_stay_with_the_client() -> None:
    toy = toy_of(APFL(alpha=0.5), task=normalized_layers())
    start = copy(toy.server["model"])
    toy.step([0])
    own, server = toy.states()[0]["local"], toy.server["model"]
    names, buffers = toy.task.network.parameter_names, toy.task.network.buffer_names
    assert len(buffers) == 2
    for name in buffers:
        assert not torch.equal(own[name], server[name]) and not torch.equal(own[name], start[name])
    # nothing was recorded in the initial model of a client never sampled: it has the server's statistics
    rows = toy.scores()
    for client, (local, recorded) in {0: (own, own), 1: (start, server)}.items():
        mixed = {name: (server[name] + local[name]) / 2 for name in names} | {name: recorded[name] for name in buffers}
        part = toy.dataset.load(client)["test"]
        loss = float(toy.task.cross_entropy(toy.task.network.logits(mixed, part.x), Batch(part.x, part.y)))
        assert abs(rows[client]["personalized"].loss - loss) < 1e-10


def test_alpha_outside_the_unit_interval_is_refused() -> None:
    for alpha in (-0.1, 1.1):
        with pytest.raises(ValidationError):
            APFL(alpha=alpha)


@pytest.mark.slow
def test_the_mixture_beats_the_global_and_the_local_model() -> None:
    clients = related_clients(own=0.8)
    mixture = accuracies(APFL(), clients)
    assert mixture["personalized"] > mixture["global"] + 0.02
    assert mixture["personalized"] > accuracies(Local(), clients)["personalized"] + 0.02


@pytest.mark.slow
def test_alpha_adapts_to_how_much_clients_differ() -> None:
    shares = []
    for own in (0.0, 3.0):
        train = TrainConfig(rounds=10, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
        toy = Toy(APFL(alpha=0.5, adaptive=True), related_clients(own, samples=60), softmax_regression(10, 2), train)
        toy.run()
        shares.append(np.mean([float(state["alpha"]) for state in toy.states().values()]))
    assert shares[1] > shares[0] + 0.1
