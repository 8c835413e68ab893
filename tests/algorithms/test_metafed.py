"""MetaFed: an oracle in plain PyTorch, local training, a relay, the personalization's weight, messages, newcomers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.metafed import MetaFed
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.partial_toys import held_out_accuracy, initial, planted_clients
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 5, 10, 7)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.8
)
COHORTS = ([1, 2], [0, 1, 4], [0, 1, 2, 3, 4], [2, 3])


def data() -> ListDataset:
    """Clients of whom all but the last have samples for validation."""
    plain, others = random_clients(SIZES), random_clients((4, 5, 6, 4, 0))
    parts = [plain.load(client)["train"] for client in range(len(SIZES))]
    held = [others.load(client)["train"] for client in range(len(SIZES))]
    return ListDataset([(part.x, part.y) for part in parts], validation=[(part.x, part.y) for part in held])


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, data(), task or two_layers(), **{"train": TRAIN, **options})


def hidden(model: Tree, x: Tensor) -> Tensor:
    return torch.relu(x @ model["inner.weight"].T + model["inner.bias"])


def right(toy: Toy, client: int, model: Tree) -> float:
    """The share of the samples for validation, or else for training, that a model has right."""
    parts = toy.dataset.load(client)
    part = parts["validation"] if len(parts["validation"]) else parts["train"]
    logits = hidden(model, part.x) @ model["head.weight"].T + model["head.bias"]
    return float((logits.argmax(1) == part.y).double().mean())


def trained(
    toy: Toy, client: int, start: Tree, teacher: Tree | None, weight: float, epochs: int, stream: str, round: int
) -> Tree:
    part = toy.dataset.load(client)["train"]
    model = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimizer = torch.optim.SGD(model.values(), lr=0.1 * 0.8**round, momentum=0.5, weight_decay=0.01)
    n, generator = len(part.y), toy.context.streams.generator(f"batches{stream}", round, client)
    for index in plan_batches(n, 4, epochs * -(-n // 4), generator).batches(CPU):
        optimizer.zero_grad()
        f = hidden(model, part.x[index])
        value = F.cross_entropy(f @ model["head.weight"].T + model["head.bias"], part.y[index])
        if teacher is not None:
            value = value + weight * F.mse_loss(f, hidden(teacher, part.x[index]))
        value.backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in model.items()}


@pytest.mark.parametrize("threshold", [0.4, 0.6, 0.8])
def test_inv_meta_1_rounds_are_those_of_an_oracle_in_plain_pytorch(threshold: float) -> None:
    algorithm = MetaFed(
        distillation_weight=0.7, ready_above=threshold, teaches_above=0.9, warmup_epochs=3, personal_epochs=1
    )
    toy = toy_of(algorithm)
    models: dict[int, Tree] = {}
    ready: dict[int, bool] = {}
    last = None
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            if client not in models:
                models[client] = trained(toy, client, initial(toy), None, 0, 3, ".warmup", round)
                ready[client] = right(toy, client, models[client]) > threshold
            if last is not None and not ready[client]:
                models[client] = trained(toy, client, last, None, 0, 2, "", round)
            else:
                models[client] = trained(toy, client, models[client], last, 0.7, 2, "", round)
            ready[client] = ready[client] or right(toy, client, models[client]) > threshold
            last = models[client]
        toy.step(cohort)
        begun = torch.tensor([int(client in models) for client in range(len(SIZES))])
        assert_close(toy.server, {"begun": begun, "teacher": last}, 1e-12)
        for client, model in models.items():
            assert_close(toy.states()[client]["model"], model, 1e-12)
            assert toy.states()[client]["ready"] == ready[client]
    assert last is not None
    for client, rows in toy.scores(final=True).items():
        part = toy.dataset.load(client)["test"]
        theirs, own = right(toy, client, last), right(toy, client, models[client])
        weight = 0.7 * 10 ** min(1, (theirs - own) * 5) / 10
        if theirs <= own and theirs < 0.9:
            weight = 0
        if ready[client]:
            tuned = trained(toy, client, models[client], last, weight, 1, ".personal", 3)
        else:
            tuned = trained(toy, client, last, None, 0, 1, ".personal", 3)
        for row, model in (("personalized", tuned), ("cyclic", models[client])):
            logits = hidden(model, part.x) @ model["head.weight"].T + model["head.bias"]
            assert abs(rows[row].loss - float(F.cross_entropy(logits, part.y))) < 1e-12


@pytest.mark.parametrize("task", [two_layers(), normalized_layers()], ids=["plain", "buffers"])
def test_inv_meta_2_ready_clients_without_distillation_train_alone(task: Any) -> None:
    algorithm = MetaFed(distillation_weight=0, ready_above=0, warmup_epochs=0, select_on="train")
    ours, theirs = toy_of(algorithm, task), toy_of(Local(), task)
    for cohort in COHORTS:
        ours.step(cohort)
        theirs.step(cohort)
        for client, state in theirs.states().items():
            if state and ours.states()[client]["ready"]:
                assert_equal(ours.states()[client]["model"], state["local"])
    assert sum(state["ready"] for state in ours.states().values()) >= 3


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_meta_3_clients_that_are_never_ready_hand_one_model_on(mode: str) -> None:
    """From the second client on; the first trains its own model."""
    toy, relay = toy_of(MetaFed(ready_above=1, warmup_epochs=0), mode=mode), toy_of(FedAvg(), mode=mode)
    for round, cohort in enumerate(COHORTS):
        for client in cohort:
            relay.round = round
            relay.step([client])
        assert_equal(toy.step(cohort)["teacher"], relay.server["model"])


def test_inv_meta_4_a_teacher_that_is_the_model_itself_teaches_nothing_at_first() -> None:
    """With one client u is v_k, and one step is one of local training."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
    ours = toy_of(MetaFed(distillation_weight=5, ready_above=0, warmup_epochs=0, select_on="train"), train=train)
    theirs = toy_of(Local(), train=train)
    for _ in range(3):
        ours.step([1])
        theirs.step([1])
    assert_close(ours.states()[1]["model"], theirs.states()[1]["local"], 1e-14)


def test_inv_meta_5_before_the_last_round_the_personalized_model_is_the_clients_own() -> None:
    toy = toy_of(MetaFed(warmup_epochs=1, ready_above=0.3))
    for cohort in COHORTS[:2]:
        toy.step(cohort)
    for final, epochs in ((False, None), (True, 0)):
        one = toy_of(MetaFed(warmup_epochs=1, ready_above=0.3, personal_epochs=epochs))
        for cohort in COHORTS[:2]:
            one.step(cohort)
        for rows in one.scores(final=final).values():
            assert (rows["personalized"].vector == rows["cyclic"].vector).all()
    # a client never sampled has the initial model, also at the end
    part, rows = toy.dataset.load(3)["test"], toy.scores(final=True)[3]
    logits = toy.task.network.logits(initial(toy), part.x)
    assert abs(rows["personalized"].loss - float(F.cross_entropy(logits, part.y))) < 1e-12
    assert (rows["personalized"].vector == rows["cyclic"].vector).all()


def test_one_model_goes_down_and_one_up_but_to_the_first_client_of_all() -> None:
    toy = toy_of(MetaFed(warmup_epochs=1))
    size = 8 * toy.task.network.num_parameters
    toy.step([1, 2])
    assert toy.federation.traffic.by_client == {1: (0, size), 2: (size, size)}
    toy.step([1, 3])
    assert toy.federation.traffic.by_client == dict.fromkeys([1, 3], (size, size))


def test_a_newcomer_does_what_a_client_of_a_cohort_does() -> None:
    algorithm = MetaFed(warmup_epochs=1, ready_above=0.3)
    toy, other = toy_of(algorithm, unseen=1), toy_of(algorithm)
    toy.step([0, 2])
    other.step([0, 2])
    found = toy.scores(newcomers=True)[4]["cyclic"].loss
    other.round = 0
    other.step([4])
    assert found == pytest.approx(other.scores()[4]["cyclic"].loss, abs=1e-12)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_vectorized_agrees_with_looped(make: Any) -> None:
    looped, stacked = (
        toy_of(MetaFed(warmup_epochs=2, ready_above=0.5), make(), mode=mode) for mode in ("looped", "vectorized")
    )
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
    assert_close(looped.states(), stacked.states(), 1e-10)
    mine, theirs = looped.scores(final=True), stacked.scores(final=True)
    for client, rows in mine.items():
        assert rows["personalized"].loss == pytest.approx(theirs[client]["personalized"].loss, abs=1e-9)


def test_clients_without_validation_samples_are_refused() -> None:
    sizes = np.array([[5, 0, 5], [6, 0, 6]])
    with pytest.raises(ConfigError, match=r"holdout\.validation leaves no client validation samples"):
        MetaFed().check_data(two_layers(), sizes, 0)
    MetaFed(select_on="train").check_data(two_layers(), sizes, 0)
    MetaFed().check_data(two_layers(), sizes + np.array([[0, 1, 0], [0, 0, 0]]), 0)


@pytest.mark.parametrize(("own", "samples", "threshold"), [("classes", 8, 1.0), ("head", 25, 0.3)])
@pytest.mark.slow
def test_learning(own: str, samples: int, threshold: float) -> None:
    """A model that goes round learns a common rule; clients that are ready early keep a rule of their own."""
    train = TRAIN.model_copy(
        update={"rounds": 10, "clients_per_round": "all", "batch_size": 10, "lr_decay": 1.0, "momentum": 0.5}
    )
    accuracy = {}
    for algorithm in (MetaFed(warmup_epochs=5, ready_above=threshold), Local()):
        toy = Toy(algorithm, planted_clients(own, samples=samples), two_layers(12, 8), train)
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, "personalized", final=True)
    assert accuracy["metafed"] > accuracy["local"] + 0.02, accuracy
