"""Robust accuracy is a count over samples that mislead each model by itself, looped and stacked alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actors.hosting import scoring
from algorithms.fat import FAT
from algorithms.fedavg import FedAvg
from algorithms.knn_per import KnnPer
from algorithms.superfed import SuPerFed
from rayfl.engine.scoring.evaluation_together import evaluate_together
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.engine.updates.settings import TrainConfig
from rayfl.metrics.changed_inputs import ASR, ROBUST, ChangedMeasures
from rayfl.tasks.classification import Classification
from tests.actors.hosting.test_backdoor_scores import BACKDOOR, scores_of, toy_logits
from tests.support.elsewhere import elsewhere
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

ATTACK = InputAttack(0.3, 0.1, 4, "linf", "cross_entropy", np.ones(5, np.float32))


def toy(mode: str, method: Any = None, attack: InputAttack | None = ATTACK, **options: Any) -> Toy:
    """Two rounds of SuPerFed on ragged clients."""
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    changes = [ROBUST] * (attack is not None) + [ASR] * ("backdoor" in options)
    measures = {"measures": ChangedMeasures(changes=changes)} if changes else {}
    task = Classification(two_layers().network, **measures)
    data = random_clients([17, 3, 12, 9], seed=1)
    made = Toy(method or SuPerFed(start=0.5), data, task, train, mode=mode, input_attack=attack, **options)
    made.run()
    return made


def test_looped_and_stacked_clients_have_the_same_robust_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = []

    def noted(asked: Any, *rest: Any) -> Any:
        stacked.append(rest[-1])
        return evaluate_together(asked, *rest)

    monkeypatch.setattr(scoring, "evaluate_together", noted)
    looped = scores_of(toy("looped"))
    with elsewhere() as device:
        found = scores_of(toy("vectorized", device=device))
    assert set(stacked) == {None, ATTACK}
    changed = 0
    for these, those in zip(looped, found, strict=True):
        assert len(these[0]) > 1
        for client in these:
            for name, statistics in these[client].items():
                np.testing.assert_array_equal(
                    statistics.vector[[0, 2, -2, -1]], those[client][name].vector[[0, 2, -2, -1]]
                )
                assert statistics.vector[-2] == statistics.vector[0] and statistics.vector[-1] <= statistics.vector[2]
                changed += statistics.vector[-1] < statistics.vector[2]
    assert changed


def test_inv_oracle_the_count_is_that_of_a_plain_attack_and_nothing_else_changes() -> None:
    made = toy("looped", FedAvg())
    for client, rows in made.scores().items():
        test = made.dataset.load(client)["test"]
        x = test.x.clone()
        for _ in range(ATTACK.steps):
            x = x.detach().requires_grad_()
            value = torch.nn.functional.cross_entropy(toy_logits(made.server, x), test.y, reduction="sum")
            (slope,) = torch.autograd.grad(value, x)
            x = (x + 0.1 * slope.sign()).clamp(test.x - 0.3, test.x + 0.3)
        right = (toy_logits(made.server, x).argmax(1) == test.y).double().mean()
        assert rows["global"].metrics()["robust_top1"] == pytest.approx(right.item())
    plain = toy("looped", FedAvg(), attack=None).scores()
    with_backdoor = toy("looped", FedAvg(), backdoor=BACKDOOR)
    for client, rows in made.scores().items():
        np.testing.assert_array_equal(rows["global"].vector[:-2], plain[client]["global"].vector)
        both = with_backdoor.scores()[client]["global"]
        np.testing.assert_array_equal(both.vector[:-2], rows["global"].vector)
        assert {"robust_top1", "asr"} <= set(both.metrics())


def test_training_samples_are_not_attacked() -> None:
    found = toy("looped").scores(split="train")
    assert all(one.vector[-2] == 0 for rows in found.values() for one in rows.values())
    measures = ChangedMeasures(changes=[ROBUST])
    assert [measures.measured_on("robust_top1", split) for split in ("train", "validation", "test", "official")] == [
        False, True, True, True,
    ]  # fmt: skip
    assert "no slope" in measures.undefined("robust_top1") and measures.measured_on("top1", "train")


def test_rows_that_share_what_they_have_computed_have_slopes_of_their_own() -> None:
    found = toy("looped", KnnPer(neighbours=3)).scores()
    for rows in found.values():
        assert len(rows) > 5
        for one in rows.values():
            assert one.vector[-2] == one.n


def test_predictions_without_a_slope_have_no_robust_accuracy_and_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    found = toy("looped", FAT(radius=0.3, step=0.1, steps=2, unit="input")).scores()
    for rows in found.values():
        assert np.isnan(rows["attacked"].metrics()["robust_top1"]) and rows["attacked"].n
        assert rows["global"].metrics()["robust_top1"] <= rows["global"].metrics()["top1"]
    said = [one.message for one in caplog.records if "robust accuracy of 'attacked' is unknown" in one.message]
    assert len(said) == 1
