"""Predictions for triggered samples are scored one by one and in stacks alike, for all models of a sweep, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from actors.hosting import scoring
from algorithms.superfed import SuPerFed
from rayfl.data.backdoor import Backdoor
from rayfl.data.triggers import Columns
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.metrics.changed_inputs import ChangedMeasures
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import elsewhere
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

TARGET = 1
BACKDOOR = Backdoor(Columns({2: 3.0, 4: -3.0}), TARGET, 0.5)
Rows = dict[int, dict[str, Statistics]]


def toy(mode: str, backdoor: Backdoor | None = BACKDOOR, **options: Any) -> Toy:
    """Two rounds of SuPerFed on ragged clients, of which the second has samples of the target alone."""
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    data = random_clients([17, 3, 12, 9], seed=1)
    data._clients[1] = (data._clients[1][0], torch.full_like(data._clients[1][1], TARGET))
    measures = {} if backdoor is None else {"measures": ChangedMeasures()}
    task = Classification(two_layers().network, **measures)
    made = Toy(SuPerFed(start=0.5), data, task, train, mode=mode, backdoor=backdoor, **options)
    made.run()
    return made


def scores_of(made: Toy) -> list[Rows]:
    """Of models right after training, and of an evaluation."""
    return [{client: rows["test"] for client, rows in made.federation.trained_scores.items()}, made.scores()]


def test_looped_and_stacked_clients_have_the_same_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked: list[tuple[int, int]] = []

    def noted(asked: Sequence[ScoringRequest], *rest: Any) -> list[dict[str, Statistics]]:
        stacked.append((len(asked), sum(len(one.examples) for one in asked)))
        return evaluate_together(asked, *rest)

    monkeypatch.setattr(scoring, "evaluate_together", noted)
    looped, vectorized = (scores_of(toy(mode)) for mode in ("looped", "vectorized"))
    assert not stacked
    with elsewhere() as device:
        found = scores_of(toy("vectorized", device=device))
    labels = [y for place, (_, y) in enumerate(random_clients([17, 3, 12, 9], seed=1)._clients) if place != 1]
    others = sum(int((y != TARGET).sum()) for y in labels)
    assert stacked[:2] == [(4, 41), (4, others)], "the triggered samples are one more evaluation"
    for these, those, more in zip(looped, vectorized, found, strict=True):
        assert len(these[0]) > 1
        for client in these:
            for name, statistics in these[client].items():
                for other in (those[client][name], more[client][name]):
                    np.testing.assert_array_equal(statistics.vector[[0, 2, -2, -1]], other.vector[[0, 2, -2, -1]])


def test_the_rate_is_a_count_over_samples_of_other_classes() -> None:
    made = toy("looped")
    for client, rows in made.scores().items():
        x, y = made.dataset.load(client)["test"].x.clone(), made.dataset.load(client)["test"].y
        plain = toy_logits(made.server, x).argmax(1)
        x[:, 2], x[:, 4] = 3.0, -3.0
        fooled = toy_logits(made.server, x).argmax(1)[y != TARGET] == TARGET
        metrics = rows["global"].metrics()
        assert metrics["top1"] == pytest.approx((plain == y).double().mean().item())
        if client == 1:
            assert np.isnan(metrics["asr"]) and "no sample of another class" in ChangedMeasures().undefined("asr")
        else:
            assert metrics["asr"] == pytest.approx(fooled.double().mean().item())
    with_, without = (toy("looped", one).scores() for one in (BACKDOOR, None))
    for client, models in without.items():
        for name, statistics in models.items():
            np.testing.assert_array_equal(with_[client][name].vector[:-2], statistics.vector)


def test_other_splits_are_not_scored_again() -> None:
    found = toy("looped").scores(split="train")
    assert all(one.vector[-2] == 0 for rows in found.values() for one in rows.values())
    measures = ChangedMeasures()
    assert [measures.measured_on("asr", split) for split in ("train", "validation", "test", "official")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert measures.measured_on("top1", "train")


def toy_logits(server: Tree, x: torch.Tensor) -> torch.Tensor:
    """Of the global model, by plain matrix products."""
    model: Any = server.get("model", server)
    hidden = (x @ model["inner.weight"].T + model["inner.bias"]).relu()
    found: torch.Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def test_triggered_samples_are_new_ones() -> None:
    x, y = torch.zeros(3, 5), torch.tensor([0, 1, 2])
    found = BACKDOOR.triggered(Examples(x, y))
    assert not x.any() and y.tolist() == [0, 1, 2] and found.y.tolist() == [TARGET, TARGET]
    assert found.x.tolist() == [[0, 0, 3, 0, -3]] * 2
