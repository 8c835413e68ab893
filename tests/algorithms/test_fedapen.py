"""FedAPEN: an oracle in plain PyTorch, mutual learning, weights that a client learns, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedapen import FedAPEN
from algorithms.fml import FML
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from rayfl.tasks.base import Batch
from tests.support.partial_toys import initial, three_layers
from tests.support.subnetwork_toys import SIZES, TRAIN, clients, logits_of
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close

COHORTS = ([0, 1, 3], [1, 3], [0, 1, 2], [0, 3])


def toy_of(algorithm: Any, task: Any = None, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """The method on four clients, of which the last has no validation samples."""
    return Toy(algorithm, clients(), task or two_layers(), train, **options)


def order(toy: Toy, stream: str, client: int, round: int, samples: int, epochs: int) -> list[Tensor]:
    generator = toy.context.streams.generator(stream, round, client)
    return list(plan_batches(samples, 4, epochs * -(-samples // 4), generator).batches(CPU))


def weight_of(toy: Toy, models: tuple[Tree, Tree], share: float, client: int, round: int, method: FedAPEN) -> float:
    """lambda_k after its steps, each clipped, with the gradient written out."""
    parts = toy.dataset.load(client)
    part = parts["train"] if method.tuning_data == "train" or client == 3 else parts["validation"]
    private, shared = (logits_of(model, part.x) for model in models)
    for index in order(toy, "batches.weight", client, round, len(part.y), method.weight_epochs):
        z = share * private[index] + (1 - share) * shared[index]
        slope = (z.softmax(-1) - F.one_hot(part.y[index], 3)) * (private[index] - shared[index])
        share = min(max(share - method.weight_lr * float(slope.sum(-1).mean()), 0.0), 1.0)
    return share


def trained(toy: Toy, models: tuple[Tree, Tree], share: float, client: int, round: int, method: FedAPEN) -> list[Tree]:
    """Both models after a local update, each with an optimizer of its own."""
    part = toy.dataset.load(client)["train"]
    pair = [{name: leaf.clone().requires_grad_() for name, leaf in model.items()} for model in models]
    rules = [torch.optim.SGD(model.values(), lr=0.1, momentum=0.5, weight_decay=0.01) for model in pair]
    kept = 0.5 if method.training_weight == "equal" else share
    for index in order(toy, "batches", client, round, len(part.y), 2):
        x, y = part.x[index], part.y[index]
        private, shared = (logits_of(model, x) for model in pair)
        for own, other, mixed in (
            (private, shared, kept * private + (1 - kept) * shared.detach()),
            (shared, private, kept * private.detach() + (1 - kept) * shared),
        ):
            taught = F.kl_div(own.log_softmax(-1), other.detach().softmax(-1), reduction="batchmean")
            loss = F.cross_entropy(own, y) + taught + method.ensemble_weight * F.cross_entropy(mixed, y)
            loss.backward()  # type: ignore[no-untyped-call]
        for rule in rules:
            rule.step()
            rule.zero_grad()
    return [{name: leaf.detach() for name, leaf in model.items()} for model in pair]


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "fast": {"weight_lr": 0.8, "weight_epochs": 3, "ensemble_weight": 0.5, "aggregation": "samples"},
    "equal": {"weight_lr": 0.3, "training_weight": "equal", "tuning_data": "train"},
    "fixed": {"weight_epochs": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_apen_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedAPEN(**SETTINGS[name])
    toy = toy_of(method)
    model, private, share = initial(toy), dict[int, Tree](), dict[int, float]()
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            if client in private:
                share[client] = weight_of(toy, (private[client], model), share[client], client, round, method)
            else:
                private[client] = toy.task.network.initialize(toy.context.streams.integer("init.local", client=client))
                share[client] = 0.5
            own, shared = trained(toy, (private[client], model), share[client], client, round, method)
            private[client] = own
            sent.append((1 if method.aggregation == "uniform" else SIZES[client], shared))
        whole = sum(weight for weight, _ in sent)
        model = {key: sum(weight * one[key] for weight, one in sent) / whole for key in model}  # type: ignore[misc]
        assert_close(toy.step(cohort)["model"], model, 1e-12)
        states = toy.states()
        for client, own in private.items():
            assert_close(states[client]["private"], own, 1e-12)
            assert float(states[client]["share"]) == pytest.approx(share[client], abs=1e-12)
    moved = {value for value in share.values() if value != 0.5}
    assert bool(moved) == (name != "fixed")


def test_inv_apen_2_without_the_mixture_it_is_mutual_learning_with_twice_the_rate() -> None:
    """FML has half of each term, where momentum and decay are none."""
    plain = {"momentum": 0.0, "weight_decay": 0.0}
    ours = toy_of(FedAPEN(ensemble_weight=0), train=TRAIN.model_copy(update=plain))
    theirs = toy_of(FML(), train=TRAIN.model_copy(update={**plain, "lr": 0.2}))
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)
        assert ours.federation.traffic == theirs.federation.traffic
    for client, state in theirs.states().items():
        assert_close(ours.states()[client]["private"], state["private"], 1e-12)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_inv_apen_3_neither_loss_moves_the_other_model(share: float) -> None:
    method, task, part = FedAPEN(), two_layers(), clients().load(0)["train"]
    models = {name: task.network.initialize(seed) for seed, name in enumerate(("private", "shared"))}
    frozen = {"share": torch.tensor(share, dtype=torch.float64)}
    for name, weight, other in (("private", share, "shared"), ("shared", 1 - share, "private")):
        moved = {key: leaf.clone().requires_grad_() for key, leaf in models[name].items()}
        value = method.mutual({**models, name: moved}, Batch(part.x, part.y), task, frozen, None)
        found = torch.autograd.grad(value, list(moved.values()))
        own, known = logits_of(moved, part.x), logits_of(models[other], part.x)
        loss = F.cross_entropy(own, part.y) + F.cross_entropy(weight * own + (1 - weight) * known, part.y)
        loss = loss + F.kl_div(own.log_softmax(-1), known.softmax(-1), reduction="batchmean")
        expected = torch.autograd.grad(loss, list(moved.values()))
        assert_close(dict(zip(moved, found, strict=True)), dict(zip(moved, expected, strict=True)), 1e-12)


def test_inv_apen_4_the_weight_goes_to_the_best_mixture() -> None:
    """On full batches: the loss of mixed logits is convex in the weight."""
    toy = toy_of(
        FedAPEN(weight_lr=0.5, weight_epochs=400), train=TRAIN.model_copy(update={"batch_size": None, "lr": 0.5})
    )
    toy.step([0, 1, 3])
    before, model = toy.states(), toy.server["model"]
    toy.step([0, 1, 3])
    for client in (0, 1, 3):
        part = toy.dataset.load(client)["train" if client == 3 else "validation"]
        private, shared = (logits_of(one, part.x) for one in (before[client]["private"], model))
        losses = [float(F.cross_entropy(torch.lerp(shared, private, k / 1000), part.y)) for k in range(1001)]
        assert float(toy.states()[client]["share"]) == pytest.approx(int(np.argmin(losses)) / 1000, abs=2e-3)


def test_inv_apen_5_at_its_ends_the_mixture_is_one_of_the_models() -> None:
    toy = toy_of(FedAPEN(weight_epochs=0))
    toy.step([0, 1])
    states = toy.states()
    for share, row in ((0.0, "global"), (1.0, "private")):
        for client in (0, 1):
            toy.client_hosts[0].states.replace(
                client, {**states[client], "share": torch.tensor(share, dtype=torch.float64)}, 0
            )
        for client, rows in toy.scores().items():
            assert rows["personalized"].vector.tolist() == rows[row if client < 2 else "global"].vector.tolist()


def test_the_mixture_is_scored_with_the_weight_that_it_learns_for_the_mean() -> None:
    method = FedAPEN(weight_lr=0.5)
    toy = toy_of(method)
    toy.step([0, 1])
    rows, states = toy.scores(), toy.states()
    for client in (0, 1):
        private, model = states[client]["private"], toy.server["model"]
        share = weight_of(toy, (private, model), 0.5, client, 0, method)
        part = toy.dataset.load(client)["test"]
        mixed = share * logits_of(private, part.x) + (1 - share) * logits_of(model, part.x)
        assert rows[client]["personalized"].loss == pytest.approx(float(F.cross_entropy(mixed, part.y)), abs=1e-12)
        assert float(toy.states()[client]["share"]) == 0.5, "what is learned for an evaluation is not kept"


def test_clients_never_sampled_have_the_server_s_model_and_the_shared_model_alone_travels() -> None:
    toy = toy_of(FedAPEN())
    toy.step([0, 1])
    size = num_bytes(initial(toy))
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 1), (size, size))
    rows = toy.scores()[2]
    assert rows["private"].vector.tolist() == rows["global"].vector.tolist() == rows["personalized"].vector.tolist()


def test_validation_samples_are_needed_unless_the_weight_is_learned_on_others() -> None:
    sizes = np.array([[9, 0, 9], [5, 0, 5]])
    with pytest.raises(
        ConfigError, match=r"holdout\.validation leaves no client validation samples.*tuning_data=train"
    ):
        FedAPEN().check_data(two_layers(), sizes, 0)
    for other in ({"tuning_data": "train"}, {"weight_epochs": 0}, {"weight_lr": 0}):
        FedAPEN(**other).check_data(two_layers(), sizes, 0)
    FedAPEN().check_data(two_layers(), np.array([[9, 1, 9], [5, 0, 5]]), 0)


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_vectorized_agrees_with_looped(make: Any, optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (toy_of(FedAPEN(weight_lr=0.3), make(), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort)["model"], stacked.step(cohort)["model"], 1e-8)
    for client, state in looped.states().items():
        assert_close(state["share"], stacked.states()[client]["share"], 1e-8)
    assert "failed together" not in caplog.text
