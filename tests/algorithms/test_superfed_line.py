"""The line between SuPerFed's federated and local model, as it is evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.parts.lines import GRID
from algorithms.superfed import SuPerFed
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.params import copy
from rayfl.tasks.base import Predictor
from tests.support.superfed_toys import MODES, client_of, normed, some_batch, toy
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_equal


def rows_of(run: Toy, id: int, round: int) -> dict[str, Predictor]:
    """The predictors of a client."""
    engine = run.client_hosts[0].engine
    procedure = run.algorithm.predictors(client_of(run, id, round), run.server)
    rows: dict[str, Predictor] = run_procedures({id: procedure}, engine)[id]
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_9_ends_of_the_evaluated_line(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.0))
    run.run()
    for client, state in run.states().items():
        rows = rows_of(run, client, round=3)
        assert list(rows) == ["global", *(f"lambda={value}" for value in GRID)]
        assert_equal(rows["global"].built()[0], run.server["model"])
        assert_equal(rows["lambda=0.0"].built()[0], run.server["model"])
        assert_equal(rows["lambda=1.0"].built()[0], state["local"])


def test_after_training_the_line_is_between_the_trained_models() -> None:
    run = toy(SuPerFed(start=0.0))
    run.step([1])
    trained, later = run.federation.trained_scores[1]["test"], run.scores()[1]
    # the model of the only client of the round is the server's from now on
    for value in GRID:
        assert trained[f"lambda={value}"].vector.tolist() == later[f"lambda={value}"].vector.tolist()


def test_inv_sf_10_the_line_is_affine_in_the_coefficient() -> None:
    task = softmax_regression()
    run = toy(SuPerFed(start=0.0), task=task)
    run.run()
    rows = rows_of(run, 0, round=3)
    line = [rows[f"lambda={value}"].built()[0] for value in GRID]
    epsilon = torch.finfo(torch.float64).eps
    for name, middle in line[5].items():
        ends = line[0][name], line[10][name]
        ulp = epsilon * torch.maximum(ends[0].abs(), ends[1].abs())
        assert ((middle - (ends[0] + ends[1]) / 2).abs() <= ulp).all()
    batch = some_batch(20)
    logits = [task.logits(model, batch) for model in line]
    losses = [float(task.cross_entropy(value, batch)) for value in logits]
    for value, mixed in zip(GRID, logits, strict=True):
        torch.testing.assert_close(mixed, (1 - value) * logits[0] + value * logits[10], rtol=0, atol=1e-12)
    assert all(losses[i - 1] + losses[i + 1] - 2 * losses[i] >= -1e-12 for i in range(1, 10))


@pytest.mark.parametrize("mode", MODES)
def test_inv_sf_11_order_of_the_ways_to_choose_a_coefficient(mode: str) -> None:
    run = toy(SuPerFed(mode=mode, start=0.25, orthogonality_weight=1.0))
    run.run()
    scores = run.scores(final=True)
    accuracy = np.array([[s[f"lambda={value}"].top1 for value in GRID] for s in scores.values()])
    oracle, best_mean = accuracy.max(1).mean(), accuracy.mean(0).max()
    ends = accuracy.mean(0)[[0, -1]].max()
    assert oracle >= best_mean >= ends
    assert len(set(accuracy.flatten())) > 3
    for client, row in enumerate(scores.values()):
        assert row["global"].top1 == accuracy[client, 0]


def test_evaluation_in_the_first_phase_has_only_the_global_row() -> None:
    run = toy(SuPerFed(start=0.5))
    line = {f"lambda={value}" for value in GRID}
    for round in range(4):
        run.step()
        trained = [set(splits["test"]) for splits in run.federation.trained_scores.values()]
        expected = ({"global"}, {"local"}) if round < 2 else ({"global"} | line, line)
        assert all(rows == expected[1] for rows in trained)
        assert len(trained) == 3
        assert all(set(rows) == expected[0] for rows in run.scores().values())


def test_clients_never_mixed_are_scored_with_their_initial_local_model() -> None:
    run = toy(SuPerFed(start=0.0))
    run.step([0, 1])
    rows = rows_of(run, 3, round=0)
    assert_equal(rows["lambda=1.0"].built()[0], client_of(run, 3).fresh_model())
    assert set(run.states()) == {0, 1}


def test_evaluation_has_no_side_effects() -> None:
    run = toy(SuPerFed(start=0.0))
    run.run(2)
    states, server = run.states(), copy(run.server)
    first, second = run.scores(), run.scores()
    assert_equal(run.states(), states)
    assert_equal(run.server, server)
    assert all((first[c][row].vector == second[c][row].vector).all() for c in first for row in first[c])


@pytest.mark.parametrize("mode", MODES)
def test_buffers_belong_to_the_federated_model(mode: str) -> None:
    """They record the mixed model's batches, travel with w^f, and neither penalty nor decay nor line touches them."""
    run = toy(SuPerFed(mode=mode, start=0.0, proximal_weight=0.1), task=normed())
    initial = copy(run.server["model"])
    run.run()
    buffers = run.task.network.buffer_names
    for name in buffers:
        assert (run.server["model"][name] - initial[name]).abs().max() > 1e-2
    for client, state in run.states().items():
        fresh = client_of(run, client).fresh_model()
        assert_equal({name: state["local"][name] for name in buffers}, {name: fresh[name] for name in buffers})
        for row in rows_of(run, client, round=3).values():
            assert_equal({name: row.built()[0][name] for name in buffers}, {n: run.server["model"][n] for n in buffers})


@pytest.mark.parametrize("mode", ["mm", pytest.param("lm", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_model_within_the_line_beats_both_its_ends_and_federated_averaging(mode: Any) -> None:
    """On new samples of clients whose rules are a common one and as much again of their own."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    seen, new = [], []
    for _ in range(6):
        rule = common + 0.5 * torch.randn(5, 3, generator=generator, dtype=torch.float64)
        x = torch.randn(240, 5, generator=generator, dtype=torch.float64)
        y = (x @ rule).argmax(1)
        seen.append((x[:40], y[:40]))
        new.append((x[40:], y[40:]))
    dataset = ListDataset(seen, validation=new)
    train = TrainConfig(rounds=20, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.1, momentum=0.5)

    def accuracy(algorithm: Any) -> dict[str, float]:
        run = Toy(algorithm, dataset, two_layers(hidden=16), train)
        run.run()
        scores = run.federation.evaluate(run.server, ("validation",), final=True)
        rows = [splits["validation"] for splits in scores.values()]
        return {name: float(np.mean([row[name].top1 for row in rows])) for name in rows[0]}

    line, averaged = accuracy(SuPerFed(mode=mode)), accuracy(FedAvg())
    best = max(line, key=lambda name: line[name])
    assert best not in ("global", "lambda=0.0", "lambda=1.0")
    assert line[best] > 0.05 + max(averaged["global"], line["lambda=0.0"], line["lambda=1.0"])
