"""Accuracy on frequent, medium and rare classes: which classes these are, and what is counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.partitions.long_tail import LongTail
from rayfl.experiment.parts import Parts
from rayfl.metrics import Statistics
from rayfl.metrics.changed_inputs import ChangedMeasures
from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.frequency import BY_FREQUENCY, GROUPS, frequency_groups
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification_section import ClassificationSection
from tests.metrics.test_further_tasks import classes, scored

NAMES = [metric.name for metric in GROUPS]


def test_shares_are_those_of_cifar10_lt() -> None:
    counts = LongTail(imbalance_factor=100).profile(np.full(10, 5000), RandomStreams(0))
    # 5000 + 2997 of 12406 samples are 64 %, with 1796 more 79 %; with 1077 + 645 + 387 more 96 %
    assert frequency_groups(counts, "share").tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    order = np.array([3, 8, 0, 1, 9, 2, 7, 5, 4, 6])
    assert frequency_groups(counts[order], "share").tolist() == [1, 2, 0, 0, 2, 0, 2, 1, 1, 2]
    assert frequency_groups(counts, "share", (0.4, 0.65)).tolist() == [0, 1, 1, *[2] * 7]


@pytest.mark.parametrize("seed", range(20))
def test_inv_frequency_1_groups_of_shares_are_the_smallest_heads_that_reach_them(seed: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 50, generator.integers(1, 12))
    groups = frequency_groups(counts, "share")
    for last, share in ((0, 0.75), (1, 0.95)):
        inside = counts[groups <= last]
        assert inside.sum() >= share * counts.sum() and inside.sum() - inside.min() < share * counts.sum()
    for one in (0, 1):
        assert counts[groups == one].min(initial=99) >= counts[groups == one + 1].max(initial=0)


def test_counts_are_those_of_open_long_tailed_recognition() -> None:
    assert frequency_groups(np.array([101, 100, 20, 19, 0]), "count").tolist() == [0, 1, 1, 2, 2]
    assert frequency_groups(np.array([101, 100, 20, 19, 0]), "count", (19, 1)).tolist() == [0, 0, 0, 1, 2]


def test_wrong_labels_make_no_class_frequent() -> None:
    content = {
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "long_tail": {"imbalance_factor": 20},
        "task": {"name": "classification", "metrics": [BY_FREQUENCY]},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fedavg",
        "evaluation": {"unseen_clients": 0.25},
    }
    noise = {"kind": "symmetric", "ratio": 0.6}
    clean, noisy = (Parts(load_config(Experiment, {**content, **more}, [])) for more in ({}, {"noise": noise}))
    x, y = torch.eye(10).repeat(2, 1).log_softmax(-1), torch.arange(10).repeat(2)
    assert not np.array_equal(clean.dataset.labels(0)["train"], noisy.dataset.labels(0)["train"])
    one, other = (parts.task.measures.statistics(x, y) for parts in (clean, noisy))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [ClassificationMeasures, ChangedMeasures])
def test_the_share_of_right_ones_among_samples_of_a_group(kind: type[ClassificationMeasures]) -> None:
    predictions, y = classes(0, 300, 5)
    groups = np.array([1, 0, 2, 0, 1])
    found = scored(kind((BY_FREQUENCY, "f1_macro"), 5, groups=groups), predictions, y)
    for number, name in enumerate(NAMES):
        of_group = torch.from_numpy(groups)[y] == number
        assert found[name] == float((predictions.argmax(1) == y)[of_group].double().mean())
    plain = scored(ClassificationMeasures(("f1_macro",), 5), predictions, y)
    assert {name: found[name] for name in plain} == plain


def test_a_group_without_samples_is_undefined_and_says_why() -> None:
    predictions, y = classes(1, 40, 3)
    measures = ClassificationMeasures((BY_FREQUENCY,), 3, groups=np.array([0, 0, 2]))
    found = scored(measures, predictions[y < 2], y[y < 2])
    assert found["top1_many"] == found["top1"] and math.isnan(found["top1_medium"]) and math.isnan(found["top1_few"])
    assert "no sample of such a class" in measures.undefined("top1_few")
    total = Statistics.from_vector(measures.statistics(predictions, y), measures).metrics()
    assert not math.isnan(total["top1_few"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": "count"}, "frequency is for top1_by_frequency"),
        ({"frequency_bounds": (0.5, 0.9)}, "frequency_bounds is for top1_by_frequency"),
        ({"metrics": (BY_FREQUENCY,), "frequency_bounds": (0.9, 0.5)}, "between 0 and 1, the first no larger"),
        ({"metrics": (BY_FREQUENCY,), "frequency_bounds": (100, 20)}, "between 0 and 1"),
        ({"metrics": (BY_FREQUENCY,), "frequency": "count", "frequency_bounds": (20, 100)}, "the second no larger"),
    ],
)
def test_options_in_vain_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassificationSection.model_validate(options)


def test_global_and_personal_models_of_a_run_have_them_on_the_balanced_test_part_and_on_clients_own(
    tmp_path: Path,
) -> None:
    result = rayfl.run(
        {
            "storage_path": str(tmp_path),
            "dataset": {"name": "digits"},
            "partition": {"name": "dirichlet", "num_clients": 3, "alpha": 1.0},
            "long_tail": {"imbalance_factor": 20, "balanced_test": 10},
            "task": {"metrics": [BY_FREQUENCY]},
            "model": {"name": "two_nn", "hidden": [8]},
            "algorithm": {"name": "fedrod"},
            "train": {"rounds": 1, "clients_per_round": "all", "local_epochs": 1, "lr": 0.1},
            "evaluation": {"official_test": True, "official_personalized": True},
            "cluster": {"backend": "inline"},
            "tracking": {"tensorboard": False},
        }
    )
    rows = [row for row in result.rounds.to_pylist() if row["split"] == "official"]
    assert {row["model"] for row in rows} == {"global", "personalized"}
    for row in rows:
        of_groups = [row[f"pooled_{name}"] for name in NAMES]
        # ten samples of each class: 4 classes have three quarters of the training samples, 4 the next fifth
        assert row["pooled_top1"] == pytest.approx(np.average(of_groups, weights=(4, 4, 2)))
    own = [row for row in result.rounds.to_pylist() if row["split"] == "test" and row["cohort"] == "all"]
    assert own and all(0 <= row["pooled_top1_many"] <= 1 for row in own)
