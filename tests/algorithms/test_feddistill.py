"""FedDistill: invariants FD, all divergences, who teaches whom, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.feddistill import FedDistill, Targets
from algorithms.local import Local
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.planted import one_rule, validation_loss
from tests.support.toy_networks import normalized_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
FORMS = [
    {"output": output, "divergence": divergence}
    for output in ("probabilities", "logits")
    for divergence in ("cross_entropy", "kl", "raw_logits", "squared_error")
    if output == "logits" or divergence in ("cross_entropy", "kl")
]


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def models(toy: Toy) -> dict[int, Tree]:
    return {client: state["local"] for client, state in toy.states().items()}


def some_logits(seed: int) -> Tensor:
    return 3 * torch.randn(7, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clients_of_classes(*owned: tuple[int, ...]) -> ListDataset:
    """Clients that have samples of these classes only, all six of each."""
    parts = []
    for client, classes in enumerate(owned):
        generator = torch.Generator().manual_seed(client)
        y = torch.tensor(classes).repeat_interleave(6)
        parts.append((torch.randn(len(y), 5, generator=generator, dtype=torch.float64), y))
    return ListDataset(parts, 3)


@MODES
@pytest.mark.parametrize("form", FORMS)
def test_inv_fd_1_weight_zero_is_local_training(mode: str, form: dict[str, Any]) -> None:
    taught, alone = (toy_of(a, mode=mode) for a in (FedDistill(distillation_weight=0, **form), Local()))
    for _ in range(TRAIN.rounds):
        taught.step()
        alone.step()
        assert_equal(models(taught), models(alone))


def test_inv_fd_2_in_round_0_nobody_is_taught() -> None:
    taught, alone = toy_of(FedDistill(distillation_weight=5)), toy_of(Local())
    taught.step([0, 1, 2])
    alone.step([0, 1, 2])
    assert_equal(models(taught), models(alone))
    taught.step([0, 1, 2])
    alone.step([0, 1, 2])
    assert not torch.equal(models(taught)[0]["head.weight"], models(alone)[0]["head.weight"])


@pytest.mark.parametrize("alone", [True, False])
def test_inv_fd_3_a_client_does_not_teach_itself(alone: bool) -> None:
    dataset = random_clients([10])
    taught, local = toy_of(FedDistill(leave_one_out=alone), dataset=dataset), toy_of(Local(), dataset=dataset)
    taught.run()
    local.run()
    same = torch.equal(models(taught)[0]["head.weight"], models(local)[0]["head.weight"])
    assert same == alone


def test_inv_fd_4_of_two_clients_with_a_class_each_is_taught_by_the_other() -> None:
    toy = toy_of(FedDistill(), dataset=clients_of_classes((0, 1), (1, 2), (2,)))
    toy.step([0, 1, 2])
    tables = toy.server["tables"]
    for client, classes, rows in ((0, {1, 2}, {1: 1}), (1, {0, 1, 2}, {0: 0, 1: 0, 2: 2}), (2, {0, 1, 2}, {2: 1})):
        found = Targets(tables).without(str(client))
        assert {int(y) for y in found["exist"].nonzero()[:, 0]} == classes
        for y, other in rows.items():
            assert_equal(found["means"][y], tables[str(other)]["means"][y])
    everybody = Targets(tables).without(None)
    assert_close(everybody["means"][1], (tables["0"]["means"][1] + tables["1"]["means"][1]) / 2, 1e-12)
    # who was not in the cohort is taught by all that were
    assert_equal(Targets(tables).without("7"), everybody)


def test_inv_fd_5_rows_of_probabilities_sum_to_one() -> None:
    toy = toy_of(FedDistill())
    for _ in range(2):
        toy.step([0, 1, 2])
        for table in toy.server["tables"].values():
            assert_close(table["means"].sum(1), table["exist"], 1e-12)


@pytest.mark.parametrize("hidden", [3, 30])
def test_inv_fd_6_bytes_are_those_of_two_small_tables(hidden: int) -> None:
    toy = toy_of(
        FedDistill(),
        task=two_layers(hidden=hidden, double=False),
        dataset=random_clients(SIZES, dtype=torch.float32),
    )
    for _ in range(3):
        toy.step([0, 1])
        assert toy.federation.traffic.down == toy.federation.traffic.up == 2 * 4 * 3 * (3 + 1)


@pytest.mark.parametrize("output", ["probabilities", "logits"])
def test_inv_fd_7_a_target_equal_to_the_own_output_teaches_nothing(output: Any) -> None:
    logits = some_logits(0)
    algorithm = FedDistill(output=output, divergence="kl")
    target = logits.softmax(-1) if output == "probabilities" else logits
    student = logits.clone().requires_grad_()
    value = algorithm.distance(target, student).sum()
    (gradient,) = torch.autograd.grad(value, student)
    assert abs(float(value.detach())) < 1e-12
    assert float(gradient.abs().max()) < 1e-12


def test_inv_fd_8_gradient_with_raw_logits() -> None:
    student, target = some_logits(0).requires_grad_(), some_logits(1)
    algorithm = FedDistill(output="logits", divergence="raw_logits")
    (gradient,) = torch.autograd.grad(algorithm.distance(target, student).sum(), student)
    assert_close(gradient, target.sum(-1, keepdim=True) * student.detach().softmax(-1) - target, 1e-12)


def test_inv_fd_9_gradient_with_squared_errors() -> None:
    student, target = some_logits(0).requires_grad_(), some_logits(1)
    algorithm = FedDistill(output="logits", divergence="squared_error")
    (gradient,) = torch.autograd.grad(algorithm.distance(target, student).sum(), student)
    assert_close(gradient, (student.detach() - target) / 2, 1e-12)  # 2/C, of 4 classes


def test_divergences_by_hand() -> None:
    student, target = some_logits(0), some_logits(1)
    p, q = target.softmax(-1), student.softmax(-1)
    entropy, divergence = -(p * q.log()).sum(-1), (p * (p / q).log()).sum(-1)
    for given, output in ((p, "probabilities"), (target, "logits")):
        assert_close(FedDistill(output=output).distance(given, student), entropy, 1e-12)  # type: ignore[arg-type]
        assert_close(FedDistill(output=output, divergence="kl").distance(given, student), divergence, 1e-12)  # type: ignore[arg-type]


def test_only_samples_of_classes_with_a_target_are_taught() -> None:
    task, part = two_layers(), random_clients((8,)).load(0)["train"]
    model, batch = task.network.initialize(0), Batch(part.x, part.y)
    table = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    algorithm = FedDistill(distillation_weight=0.7)
    for exist in ([0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]):
        frozen = {"targets": table, "exist": torch.tensor(exist, dtype=torch.float64)}
        value = algorithm.taught_objective(model, batch, task, frozen, None)
        distances = -task.logits(model, batch).log_softmax(-1).mean(-1)
        expected = task.loss(model, batch) + 0.7 * (frozen["exist"][batch.y] * distances).mean()
        assert_close(value, expected, 1e-12)


def test_tables_are_mean_outputs_of_the_trained_model() -> None:
    for output in ("probabilities", "logits"):
        toy = toy_of(FedDistill(output=output))  # type: ignore[arg-type]
        toy.step([1, 2])
        examples = toy.dataset.load(1)["train"]
        logits = toy.task.network.logits(models(toy)[1], examples.x)
        outputs = logits.softmax(-1) if output == "probabilities" else logits
        for y in range(3):
            exists = bool((examples.y == y).any())
            assert bool(toy.server["tables"]["1"]["exist"][y]) == exists
            if exists:
                assert_close(toy.server["tables"]["1"]["means"][y], outputs[examples.y == y].mean(0), 1e-12)


def test_the_last_cohort_teaches() -> None:
    toy = toy_of(FedDistill())
    toy.step([0, 1])
    toy.step([2])
    assert set(toy.server["tables"]) == {"2"}


@pytest.mark.parametrize("form", FORMS)
def test_vectorized_agrees_with_looped(form: dict[str, Any]) -> None:
    looped, stacked = (
        toy_of(FedDistill(distillation_weight=0.1, **form), mode=mode) for mode in ("looped", "vectorized")
    )
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


@pytest.mark.parametrize("divergence", ["raw_logits", "squared_error"])
def test_divergences_of_logits_are_refused_for_probabilities(divergence: Any) -> None:
    toy = toy_of(FedDistill())
    with pytest.raises(ConfigError, match=rf"divergence={divergence} .* algorithm\.output=logits"):
        FedDistill(divergence=divergence).check(toy.task, toy.context)
    FedDistill(divergence=divergence, output="logits").check(toy.task, toy.context)


@pytest.mark.slow
def test_what_others_make_of_a_class_helps_against_few_samples() -> None:
    train = TrainConfig(rounds=40, clients_per_round="all", local_epochs=1, batch_size=None, lr=0.5)
    found = {}
    for algorithm in (FedDistill(), Local()):
        toy = Toy(algorithm, one_rule(10, 8, seed=1, noise=0.4), softmax_regression(), train)
        toy.run()
        found[algorithm.name] = validation_loss(toy, "personalized")
    assert found["feddistill"] < found["local"] - 0.1


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_clients_of_several_architectures_teach_each_other(mode: str) -> None:
    single, deep = two_layers(), normalized_layers()
    pair, sizes = Classification(single.network, [single, deep]), (*SIZES, *SIZES)
    toy = toy_of(FedDistill(), dataset=random_clients(sizes), task=pair, mode=mode)
    for _ in range(2):
        toy.step(range(len(sizes)))
    found, scores = models(toy), toy.scores()
    assert {tuple(model) for model in found.values()} == {
        tuple(task.network.parameter_names + task.network.buffer_names) for task in (single, deep)
    }
    for client, model in found.items():
        examples, network = toy.dataset.load(client)["test"], (deep if "norm.weight" in model else single).network
        expected = F.cross_entropy(network.logits(model, examples.x, training=False), examples.y)
        assert abs(scores[client]["personalized"].loss - float(expected)) < 1e-6
