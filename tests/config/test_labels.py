"""Labels say what differs, in few characters, and never make two configurations alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayfl.config.labels import LONGEST, labels

FOLDER = "/storage/of/the/group/projects/personalized"


def of(*options: dict[str, Any]) -> list[str]:
    """The labels of configurations with these options of a section."""
    return [", ".join(parts) for parts in labels([{"algorithm": option} for option in options])]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([{"mode": "mm"}, {"mode": "lm"}], ["mode=mm", "mode=lm"]),
        ([{"mode": "mm", "x": 1}, {"x": 1}], ["mode=mm", "mode=none"]),
        # Digits that tell no two apart go, but only where the label would be too long.
        ([{"rate": 0.0123456789}, {"rate": 0.5}], ["rate=0.0123456789", "rate=0.5"]),
        (
            [{"rate": 0.012345678901, "weight": 0.98765432101234}, {"rate": 0.0123987654321, "weight": 0.98769}],
            ["rate=0.0123, weight=0.98765", "rate=0.0124, weight=0.98769"],
        ),
        # Places lose what they share.
        (
            [{"of": f"{FOLDER}/run-a/model.pt"}, {"of": f"{FOLDER}/run-b/model.pt"}],
            ["of=…run-a…", "of=…run-b…"],
        ),
        ([{"of": FOLDER}, {"of": f"{FOLDER}/other"}], ["of=…personalized", "of=…personalized/other"]),
        # What another option says already goes, the longest first.
        (
            [
                {"distillation": "temperature", "prior": "distribution", "x": 1},
                {"distillation": "cross_entropy", "prior": "independent", "x": 2},
            ],
            ["x=1", "x=2"],
        ),
    ],
)
def test_labels(options: list[dict[str, Any]], expected: list[str]) -> None:
    assert of(*options) == expected


def test_two_options_of_one_name_have_their_sections() -> None:
    found = labels([{"train": {"lr": 0.1}, "algorithm": {"lr": 1}}, {"train": {"lr": 0.2}, "algorithm": {"lr": 2}}])
    assert found == [["train.lr=0.1", "algorithm.lr=1"], ["train.lr=0.2", "algorithm.lr=2"]]
    stages = [{"train": {"rounds": 9}, "stages": {"rounds": rounds}} for rounds in (2, 3)]
    assert labels(stages) == [["stages.rounds=2"], ["stages.rounds=3"]]  # which "rounds=2" would not say


def test_sections_are_told_apart_by_their_names_and_not_by_what_these_need() -> None:
    sections = ({"name": "none"}, {"name": "levels", "bits": 8, "error_feedback": False, "rounding": "at random"})
    assert labels([{"compression": one} for one in sections]) == [["compression=none"], ["compression=levels"]]
    schedules = labels([{"train": {"schedule": one}} for one in (None, {"name": "step", "every": 2})])
    assert schedules == [["train.schedule.name=none"], ["train.schedule.name=step"]]


VALUES = st.one_of(st.floats(0, 1), st.integers(0, 3), st.text("ab/", max_size=30), st.lists(st.integers(0, 2)))


@example([{"a": 0.0}, {"a": 0}, {"a": [0] * 12}])
@given(st.lists(st.fixed_dictionaries({"first": VALUES, "second": VALUES, "third": VALUES}), min_size=2, max_size=5))
def test_a_label_tells_as_much_as_the_options(options: list[dict[str, Any]]) -> None:
    whole, short = [[tuple(found) for found in labels([{"a": o} for o in options], n)] for n in (10**6, LONGEST)]
    assert [whole[i] == whole[j] for i in range(len(whole)) for j in range(i)] == [
        short[i] == short[j] for i in range(len(short)) for j in range(i)
    ]


def test_values_of_before_are_told_and_not_called_none() -> None:
    """Comparable configurations lack options at the value of before they were there."""
    assert labels([{"evaluation": {"every": 2}}, {"evaluation": {"every": 2, "clients": 5}}]) == [
        ["clients=all"],
        ["clients=5"],
    ]
    assert labels([{}, {"aggregator": {"name": "median"}}]) == [["aggregator=mean"], ["aggregator=median"]]
    assert labels([{"seed": 0}, {"seed": 0, "attack": {"share": 0.2}}]) == [["share=0.0"], ["share=0.2"]]
    # Another method may have no such option, and nothing is known of what has no value.
    assert labels([{"algorithm": {"x": 1}}, {"algorithm": {"x": 1, "one_sample": "y"}}]) == [
        ["one_sample=none"],
        ["one_sample=y"],
    ]
    assert labels([{"privacy": {"delta": 1}}, {"privacy": {"delta": 1, "bands": 2}}]) == [["bands=none"], ["bands=2"]]
