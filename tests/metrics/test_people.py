"""Group fairness: what is compared between groups of people, and which runs may ask for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.base import Samples
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.metrics import Statistics
from rayfl.metrics.changed_inputs import ChangedMeasures
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.people import FAIRNESS
from rayfl.report.columns import columns_of
from rayfl.runs.finding import load_run
from rayfl.runs.further import further_tables

NAMES = tuple(FAIRNESS)
CONTENT: dict[str, Any] = {
    "dataset": {"name": "synthetic_groups", "samples": 400, "dimension": 3},
    "partition": {"name": "dirichlet", "by": "group", "num_clients": 5, "alpha": 0.2, "min_samples": 20},
    "holdout": {"test": 0.3, "validation": 0.2},
    "task": {"metrics": list(NAMES)},
    "model": {"name": "two_nn", "hidden": [4]},
    "algorithm": "fedavg",
    "train": {"rounds": 3, "clients_per_round": "all", "local_epochs": 1, "lr": 0.1},
    "cluster": {"backend": "inline"},
    "tracking": {"tensorboard": False},
}


def gap(said: np.ndarray, group: np.ndarray, among: np.ndarray) -> float:
    """The largest difference between groups of the share of samples for which 1 is said, among some samples."""
    shares = [said[among & (group == one)].mean() for one in np.unique(group[among])]
    return float(max(shares) - min(shares)) if len(shares) > 1 else math.nan


def by_definition(said: np.ndarray, y: np.ndarray, group: np.ndarray) -> dict[str, float]:
    """fairlearn's ``demographic_parity_difference``, ``equal_opportunity_difference`` and
    ``equalized_odds_difference`` (``agg="worst_case"`` and ``agg="mean"``), of groups that have such samples."""
    right, wrong = gap(said, group, y == 1), gap(said, group, y == 0)
    worst = math.nan if math.isnan(right + wrong) else max(right, wrong)
    return {
        "statistical_parity": gap(said, group, np.ones(len(y), dtype=bool)),
        "equal_opportunity": right,
        "equalized_odds": worst,
        "average_odds": (right + wrong) / 2,
    }


def drawn(seed: int, n: int, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of two classes, labels and groups, the last of which is small."""
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.randn(n, 2, generator=generator).log_softmax(1)
    group = (torch.rand(n, generator=generator) ** 3 * groups).long()
    return predictions, torch.randint(2, (n,), generator=generator), group


@pytest.mark.parametrize("kind", [ClassificationMeasures, ChangedMeasures])
@pytest.mark.parametrize(("n", "groups"), [(200, 2), (60, 4), (6, 3), (2, 2)])
def test_inv_oracle_group_fairness_is_what_its_definitions_say(
    kind: type[ClassificationMeasures], n: int, groups: int
) -> None:
    measures = kind(("f1_macro", *NAMES), 2, people=groups)
    for seed in range(5):
        predictions, y, group = drawn(seed, n, groups)
        targets = measures.targets(y, group)
        cuts = [slice(0, n // 3), slice(n // 3, n)]  # sums over batches
        vector = torch.stack([measures.statistics(predictions[cut], targets[cut]) for cut in cuts]).sum(0)
        found = Statistics.from_vector(vector, measures).metrics()
        expected = by_definition(predictions.argmax(1).numpy(), y.numpy(), group.numpy())
        np.testing.assert_allclose([found[name] for name in NAMES], [expected[name] for name in NAMES], rtol=1e-12)
        plain = ClassificationMeasures(("f1_macro",), 2)
        others = Statistics.from_vector(plain.statistics(predictions, y), plain).metrics()
        assert {name: found[name] for name in others} == pytest.approx(others, nan_ok=True)


def test_inv_permutation_numbers_of_groups_make_no_difference() -> None:
    measures = ClassificationMeasures(NAMES, 2, people=3)
    predictions, y, group = drawn(7, 90, 3)
    order = torch.tensor([2, 0, 1])
    one, other = (
        Statistics.from_vector(measures.statistics(predictions, measures.targets(y, kind)), measures).metrics()
        for kind in (group, order[group])
    )
    assert one == other


def test_a_difference_needs_two_groups_that_have_such_samples() -> None:
    measures = ClassificationMeasures(NAMES, 2, people=2)
    said = torch.tensor([1, 0, 1, 1])
    predictions = torch.nn.functional.one_hot(said, 2).double().log_softmax(1)

    def found(y: list[int], group: list[int] | None) -> list[float]:
        targets = measures.targets(torch.tensor(y), None if group is None else torch.tensor(group))
        return [Statistics.from_vector(measures.statistics(predictions, targets), measures).metrics()[n] for n in NAMES]

    # group 0 says 1 for one of two, group 1 for both; among samples with the label 1 both say 1
    np.testing.assert_array_equal(found([1, 0, 1, 0], [0, 0, 1, 1]), [0.5, 0, 1, 0.5])
    np.testing.assert_array_equal(found([1, 1, 0, 0], [0, 0, 1, 1]), [0.5, math.nan, math.nan, math.nan])
    np.testing.assert_array_equal(found([1, 0, 1, 0], [1, 1, 1, 1]), [math.nan] * 4)
    np.testing.assert_array_equal(found([1, 0, 1, 0], None), [math.nan] * 4)
    assert measures.undefined("equal_opportunity") == "they have no samples with the label 1 of two groups"


def test_runs_record_it_for_each_client_and_for_all_together(tmp_path: Path) -> None:
    stop = {"metric": "equal_opportunity", "patience": 1}
    evaluation = {"every": 1, "splits": ["validation", "test"]}
    result = rayfl.run({**CONTENT, "storage_path": str(tmp_path), "early_stopping": stop, "evaluation": evaluation})
    parts = Parts(load_config(Experiment, CONTENT, []))

    def last(table: pa.Table) -> list[dict[str, Any]]:
        wanted = {"round": 3, "split": "test", "model": "global", "phase": "received"}
        rows = [row for row in table.to_pylist() if all(row[name] == value for name, value in wanted.items())]
        return [row for row in rows if row.get("cohort") != "sampled"]

    clients = last(result.clients)
    assert len(clients) == 5
    for row in clients:
        group = parts.dataset.load(row["client"])["test"].group
        assert group is not None
        assert (row["statistical_parity"] is None) == (len(group.unique()) < 2)
    known = [row["statistical_parity"] for row in clients if row["statistical_parity"] is not None]
    assert 0 < len(known) < 5
    (whole,) = (row for row in last(result.rounds) if row["cohort"] == "all")
    assert whole["statistical_parity"] == pytest.approx(np.mean(known))
    assert 0 <= whole["pooled_statistical_parity"] <= 1
    # what a user sees of it
    (table, *_) = further_tables(result)
    assert [str(column.header) for column in table.columns][:2] == ["model", "statistical parity difference"]
    mean, pooled = whole["statistical_parity"], whole["pooled_statistical_parity"]
    assert list(table.columns[1].cells) == [f"{mean:.3f} / {pooled:.3f}"]
    run = load_run(result.path, METHODS)
    column = columns_of([run])["pooled_statistical_parity"]
    assert (column.heading, column.sign, column.by_client) == ("pooled statistical parity difference", -1, False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataset": "breast_cancer", "partition": {"name": "iid", "num_clients": 2}}, "name the column that does"),
        ({"dataset": "breast_cancer"}, "partition.by=group divides samples by groups of people"),
        ({"dataset": "tests.metrics.test_people:three_classes"}, "is of two classes.*has 3"),
    ],
)
def test_data_that_cannot_have_it_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assert Parts(load_config(Experiment, {**CONTENT, **sections}, [])).task


def three_classes(seed: int) -> Samples:
    """Samples of three classes, from people of two groups."""
    spec = InputSpec("image", (2,), 3, groups=("a", "b"))
    return Samples(np.zeros((300, 2), np.float32), np.arange(300) % 3, spec, group=np.arange(300) % 2)
