"""Groups of people: the column that names them, whether models see it, and how samples carry them to clients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.data.partitions.base import IIDPartition
from rayfl.data.partitions.dirichlet import DirichletPartition
from rayfl.data.sources.made_up.people import SyntheticGroupsSource
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import DataError
from rayfl.examples import SPLITS
from rayfl.randomness import RandomStreams
from tests.support.tables import ROWS, opened, own_section


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The section ``dataset`` of a file that is written with some columns changed."""
    return partial(own_section, tmp_path)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_column_names_groups_and_models_see_it_only_if_inputs_name_it(
    own: Callable[..., dict[str, Any]], pooled: bool
) -> None:
    about: dict[str, Any] = {"y": "outcome", "group": "sex", **({"client": "none", "split": "none"} if pooled else {})}
    partition = IIDPartition(num_clients=2) if pooled else None
    hidden, shown = (
        opened(own(x=x, standardize="client", **about), partition=partition, test=0.25 if pooled else None)
        for x in (["age", "bmi"], ["age", "bmi", "sex"])
    )
    assert hidden.spec.groups == shown.spec.groups == ("f", "m")
    assert hidden.spec.shape == (2,) and shown.spec.shape == (4,)
    for client in range(hidden.num_clients):
        for split in SPLITS:
            one, other = (dataset.load(client)[split] for dataset in (hidden, shown))
            assert one.group is not None and other.group is not None
            torch.testing.assert_close(one.x, other.x[:, :2])
            assert torch.equal(one.group, other.group)
            assert torch.equal(one.group, other.x[:, 2:].argmax(1))


def test_numbers_are_in_their_order_and_need_not_be_text(own: Callable[..., dict[str, Any]]) -> None:
    dataset = opened(own(changes={"race": [10, 2, 2, 1] * 3}, x=["age"], y="outcome", group="race"), test=None)
    assert dataset.spec.groups == ("1", "2", "10")
    train = dataset.load(0)["train"]
    assert train.group is not None and set(train.group.tolist()) <= {1, 2}  # the client's last row is for testing


def test_clients_of_a_partition_by_group_have_other_shares_of_the_groups(own: Callable[..., dict[str, Any]]) -> None:
    many: dict[str, Any] = {name: ROWS[name] * 20 for name in ROWS}
    about = own(changes=many, client="none", split="none", x=["age"], y="outcome", group="sex")
    shares = {}
    for by in ("class", "group"):
        partition = DirichletPartition(num_clients=4, alpha=0.1, by=by)
        dataset = opened(about, partition=partition, test=0, validation=0)
        groups = [dataset.load(client)["train"].group.double().mean() for client in range(4)]  # type: ignore[union-attr]
        shares[by] = np.std(groups)
    # men and the outcome 1 are the same rows: by class and by group alike, but not by the number of a draw
    assert shares["group"] == shares["class"] > 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "gender"}, "group"),
        ({"group": "outcome"}, "is to be learned"),
        (
            {"group": "hospital", "changes": {"hospital": ["A"] * 12}},
            "one value alone, and groups of people are 2 to 100",
        ),
        ({"group": "sex", "changes": {"sex": ["f", None] * 6}}, "row 1.* is null"),
        ({"group": "sex", "x": "pixels", "changes": {"pixels": [[0.5, 1.0]] * 12}}, "the type list"),
    ],
)
def test_what_names_no_groups_is_refused(
    own: Callable[..., dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        opened(own(**{"x": ["age"], "y": "outcome", **options}), test=None)


def test_groups_of_texts_and_of_numbers_to_predict_are_refused(own: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="group is for"):
        ParquetSource(**own(x="note", tokenizer="words", group="sex"))
    with pytest.raises(DataError, match=r"dataset\.group is for data with a class of each sample"):
        opened(own(x=["age"], y="days", group="sex"), target="values", test=None)


def test_made_up_groups_have_their_shares_and_rules() -> None:
    about: dict[str, Any] = {"samples": 3000, "minority": 0.2, "positive": (0.5, 0.1), "likeness": -0.5, "shift": 2.0}
    source = SyntheticGroupsSource(**about, noise=0.5, group_input=False)
    samples = source.open(RandomStreams(3))
    assert samples.group is not None and isinstance(samples.x, np.ndarray)
    minority = samples.group == 1
    assert minority.sum() == 600 and samples.y[minority].sum() == 60 and samples.y[~minority].sum() == 1200
    apart = samples.x[minority].mean(0) - samples.x[~minority].mean(0)
    assert np.sqrt((apart**2).sum()) == pytest.approx(2.0, abs=0.2)
    rules = [np.cov(samples.x[own].T, samples.y[own])[-1, :-1] for own in (minority, ~minority)]
    cosine = rules[0] @ rules[1] / np.sqrt((rules[0] ** 2).sum() * (rules[1] ** 2).sum())
    assert cosine == pytest.approx(-0.5, abs=0.15)
    shown = source.model_copy(update={"group_input": True}).open(RandomStreams(3))
    assert shown.spec.shape == (11,)
    np.testing.assert_array_equal(shown.x[:, :10], samples.x)
    np.testing.assert_array_equal(shown.x[:, 10], samples.group)
