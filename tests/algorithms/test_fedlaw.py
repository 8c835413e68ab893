"""FedLAW: an oracle in plain PyTorch, federated averaging, what is learned, statistics, messages, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedlaw import FedLAW, mixed
from rayfl.engine.updates.batches import plan_batches
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes
from tests.support.partial_toys import COHORTS, SIZES, TRAIN, initial, three_layers
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, random_clients

ROOT = 9


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES, public=ROOT), task or two_layers(), TRAIN, **options)


def logits_of(model: Tree, x: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    logits: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return logits


SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"server_lr": 0.1, "server_batch_size": 4},
    "weights": {"server_lr": 0.3, "shrinking": False, "aggregation": "uniform"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_inv_law_1_rounds_are_those_of_an_oracle_in_plain_pytorch(name: str) -> None:
    method = FedLAW(server_epochs=3, **SETTINGS[name])
    toy = toy_of(method)
    model = initial(toy)
    x, y = toy.dataset.load_public(), torch.from_numpy(toy.dataset.public_labels())
    for round, cohort in enumerate([*COHORTS, [0, 1, 2, 3], [3]]):
        trained: list[Tree] = []
        for k in cohort:
            part = toy.dataset.load(k)["train"]
            leaves = {key: leaf.clone().requires_grad_() for key, leaf in model.items()}
            optimizer: Any = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
            generator = toy.context.streams.generator("batches", round, k)
            for index in plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), generator).batches(CPU):
                optimizer.zero_grad()
                F.cross_entropy(logits_of(leaves, part.x[index]), part.y[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            trained.append({key: leaf.detach() for key, leaf in leaves.items()})
        sizes = torch.tensor([1.0 if method.aggregation == "uniform" else SIZES[k] for k in cohort]).double()
        moving = [
            (sizes / sizes.sum()).log().requires_grad_(),
            torch.zeros((), dtype=torch.float64, requires_grad=True),
        ]

        def made(moving: list[Tensor] = moving, trained: list[Tree] = trained) -> Tree:
            p = moving[0].softmax(0)
            return {key: moving[1].exp() * sum(w * one[key] for w, one in zip(p, trained)) for key in trained[0]}  # noqa: B905

        optimizer = torch.optim.Adam(moving[: 1 + method.shrinking], lr=method.server_lr, betas=(0.5, 0.999))
        batch = method.server_batch_size
        generator = toy.context.streams.generator("batches.weights", round, -1)
        for index in plan_batches(ROOT, batch, 3 * -(-ROOT // min(batch, ROOT)), generator).batches(CPU):
            optimizer.zero_grad()
            F.cross_entropy(logits_of(made(), x[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model = {key: leaf.detach() for key, leaf in made().items()}
        assert_close(toy.step(cohort)["model"], model, 1e-11)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_law_2_without_epochs_it_is_federated_averaging(make: Any, aggregation: Any) -> None:
    ours = toy_of(FedLAW(server_epochs=0, aggregation=aggregation), make())
    theirs = toy_of(FedAvg(aggregation=aggregation), make())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_law_3_of_one_client_without_shrinking_the_model_is_its_own() -> None:
    ours, theirs = toy_of(FedLAW(shrinking=False)), toy_of(FedAvg())
    for cohort in ([0], [3], [1]):
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-12)


def test_inv_law_4_buffers_are_means_without_the_factor() -> None:
    task = normalized_layers()
    models = [task.network.initialize(seed) for seed in range(3)]
    for place, one in enumerate(models):
        one["norm.running_mean"] += place
    stacked = {name: torch.stack([one[name] for one in models]) for name in models[0]}
    learned = {"logits": torch.tensor([0.1, 0.7, -0.2]).double(), "log_factor": torch.tensor(-0.5).double()}
    p, found = learned["logits"].softmax(0), mixed(stacked, learned, task)
    for name in models[0]:
        factor = 1 if name in task.network.buffer_names else torch.tensor(-0.5).double().exp()
        expected = factor * sum(weight * one[name] for weight, one in zip(p, models, strict=True))
        assert_close(found[name], torch.as_tensor(expected).to(found[name]), 1e-12)


def test_inv_law_5_the_loss_on_the_servers_samples_falls() -> None:
    toy, plain = toy_of(FedLAW(server_epochs=30, server_lr=0.05)), toy_of(FedAvg())
    x, y = toy.dataset.load_public(), torch.from_numpy(toy.dataset.public_labels())
    ours, theirs = (one.step([0, 1, 2, 3])["model"] for one in (toy, plain))
    assert F.cross_entropy(logits_of(ours, x), y) < F.cross_entropy(logits_of(theirs, x), y)


def test_the_servers_passes_leave_running_statistics_as_the_mean_has_them() -> None:
    ours, theirs = toy_of(FedLAW(server_epochs=4, server_lr=1e-12), three_layers()), toy_of(FedAvg(), three_layers())
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], theirs.step(cohort)["model"], 1e-8)


def test_only_models_travel() -> None:
    toy = toy_of(FedLAW(server_epochs=1))
    size = num_bytes(initial(toy))
    for cohort in COHORTS:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert not any(toy.states().values()) and set(toy.server) == {"model"}


def test_vectorized_agrees_with_looped() -> None:
    method = FedLAW(server_epochs=2, server_lr=0.1)
    looped, stacked = (toy_of(method, three_layers(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-8)


def test_a_run_without_samples_of_the_server_is_refused() -> None:
    toy = toy_of(FedLAW())
    with pytest.raises(ConfigError, match=r"holdout.public is 0, .* set holdout.public=200"):
        FedLAW().check_data(toy.task, toy.dataset.sizes(), 0)
    FedLAW().check_data(toy.task, toy.dataset.sizes(), ROOT)
    FedLAW(server_epochs=0).check_data(toy.task, toy.dataset.sizes(), 0)
