"""PerAda: an oracle in plain PyTorch, Ditto and FedDF as parts of it, adapters, what is kept and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.ditto import Ditto
from algorithms.feddf import FedDF
from algorithms.perada import PerAda
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.randomness import RandomStreams
from tests.support.adapted import adapted_toy, images, random_images
from tests.support.partial_toys import three_layers
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 2], [1, 2, 3], [0, 1])
PUBLIC = 11


def toy_of(algorithm: Any, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES, public=PUBLIC), task or two_layers(), train, **options)


def logits_of(model: Tree, x: Tensor) -> Tensor:
    """Logits of two_layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return hidden @ model["head.weight"].T + model["head.bias"]


def gone_down(toy: Toy, start: Tree, client: int, round: int, near: Tree | None, weight: float, epochs: int) -> Tree:
    """SGD on a client's samples; with ``near`` the personal pass, on batches of its own."""
    part = toy.dataset.load(client)["train"]
    n = len(part.y)
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in start.items()}
    rule = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    stream = "batches" if near is None else "batches.1"
    generator = toy.context.streams.generator(stream, round, client)
    for index in plan_batches(n, 4, epochs * -(-n // 4), generator).batches(CPU):
        loss = F.cross_entropy(logits_of(leaves, part.x[index]), part.y[index])
        if near is not None:
            loss = loss + weight / 2 * sum((leaves[key] - leaf).square().sum() for key, leaf in near.items())
        rule.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def distilled(start: Tree, teachers: list[Tree], public: Tensor, round: int, method: PerAda) -> Tree:
    """The server's steps of Adam, whose rate falls to 0 along a cosine."""
    student = {key: leaf.clone().requires_grad_() for key, leaf in start.items()}
    rule = torch.optim.Adam(student.values(), method.server_lr)
    course = torch.optim.lr_scheduler.CosineAnnealingLR(rule, method.distill_steps)
    generator = RandomStreams(0).generator("batches.distill", round, -1)
    size, rows = method.server_batch_size, list[Any]()
    while len(rows) < method.distill_steps:
        rows += np.array_split(generator.permutation(PUBLIC), range(size, PUBLIC, size))
    for index in rows[: method.distill_steps]:
        x = public[index]
        target = torch.stack([logits_of(model, x) for model in teachers]).mean(0).softmax(-1)
        rule.zero_grad()
        F.kl_div(F.log_softmax(logits_of(student, x), 1), target, reduction="batchmean").backward()
        rule.step()
        course.step()
    return {key: leaf.detach() for key, leaf in student.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "each": {"distill_steps": 7, "server_lr": 0.02, "server_batch_size": 4},
    "first": {"distill_steps": 2, "distill_rounds": 2, "aggregation": "samples", "proximal_weight": 3.0},
    "none": {"distill_steps": 0, "personal_epochs": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_perada_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = PerAda(**SETTINGS[name])
    toy = toy_of(method)
    first = dict(toy.server["model"])
    model, personal = first, dict[int, Tree]()
    for round, cohort in enumerate(COHORTS):
        trained = [gone_down(toy, model, client, round, None, 0, 2) for client in cohort]
        for client in cohort:
            start, epochs = personal.get(client, first), method.personal_epochs or 2
            personal[client] = gone_down(toy, start, client, round, model, method.proximal_weight, epochs)
        weights = [1 if method.aggregation == "uniform" else SIZES[client] for client in cohort]
        pairs = list(zip(weights, trained, strict=True))
        model = {key: sum(weight * one[key] for weight, one in pairs) / sum(weights) for key in model}  # type: ignore[misc]
        if method.distill_steps and round < (method.distill_rounds or 9):
            model = distilled(model, trained, toy.dataset.load_public(), round, method)
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        assert_close({str(client): toy.states()[client]["personal"] for client in personal}, named(personal), 1e-12)


def named(models: dict[int, Tree]) -> Tree:
    return {str(client): model for client, model in models.items()}


@pytest.mark.parametrize("make", [two_layers, three_layers])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_perada_2_without_steps_of_the_server_it_is_ditto_to_the_bit(make: Any, mode: str) -> None:
    ours = toy_of(PerAda(distill_steps=0), make(), mode=mode)
    theirs = toy_of(Ditto(aggregation="uniform"), make(), mode=mode)
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
        assert ours.federation.traffic == theirs.federation.traffic
    assert_equal(named(ours.states()), named(theirs.states()))


@pytest.mark.parametrize("target", ["avg_logits", "avg_probs", "avg_losses"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_perada_3_its_server_is_feddfs_to_the_bit(make: Any, target: Any) -> None:
    options: dict[str, Any] = {"distill_steps": 5, "server_lr": 0.03, "server_batch_size": 4, "temperature": 2.0}
    options |= {"distill_target": target, "server_max_grad_norm": 0.5, "aggregation": "samples"}
    ours, theirs = toy_of(PerAda(**options), make()), toy_of(FedDF(**options), make())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["models"]["0"])
        assert ours.federation.traffic == theirs.federation.traffic


def test_inv_perada_4_personal_models_do_not_move_the_federated_one() -> None:
    found = []
    for weight, epochs in ((0.0, None), (2.0, 3), (1.0, 0)):
        toy = toy_of(PerAda(distill_steps=3, proximal_weight=weight, personal_epochs=epochs))
        found.append([toy.step(cohort)["model"] for cohort in COHORTS][-1])
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_inv_perada_5_rounds_after_the_last_that_distils_are_dittos() -> None:
    ours, theirs = toy_of(PerAda(distill_steps=3, distill_rounds=1)), toy_of(Ditto(aggregation="uniform"))
    ours.step(COHORTS[0])
    theirs.step(COHORTS[0])
    theirs.server = dict(ours.server)
    for cohort in COHORTS[1:]:
        assert_equal(ours.step(cohort), theirs.step(cohort))


def test_clients_keep_their_personal_models_alone() -> None:
    toy = toy_of(PerAda(distill_steps=2))
    toy.step([0, 2])
    assert [(client, set(state)) for client, state in toy.states().items() if state] == [
        (0, {"personal"}),
        (2, {"personal"}),
    ]
    rows = toy.scores()
    assert set(rows[0]) == {"global", "personalized"}


def test_over_a_pretrained_model_adapters_and_head_are_all_that_is_personal() -> None:
    data = images()
    data._public = random_images(6, torch.Generator().manual_seed(1))[0]
    toy = adapted_toy(PerAda(distill_steps=2), dataset=data)
    toy.step([0, 2])
    trained = set(toy.task.network.parameter_names)
    assert set(toy.server["model"]) == set(toy.states()[0]["personal"]) == trained
    assert all("lora_" in name or "classifier" in name for name in trained)


def test_public_samples_are_needed() -> None:
    sizes = np.ones((4, 3), dtype=np.int64)
    with pytest.raises(ConfigError, match=r"holdout\.public is 0, but in perada the server learns"):
        PerAda().check_data(two_layers(), sizes, 0)
    PerAda(distill_steps=0).check_data(two_layers(), sizes, 0)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(PerAda(distill_steps=4), make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)
    assert_close(named(looped.states()), named(stacked.states()), 1e-8)
    assert "failed together" not in caplog.text
