"""SuPerFed's rounds: its phases, its draws, and the local models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.fedprox import FedProx
from algorithms.local import Local
from algorithms.superfed import SuPerFed
from rayfl.engine.engine import Engine
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import InputSpec
from rayfl.models.zoo import CharLSTM
from rayfl.params import Tree, copy, squared_distance
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.superfed_toys import FREE, MODES, SIZES, TRAIN, client_of, normed, toy
from tests.support.toy_networks import two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal

TEXT = InputSpec("tokens", (5,), 7, vocabulary=7)
NO_DECAY = TRAIN.model_copy(update={"weight_decay": 0.0})


def history(run: Toy) -> dict[int, Tree]:
    return {round: copy(run.step()["model"]) for round in range(run.train.rounds)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0.0, 0.5, 1.0])
def test_inv_sf_1_at_coefficient_zero_it_is_federated_averaging(mode: str, start: float) -> None:
    for make in (two_layers, normed):
        reference = history(toy(FedAvg(), task=make()))
        algorithm = SuPerFed(mode=mode, start=start, fixed_coefficient=0.0, **FREE)
        assert_close(history(toy(algorithm, task=make())), reference, 1e-12)


def test_inv_sf_1_the_first_phase_does_not_touch_the_local_model() -> None:
    run = toy(SuPerFed(start=1.0, local_init="copy", orthogonality_weight=2.0))
    received: dict[int, Tree] = {}
    for round in range(4):
        for client in run.cohort(round):
            received.setdefault(client, copy(run.server["model"]))
        run.step()
    assert_equal({client: state["local"] for client, state in run.states().items()}, received)
    unseen = toy(SuPerFed(start=1.0))
    unseen.run()
    assert unseen.states() == {}


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_1_coefficient_zero_leaves_the_local_model_at_its_start(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0, fixed_coefficient=0.0, **FREE), NO_DECAY)
    run.run()
    for client, state in run.states().items():
        assert_equal(state["local"], client_of(run, client).fresh_model())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_inv_sf_2_with_proximity_it_is_fedprox_at_twice_the_weight(mode: str, start: float) -> None:
    algorithm = SuPerFed(mode=mode, start=start, fixed_coefficient=0.0, orthogonality_weight=0.0, proximal_weight=0.2)
    reference = history(toy(FedProx(proximal_weight=0.4)))
    assert_close(history(toy(algorithm)), reference, atol=1e-12)
    distance = squared_distance(reference[3], history(toy(FedAvg()))[3])
    assert distance > 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_6_at_coefficient_one_the_server_stands_still(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0, fixed_coefficient=1.0, **FREE), NO_DECAY)
    reference = toy(Local(local_init="own"), NO_DECAY)
    initial = copy(run.server)
    assert_equal(run.run(), initial)
    reference.run()
    assert_close(run.states(), reference.states(), 1e-12)
    for client, state in run.states().items():
        assert not torch.equal(state["local"]["head.weight"], client_of(run, client).fresh_model()["head.weight"])


def test_inv_sf_7_phase_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    original = RandomStreams.generator

    def spy(self: RandomStreams, name: str, round: int = -1, client: int = -1) -> np.random.Generator:
        asked.append((name, round))
        return original(self, name, round, client)

    monkeypatch.setattr(RandomStreams, "generator", spy)
    for start, first in ((0.5, 2), (0.0, 0), (0.3, 1), (1.0, 4)):
        asked.clear()
        toy(SuPerFed(start=start)).run()
        assert {round for name, round in asked if name == "mix"} == set(range(first, 4))


@pytest.mark.parametrize(
    ("start", "rounds", "first"), [(0.29, 100, 29), (0.0, 100, 0), (0.4, 200, 80), (0.35, 10, 3), (1.0, 7, 7)]
)
def test_inv_sf_7_the_first_mixing_round_survives_float_noise(start: float, rounds: int, first: int) -> None:
    algorithm = SuPerFed(start=start)
    assert [t for t in range(rounds) if algorithm.course(t, rounds)] == list(range(first, rounds))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[TrainRequest]:
    """Everything that engines are asked from now on."""
    requests: list[TrainRequest] = []
    original = Engine.execute

    def spy(self: Engine, batch: Any) -> list[Any]:
        requests.extend(batch)
        return original(self, batch)

    monkeypatch.setattr(Engine, "execute", spy)
    return requests


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_8_number_of_draws(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = recorded(monkeypatch)
    run = toy(SuPerFed(mode=mode, start=0.0))
    run.step([0, 1, 2, 3])
    assert [request.client for request in requests] == [0, 1, 2, 3]
    for request in requests:
        steps = 2 * -(-SIZES[request.client] // 8)
        shape = (steps,) if mode == "mm" else (steps, 2)
        expected = run.context.streams.generator("mix", 0, request.client).random(shape)
        assert request.draws is not None
        np.testing.assert_array_equal(request.draws["coefficient"], expected)


def text(stacked: int) -> Any:
    """A character model with a number of LSTM layers, and clients with random text."""
    task = Classification(CharLSTM(embedding=3, hidden=4, layers=stacked).network(TEXT))
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(0, 7, (n, 5), generator=generator), torch.randint(0, 7, (n,), generator=generator))
        for n in SIZES
    ]
    return {"dataset": ListDataset(pairs, classes=7), "task": task, "train": TRAIN}


@pytest.mark.parametrize(("stacked", "per_layer", "width"), [(2, False, 3), (2, True, 4), (3, True, 5)])
def test_inv_sf_8_draws_for_stacked_recurrent_layers(
    stacked: int, per_layer: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = recorded(monkeypatch)
    run = Toy(SuPerFed(mode="lm", start=0.0, lm_lstm_per_layer=per_layer), **text(stacked))
    run.step([0, 1])
    shapes = [request.draws["coefficient"].shape for request in requests if request.draws is not None]
    assert shapes == [(6, width), (4, width)]


@pytest.mark.slow
def test_a_single_recurrent_layer_is_one_layer_either_way() -> None:
    runs = [Toy(SuPerFed(mode="lm", start=0.0, lm_lstm_per_layer=apart), **text(1)) for apart in (False, True)]
    assert_equal(runs[0].run(), runs[1].run())
    stacks = [Toy(SuPerFed(mode="lm", start=0.0, lm_lstm_per_layer=apart), **text(2)) for apart in (False, True)]
    assert not torch.equal(stacks[0].run()["model"]["head.weight"], stacks[1].run()["model"]["head.weight"])
