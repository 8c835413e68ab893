"""FedDF: invariants DF, the server's steps written out in PyTorch, several architectures, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.feddf import FedDF
from algorithms.parts.architectures import architecture
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch
from tests.support.fedme_toys import two_architectures
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
TARGETS = ("avg_logits", "avg_probs", "avg_losses")


def toy_of(algorithm: Any, task: Any = None, public: int = 11, **options: Any) -> Toy:
    settings = {
        "dataset": random_clients(SIZES, public=public),
        "task": task or two_layers(),
        "train": TRAIN,
        **options,
    }
    return Toy(algorithm, **settings)


def of(rows: Any, y: Tensor) -> Batch:
    return Batch(torch.zeros(len(rows), 1), y)


@pytest.mark.parametrize("policy", ["samples", "uniform"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_df_1_without_steps_of_the_server_it_is_fedavg(policy: Any, mode: str) -> None:
    distilled = toy_of(FedDF(distill_steps=0, aggregation=policy), public=0, mode=mode)
    plain = toy_of(FedAvg(aggregation=policy), public=0, mode=mode)
    for cohort in ([0, 1], [1, 2, 3], [2]):
        assert_equal(distilled.step(cohort)["models"]["0"], plain.step(cohort)["model"])
        assert distilled.federation.traffic == plain.federation.traffic
    assert distilled.states() == {}


@pytest.mark.parametrize("target", TARGETS)
def test_inv_df_2_one_client_teaches_itself_nothing(target: Any) -> None:
    algorithm = FedDF(distill_steps=40, distill_target=target, server_optimizer="sgd", server_lr=0.5)
    found, plain = toy_of(algorithm), toy_of(FedAvg())
    for client in (1, 3):
        model = found.step([client])["models"]["0"]
        plain.server = {"model": plain.step([client])["model"]}
        assert_close(model, plain.server["model"], 1e-12)


def test_inv_df_2_equal_logits_have_no_gradient_at_all() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    value = FedDF().divergence(logits, of(logits, logits.detach()))
    assert float(value.detach()) == 0
    assert not torch.autograd.grad(value, logits)[0].any()


GOLDEN = {"avg_logits": 0.060904505598, "avg_probs": 0.053851532497, "avg_losses": 0.270524050943}
TEACHERS = torch.tensor([[[2.0, 0.0, -1.0]], [[0.0, 1.0, 0.0]]], dtype=torch.float64)


def golden(target: Any, **options: Any) -> tuple[float, Tensor]:
    """Loss and gradient of one sample with two teachers."""
    algorithm = FedDF(distill_target=target, **options)
    targets = torch.stack([algorithm.lesson(logits) for logits in TEACHERS]).mean(0)
    student = torch.tensor([[0.5, 0.2, 0.0]], dtype=torch.float64, requires_grad=True)
    value = algorithm.divergence(student, of(student, targets))
    return float(value.detach()), torch.autograd.grad(value, student)[0]


@pytest.mark.parametrize("target", TARGETS)
def test_inv_df_3_golden_values(target: Any) -> None:
    assert abs(golden(target)[0] - GOLDEN[target]) < 1e-12


def test_inv_df_3_gradients() -> None:
    expected = torch.tensor([[-0.120536872317, -0.015901127111, 0.136437999428]], dtype=torch.float64)
    assert_close({"x": golden("avg_logits")[1]}, {"x": expected}, 1e-12)
    for temperature in (1.0, 3.0):
        one, other = (golden(target, temperature=temperature)[1] for target in ("avg_probs", "avg_losses"))
        assert_close({"x": one}, {"x": other}, 1e-15)


def test_inv_df_3_there_is_no_factor_of_the_squared_temperature() -> None:
    cold, warm = golden("avg_logits")[1].norm(), golden("avg_logits", temperature=20.0)[1].norm()
    assert warm < cold / 100


def test_inv_df_4_a_constant_added_to_a_teachers_logits_changes_nothing() -> None:
    algorithm = FedDF()
    student = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teachers = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = teachers + torch.tensor([2.5, -4.0], dtype=torch.float64)[:, None, None]
    found = [algorithm.divergence(student, of(student, one.mean(0))) for one in (teachers, moved)]
    assert abs(float(found[0] - found[1])) < 1e-14


def test_inv_df_5_the_order_of_clients_is_irrelevant() -> None:
    algorithm = FedDF(distill_steps=5)
    expected = toy_of(algorithm).step([0, 1, 3])
    for cohort, hosts in (([3, 0, 1], 1), ([1, 3, 0], 2), ([0, 1, 3], 3)):
        assert_equal(toy_of(algorithm, hosts=hosts).step(cohort), expected)


@pytest.mark.parametrize("target", TARGETS)
def test_inv_df_6_it_is_the_ensemble_run_on_the_server(target: Any) -> None:
    steps, size, tau = 9, 4, 2.0
    options: dict[str, Any] = {"server_lr": 0.05, "server_batch_size": size, "server_max_grad_norm": 0.01}
    algorithm = FedDF(distill_steps=steps, distill_target=target, temperature=tau, **options)
    toy, plain = toy_of(algorithm), toy_of(FedAvg())
    found = toy.step([0, 2])["models"]["0"]
    trained = [toy_of(FedAvg()).step([client])["model"] for client in (0, 2)]
    student = {name: leaf.requires_grad_() for name, leaf in plain.step([0, 2])["model"].items()}
    public, network = toy.dataset.load_public(), toy.task.network
    rule = torch.optim.Adam(student.values(), 0.05)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(rule, steps)
    generator = RandomStreams(0).generator("batches.distill", 0, -1)
    orders = [np.array_split(generator.permutation(11), [4, 8]) for _ in range(3)]
    for rows in [part for order in orders for part in order]:
        x = public[rows]
        teachers = [network.logits(model, x).detach() / tau for model in trained]
        logs = (network.logits(student, x) / tau).log_softmax(-1)
        means = {
            "avg_logits": [(sum(teachers) / 2).softmax(-1)],
            "avg_probs": [(teachers[0].softmax(-1) + teachers[1].softmax(-1)) / 2],
            "avg_losses": [teacher.softmax(-1) for teacher in teachers],
        }[target]
        value = sum((p * (p.log() - logs)).sum(-1).mean() for p in means) / len(means)
        rule.zero_grad()
        value.backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(student.values(), 0.01)
        rule.step()
        course.step()
    assert_close(found, {name: leaf.detach() for name, leaf in student.items()}, 1e-9)


def test_a_constant_rate_of_the_servers_sgd() -> None:
    algorithm = FedDF(
        distill_steps=1, server_optimizer="sgd", server_schedule="constant", server_max_grad_norm=None, server_lr=0.3
    )
    toy, plain = toy_of(algorithm), toy_of(FedAvg())
    found, mean = toy.step([0, 2])["models"]["0"], plain.step([0, 2])["model"]
    trained = [toy_of(FedAvg()).step([client])["model"] for client in (0, 2)]
    public, network = toy.dataset.load_public(), toy.task.network
    target = sum(network.logits(model, public) for model in trained).div(2).softmax(-1).detach()  # type: ignore[union-attr]
    student = {name: leaf.requires_grad_() for name, leaf in mean.items()}
    value = -(target * network.logits(student, public).log_softmax(-1)).sum(-1).mean()
    slopes = torch.autograd.grad(value, list(student.values()))
    expected = {
        name: (leaf - 0.3 * slope).detach() for (name, leaf), slope in zip(student.items(), slopes, strict=True)
    }
    assert_close(found, expected, 1e-12)


def test_models_are_dropped_when_they_have_taught() -> None:
    toy = toy_of(FedDF(distill_steps=2))
    toy.step([0, 1])
    assert not any(toy.states().values())


def test_the_students_running_statistics_are_those_of_the_public_samples() -> None:
    train = TRAIN.model_copy(update={"batch_size": 3})
    toy, plain = (
        toy_of(algorithm, normalized_layers(), train=train) for algorithm in (FedDF(distill_steps=50), FedAvg())
    )
    found, mean = toy.step([0, 1])["models"]["0"], plain.step([0, 1])["model"]
    layer = torch.nn.functional.linear(toy.dataset.load_public(), found["inner.weight"], found["inner.bias"])
    assert (found["norm.running_mean"] - layer.mean(0)).abs().max() < 0.05
    assert (mean["norm.running_mean"] - layer.mean(0)).abs().max() > 0.05


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(FedDF(distill_steps=4), mode=mode) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())


def drawn(toy: Toy) -> list[int]:
    return [architecture(client, 2, toy.context) for client in range(len(SIZES))]


def test_each_architecture_learns_from_all() -> None:
    algorithm = FedDF(distill_steps=1, server_optimizer="sgd", server_schedule="constant", server_lr=0.3)
    toy = toy_of(algorithm, two_architectures(), seed=2)
    numbers = drawn(toy)
    assert set(numbers) == {0, 1}
    network = [candidate.network for candidate in toy.task.candidates]
    before = {number: dict(model) for number, model in toy.server["models"].items()}
    cohort = [0, 1, 2, 3]
    after = toy.step(cohort)["models"]
    assert [set(after[str(number)]) for number in (0, 1)] == [set(net.parameter_names) for net in network]
    assert toy.federation.traffic.down == sum(num_bytes(before[str(number)]) for number in numbers)
    undistilled = toy_of(algorithm.model_copy(update={"distill_steps": 0}), two_architectures(), seed=2)
    means = undistilled.step(cohort)["models"]
    public = toy.dataset.load_public()
    trained = []
    for client, number in enumerate(numbers):
        alone = toy_of(algorithm.model_copy(update={"distill_steps": 0}), two_architectures(), seed=2)
        trained.append(network[number].logits(alone.step([client])["models"][str(number)], public).detach())
    target = torch.stack(trained).mean(0).softmax(-1)
    for number in (0, 1):
        student = {name: leaf.clone().requires_grad_() for name, leaf in means[str(number)].items()}
        value = -(target * network[number].logits(student, public).log_softmax(-1)).sum(-1).mean()
        slopes = torch.autograd.grad(value, list(student.values()))
        stepped = {n: (leaf - 0.3 * slope).detach() for (n, leaf), slope in zip(student.items(), slopes, strict=True)}
        assert_close(after[str(number)], stepped, 1e-12)


def test_an_architecture_that_nobody_has_goes_on_from_its_last_model() -> None:
    toy = toy_of(FedDF(distill_steps=0), two_architectures(), seed=2)
    other = str(1 - drawn(toy)[1])
    before = toy.server["models"][other]
    assert_equal(toy.step([1])["models"][other], before)
    taught = toy_of(FedDF(distill_steps=3), two_architectures(), seed=2)
    assert not torch.equal(taught.step([1])["models"][other]["head.weight"], before["head.weight"])


def test_a_clients_row_is_of_its_architecture() -> None:
    toy = toy_of(FedDF(distill_steps=2, finetune_epochs=1), two_architectures(), seed=2)
    toy.step([0, 1, 2, 3])
    for client, rows in toy.scores(final=True).items():
        assert set(rows) == {"global", "finetuned"}
        candidate = toy.task.candidates[drawn(toy)[client]]
        sample = toy.dataset.load(client)["test"]
        model: Tree = toy.server["models"][str(drawn(toy)[client])]
        correct = (candidate.network.logits(model, sample.x).argmax(1) == sample.y).double().mean()
        assert abs(rows["global"].top1 - float(correct)) < 1e-12
    assert set(toy.algorithm.global_predictors(toy.server, toy.task)) == {"architecture-0", "architecture-1"}


def test_public_samples_are_needed() -> None:
    sizes = np.ones((4, 3), dtype=np.int64)
    with pytest.raises(ConfigError, match=r"holdout\.public is 0, but in feddf the server learns"):
        FedDF().check_data(two_layers(), sizes, 0)
    FedDF(distill_steps=0).check_data(two_layers(), sizes, 0)
    FedDF().check_data(two_layers(), sizes, 5)


@pytest.mark.parametrize("wrong", [{"temperature": 0}, {"distill_steps": -1}, {"server_batch_size": 0}])
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FedDF(**wrong)
