"""FedMD: invariants MD, what travels, alignment samples, several architectures, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedmd import FedMD
from algorithms.local import Local
from algorithms.parts.architectures import architecture
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy
from rayfl.tasks.base import Batch
from tests.support.fedme_toys import two_architectures
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)


def toy_of(algorithm: Any, task: Any = None, public: int = 11, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES, public=public), task or two_layers(), train, **options)


def of(y: Tensor) -> Batch:
    return Batch(torch.zeros(len(y), 1), y)


def logits_of(toy: Toy, client: int, x: Tensor) -> Tensor:
    """What a client's model says, the initial one if it has none."""
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    return toy.task.network.logits(toy.states().get(client, {}).get("local", initial), x)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_md_1_without_digest_it_is_local_training(mode: str) -> None:
    toy, alone = toy_of(FedMD(digest_epochs=0), public=0, mode=mode), toy_of(Local(), public=0, mode=mode)
    for cohort in ([0, 1], [1, 2, 3], [2]):
        toy.step(cohort)
        alone.step(cohort)
        assert_equal(toy.states(), alone.states())
        assert (toy.federation.traffic.down, toy.federation.traffic.up) == (0, 0)


def test_inv_md_2_models_that_agree_have_nothing_to_digest() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 0})
    toy = toy_of(FedMD(digest_loss="mse", digest_epochs=5), train=train)
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    toy.step([0, 1, 2])
    for client in range(3):
        assert_close(toy.states()[client]["local"], initial, 1e-12)


def test_inv_md_3_the_consensus_is_the_mean_of_the_logits_in_any_order() -> None:
    seen = []
    for cohort, hosts in (([0, 1, 3], 1), ([3, 0, 1], 1), ([1, 3, 0], 3)):
        toy = toy_of(FedMD(), hosts=hosts)
        for client in range(4):
            toy.step([client])
        public = toy.dataset.load_public()
        expected = sum(logits_of(toy, client, public) for client in (0, 1, 3)) / 3
        toy.federation.begin_round(toy.round)
        seen.append(toy.federation.mean(toy.algorithm.say, cohort, {})["logits"])  # type: ignore[attr-defined]
        assert_close(seen[-1], expected, 1e-12)
    assert_equal({"x": seen[0]}, {"x": seen[1]})
    assert_equal({"x": seen[0]}, {"x": seen[2]})


def test_inv_md_3_weights_may_be_the_numbers_of_samples() -> None:
    toy = toy_of(FedMD(consensus="samples"))
    toy.step([0])
    public = toy.dataset.load_public()
    toy.federation.begin_round(1)
    found = toy.federation.mean(toy.algorithm.say, [0, 1], {})["logits"]  # type: ignore[attr-defined]
    expected = (9 * logits_of(toy, 0, public) + 12 * logits_of(toy, 1, public)) / 21
    assert_close(found, expected, 1e-12)


def test_inv_md_4_a_constant_on_one_partys_logits_moves_the_consensus_by_its_share() -> None:
    shift = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    said = []
    for moved in (False, True):
        toy = toy_of(FedMD())
        toy.step([0, 1])
        if moved:
            states = toy.client_hosts[0].states
            local = copy(states.all()[1]["local"])
            local["head.bias"] = local["head.bias"] + shift
            states.replace(1, {"local": local}, 0)
        toy.federation.begin_round(1)
        said.append(toy.federation.mean(toy.algorithm.say, [0, 1, 2, 3], {})["logits"])  # type: ignore[attr-defined]
    assert_close(said[1] - said[0], (shift / 4).expand(11, 3), 1e-12)


def test_inv_md_5_gradients_of_the_absolute_difference_are_signs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    target[0, 0] = logits[0, 0]
    logits.requires_grad_()
    gradient = torch.autograd.grad(FedMD().distance(logits, of(target)), logits)[0]
    assert_close(gradient, (logits.detach() - target).sign() / 15, 1e-15)
    squared = torch.autograd.grad(FedMD(digest_loss="mse").distance(logits, of(target)), logits)[0]
    assert_close(squared, 2 * (logits.detach() - target) / 15, 1e-15)


def test_small_differences_can_be_left_alone() -> None:
    logits = torch.tensor([[0.3, -0.05, 0.1]], dtype=torch.float64, requires_grad=True)
    value = FedMD(digest_deadband=0.1).distance(logits, of(torch.zeros(1, 3, dtype=torch.float64)))
    assert_close(torch.autograd.grad(value, logits)[0], torch.tensor([[1 / 3, 0.0, 0.0]], dtype=torch.float64), 1e-15)
    train = TRAIN.model_copy(update={"local_epochs": 0})
    toy = toy_of(FedMD(digest_deadband=1e-6), train=train)
    toy.step([0, 1])
    assert_equal(toy.states()[0], toy.states()[1])
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    assert_equal(toy.states()[0]["local"], initial)


def test_a_round_is_logits_then_digest_then_revisit() -> None:
    algorithm = FedMD(digest_batch_size=4, digest_epochs=2, digest_lr=0.02, digest_loss="mse")
    toy = toy_of(algorithm)
    toy.step([0])
    toy.step([1])
    public, start = toy.dataset.load_public(), {client: copy(toy.states()[client]["local"]) for client in (0, 1)}
    consensus = sum(toy.task.network.logits(model, public) for model in start.values()) / 2
    toy.step([0, 1])
    for client in (0, 1):
        model = {name: leaf.requires_grad_() for name, leaf in start[client].items()}
        for stream, lr, x, y in (
            (".digest", 0.02, public, consensus),
            ("", 0.1, *(getattr(toy.dataset.load(client)["train"], key) for key in "xy")),
        ):
            rule = torch.optim.SGD(model.values(), lr, momentum=0.5)
            generator = toy.context.streams.generator(f"batches{stream}", 2, client)
            for _ in range(2):
                order = generator.permutation(len(y))
                for rows in (order[i : i + 4] for i in range(0, len(y), 4)):
                    logits = toy.task.network.logits(model, x[rows])
                    value = (
                        (logits - y[rows].detach()).square().mean()
                        if stream
                        else torch.nn.functional.cross_entropy(logits, y[rows])
                    )
                    rule.zero_grad()
                    value.backward()
                    rule.step()
        assert_close(toy.states()[client]["local"], {name: leaf.detach() for name, leaf in model.items()}, 1e-11)


def test_logits_are_all_that_travels() -> None:
    for size, rows in ((5000, 11), (4, 4)):
        toy = toy_of(FedMD(alignment_samples=size))
        toy.step([0, 2])
        assert (toy.federation.traffic.down, toy.federation.traffic.up) == (2 * 8 * 3 * rows, 2 * 8 * 3 * rows)
        assert {key for state in toy.states().values() for key in state} == {"local"}


def test_alignment_samples_are_drawn_in_every_round_and_are_the_same_for_all() -> None:
    seen: dict[int, list[Tensor]] = {}

    class Watching(FedMD):
        def alignment(self, client: Any) -> Tensor:
            found = super().alignment(client)
            seen.setdefault(client.round, []).append(found)
            return found

    toy = toy_of(Watching(alignment_samples=5))
    toy.step([0, 1])
    toy.step([1, 2])
    for found in seen.values():
        assert len(found) == 4 and all(torch.equal(found[0], other) for other in found)
        assert len(found[0].unique(dim=0)) == 5
    assert not torch.equal(seen[0][0], seen[1][0])


def test_a_first_training_takes_place_once() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 0})
    toy = toy_of(FedMD(initial_epochs=2, digest_deadband=1e9), train=train)
    plain = toy_of(Local())
    toy.step([0, 1])
    first = toy.states()
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    assert not torch.equal(first[0]["local"]["head.weight"], initial["head.weight"])
    toy.step([0, 1])
    assert_equal(toy.states()[0], first[0])
    alone = toy_of(FedMD(initial_epochs=2, digest_epochs=0), train=train)
    alone.step([0, 1])
    assert_equal(alone.states(), first)
    plain.step([0, 1])
    assert not torch.equal(plain.states()[0]["local"]["head.weight"], first[0]["local"]["head.weight"])


def test_parties_of_several_architectures_agree() -> None:
    toy = toy_of(FedMD(digest_loss="mse", digest_epochs=20), two_architectures(), seed=2)
    numbers = [architecture(client, 2, toy.context) for client in range(4)]
    assert set(numbers) == {0, 1}
    toy.step([0, 1, 2, 3])
    for client, number in enumerate(numbers):
        network = toy.task.candidates[number].network
        assert set(toy.states()[client]["local"]) == set(network.parameter_names)
    assert set(toy.scores()[0]) == {"personalized"}
    still = TRAIN.model_copy(update={"local_epochs": 0})
    spread = []
    for epochs in (0, 20):
        apart = toy_of(FedMD(digest_loss="mse", digest_epochs=epochs), two_architectures(), train=still, seed=2)
        public = apart.dataset.load_public()
        for _ in range(2):
            apart.step([0, 1, 2, 3])
        said = [
            apart.task.candidates[number].network.logits(apart.states()[client]["local"], public)
            for client, number in enumerate(numbers)
        ]
        spread.append(float(torch.stack(said).std(0).mean()))
    assert spread[1] < spread[0] / 2


def test_logits_are_said_in_evaluation_mode() -> None:
    train = TRAIN.model_copy(update={"batch_size": 3})
    toy = toy_of(FedMD(), normalized_layers(0.5), train=train)
    toy.step([0, 1])
    before = toy.states()
    toy.federation.begin_round(1)
    said = [toy.federation.mean(toy.algorithm.say, [0], {})["logits"] for _ in range(2)]  # type: ignore[attr-defined]
    assert_equal({"x": said[0]}, {"x": said[1]})
    assert_equal(toy.states(), before)


@pytest.mark.parametrize("loss", ["mae", "mse"])
def test_vectorized_agrees_with_looped(loss: Any) -> None:
    # in round 0 models differ by rounding alone, and the sign of that is nobody's
    algorithm = FedMD(digest_loss=loss, digest_deadband=1e-9)
    looped, stacked = (toy_of(algorithm, mode=mode) for mode in ("looped", "vectorized"))
    looped.run()
    stacked.run()
    assert_close(looped.states(), stacked.states())


def test_public_samples_are_needed() -> None:
    sizes = np.ones((4, 3), dtype=np.int64)
    with pytest.raises(ConfigError, match=r"holdout\.public is 0, but in fedmd clients exchange"):
        FedMD().check_data(two_layers(), sizes, 0)
    FedMD(digest_epochs=0).check_data(two_layers(), sizes, 0)
    FedMD().check_data(two_layers(), sizes, 5)
