"""FedMe with clients of different architectures: the first ones, stacking, fine-tuning, and what it is good for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedme import FedMe, PairLoss
from algorithms.local import Local
from algorithms.parts.exchange import clustered
from rayfl.engine.stacks import vectorized
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy, num_bytes
from rayfl.randomness import RandomStreams
from tests.support.fedme_toys import TRAIN, Call, Forced, calls, clients, own_weights, two_architectures
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal

__all__ = ["calls"]

MIXED = (0, 1, 1, 0, 1)


def toy_of(algorithm: FedMe, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, clients(), two_architectures(), train, **options)


class Renamed(RandomStreams):
    """Streams in which a round's batches are those of the training that finds the first architecture."""

    def generator(self, name: str, round: int = -1, client: int = -1) -> np.random.Generator:
        return super().generator("batches.architecture" if name == "batches" else name, round, client)


def exclusive_or(sizes: Sequence[int]) -> ListDataset:
    """Two inputs whose label is whether their signs differ; validation samples too."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(count, 2, generator=generator, dtype=torch.float64) * 2 - 1
        return x, (x[:, 0] * x[:, 1] < 0).long()

    return ListDataset([draw(n) for n in sizes], classes=2, validation=[draw(60) for _ in sizes])


def held_accuracy(toy: Toy) -> float:
    """Mean accuracy on the validation samples."""
    scores = toy.federation.evaluate({}, ("validation",), False, toy.algorithm.served(toy.server, toy.context)[1])
    return float(np.mean([found["validation"]["personalized"].top1 for found in scores.values()]))


def test_the_engine_stacks_clients_of_equal_pairs_of_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[Any]] = []
    train = vectorized.train

    def recording(requests: Sequence[Any], *others: Any) -> Any:
        groups.append([request.objective for request in requests])
        return train(requests, *others)

    monkeypatch.setattr(vectorized, "train", recording)
    toy = own_weights(toy_of(Forced(given=((2, 4, 1, 1, 2),)), mode="vectorized"), MIXED)
    toy.step()
    assert groups == [[PairLoss(0, 1, True)] * 2, [PairLoss(1, 1, True)] * 3]


def test_vectorized_differs_by_rounding_alone() -> None:
    algorithm = FedMe(cluster_rounds=(1,), initial_epochs=2)
    looped, stacked = (toy_of(algorithm, mode=mode) for mode in ("looped", "vectorized"))
    for _ in range(TRAIN.rounds):
        assert_close(looped.step(), stacked.step())


@pytest.mark.parametrize("hosts", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_results_do_not_depend_on_the_number_of_hosts(hosts: int) -> None:
    algorithm = FedMe(cluster_rounds=(1, 2), initial_epochs=2)
    one, more = toy_of(algorithm), toy_of(algorithm, hosts=hosts)
    for _ in range(TRAIN.rounds):
        assert_equal(one.step(), more.step())


@pytest.mark.parametrize("warm", [False, True])
def test_first_architectures_are_the_most_accurate_ones_of_local_training(warm: bool, calls: list[Call]) -> None:
    toy = toy_of(FedMe(initial_epochs=3, warm=warm), TRAIN.model_copy(update={"local_epochs": 0}))
    assert toy.server == {}
    toy.step()
    assert [call.procedure for call in calls] == ["choose_architecture", "local_update"]
    train = TRAIN.model_copy(update={"local_epochs": 3})
    alone = [Toy(Local(), toy.dataset, task, train, streams=Renamed(0)) for task in toy.task.candidates]
    for local in alone:
        local.step()
    seed, chosen = toy.context.streams.integer("init.global"), set()
    for client in range(5):
        part = toy.dataset.load(client)["validation"]
        quality = []
        for local in alone:
            predicted = local.task.log_probabilities([local.states()[client]["local"]], part.x)
            hits, score = (predicted.argmax(1) == part.y).sum(), predicted.gather(1, part.y[:, None]).sum()
            quality.append((-int(hits), -float(score)))
        best = quality.index(min(quality))
        chosen.add(best)
        reply = calls[0].replies[client]
        assert reply["architecture"] == best
        trained, initial = alone[best].states()[client]["local"], toy.task.candidates[best].network.initialize(seed)
        assert_equal(reply["model"], trained if warm else initial)
        assert_equal(calls[1].payloads[client]["personal"], reply["model"])
    assert chosen == {0, 1}


def test_local_training_lasts_as_long_as_all_rounds_unless_told_otherwise(calls: list[Call]) -> None:
    default, same = (toy_of(FedMe(initial_epochs=epochs, warm=True)) for epochs in (None, TRAIN.rounds * 2))
    assert_equal(default.step(), same.step())


def test_it_has_as_many_steps_as_all_rounds_where_these_are_limited(calls: list[Call]) -> None:
    limited, rounds = TRAIN.model_copy(update={"max_local_steps": 1}), TRAIN.rounds
    longer = TRAIN.model_copy(update={"max_local_steps": rounds, "local_epochs": 40})
    first, same = toy_of(FedMe(warm=True), limited), toy_of(FedMe(warm=True, initial_epochs=40), longer)
    first.step()
    same.step()
    found = [call.replies for call in calls if "architecture" in next(iter(call.replies.values()))]
    assert_equal(*({str(k): reply for k, reply in replies.items()} for replies in found))


@pytest.mark.parametrize("number", [0, 1])
def test_a_fixed_first_architecture_needs_no_training(number: int, calls: list[Call]) -> None:
    toy = toy_of(FedMe(initial_architecture=number))
    initial = toy.task.candidates[number].network.initialize(toy.context.streams.integer("init.global"))
    for slot in range(5):
        assert_equal(toy.server["models"][str(slot)], initial)
        assert toy.server["architectures"][str(slot)] == number
    assert set(toy.scores()) == set(range(5))
    toy.step()
    assert [call.procedure for call in calls] == ["local_update"]


def test_a_fixed_first_architecture_may_be_trained_first() -> None:
    toy = toy_of(FedMe(initial_architecture=1, warm=True, initial_epochs=1))
    assert toy.server == {}
    assert set(toy.step()["architectures"].values()) == {1}


def test_only_messages_of_a_deployment_are_traffic() -> None:
    toy = own_weights(toy_of(FedMe(cluster_rounds=(0,), model_tuning=False)), (1,) * 5)
    toy.step()
    size = num_bytes(toy.server["models"]["0"])
    assert toy.federation.traffic.by_client == dict.fromkeys(range(5), (2 * size + 2 * 8, 2 * size + 8))


@pytest.mark.parametrize("epochs", [0, 2])
def test_each_client_fine_tunes_its_own_architecture(epochs: int) -> None:
    toy = own_weights(toy_of(FedMe(finetune_epochs=epochs, finetune_select="best_val", model_tuning=False)), MIXED)
    toy.run(2)
    assert set(toy.server["architectures"].values()) == {0, 1}
    before = copy(toy.server)
    final, usual = toy.scores(final=True), toy.scores()
    assert_equal(toy.server, before)
    for client, rows in final.items():
        assert set(usual[client]) == {"personalized"}
        assert set(rows) == {"personalized", "finetuned"}
        assert np.array_equal(usual[client]["personalized"].vector, rows["personalized"].vector)
        same = np.array_equal(rows["finetuned"].vector, rows["personalized"].vector)
        assert same == (epochs == 0)


def test_an_evaluation_sends_each_client_its_own_model_only() -> None:
    toy = own_weights(toy_of(FedMe()), MIXED)
    common, own = toy.algorithm.served(toy.server, toy.context)
    assert common == {}
    for client in range(5):
        assert set(own[client]) == {"model", "architecture"}
        assert own[client]["model"] is toy.server["models"][str(client)]
        assert own[client]["architecture"] == MIXED[client]


@pytest.mark.parametrize(
    ("settings", "train", "message"),
    [
        ({}, {"clients_per_round": 3}, r"train\.clients_per_round is 3 of 5 clients.*set train\.clients_per_round=all"),
        ({}, {"persist_optimizer": True}, r"train\.persist_optimizer"),
        ({"initial_architecture": 2}, {}, r"algorithm\.initial_architecture is 2, but the highest number .* is 1"),
        ({"finetune_lr": 0.1}, {}, r"algorithm\.finetune_lr without algorithm\.finetune_epochs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Any, train: Any, message: str) -> None:
    toy = toy_of(FedMe())
    toy.algorithm.check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=message):
        FedMe(**settings).check(toy.task, toy_of(FedMe(), TRAIN.model_copy(update=train)).context)


def test_a_single_client_has_nobody_to_exchange_with() -> None:
    toy = Toy(FedMe(), clients((9,)), two_architectures(), TRAIN)
    with pytest.raises(ConfigError, match="two clients at least"):
        toy.algorithm.check(toy.task, toy.context)


def test_data_that_do_not_suffice_are_refused() -> None:
    mixed, single = two_architectures(), two_layers()
    sizes = np.array([[9, 2, 1], [5, 0, 1], [7, 0, 1]])
    for method in (FedMe(), FedMe(cluster_rounds=(1,), model_clustering=False)):
        method.check_data(mixed, sizes[:1], public=0)
    with pytest.raises(ConfigError, match=r"holdout\.public is 0.*holdout\.public=1000.*model_clustering=false"):
        FedMe(cluster_rounds=(1,)).check_data(mixed, sizes[:1], public=0)
    for method, task in ((FedMe(), single), (FedMe(model_tuning=False), mixed)):
        with pytest.raises(ConfigError, match=r"holdout\.validation leaves 2 of 3 clients.*tuning_data=train"):
            method.check_data(task, sizes, public=0)
    for data in ("train", "both"):
        FedMe(tuning_data=data).check_data(mixed, sizes, public=0)  # type: ignore[arg-type]
    FedMe(model_tuning=False).check_data(single, sizes, public=0)
    FedMe(model_tuning=False, initial_architecture=1).check_data(mixed, sizes, public=0)


LEARNING = TrainConfig(rounds=12, clients_per_round="all", local_epochs=3, batch_size=8, lr=0.3, momentum=0.9)


def learned(algorithm: FedMe, dataset: ListDataset, architectures: Sequence[int]) -> Toy:
    toy = Toy(algorithm, dataset, two_architectures(2, 8, 2), LEARNING, mode="vectorized")
    own_weights(toy, architectures).run()
    return toy


@pytest.mark.slow
def test_model_tuning_spreads_the_architecture_that_can_learn() -> None:
    """A softmax regression cannot learn the exclusive or."""
    dataset = exclusive_or([40] * 6)
    tuned, fixed = (learned(FedMe(model_tuning=on), dataset, (0, 0, 0, 0, 1, 1)) for on in (True, False))
    assert list(tuned.server["architectures"].values()) == [1] * 6
    assert list(fixed.server["architectures"].values()) == [0, 0, 0, 0, 1, 1]
    assert held_accuracy(tuned) > 0.9 > 0.75 > held_accuracy(fixed)


def opposites(seed: int) -> ListDataset:
    """A linear rule of four inputs that every other client labels the other way round."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(4, generator=generator, dtype=torch.float64)

    def draw(count: int, flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        return x, ((x @ rule > 0) ^ flip).long()

    train, held = ([draw(count, client % 2 == 1) for client in range(8)] for count in (40, 60))
    return ListDataset(train, classes=2, public=draw(40, False)[0], validation=held)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.slow
def test_clustering_keeps_apart_who_would_mislead_each_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[list[int]] = []

    def recording(*given: Any) -> list[int]:
        labels.append(clustered(*given))
        return labels[-1]

    monkeypatch.setattr("algorithms.fedme.clustered", recording)
    train = TrainConfig(rounds=10, clients_per_round="all", local_epochs=2, batch_size=5, lr=0.1, momentum=0.5)
    found = {}
    for on in (True, False):
        algorithm = FedMe(cluster_rounds=(2,), model_tuning=False, model_clustering=on)
        toy = Toy(algorithm, opposites(seed), two_architectures(4, 8, 2), train, seed=seed)
        own_weights(toy, (0,) * 8).run()
        found[on] = held_accuracy(toy)
    assert len(labels) == 8
    assert labels[-1] in ([0, 1] * 4, [1, 0] * 4)
    assert found[True] > 0.95
    assert found[True] > found[False]


@pytest.mark.slow
def test_exchange_beats_local_training_of_few_samples() -> None:
    dataset = exclusive_or([10] * 8)
    local = learned(Forced(given=(tuple(range(8)),), model_tuning=False), dataset, (1,) * 8)
    exchanged = learned(FedMe(), dataset, (1,) * 8)
    assert held_accuracy(exchanged) > held_accuracy(local) + 0.05
