"""FLDA: invariants FLDA, both mixtures and both gates, and what the mixture is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.flda import FLDA
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, from_leaves, leaves, zeros_like
from rayfl.tasks.base import Batch
from tests.support.planted import two_domains, validation_loss
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
MIXTURES = pytest.mark.parametrize("mix", ["probabilities", "logits"])
SHARED, PRIVATE = 1000.0, -1000.0
"""Biases of gates that are open for one model alone, to the bit."""


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


def parts(bias: float = 0.0, width: int = 7) -> Tree:
    """Two models and a gate that depends on its input."""
    network = two_layers().network
    gate = {"weight": draw(width), "bias": torch.tensor(bias, dtype=torch.float64)}
    return {"shared": network.initialize(1), "private": network.initialize(2), "gate": gate}


def gradients(algorithm: FLDA, tree: Tree, batch: Batch) -> Tree:
    pairs = [(path, leaf.clone().requires_grad_()) for path, leaf in leaves(tree)]
    value = algorithm.objective(from_leaves(dict(pairs)), batch, two_layers(), None, None)
    found = torch.autograd.grad(value, [leaf for _, leaf in pairs], materialize_grads=True)
    return from_leaves({path: part for (path, _), part in zip(pairs, found, strict=True)})


@MODES
def test_inv_flda_1_a_gate_held_open_for_the_shared_model_is_fedavg(mode: str) -> None:
    held, plain = (toy_of(algorithm, mode=mode) for algorithm in (FLDA(gate_bias=SHARED, gate_lr=0), FedAvg()))
    for _ in range(TRAIN.rounds):
        assert_equal(held.step(), plain.step())
    found, expected = held.scores(), plain.scores()
    for client in held.states():
        assert found[client]["personalized"].loss == pytest.approx(expected[client]["global"].loss, abs=1e-12)


@MIXTURES
def test_inv_flda_1_the_other_model_gets_no_gradient(mix: Any) -> None:
    for bias, silent in ((SHARED, "private"), (PRIVATE, "shared")):
        tree = parts(bias)
        tree["gate"]["weight"] = torch.zeros_like(tree["gate"]["weight"])
        found = gradients(FLDA(mix=mix), tree, some_batch())
        assert_equal(found[silent], zeros_like(found[silent]))
        speaking = {"shared", "private"} - {silent}
        assert all(found[name]["head.weight"].abs().max() > 1e-3 for name in speaking)


@MODES
@MIXTURES
def test_inv_flda_2_a_gate_held_open_for_the_private_model_is_local_training(mix: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"weight_decay": 0.0})
    held, alone = (
        toy_of(algorithm, train, mode=mode)
        for algorithm in (FLDA(gate_bias=PRIVATE, gate_lr=0, mix=mix), Local(local_init="own"))
    )
    initial = copy(held.server)
    compare = assert_equal if mix == "probabilities" else assert_close
    for _ in range(train.rounds):
        assert_equal(held.step(), initial)
        alone.step()
        for client, state in alone.states().items():
            compare(held.states()[client]["private"], state["local"])


@MIXTURES
@pytest.mark.parametrize("bias", [0.0, 3.0, -40.0, SHARED])
def test_inv_flda_3_probabilities_sum_to_one(mix: Any, bias: float) -> None:
    shared, private, gate = 5 * draw(6, 3), 5 * draw(6, 3, seed=1), bias + draw(6, seed=2)
    mixed = FLDA(mix=mix).mixed(shared, private, gate)
    assert_close(mixed.exp().sum(-1), torch.ones(6, dtype=torch.float64), 1e-12)
    share = gate.sigmoid()[:, None]
    if mix == "probabilities":
        assert_close(mixed.exp(), share * shared.softmax(-1) + (1 - share) * private.softmax(-1), 1e-12)
    else:
        assert_close(mixed.exp(), (share * shared + (1 - share) * private).softmax(-1), 1e-12)


def test_inv_flda_4_log_likelihood_with_respect_to_the_gate() -> None:
    shared, private, gate = draw(6, 3), draw(6, 3, seed=1), draw(6, seed=2).requires_grad_()
    label = some_batch().y[:, None]
    likelihood = FLDA().mixed(shared, private, gate).gather(1, label)[:, 0]
    found = torch.autograd.grad(likelihood.sum(), gate)[0]
    s = gate.detach().sigmoid()
    q_w, q_v = (logits.softmax(-1).gather(1, label)[:, 0] for logits in (shared, private))
    expected = (q_w - q_v) / (s * q_w + (1 - s) * q_v)
    assert_close(found / (s * (1 - s)), expected, 1e-12)


def test_objective_is_the_mean_negative_log_likelihood_of_the_mixture() -> None:
    batch, task = some_batch(), two_layers()
    for source, width in (("features", 7), ("raw", 5)):
        tree = parts(0.3, width)
        features, shared = task.features_and_logits(tree["shared"], batch)
        seen = features if source == "features" else batch.x
        s = torch.sigmoid(seen @ tree["gate"]["weight"] + 0.3)[:, None]
        mixed = s * shared.softmax(-1) + (1 - s) * task.logits(tree["private"], batch).softmax(-1)
        expected = -mixed.gather(1, batch.y[:, None]).log().mean()
        found = FLDA(gate_input=source).objective(tree, batch, task, None, None)  # type: ignore[arg-type]
        assert_close(found, expected, 1e-12)


def test_the_gate_sees_features_as_constants() -> None:
    """With two equal models no gate changes the loss, and with different ones the body moves by its model alone."""
    tree, batch, task = parts(), some_batch(), two_layers()
    found = gradients(FLDA(), tree, batch)
    s = torch.sigmoid(task.features(tree["shared"], batch) @ tree["gate"]["weight"])
    leaf = {name: value.clone().requires_grad_() for name, value in tree["shared"].items()}
    private = task.logits(tree["private"], batch).softmax(-1)
    mixed = s[:, None] * task.logits(leaf, batch).softmax(-1) + (1 - s)[:, None] * private
    loss = -mixed.gather(1, batch.y[:, None]).log().mean()
    assert_close(found["shared"], dict(zip(leaf, torch.autograd.grad(loss, list(leaf.values())), strict=True)), 1e-14)
    assert found["gate"]["weight"].abs().max() > 1e-4
    tree["private"] = tree["shared"]
    assert_close(gradients(FLDA(), tree, batch)["gate"], zeros_like(tree["gate"]), 1e-15)


def test_a_gate_whose_rate_is_zero_stays_as_it_was() -> None:
    still, moving = (toy_of(FLDA(gate_bias=0.3, gate_lr=rate)) for rate in (0, None))
    for toy in (still, moving):
        toy.step([0])
    gate = still.states()[0]["gate"]
    assert float(gate["bias"]) == 0.3 and not gate["weight"].any()
    assert moving.states()[0]["gate"]["weight"].all()


@pytest.mark.parametrize("options", [{}, {"gate_input": "raw"}, {"mix": "logits", "gate_lr": 0.5}])
def test_flda_vectorized_agrees_with_looped(options: dict[str, Any]) -> None:
    looped, stacked = (toy_of(FLDA(**options), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


@pytest.mark.parametrize(("source", "width"), [("features", 7), ("raw", 5)])
def test_states_and_rows(source: Any, width: int) -> None:
    run = toy_of(FLDA(gate_input=source), task=normalized_layers(0.3), train=TRAIN.model_copy(update={"batch_size": 3}))
    run.step([1])
    assert set(run.states()) == {1}
    assert set(run.states()[1]) == {"private", "gate"}
    gate = run.states()[1]["gate"]
    assert gate["weight"].shape == (width,) and gate["weight"].any()
    own = run.states()[1]["private"]
    assert not torch.equal(own["norm.running_mean"], run.server["model"]["norm.running_mean"])
    assert set(run.federation.trained_scores[1]["test"]) == {"personalized", "local"}
    scores = run.scores()
    assert set(scores[1]) == {"global", FLDA.personalized}
    # a client never sampled mixes half and half with a private model of its own
    part, network = run.dataset.load(3)["test"], run.task.network
    private = network.initialize(run.context.streams.integer("init.local", client=3))
    halves = [network.logits(model, part.x).softmax(-1) / 2 for model in (run.server["model"], private)]
    expected = -sum(halves).gather(1, part.y[:, None]).log().mean()  # type: ignore[union-attr]
    assert scores[3]["personalized"].loss == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.slow
def test_a_gate_of_its_input_tells_where_everybodys_rule_holds() -> None:
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.1, momentum=0.5)
    data = two_domains(clients=6, train=30, seed=1)
    runs = {}
    for row, algorithm in (
        ("global", FedAvg()),
        ("personalized", Local(local_init="own")),
        ("personalized", FLDA(gate_input="raw")),
    ):
        run = Toy(algorithm, data, two_layers(hidden=16), train, mode="vectorized")
        run.run()
        runs[algorithm.name] = validation_loss(run, row)
        states = run.states()
    assert runs["flda"] < min(runs["fedavg"], runs["local"]) - 0.1
    # the last input says which rule holds: every gate opens for the shared model where it is positive
    assert all(state["gate"]["weight"][-1] > 0.1 for state in states.values())
