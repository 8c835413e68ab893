"""FedGKD: an oracle in plain PyTorch, federated averaging, the teacher, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedgkd import FedGKD
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.base import Batch
from tests.support.partial_toys import COHORTS, TRAIN, initial, three_layers, toy_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, assert_close, assert_equal

SETTINGS: dict[str, dict[str, Any]] = {
    "three": {"models": 3, "distillation_weight": 1.5, "temperature": 2.0},
    "one": {"models": 1, "distillation_weight": 3.0, "aggregation": "uniform"},
    "mse": {"divergence": "mse", "distillation_weight": 0.7},
}


def logits_of(model: Tree, x: Tensor) -> Tensor:
    """Logits of two_layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden @ model["head.weight"].T + model["head.bias"]


def loss_of(model: Tree, teacher: Tree | None, x: Tensor, y: Tensor, method: FedGKD) -> Tensor:
    """The objective, with PyTorch's own losses."""
    logits = logits_of(model, x)
    loss = F.cross_entropy(logits, y)
    if teacher is None:
        return loss
    known, tau = logits_of(teacher, x), method.temperature
    if method.divergence == "mse":
        return loss + method.distillation_weight / 2 * F.mse_loss(logits, known)
    pair = (F.log_softmax(logits / tau, 1), F.softmax(known / tau, 1))
    return loss + method.distillation_weight / 2 * tau**2 * F.kl_div(*pair, reduction="batchmean")


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_fedgkd_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedGKD(**SETTINGS[name])
    toy = toy_of(method, task=two_layers())
    model, past = initial(toy), list[Tree]()
    for round, cohort in enumerate([*COHORTS, [0, 1, 2, 3], [3]]):
        teacher = {key: torch.stack([one[key] for one in past]).mean(0) for key in model} if past else None
        total, mass = {key: torch.zeros_like(leaf) for key, leaf in model.items()}, 0
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            n = len(part.y)
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, client)
            for index in plan_batches(n, 4, 2 * -(-n // 4), generator).batches(CPU):
                optimizer.zero_grad()
                loss_of(leaves, teacher, part.x[index], part.y[index], method).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            weight = 1 if method.aggregation == "uniform" else n
            mass += weight
            total = {key: total[key] + weight * leaf.detach() for key, leaf in leaves.items()}
        model = {key: leaf / mass for key, leaf in total.items()}
        past = [*past, model][-method.models :]
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        assert len(toy.server["past"]) == min(round + 1, method.models)


@pytest.mark.parametrize("aggregation", ["samples", "uniform", "population"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_fedgkd_2_without_the_term_it_is_federated_averaging_to_the_bit(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedGKD(distillation_weight=0, aggregation=aggregation), task=make())
    theirs = toy_of(FedAvg(aggregation=aggregation), task=make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client


def test_inv_fedgkd_3_the_first_round_is_federated_averagings() -> None:
    ours, theirs = toy_of(FedGKD(distillation_weight=9.0)), toy_of(FedAvg())
    assert_equal(ours.step([0, 1, 2])["model"], theirs.step([0, 1, 2])["model"])


def test_inv_fedgkd_4_a_first_step_that_the_received_model_teaches_is_a_plain_one() -> None:
    """One full batch a round: where student and teacher agree, the distance has no gradient."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": 12})
    for divergence in ("kl", "mse"):
        ours = toy_of(FedGKD(models=1, distillation_weight=50.0, divergence=divergence), train, two_layers())
        plain = toy_of(FedAvg(), train, two_layers())
        for cohort in COHORTS:
            assert_close(ours.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


@pytest.mark.parametrize("models", [1, 2, 3])
def test_inv_fedgkd_5_the_teacher_is_the_mean_of_the_last_models(models: int) -> None:
    method = FedGKD(models=models)
    toy, seen = toy_of(method, task=three_layers()), list[Tree]()
    assert method.sent(toy.server).keys() == {"model"}
    for cohort in COHORTS:
        seen.append(copy(toy.step(cohort)["model"]))
        sent, last = method.sent(toy.server), seen[-models:]
        assert sent.keys() == ({"model", "teacher"} if len(last) > 1 else {"model"})
        if "teacher" in sent:
            mean = {key: torch.stack([one[key].double() for one in last]).mean(0) for key in last[0]}
            assert_close(sent["teacher"], mean, 1e-12)


def test_the_teacher_travels_beside_the_model_and_clients_keep_nothing() -> None:
    toy = toy_of(FedGKD())
    size = num_bytes(initial(toy))
    for round, cohort in enumerate(COHORTS):
        toy.step(cohort)
        down = size if round < 2 else 2 * size
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down, size))
    assert not any(toy.states().values())
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"model"}


def test_the_teacher_runs_in_evaluation_mode_and_padding_counts_nothing() -> None:
    task = three_layers()
    part = toy_of(FedGKD()).dataset.load(0)["train"]
    model, teacher = task.network.initialize(0), task.network.initialize(1)
    before, method = copy(teacher), FedGKD(distillation_weight=2.0)
    batch = Batch(part.x[:4], part.y[:4])
    value = method.taught(copy(model), batch, task, {"teacher": teacher}, None)
    logits, known = task.logits(copy(model), batch), task.network.logits(before, batch.x, training=False)
    pair = (F.log_softmax(logits, 1), F.softmax(known, 1))
    assert_close(value, F.cross_entropy(logits, batch.y) + F.kl_div(*pair, reduction="batchmean"), 1e-12)
    assert_equal(teacher, before)
    simple = two_layers()
    one, other = simple.network.initialize(0), {"teacher": simple.network.initialize(1)}
    padded = Batch(part.x[:6], part.y[:6], torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64))
    found, expected = (method.taught(one, some, simple, other, None) for some in (padded, batch))
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("divergence", ["kl", "mse"])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(
    make: Any, optimizer: Any, divergence: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    method = FedGKD(divergence=divergence, distillation_weight=1.0)
    looped, stacked = (toy_of(method, train, make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    assert "failed together" not in caplog.text
