"""FML: invariants FML, fixture G6, whose momentum is kept, and what mutual learning is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from algorithms.fedavg import FedAvg
from algorithms.fml import FML, mutual_loss
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, from_leaves, leaves
from rayfl.tasks.base import Batch
from tests.support.planted import one_rule, validation_loss
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def some_batch(size: int = 6) -> Batch:
    examples = random_clients([size], seed=3).load(0)["train"]
    return Batch(examples.x, examples.y)


def gradients(algorithm: FML, tree: Tree, batch: Batch) -> Tree:
    """The gradient of the objective at a tree of two models."""
    pairs = [(path, leaf.clone().requires_grad_()) for path, leaf in leaves(tree)]
    value = algorithm.objective(from_leaves(dict(pairs)), batch, two_layers(), None, None)
    parts = torch.autograd.grad(value, [leaf for _, leaf in pairs])
    return from_leaves({path: part for (path, _), part in zip(pairs, parts, strict=True)})


@MODES
def test_inv_fml_1_without_teaching_they_are_local_training_and_federated_averaging(mode: str) -> None:
    both, alone, average = (
        toy_of(algorithm, mode=mode)
        for algorithm in (
            FML(private_weight=1, meme_weight=1),
            Local(local_init="own"),
            FedAvg(aggregation="uniform"),
        )
    )
    for _ in range(TRAIN.rounds):
        assert_equal(both.step(), average.step())
        alone.step()
        assert {k: s["private"] for k, s in both.states().items()}.keys() == alone.states().keys()
        for client, state in alone.states().items():
            assert_equal(both.states()[client]["private"], state["local"])


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_fml_a_meme_that_is_not_taught_is_federated_averaging_whatever_the_private_model_learns(weight: float) -> None:
    taught, average = toy_of(FML(private_weight=weight, meme_weight=1)), toy_of(FedAvg(aggregation="uniform"))
    alone = toy_of(Local(local_init="own"))
    for _ in range(TRAIN.rounds):
        assert_equal(taught.step(), average.step())
        alone.step()
    client = min(alone.states())
    assert not torch.equal(
        taught.states()[client]["private"]["head.weight"], alone.states()[client]["local"]["head.weight"]
    )


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_inv_fml_2_equal_models_teach_each_other_nothing(weight: float) -> None:
    logits = 3 * torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch, task = some_batch(), two_layers()

    def divergence(student: Tensor) -> Tensor:
        return mutual_loss(student, logits, batch, task, 0.0)

    assert float(divergence(logits)) == 0
    assert torch.equal(grad(divergence)(logits), torch.zeros_like(logits))
    stacked = torch.stack([logits, logits])
    assert torch.equal(vmap(grad(divergence))(stacked), torch.zeros_like(stacked))
    model = task.network.initialize(0)
    found = gradients(FML(private_weight=weight, meme_weight=weight), {"private": model, "meme": model}, batch)
    assert_equal(found["private"], found["meme"])
    labels = gradients(FML(private_weight=1, meme_weight=1), {"private": model, "meme": model}, batch)
    assert_close(found["meme"], {name: weight * leaf for name, leaf in labels["meme"].items()}, 1e-15)


@MODES
def test_inv_fml_2_models_once_equal_stay_equal(mode: str) -> None:
    run = toy_of(FML(), mode=mode)
    run.client_hosts[0].states.replace(2, {"private": copy(run.server["model"])}, 0)
    before = copy(run.server["model"])
    for _ in range(3):
        run.step([2])
        assert_equal(run.states()[2]["private"], run.server["model"])
    assert not torch.equal(run.server["model"]["head.weight"], before["head.weight"])


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_inv_fml_3_gradient_with_respect_to_the_logits(weight: float) -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = some_batch()
    found = grad(lambda z: mutual_loss(z, teacher, batch, two_layers(), weight))(student)
    own, other = student.softmax(-1), teacher.softmax(-1)
    labels = torch.nn.functional.one_hot(batch.y, 3)
    expected = (weight * (own - labels) + (1 - weight) * (own - other)) / 6
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_inv_fml_4_neither_loss_moves_the_other_model() -> None:
    batch, task = some_batch(), two_layers()
    models = {"private": task.network.initialize(1), "meme": task.network.initialize(2)}
    logits = {name: task.logits(model, batch) for name, model in models.items()}
    found = gradients(FML(private_weight=0.3, meme_weight=0.6), models, batch)
    for own, other, weight in (("private", "meme", 0.3), ("meme", "private", 0.6)):
        leaf = {name: tensor.clone().requires_grad_() for name, tensor in models[own].items()}
        loss = mutual_loss(task.logits(leaf, batch), logits[other], batch, task, weight)
        alone = dict(zip(leaf, torch.autograd.grad(loss, list(leaf.values())), strict=True))
        assert_close(found[own], alone, 1e-15)


def test_g6() -> None:
    student = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor([[0.0, 2.0, 0.0]], dtype=torch.float64)
    loss = mutual_loss(student, teacher, Batch(student, torch.tensor([0])), two_layers(), 0.5)
    assert loss.item() == pytest.approx(0.574819623495, abs=1e-9)
    gradient = torch.autograd.grad(loss, student)[0][0]
    assert gradient.tolist() == pytest.approx([0.111987466315, -0.148764550026, 0.036777083711], abs=1e-9)


def test_the_meme_starts_with_empty_momentum_and_the_private_model_does_not() -> None:
    """Without teaching both are known: local training with kept momentum, federated averaging without."""
    kept = TRAIN.model_copy(update={"persist_optimizer": True})
    both = toy_of(FML(private_weight=1, meme_weight=1, persist_private_optimizer=True))
    average = toy_of(FedAvg(aggregation="uniform"))
    alone, forgetting = toy_of(Local(local_init="own"), kept), toy_of(Local(local_init="own"))
    for cohort in ([0, 1], [1, 2], [0, 1]):
        assert_equal(both.step(cohort), average.step(cohort))
        alone.step(cohort)
        forgetting.step(cohort)
        for client, state in alone.states().items():
            own = both.states()[client]
            assert_equal(own["private"], state["local"])
            assert_equal(own["optimizer"], {"main": {"private": state["optimizer"]["main"]}})
    assert not torch.equal(forgetting.states()[1]["local"]["head.weight"], both.states()[1]["private"]["head.weight"])


def test_persist_optimizer_keeps_the_momentum_of_both() -> None:
    run = toy_of(FML(), TRAIN.model_copy(update={"persist_optimizer": True}))
    run.step([1])
    assert set(run.states()[1]["optimizer"]["main"]) == {"private", "meme"}


@pytest.mark.parametrize("options", [{}, {"persist_private_optimizer": True}, {"private_weight": 0.0}])
def test_fml_vectorized_agrees_with_looped(options: dict[str, Any]) -> None:
    looped, stacked = (toy_of(FML(**options), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


def test_fml_rows_and_running_statistics() -> None:
    run = toy_of(FML(), task=normalized_layers(0.3), train=TRAIN.model_copy(update={"batch_size": 3}))
    initial = copy(run.server["model"])
    run.step([1])
    assert set(run.federation.trained_scores[1]["test"]) == {"personalized", "local"}
    own = run.states()[1]["private"]
    for model in (own, run.server["model"]):
        assert not torch.equal(model["norm.running_mean"], initial["norm.running_mean"])
    assert not torch.equal(own["norm.running_mean"], run.server["model"]["norm.running_mean"])
    rows = run.scores()[3]
    assert set(rows) == {"global", FML.personalized}
    # a client never sampled has a private model of its own, not the initial meme
    assert (
        rows["personalized"].loss != Toy(FML(), run.dataset, normalized_layers(0.3), TRAIN).scores()[3]["global"].loss
    )
    assert set(run.states()) == {1}


@pytest.mark.slow
def test_private_models_learn_from_everybody_through_the_meme() -> None:
    """Few noisy samples and one rule: what the meme teaches, a client alone cannot know."""
    train = TrainConfig(rounds=10, clients_per_round="all", local_epochs=3, batch_size=6, lr=0.1, momentum=0.5)
    for seed in (0, 1):
        data = one_rule(clients=6, train=18, seed=seed, noise=0.3)
        alone, taught = (
            Toy(algorithm, data, two_layers(hidden=16), train, mode="vectorized")
            for algorithm in (Local(local_init="own"), FML())
        )
        alone.run()
        taught.run()
        assert validation_loss(taught, "personalized") < validation_loss(alone, "personalized") - 0.05
