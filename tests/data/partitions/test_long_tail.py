"""Long tails: how many samples a class keeps, which ones, who gets them, and what test parts there are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.partitions.long_tail import LongTail
from rayfl.errors import ConfigError, DataError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from tests.data.sources.test_official_test import CLASSES, TEST_ROWS, own_file

STREAMS = RandomStreams(3)
LABELS = np.arange(500) % 5


def sizes(tail: LongTail, labels: np.ndarray = LABELS, classes: int = 5) -> list[int]:
    kept = tail.divided(labels, classes, STREAMS).kept
    return np.bincount(labels[kept], minlength=classes).tolist()


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (1, [5000] * 10),
        (10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
    ],
)
def test_the_sizes_are_those_of_cifar10_lt(factor: float, expected: list[int]) -> None:
    assert LongTail(imbalance_factor=factor).profile(np.full(10, 5000), STREAMS).tolist() == expected


def test_the_largest_profile_that_the_classes_can_have() -> None:
    tail, available = LongTail(imbalance_factor=16), np.array([100, 90, 20, 40, 9])
    found = tail.profile(available, STREAMS)
    # the third class has 20 samples, a quarter of 80
    assert found.tolist() == [80, 40, 20, 10, 5] and (found <= available).all()
    with pytest.raises(DataError, match="leaves class 0 no sample, since class 4 has only 9"):
        LongTail(imbalance_factor=16, order=(4, 3, 2, 1, 0)).profile(available, STREAMS)


def test_orders() -> None:
    given = sizes(LongTail(imbalance_factor=16, order=(3, 1, 4, 0, 2)))
    assert given == [12, 50, 6, 100, 25]
    drawn = LongTail(imbalance_factor=16, order="drawn")
    assert sorted(sizes(drawn)) == [6, 12, 25, 50, 100]
    assert sizes(drawn) == sizes(drawn)
    seeds = {tuple(drawn.profile(np.full(5, 100), RandomStreams(seed)).tolist()) for seed in range(8)}
    assert len(seeds) > 1


def test_what_a_larger_factor_keeps_is_among_what_a_smaller_one_keeps_and_never_in_the_test_part() -> None:
    found = [LongTail(imbalance_factor=factor, balanced_test=7).divided(LABELS, 5, STREAMS) for factor in (1, 4, 16)]
    for one, other in pairwise(found):
        assert np.isin(other.kept, one.kept).all() and len(other.kept) < len(one.kept)
        assert np.array_equal(one.test, other.test)
    assert not np.isin(found[0].test, found[0].kept).any() and len(found[0].kept) == 465
    assert np.bincount(LABELS[found[0].test]).tolist() == [7] * 5
    other = LongTail(imbalance_factor=4, balanced_test=7).divided(LABELS, 5, RandomStreams(4))
    assert not np.array_equal(other.kept, found[1].kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imbalance_factor": 101}, "is 101, which leaves class 4 no sample, since class 0 has only 100"),
        ({"balanced_test": 101}, "balanced_test is 101, but class 0 has only 100"),
        ({"balanced_test": 100}, "class 0 has only 100 samples, so that none is left for clients"),
        ({"imbalance_factor": 21, "balanced_test": 80}, "only 20 left after long_tail.balanced_test; lower one"),
        ({"imbalance_factor": 2, "order": (0, 1, 2, 3)}, "must name each of the classes 0 to 4 once"),
        ({"imbalance_factor": 2, "order": (0, 1, 2, 3, 3)}, "must name each of the classes 0 to 4 once"),
    ],
)
def test_what_the_classes_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        LongTail(**options).divided(LABELS, 5, STREAMS)


def test_a_test_part_with_too_few_samples_for_the_tail_is_named() -> None:
    with pytest.raises(DataError, match=r"has only 100 in the official test part; .* long_tail\.official_test=as_is"):
        LongTail(imbalance_factor=101, official_test="long_tailed").thinned_test(LABELS, 5, STREAMS)


def test_one_class_has_no_tail_and_a_class_without_samples_is_named() -> None:
    with pytest.raises(ConfigError, match="needs two classes"):
        LongTail(imbalance_factor=2).divided(np.zeros(9, dtype=np.int64), 1, STREAMS)
    with pytest.raises(DataError, match="since class 5 has only 0"):
        LongTail(imbalance_factor=2).divided(LABELS, 6, STREAMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "drawn"}, "order does nothing with imbalance_factor=1"),
        ({"official_test": "long_tailed"}, "official_test does nothing with imbalance_factor=1"),
        ({"imbalance_factor": 2, "balanced_test": 3, "official_test": "long_tailed"}, "takes the place of"),
        ({"imbalance_factor": 0.5}, "greater than or equal to 1"),
    ],
)
def test_options_in_vain_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongTail.model_validate(options)


def content(tail: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 4},
        "holdout": {"test": 0.0, "validation": 0.0},
        "long_tail": tail,
        "model": "two_nn",
        "algorithm": "fedavg",
        "train": {"rounds": 1, "clients_per_round": "all"},
        "evaluation": {"official_test": True},
        **changes,
    }


def parts_of(tail: dict[str, Any], **changes: Any) -> Parts:
    return Parts(load_config(Experiment, content(tail, **changes), []))


def of_all(parts: Parts, what: str = "labels") -> np.ndarray:
    each = (getattr(parts.dataset, what)(client)["train"] for client in range(parts.num_clients))
    return np.concatenate(list(each))


@pytest.mark.parametrize("partition", [{"name": "iid"}, {"name": "dirichlet", "alpha": 1.0}, {"name": "pathological"}])
def test_clients_have_the_long_tail_between_them_and_the_test_part_is_theirs_in_no_part(
    partition: dict[str, Any],
) -> None:
    parts = parts_of({"imbalance_factor": 20, "balanced_test": 30}, partition={**partition, "num_clients": 4})
    labels, classes = labels_of(parts)
    expected = LongTail(imbalance_factor=20).profile(np.bincount(labels, minlength=classes) - 30, STREAMS)
    found = np.bincount(of_all(parts))
    assert found.tolist() == expected.tolist()
    owned = of_all(parts, "places")
    assert len(set(owned.tolist())) == len(owned) == found.sum()
    assert np.bincount(parts.official_test.samples.y).tolist() == [30] * 10
    thinned = parts.config.long_tail.divided(labels, classes, parts.streams)
    assert set(owned.tolist()) == set(thinned.kept.tolist())


def labels_of(parts: Parts) -> tuple[np.ndarray, int]:
    opened = parts.config.dataset.open(parts.streams)
    return opened.y, opened.spec.num_classes


def test_an_official_test_part_stays_has_the_same_tail_or_gives_way(tmp_path: Path) -> None:
    dataset = {"name": "parquet", "path": str(own_file(tmp_path)), "part": "train"}
    tails: list[dict[str, Any]] = [{}, {"official_test": "long_tailed"}, {"balanced_test": 4}]
    whole, thinned, aside = (
        parts_of({"imbalance_factor": 4, "order": (2, 0, 1), **tail}, dataset=dataset).official_test for tail in tails
    )
    assert len(whole) == TEST_ROWS
    available, counts = (np.bincount(one.samples.y) for one in (whole, thinned))
    largest = (available[[2, 0, 1]] * np.array([1, 2, 4])).min()
    assert counts[[2, 0, 1]].tolist() == [int(largest / share) for share in (1, 2, 4)]
    held = {one.tobytes() for one in whole.samples.x}
    assert all(one.tobytes() in held for one in thinned.samples.x)
    # it is of the samples that clients could have had
    assert np.bincount(aside.samples.y).tolist() == [4] * CLASSES
    assert aside.load(0, 99).x.shape == (12, 16)


@pytest.mark.parametrize("tail", [{"balanced_test": 5}, {"imbalance_factor": 2, "official_test": "long_tailed"}])
def test_a_test_part_that_nobody_is_scored_on_is_refused(tail: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"a test part that nobody is scored on: set evaluation\.official_test"):
        parts_of(tail, evaluation={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": {"name": "synthetic"}, "partition": {"name": "natural"}}, "already belong to clients"),
        ({"dataset": {"name": "diabetes"}, "task": {"name": "regression"}}, "those of dataset 'diabetes' have none"),
    ],
)
def test_data_without_classes_or_with_clients_of_their_own_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = parts_of({"imbalance_factor": 2}, **changes).dataset


def test_the_partition_of_a_run_is_not_thinned_again(tmp_path: Path) -> None:
    from rayfl.data.partitions.assignment import to_parquet

    parts = parts_of({"imbalance_factor": 4}, evaluation={})
    path = tmp_path / "partition.parquet"
    path.write_bytes(to_parquet(parts.assignment))
    partition, rest = {"name": "file", "path": str(path)}, {"holdout": {}, "evaluation": {}}
    with pytest.raises(ConfigError, match=r"long_tail: partition\.path says which samples clients have"):
        _ = parts_of({"imbalance_factor": 4}, partition=partition, **rest).dataset
    assert parts_of({}, partition=partition, **rest).partition_hash == parts.partition_hash


def test_without_a_tail_runs_are_what_they_were() -> None:
    plain = content({}, evaluation={})
    without = {key: value for key, value in plain.items() if key != "long_tail"}
    one, other = (load_config(Experiment, each, []) for each in (plain, without))
    assert one.fingerprint() == other.fingerprint() and "long_tail" not in one.identity()
    assert parts_of({"imbalance_factor": 2}, evaluation={}).config.fingerprint() != one.fingerprint()
