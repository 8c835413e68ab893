"""Stacks of clients have the statistics of clients that are scored one by one, in far fewer launches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from actors.hosting import scoring
from algorithms.parts.lines import GRID
from algorithms.superfed import SuPerFed
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.scoring.mixtures import Mixture
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import Examples, InputSpec
from rayfl.metrics import Statistics
from rayfl.metrics.language import IGNORED
from rayfl.metrics.regression import RegressionMeasures
from rayfl.models.base import Network
from rayfl.models.networks.tokens import WindowModel
from rayfl.models.zoo import CharLSTM, TwoNN
from rayfl.tasks.base import Predictor
from rayfl.tasks.classification import Classification
from rayfl.tasks.classification_section import ClassificationSection
from rayfl.tasks.further_tasks import ErrorLoss, LanguageModel, Regression
from rayfl.tasks.registry import MultilabelSection, RegressionSection
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches
from tests.support.problems import Gated, Normalized, Scaled, SmallCNN, examples
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

torch.set_num_threads(1)

IMAGE, VECTOR = InputSpec("image", (1, 6, 6), 4), InputSpec("image", (6,), 4)
SIZES = (17, 3, 0, 64, 25, 10, 41)
NETWORKS: dict[str, tuple[Any, InputSpec]] = {
    "perceptron": (lambda: TwoNN(hidden=(20, 20)).build(IMAGE), IMAGE),
    "convolutions": (SmallCNN, IMAGE),
}


def sweep(task: Classification, k: int, server: Any) -> dict[str, Predictor]:
    """A global model, an own one, and the points on the line between them."""
    own = task.network.initialize(k)
    points = {f"lambda={c}": Predictor.of(Mixture(server, own, c, task)) for c in GRID}
    return {
        "global": Predictor.of(server),
        **points,
        "own": Predictor.of(own),
        "other": Predictor.of(task.network.initialize(99 + k)),
    }


def close(found: Mapping[str, Statistics], expected: Mapping[str, Statistics]) -> None:
    """Equal counts, and sums that differ by rounding."""
    assert list(found) == list(expected)
    for name, one in found.items():
        vector, other = one.vector, expected[name].vector
        counts = np.r_[0, 2, 3, 4:19, 34:49]
        np.testing.assert_array_equal(vector[counts], other[counts])
        np.testing.assert_allclose(vector, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [16, 1000])
@pytest.mark.parametrize(("factory", "spec"), NETWORKS.values(), ids=NETWORKS.keys())
def test_ragged_clients_and_all_points_of_a_sweep_agree(factory: Any, spec: InputSpec, batch_size: int) -> None:
    task = Classification(Network(factory))
    server = task.network.initialize(50)
    asked = [ScoringRequest(sweep(task, k, server), examples(n, spec, k)) for k, n in enumerate(SIZES)]
    for one, found in zip(asked, evaluate_together(asked, task, batch_size), strict=True):
        if len(one.examples):
            close(
                {name: found[name] for name in one.predictors}, evaluate(one.predictors, one.examples, task, batch_size)
            )
        else:
            assert found == {}


def test_few_clients_at_a_time_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayfl.engine.scoring import evaluation_together as module

    task = Classification(Network(lambda: TwoNN(hidden=(20, 20)).build(IMAGE)))
    asked = [
        ScoringRequest(sweep(task, k, task.network.initialize(k % 2)), examples(n, IMAGE, k))
        for k, n in enumerate(SIZES)
    ]
    with profile(activities=[ProfilerActivity.CPU]) as together:
        whole = evaluate_together(asked, task, 16)
    monkeypatch.setattr(module, "CPU_STACK_BYTES", 1)
    with profile(activities=[ProfilerActivity.CPU]) as apart:
        found = evaluate_together(asked, task, 16)
    passes, more = (sum(op.name == "aten::log_softmax" for op in seen.events()) for seen in (together, apart))
    assert 0 < 2 * passes < more
    for one, other in zip(found, whole, strict=True):
        close(one, other)


def test_one_model_for_all_needs_no_stack() -> None:
    """Any network predicts for the samples of all clients at once, also one that cannot be stacked."""
    spec = InputSpec("tokens", (9,), 12, 12)
    task = Classification(CharLSTM(hidden=8).network(spec))
    predictors = {"global": Predictor.of(task.network.initialize(0))}
    asked = [ScoringRequest(predictors, examples(n, spec, k)) for k, n in enumerate((5, 9, 2))]
    for one, found in zip(asked, evaluate_together(asked, task, 4), strict=True):
        close(found, evaluate(predictors, one.examples, task, 4))


class Unrecorded(Normalized):
    """Normalized by statistics of the batch in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)


STACKED = {"global", "own", "other"}


@pytest.mark.parametrize(
    ("factory", "left"), [(Gated, {"global"}), (Normalized, STACKED), (Scaled, STACKED), (Unrecorded, set())]
)
def test_what_cannot_be_stacked_is_left_out(factory: Any, left: set[str]) -> None:
    task = Classification(Network(factory))
    server = task.network.initialize(50)
    asked = []
    for k in range(2):
        predictors = sweep(task, k, server)
        if factory is Gated:  # else the global model is a point of a line that cannot be stacked
            predictors = {name: predictors[name] for name in ("global", "own")}
        predictors["ensemble"] = Predictor.of(server, server)
        predictors["code"] = Predictor.of(server, combine=lambda models, x, task: task.log_probabilities(models, x))
        asked.append(ScoringRequest(predictors, examples(5, VECTOR, k)))
    assert [set(one) for one in evaluate_together(asked, task, 16)] == [left] * 2


def toy(mode: str, **options: Any) -> Toy:
    """Two rounds of SuPerFed on ragged clients, the second with sweeps."""
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    made = Toy(SuPerFed(start=0.5), random_clients([17, 3, 12, 9], seed=1), two_layers(), train, mode=mode, **options)
    made.run()
    return made


def scores_of(made: Toy) -> list[dict[int, dict[str, Statistics]]]:
    """Of models right after training, and of an evaluation."""
    return [{client: rows["test"] for client, rows in made.federation.trained_scores.items()}, made.scores()]


def test_hosts_score_in_stacks_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked: list[int] = []

    def noted(asked: Sequence[ScoringRequest], *rest: Any) -> list[dict[str, Statistics]]:
        stacked.append(len(asked))
        return evaluate_together(asked, *rest)

    monkeypatch.setattr(scoring, "evaluate_together", noted)
    expected = [scores_of(toy(mode)) for mode in ("looped", "vectorized")]
    assert not stacked
    with elsewhere() as device:
        found = scores_of(toy("vectorized", device=device))
    assert stacked == [4] * 3
    for others in expected:
        for these, those in zip(found, others, strict=True):
            assert list(these) == list(those) == [0, 1, 2, 3]
            for client in these:
                close(these[client], those[client])


def test_a_failure_in_a_stack_is_said_and_scored_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise ArithmeticError("no stack")

    expected = toy("vectorized").scores()
    monkeypatch.setattr(scoring, "evaluate_together", fails)
    with elsewhere() as device, caplog.at_level(logging.WARNING):
        found = toy("vectorized", device=device).scores()
    for client in expected:
        close(found[client], expected[client])
    assert [record.getMessage() for record in caplog.records] == ["4 clients are scored one by one: no stack"]


def launches(clients: int, device: torch.device) -> Launches:
    """Scores SuPerFed's sweep for clients with TwoNN and parts of several sizes."""
    spec = InputSpec("image", (1, 28, 28), 10)
    task = Classification(TwoNN().network(spec))
    server = {name: leaf.to(device) for name, leaf in task.network.initialize(50).items()}
    asked = []
    for k in range(clients):
        part, own = examples(8 + k % 5, spec, k), task.network.initialize(k)
        own = {name: leaf.to(device) for name, leaf in own.items()}
        points = {f"lambda={c}": Predictor.of(Mixture(server, own, c, task)) for c in GRID}
        moved = Examples(part.x.to(device), part.y.to(device))
        asked.append(ScoringRequest({"global": Predictor.of(server), **points}, moved))
    with Launches() as counted:
        found = evaluate_together(asked, task, 256)
    assert all(len(one) == 1 + len(GRID) for one in found)
    return counted


@PRETENDED
def test_a_sweep_takes_15_launches_a_stack_and_no_wait_more_for_more_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayfl.engine.scoring import evaluation_together as module

    with elsewhere() as device:
        one, same = launches(4, device), launches(8, device)
        monkeypatch.setattr(module, "DEVICE_STACK_BYTES", 4 * 11 * (199_210 + 12 * (784 + 10)) * 4)
        two, three = launches(8, device), launches(12, device)
    assert one.launches == same.launches
    a_stack = two.launches.total() - one.launches.total()
    assert a_stack == three.launches.total() - two.launches.total()
    assert a_stack <= 15
    assert one.waits == three.waits
    assert one.launches.total() <= 60


VALUES, LABELS = (InputSpec("image", (6,), 4, target=target) for target in ("values", "labels"))
TEXT = InputSpec("tokens", (5,), 9, 9, "tokens")


def of_a_task(name: str) -> tuple[Any, Any]:
    """A task on a small network, and what makes samples of a number and a seed."""

    def samples(n: int, k: int) -> Examples:
        generator = torch.Generator().manual_seed(k)
        if name == "language_model":
            text = torch.randint(1, 9, (n, 6), generator=generator)
            shown = torch.rand(n, 5, generator=generator) < 0.8
            return Examples(text[:, :-1], text[:, 1:].where(shown, IGNORED))
        y = torch.randn(n, 4, generator=generator)
        return Examples(torch.rand(n, 6, generator=generator), (y > 0).float() if name == "multilabel" else y)

    if name == "language_model":
        return LanguageModel(WindowModel(embedding=3, hidden=4).network(TEXT), (), TEXT), samples
    if name == "groups of people":
        spec = replace(IMAGE, num_classes=2, groups=("a", "b", "c"))
        section = ClassificationSection(metrics=("equalized_odds", "auroc"))
        made = section.task([Network(lambda: TwoNN(hidden=(20, 20)).build(spec))], spec)
        return made, lambda n, k: replace(examples(n, spec, k), group=torch.arange(n) % (k + 1) % 3)
    if name == "classification":
        section = ClassificationSection(metrics=("auroc", "f1_macro", "top1_by_frequency"))
        counts = np.arange(IMAGE.num_classes)
        made = section.task([Network(NETWORKS["perceptron"][0])], IMAGE, counts=counts)
        return made, lambda n, k: examples(n, IMAGE, k)
    kind, spec = {"regression": (RegressionSection, VALUES), "multilabel": (MultilabelSection, LABELS)}[name]
    return kind().task([Network(lambda: TwoNN(hidden=(20, 20)).build(spec))], spec), samples


@pytest.mark.parametrize("name", ["classification", "groups of people", "regression", "multilabel", "language_model"])
def test_every_task_is_scored_in_stacks(name: str) -> None:
    task, samples = of_a_task(name)
    server = task.network.initialize(50)
    asked = [ScoringRequest(sweep(task, k, server), samples(n, k)) for k, n in enumerate(SIZES)]
    for one, found in zip(asked, evaluate_together(asked, task, 16), strict=True):
        assert len(found) == (len(one.predictors) if len(one.examples) else 0)
        for row, statistics in found.items():
            (alone,) = evaluate({row: one.predictors[row]}, one.examples, task, 16).values()
            np.testing.assert_allclose(statistics.vector, alone.vector, rtol=1e-5, atol=1e-5)


class OwnMeasures(RegressionMeasures):
    """Counts samples twice."""

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().statistics(predictions, targets)


class OwnStatistics(Regression):
    """Scores in a way of its own."""

    def statistics(self, *given: Any) -> Tensor:
        return 2 * super().statistics(*given)


class WithOwnMeasures(Regression):
    """Has measures of its own."""

    @property
    def measures(self) -> OwnMeasures:
        return OwnMeasures(4, ErrorLoss())


@pytest.mark.parametrize("kind", [OwnStatistics, WithOwnMeasures])
def test_a_task_that_scores_in_its_own_way_is_scored_one_by_one(kind: type[Regression]) -> None:
    task = kind(Network(lambda: TwoNN(hidden=(20, 20)).build(VALUES)), (), VALUES)
    samples = Examples(torch.zeros(8, 6), torch.zeros(8, 4))
    assert evaluate_together(
        [ScoringRequest({"global": Predictor.of(task.network.initialize(0))}, samples)], task, 100
    ) == [{}]


def test_models_are_not_made_for_a_split_without_samples() -> None:
    def made() -> Any:
        raise AssertionError("this model was made for nothing")

    task = Classification(TwoNN(hidden=(4,)).network(VECTOR))
    none = examples(0, VECTOR, 0)
    found = evaluate({"lambda=0.5": Predictor.of(made)}, none, task, 8)
    assert found["lambda=0.5"].vector.tobytes() == Statistics.empty(task.measures).vector.tobytes()
