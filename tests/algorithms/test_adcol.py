"""ADCOL: an oracle in plain PyTorch, local training, divergences, messages, newcomers, and what becomes of features."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.adcol import ADCOL, discriminated, divergence
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.partial_toys import COHORTS, TRAIN, initial, labelled, three_layers, toy_of, vectors
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2], [1, 1], [2, 0, 2, 2], [0, 0, 1])
SMALL: dict[str, Any] = {"discriminator_hidden": 6, "server_lr": 0.1}


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def own(toy: Toy, client: int) -> Tree:
    """v_k."""
    model: Tree = toy.states()[client]["local"]
    return model


def modules_of(discriminator: Tree) -> nn.Sequential:
    """D as modules of PyTorch."""
    network, statistics = discriminator["network"], discriminator["statistics"]
    (hidden, width), classes = network["first"]["matrix"].shape, len(network["third"]["matrix"])
    found = nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes, bias=False),
    ).double()
    tensors = {"6.weight": network["third"]["matrix"]}
    for place, name in ((0, "first"), (3, "second")):
        tensors[f"{place}.weight"] = network[name]["matrix"]
        tensors[f"{place + 1}.weight"], tensors[f"{place + 1}.bias"] = network[name]["gain"], network[name]["offset"]
        tensors[f"{place + 1}.running_mean"] = statistics[name]["mean"]
        tensors[f"{place + 1}.running_var"] = statistics[name]["variance"]
        tensors[f"{place + 1}.num_batches_tracked"] = torch.tensor(0)
    found.load_state_dict(tensors)
    return found


def tree_of(modules: nn.Sequential) -> Tree:
    """D's tree."""
    tensors = {name: leaf.detach() for name, leaf in modules.state_dict().items()}
    network: Tree = {"third": {"matrix": tensors["6.weight"]}}
    statistics: Tree = {}
    for place, name in ((0, "first"), (3, "second")):
        norm = f"{place + 1}."
        network[name] = {
            "matrix": tensors[f"{place}.weight"],
            "gain": tensors[f"{norm}weight"],
            "offset": tensors[f"{norm}bias"],
        }
        statistics[name] = {"mean": tensors[f"{norm}running_mean"], "variance": tensors[f"{norm}running_var"]}
    return {"network": network, "statistics": statistics}


def steps(parameters: Any, loss: Any, plan: Any, **options: Any) -> None:
    """Takes steps of SGD on a loss of the samples with the given numbers."""
    optimizer = torch.optim.SGD(parameters, **options)
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        loss(index).backward()
        optimizer.step()


@pytest.mark.parametrize("direction", ["from_uniform", "to_uniform"])
def test_inv_adcol_1_rounds_are_those_of_an_oracle_in_plain_pytorch(direction: Any) -> None:
    toy = several(ADCOL(adversarial_weight=0.7, divergence=direction, server_epochs=2, **SMALL))
    streams, network = toy.context.streams, toy.task.network
    discriminator = modules_of(toy.server["discriminator"])
    models: dict[int, Tree] = {}
    for round, cohort in enumerate(([0, 1, 2, 3], [0, 2], [2, 3], [0, 1])):
        features, owners = [], []
        for client in cohort:
            part = toy.dataset.load(client)["train"]
            model = {k: v.clone().requires_grad_() for k, v in models.get(client, initial(toy)).items()}
            discriminator.eval()

            def loss(index: Tensor, model: Any = model, part: Any = part) -> Tensor:
                f, z = network.head_inputs_and_logits(model, part.x[index])
                said, uniform = F.log_softmax(discriminator(f), -1), torch.full((len(index), 4), 0.25).double()
                if direction == "from_uniform":
                    apart = F.kl_div(said, uniform, reduction="batchmean")
                else:
                    apart = F.kl_div(uniform.log(), said.exp(), reduction="batchmean")
                return F.cross_entropy(z, part.y[index]) + 0.7 * apart

            n = len(part.y)
            batches = plan_batches(n, 4, 2 * -(-n // 4), streams.generator("batches", round, client))
            steps(model.values(), loss, batches, lr=0.1, momentum=0.5, weight_decay=0.01)
            models[client] = {k: v.detach() for k, v in model.items()}
            features.append(network.head_inputs_and_logits(models[client], part.x)[0])
            owners += [client] * n
        x, k = torch.cat(features), torch.tensor(owners)
        discriminator.train()
        batches = plan_batches(len(k), 4, 2 * -(-len(k) // 4), streams.generator("batches", round, -1))

        def recognition(index: Tensor, x: Tensor = x, k: Tensor = k) -> Tensor:
            return F.cross_entropy(discriminator(x[index]), k[index])

        steps(discriminator.parameters(), recognition, batches, lr=0.1)
        toy.step(cohort)
        assert_close(toy.server["discriminator"], tree_of(discriminator), 1e-12)
    for client, model in models.items():
        assert_close(own(toy, client), model, 1e-12)


@pytest.mark.parametrize("make", [two_layers, three_layers])
def test_inv_adcol_2_without_the_term_it_is_local_training_and_nothing_travels(make: Any) -> None:
    alone, shared = toy_of(Local(), task=make()), toy_of(ADCOL(adversarial_weight=0), task=make())
    before = shared.server
    for cohort in COHORTS:
        alone.step(cohort)
        shared.step(cohort)
        assert shared.federation.traffic.by_client == dict.fromkeys(cohort, (0, 0))
    assert_equal(shared.states(), alone.states())
    assert_equal(shared.server, before)
    assert vectors(shared.scores(), "personalized") == vectors(alone.scores(), "personalized")


def test_inv_adcol_3_without_a_server_step_the_discriminator_stays_and_no_feature_is_sent() -> None:
    toy = several(ADCOL(server_epochs=0, **SMALL))
    before = toy.server
    for cohort in ([0, 1], [2, 3]):
        assert_equal(toy.step(cohort), before)
        assert {up for _, up in toy.federation.traffic.by_client.values()} == {0}


def test_inv_adcol_4_features_of_each_sample_go_up_and_the_discriminator_down() -> None:
    toy = several(ADCOL(**SMALL))
    down = 7 * 6 + 6 * 6 + 6 * 4 + 2 * 4 * 6
    for cohort in ([0, 1], [2, 3]):
        toy.step(cohort)
        assert toy.federation.traffic.by_client == {k: (8 * down, 8 * 7 * len(SEVERAL[k])) for k in cohort}
    assert set(toy.server) == {"discriminator"} and all(set(state) == {"local"} for state in toy.states().values())
    assert toy.algorithm.served(toy.server, toy.context) == ({}, {})


def test_inv_adcol_5_divergences_are_zero_at_uniform_and_those_of_pytorch() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    uniform = torch.full((5, 4), 0.25, dtype=torch.float64)
    for reverse in (False, True):
        assert divergence(uniform.log(), reverse).abs().max() < 1e-15
        pair = (uniform.log(), logits.softmax(-1)) if reverse else (logits.log_softmax(-1), uniform)
        expected = F.kl_div(*pair, reduction="none").sum(-1)
        assert_close(divergence(logits.log_softmax(-1), reverse), expected, 1e-14)
        assert (expected > 0).all()
    assert divergence(torch.zeros(3, 1)).tolist() == [0.0] * 3


def drifting(clients: int = 4, samples: int = 60) -> ListDataset:
    """Clients with one rule for their labels, whose further inputs are each at a place of the client's own."""
    generator = torch.Generator().manual_seed(4)
    parts = []
    for client in range(clients):
        x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        x[:, 2:] = 0.3 * x[:, 2:] + torch.eye(4, 3, dtype=torch.float64)[client] * 2
        parts.append((x, y))
    return ListDataset(parts)


def recognised(toy: Toy) -> float:
    """Mean probability that a new discriminator, trained for long, gives the right client of a feature."""
    network = toy.task.network
    parts = [toy.dataset.load(client)["train"].x for client in range(4)]
    x = torch.cat([network.head_inputs_and_logits(own(toy, client), part)[0] for client, part in enumerate(parts)])
    k = torch.arange(4).repeat_interleave(len(parts[0]))
    layer = nn.Linear(20, 4).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(layer(x), k).backward()
        optimizer.step()
    return float(layer(x).detach().softmax(-1).gather(1, k[:, None]).mean())


@pytest.mark.slow
def test_inv_adcol_6_features_of_clients_become_harder_to_tell_apart() -> None:
    train = TrainConfig(rounds=25, clients_per_round=4, local_epochs=2, batch_size=16, lr=0.1)
    found = {}
    for weight in (0.0, 0.1):
        algorithm = ADCOL(adversarial_weight=weight, discriminator_hidden=16, server_lr=0.1, server_epochs=5)
        toy = Toy(algorithm, drifting(), two_layers(hidden=20), train)
        for _ in range(25):
            toy.step([0, 1, 2, 3])
        found[weight] = recognised(toy)
        assert min(one["personalized"].top1 for one in toy.scores().values()) > 0.8
    assert found[0.1] < found[0.0] - 0.2, found


def test_a_newcomer_trains_with_the_discriminator_and_has_no_place_in_it() -> None:
    toy = Toy(ADCOL(adversarial_weight=2.0, **SMALL), labelled(*SEVERAL), two_layers(), TRAIN, unseen=1)
    for cohort in ([0, 1], [0, 2]):
        toy.step(cohort)
    assert len(toy.server["discriminator"]["network"]["third"]["matrix"]) == 3
    assert set(toy.algorithm.served(toy.server, toy.context)[1]) == {3}
    apart = Toy(ADCOL(adversarial_weight=0), labelled(*SEVERAL), two_layers(), TRAIN, unseen=1)
    found, plain = (one.scores(final=True, newcomers=True)[3]["personalized"].loss for one in (toy, apart))
    assert abs(found - plain) > 1e-6


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_one_sample_and_one_class_give_finite_values(make: Any, mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1})
    toy = Toy(ADCOL(adversarial_weight=2.0, **SMALL), labelled([0], [1, 1, 1], [2, 0]), make(), train, mode=mode)
    for cohort in ([0, 1, 2], [0], [1, 2]):
        toy.step(cohort)
    leaves = [leaf for part in toy.server["discriminator"].values() for one in part.values() for leaf in one.values()]
    assert all(leaf.isfinite().all() for leaf in leaves)
    assert all(leaf.isfinite().all() for client in range(3) for leaf in own(toy, client).values())


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "adam", "momentum": 0.0, "lr": 0.01}])
def test_vectorized_agrees_with_looped(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), **optimizer})
    looped, stacked = (several(ADCOL(**SMALL), train=train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
    assert_close(looped.states(), stacked.states(), 1e-9)
    assert "failed together" not in caplog.text


def test_a_client_normalizes_by_the_running_statistics_alone() -> None:
    toy = several(ADCOL(**SMALL))
    toy.step([0, 1])
    x, known = toy.dataset.load(2)["train"].x @ torch.eye(5, 7).double(), toy.server["discriminator"]
    whole = discriminated(known["network"], x, known["statistics"])[0]
    alone = torch.cat([discriminated(known["network"], row[None], known["statistics"])[0] for row in x])
    assert_close(whole, alone, 1e-14)
