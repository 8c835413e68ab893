"""What differs between configurations: one function for commands, legends and tables of options."""

from __future__ import annotations

from rayfl.config.differences import ABSENT, differences, flattened, text_of, varied

ONE = {"train": {"lr": 0.1, "clip": None}, "algorithm": {"mu": 1, "name": "fedprox"}, "init": {}}
OTHER = {"train": {"lr": 0.1, "clip": "-"}, "algorithm": {"name": "fedavg"}, "init": {}, "extra": [1, 2]}


def test_values_are_found_by_their_paths() -> None:
    assert flattened(ONE) == {
        "train.lr": 0.1,
        "train.clip": None,
        "algorithm.mu": 1,
        "algorithm.name": "fedprox",
        "init": {},
    }


def test_sections_keep_their_order_and_begin_with_their_name() -> None:
    assert differences(ONE, OTHER) == [
        ("train.clip", None, "-"),
        ("algorithm.name", "fedprox", "fedavg"),
        ("algorithm.mu", 1, ABSENT),
        ("extra", ABSENT, [1, 2]),
    ]


def test_a_field_that_is_there_differs_from_one_that_is_not_even_where_it_looks_alike() -> None:
    assert varied([{"a": {"b": ABSENT}}, {"a": {}}]) == {"a.b": [ABSENT, ABSENT], "a": [ABSENT, {}]}
    assert varied([{"a": 1}, {"a": 1}, {"a": 2}]) == {"a": [1, 1, 2]}
    assert varied([{"a": 1}]) == {}


def test_values_as_text() -> None:
    assert [text_of(value) for value in ("a", True, None, [1])] == ["a", "true", "null", "[1]"]
