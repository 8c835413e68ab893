"""Which items a training step of recommendation reads, and what it learns of them, alone and in stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.stacks import vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.ranking import RankingLoss
from rayfl.models.networks.recommenders import MatrixFactorization, NeuralCF
from rayfl.objectives import TRAINED, loss
from rayfl.tasks.base import Batch, Predictor
from rayfl.tasks.recommendation import Recommendation
from tests.support.elsewhere import elsewhere
from tests.support.problems import CPU, request
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import assert_close

torch.set_num_threads(1)
OTHERS, ITEMS = 12, 30
SPEC = InputSpec("tokens", (1 + OTHERS,), 1, ITEMS, "ranking")


def rows(n: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.randperm(ITEMS, generator=generator)[: 1 + OTHERS] for _ in range(n)])
    return Examples(x, torch.zeros(n, dtype=torch.int64))


def task_of(model: Any = None, double: bool = False, **options: Any) -> Recommendation:
    config = NeuralCF(factors=3, embedding=4, hidden=(5,)) if model is None else model
    network = DoubleNetwork(lambda: config.whole(SPEC)) if double else config.network(SPEC)
    return Recommendation(network, (), SPEC, **options)


def read_in_a_step(task: Recommendation, x: Tensor, key: int) -> Tensor:
    task.network.begin_step(torch.tensor(key))
    found = task._drawn(Batch(x, torch.zeros(len(x))), True).x
    task.network.release()
    return found


def test_a_step_reads_the_chosen_item_and_some_others_of_its_row() -> None:
    task, x = task_of(negatives=3), rows(6).x
    one, again, other = (read_in_a_step(task, x, key) for key in (5, 5, 6))
    assert one.shape == (6, 4) and one[:, 0].equal(x[:, 0])
    assert all(set(read.tolist()) <= set(row.tolist()) for read, row in zip(one[:, 1:], x[:, 1:], strict=True))
    assert one.equal(again) and not one.equal(other)
    assert read_in_a_step(task, x[:2], 5).equal(one[:2])  # whatever rows, such as padding, follow
    batch = Batch(x, torch.zeros(6))
    assert task._drawn(batch, False).x.equal(x)
    task.network.begin_step(torch.tensor(5))
    model = task.network.initialize(0)
    passes = [task.logits(model, batch), task.features_and_logits(model, batch)[1]]
    passes += [task.head_inputs_and_logits(model, batch)[1], task.classify(model, task.features(model, batch))]
    for found in passes:
        torch.testing.assert_close(found, passes[0])
    assert found.shape == (6, 4, 1)


def test_all_items_of_a_row_are_drawn_equally_often() -> None:
    task, x = task_of(negatives=4), torch.arange(1 + OTHERS).expand(50, -1)
    drawn = torch.cat([read_in_a_step(task, x, key)[:, 1:].flatten() for key in range(60)])
    counts = torch.bincount(drawn, minlength=1 + OTHERS)[1:].double()
    expected = counts.sum() / OTHERS
    assert ((counts - expected) ** 2 / expected).sum() < 40  # chi-square of 11 degrees: above that once in 10^5


def test_with_as_many_negatives_as_there_are_a_step_reads_all_and_needs_no_key() -> None:
    task, x = task_of(negatives=OTHERS), rows(3).x
    assert read_in_a_step(task, x, 1).equal(x) and not task.network.stochastic


@pytest.mark.parametrize("kind", ["bce", "bpr"])
def test_the_loss_is_that_of_the_items_that_are_read(kind: Any) -> None:
    task, data = task_of(negatives=3, error=RankingLoss(kind), double=True), rows(5)
    model = task.network.initialize(0)
    task.network.begin_step(torch.tensor(9))
    read = read_in_a_step(task, data.x, 9)
    task.network.begin_step(torch.tensor(9))
    mask = torch.tensor([1.0, 1, 1, 0, 0], dtype=torch.float64)
    found = task.loss(model, Batch(data.x, data.y, mask))
    scores = task.network.logits(model, read)[:3, :, 0]
    torch.testing.assert_close(found, RankingLoss(kind)(scores).mean(), rtol=1e-12, atol=1e-12)


def updates_of(task: Recommendation, sizes: Sequence[int]) -> list[TrainRequest]:
    return [
        request(rows(size, k), task.network.initialize(k), loss(TRAINED), client=k, batch_size=4)
        for k, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("model", [None, MatrixFactorization(embedding=3, biases=True)])
@pytest.mark.parametrize(("double", "bound"), [(True, 1e-12), (False, 1e-5)])
def test_stacked_clients_draw_and_learn_what_they_do_one_by_one(model: Any, double: bool, bound: float) -> None:
    task = task_of(model, double, negatives=3)
    updates = updates_of(task, (9, 4, 6))
    found = vectorized.train(updates, task, CPU)
    for stacked, update in zip(found, updates, strict=True):
        assert_close(stacked, looped.train(update, task, CPU), bound)
    other = looped.train(replace(updates[0], seed=1), task, CPU)
    assert max((found[0][name] - other[name]).abs().max() for name in other) > 1e-4


def test_on_a_device_steps_and_scores_are_those_of_the_processor() -> None:
    task = task_of(negatives=3)
    updates = updates_of(task, (7, 5))
    expected = [looped.train(one, task, CPU) for one in updates]
    scores = evaluate({"own": Predictor.of(expected[0])}, updates[0].examples, task, 4)["own"].vector
    with elsewhere() as device:
        sent = [
            replace(one, examples=Examples(one.examples.x.to(device), one.examples.y.to(device))) for one in updates
        ]
        for found, one in zip(vectorized.train(sent, task, device), expected, strict=True):
            assert_close({name: leaf.cpu() for name, leaf in found.items()}, one, 1e-5)
        there = {name: leaf.to(device) for name, leaf in expected[0].items()}
        found = evaluate({"own": Predictor.of(there)}, sent[0].examples, task, 4)["own"].vector
    np.testing.assert_allclose(found, scores, rtol=1e-6)


def test_clients_scored_together_have_the_sums_of_each_alone() -> None:
    task = task_of(negatives=3)
    asked = [
        ScoringRequest({"own": Predictor.of(task.network.initialize(k))}, rows(size, k))
        for k, size in enumerate((7, 1, 4))
    ]
    for one, together in zip(asked, evaluate_together(asked, task, 3), strict=True):
        alone = evaluate(one.predictors, one.examples, task, 1000)["own"].vector
        np.testing.assert_allclose(together["own"].vector, alone, rtol=1e-6)
