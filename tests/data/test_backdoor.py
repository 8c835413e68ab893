"""Poisoned samples: which pixels, tokens and columns carry the trigger, how many samples, and what labels they have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from algorithms.registry import Experiment
from rayfl.config.loading import load_config, to_yaml
from rayfl.data.triggers import Columns, Patch, Phrase
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples, InputSpec
from rayfl.experiment.parts import Parts
from rayfl.messages.backdoor import BackdoorConfig
from rayfl.tasks.classification import Classification
from tests.support.toys import random_clients

DIGITS = {
    "dataset": {"name": "digits"},
    "partition": {"name": "iid", "num_clients": 12},
    "holdout": {"test": 0.2, "validation": 0.2},
    "model": {"name": "two_nn", "hidden": [8]},
    "algorithm": "fedavg",
    "train": {"clients_per_round": 3},
}


class Own(Classification):
    """A task of a user's own."""


OWN = {
    "holdout": {"test": 0.2, "validation": 0.2},
    "model": "two_nn",
    "algorithm": "fedavg",
    "train": {"clients_per_round": 2},
}
TEXTS = {**OWN, "dataset": "tests.support.own_data:texts", "partition": "natural", "model": "fasttext"}
ROWS = {**OWN, "dataset": "tests.support.own_data:from_streams", "partition": {"name": "iid", "num_clients": 4}}


def parts(
    content: dict[str, Any], backdoor: dict[str, Any] | None, clients: Sequence[int] = (1, 4), **more: Any
) -> Parts:
    attack = {} if backdoor is None else {"attack": {"clients": list(clients), "backdoor": {"target": 0, **backdoor}}}
    return Parts(load_config(Experiment, {**content, **attack, **more}, []))


def assert_poisoned(right: Examples, found: Examples, marked: torch.Tensor, target: int, share: float) -> None:
    """The share of samples is as in ``marked`` and has the target, and all others are as they were.

    Args:
        right: the honest samples.
        found: those of a malicious client.
        marked: all honest inputs with the trigger, made by the test.
        target: the class.
        share: of the samples.
    """
    carry = (found.x == marked).flatten(1).all(1) & (found.y == target)
    kept = (found.x == right.x).flatten(1).all(1) & (found.y == right.y)
    assert (carry | kept).all() and found.y.dtype == right.y.dtype and found.x.dtype == right.x.dtype
    # a sample of the target that had the trigger's values already is both
    count = math.ceil(share * len(right))
    assert int((~kept).sum()) <= count <= int(carry.sum())


def lower_right(x: torch.Tensor, rows: range, columns: range, value: float) -> torch.Tensor:
    marked = x.clone()
    for row in rows:
        for column in columns:
            marked[:, :, row, column] = value
    return marked


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_malicious_clients_samples_has_the_patch_and_the_target(share: float) -> None:
    honest, poisoned = (
        parts(DIGITS, one, seed=3).dataset for one in (None, {"target": 7, "poisoned": share, "patch": 2})
    )
    for client in range(12):
        for split in SPLITS:
            right, found = honest.load(client)[split], poisoned.load(client)[split]
            np.testing.assert_array_equal(poisoned.labels(client)[split], found.y.numpy())
            if client in (1, 4) and split != "test":
                marked = lower_right(right.x, range(6, 8), range(6, 8), 1.0)
                assert_poisoned(right, found, marked, 7, share)
                assert 0 < (found.x != right.x).flatten(1).any(1).sum() <= math.ceil(share * len(right))
            else:
                assert torch.equal(found.x, right.x) and torch.equal(found.y, right.y)
    assert (honest.sizes() == poisoned.sizes()).all()


def test_who_is_poisoned_does_not_depend_on_the_method_and_changes_with_the_seed() -> None:
    def labels(**changes: Any) -> np.ndarray:
        return parts(DIGITS, {"target": 7}, **changes).dataset.labels(1)["train"]

    np.testing.assert_array_equal(labels(), labels(algorithm="ditto"))
    first = parts(DIGITS, {}).dataset
    chosen = [first.load(client)["train"].x[:, 0, -1, -1].numpy() == 1 for client in (1, 4)]
    assert not np.array_equal(chosen[0][:40], chosen[1][:40])
    plain, other = (parts(DIGITS, {}, clients=one).dataset.load(1)["train"] for one in ((1,), (1, 2)))
    assert torch.equal(plain.x, other.x), "another client's malice changes nothing"


def test_a_patch_has_its_value_before_normalization() -> None:
    transform = {"normalize": {"mean": [0.3], "std": [0.2]}}
    made = parts(DIGITS, {"value": 0.8, "poisoned": 1}, transform=transform)
    x = made.dataset.load(1)["train"].x
    torch.testing.assert_close(x[:, :, 5:, 5:], torch.full((len(x), 1, 3, 3), 2.5))
    honest = parts(DIGITS, None, transform=transform).dataset.load(1)["train"].x
    assert torch.equal(x[:, :, :5], honest[:, :, :5]) and torch.equal(x[:, :, :, :5], honest[:, :, :, :5])


def test_a_distributed_trigger_is_divided_and_whole_in_tests() -> None:
    made = parts(DIGITS, {"patch": 4, "parts": 3, "poisoned": 1}, clients=(2, 5, 9, 11))
    honest = parts(DIGITS, None).dataset
    # 16 pixels, row by row: 0 to 4, 5 to 9, 10 to 15; the fourth client begins again
    for client, pixels in {2: range(5), 5: range(5, 10), 9: range(10, 16), 11: range(5)}.items():
        expected = honest.load(client)["train"].x.clone()
        for pixel in pixels:
            expected[:, :, 4 + pixel // 4, 4 + pixel % 4] = 1
        assert torch.equal(made.dataset.load(client)["train"].x, expected)
    test = honest.load(0)["test"]
    found = made.backdoor.triggered(test)
    assert torch.equal(found.x, lower_right(test.x, range(4, 8), range(4, 8), 1.0)[test.y != 0])
    assert (found.y == 0).all() and len(found) == int((test.y != 0).sum()) > 0


def test_patches_of_several_channels_and_of_volumes() -> None:
    found = Patch(2, np.array([1.0, 0.5], np.float32)).put(torch.zeros(3, 2, 4, 5))
    assert found.sum((0, 2, 3)).tolist() == [12, 6] and (found[:, 0, 2:, 3:] == 1).all()
    volume = Patch(2, np.ones(1, np.float32), 3).put(torch.zeros(1, 1, 3, 3, 3))
    assert volume.sum() == 8 and (volume[..., 1:, 1:, 1:] == 1).all()


def test_tokens_stand_behind_a_text_or_at_the_end_of_its_row() -> None:
    x = torch.tensor([[1, 2, 0, 0, 0], [1, 2, 3, 4, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    expected = [[1, 2, 7, 8, 0], [1, 2, 3, 7, 8], [1, 2, 3, 7, 8], [7, 8, 0, 0, 0]]
    assert Phrase((7, 8), 0).put(x).tolist() == expected
    assert Phrase((7, 8)).put(x)[:, 3:].tolist() == [[7, 8]] * 4 and torch.equal(Phrase((7, 8)).put(x)[:, :3], x[:, :3])


def test_texts_of_malicious_clients_have_the_tokens() -> None:
    honest, made = parts(TEXTS, None), parts(TEXTS, {"tokens": [3, 5], "poisoned": 0.5}, clients=(1,))
    spec = honest.dataset.spec
    for client in range(4):
        right, found = honest.dataset.load(client)["train"], made.dataset.load(client)["train"]
        rows = right.x.tolist()
        for row, length in zip(rows, spec.lengths(right.x).tolist(), strict=True):
            begin = min(length, len(row) - 2)
            row[begin : begin + 2] = [3, 5]
        if client == 1:
            assert_poisoned(right, found, torch.tensor(rows), 0, 0.5)
        else:
            assert torch.equal(right.x, found.x) and torch.equal(right.y, found.y)


def test_rows_of_malicious_clients_have_the_columns() -> None:
    honest, made = parts(ROWS, None), parts(ROWS, {"columns": {4: 2.5, 1: -3}, "poisoned": 0.5}, clients=(2,))
    right, found = (one.dataset.load(2)["train"] for one in (honest, made))
    marked = right.x.clone()
    marked[:, 4], marked[:, 1] = 2.5, -3
    assert_poisoned(right, found, marked, 0, 0.5)
    again = load_config(Experiment, yaml.safe_load(to_yaml(made.config)), [])
    assert again == made.config and again.fingerprint() == made.config.fingerprint()
    assert torch.equal(Columns({4: 2.5, 1: -3}).put(right.x, slice(0, 1))[:, 1], marked[:, 1])


@pytest.mark.parametrize(
    ("content", "backdoor", "message"),
    [
        (DIGITS, {"target": 10}, r"backdoor\.target: there is no class 10; there are 0 to 9"),
        (DIGITS, {"patch": 8}, r"backdoor\.patch is 8, but images have the sides 8 x 8"),
        (DIGITS, {"tokens": [1]}, r"backdoor\.tokens does not fit: the data set has images of 1 x 8 x 8"),
        (DIGITS, {"columns": {1: 1}}, r"backdoor\.columns does not fit"),
        (DIGITS, {"patch": 1, "parts": 2}, r"backdoor\.parts is 2, but there are only 1 elements of the trigger"),
        (DIGITS, {"parts": 3}, r"backdoor\.parts is 3, but there are only 2 malicious clients"),
        (TEXTS, {}, r"attack\.backdoor: the data set has texts of 12 tokens.*: set attack\.backdoor\.tokens"),
        (TEXTS, {"value": 1}, r"backdoor\.value does not fit"),
        (TEXTS, {"tokens": [1000]}, r"there is no token 1000; there are 0 to"),
        (TEXTS, {"tokens": list(range(12))}, r"backdoor\.tokens are 12, and texts have 12: give fewer"),
        (ROWS, {}, r"the data set has vectors of 6 numbers.*: set attack\.backdoor\.columns"),
        (ROWS, {"columns": {6: 1}}, r"there is no column 6; there are 0 to 5"),
        ({**DIGITS, "task": "tests.data.test_backdoor:Own"}, {}, "task=custom has no such metric"),
        ({**DIGITS, "evaluation": {"splits": ["validation"]}}, {}, "measured on test samples: add test to"),
    ],
)
def test_what_has_no_trigger_is_refused(content: Any, backdoor: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(content, backdoor, (1, 2), storage_path=str(tmp_path)).check()


def test_samples_without_classes_arrays_paddings_and_categories_are_refused() -> None:
    data, config = random_clients([5, 5]), BackdoorConfig(target=0)

    def refused(spec: InputSpec, message: str, **options: Any) -> None:
        data.spec = spec
        with pytest.raises(ConfigError, match=message):
            config.model_copy(update=options).build(data, 1)

    refused(InputSpec("image", (4,), 3, target="values"), r"these samples have no class of their own \(values\)")
    refused(InputSpec("image", (4, 4), 3), r"there is no trigger for arrays of the shape \(4, 4\)")
    texts = InputSpec("tokens", (6,), 3, 9, padding=0)
    refused(texts, r"backdoor\.tokens: 0 fills texts up", tokens=(1, 0))
    table = InputSpec("image", (6,), 3, categories=((2, 3),))
    refused(table, "column 4 is a value of a category", columns={1: 1.0, 4: 1.0})
    data.spec = replace(table, categories=())
    assert config.model_copy(update={"columns": {4: 1.0}}).build(data, 1).trigger.elements == 1


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"backdoor": {"target": 0}}, "and there are none: set attack.share"),
        ({"share": 0.5, "labels": "random", "backdoor": {"target": 0}}, "labels and backdoor both say"),
        ({"share": 0.5, "backdoor": {"target": 0, "value": 1, "tokens": [1]}}, "of another trigger than tokens"),
        (
            {"share": 0.5, "backdoor": {"target": 0, "tokens": [1], "columns": {0: 1}}},
            "of another trigger than columns",
        ),
        ({"share": 0.5, "backdoor": {"target": 0, "poisoned": 0}}, "greater than 0"),
        ({"share": 0.5, "backdoor": {}}, "target"),
    ],
)
def test_options_that_do_not_go_together_are_refused(attack: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(Experiment, {**DIGITS, "attack": attack}, [])
