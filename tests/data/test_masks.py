"""Masks: from a user's function to clients, moved with augmented images, and what is refused of them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.masks import SyntheticMasksSource
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.errors import ConfigError, DataError, RayflError
from rayfl.examples import InputSpec
from rayfl.metrics.language import IGNORED
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams
from tests.support.masks import flat, made, parts, sections, solid


def pooled(seed: int) -> Any:
    return made("flat", clients=False)


def outside(seed: int) -> Any:
    def change(y: np.ndarray) -> np.ndarray:
        y[13, 2, 1] = 255
        return y

    return made("flat", change)


def nowhere(seed: int) -> Any:
    return made("flat", lambda y: np.full(y.shape, IGNORED))


def numbers(seed: int) -> Any:
    return made("flat", lambda y: y / 2)


def cut(seed: int) -> Any:
    return made("flat", lambda y: y[:, 1:])


def one_hot(seed: int) -> Any:
    return made("solid", lambda y: np.eye(3, dtype=np.uint8)[y])


@pytest.mark.parametrize("name", ["flat", "solid"])
def test_masks_of_a_users_function_are_learned_and_scored(name: str, tmp_path: Path) -> None:
    content = sections(dataset=f"{__name__}:{name}", tracking={"tensorboard": False})
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    rows = result.clients.to_pylist()
    assert {row["name"] for row in rows} == {"north", "south", "west"}
    assert all(0 <= row["dice"] <= 1 and row["n"] == 3 for row in rows if row["split"] == "test")
    dataset = parts(dataset=f"{__name__}:{name}").dataset
    x, y, _, _ = solid(0) if name == "solid" else flat(0)
    for client in range(3):
        loaded, places = dataset.load(client), dataset.places(client)
        for split, at in places.items():
            assert loaded[split].y.dtype == torch.int64
            assert np.array_equal(loaded[split].y, y[at].astype(np.int64)) and np.array_equal(loaded[split].x, x[at])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dataset": f"{__name__}:outside"}, r"y of sample 13 \(client 'south'\) has a pixel of class 255, but with "
         r"num_classes=3 classes are 0 to 2: .*255 stands for pixels that do not count, return int16 with -100"),
        ({"dataset": f"{__name__}:nowhere"}, r"nowhere: y: no pixel of any mask counts, all are -100"),
        ({"dataset": {"name": f"{__name__}:outside", "labels": "renumbered"}},
         r"num_classes is 3, but there are 4 different labels"),
        ({"dataset": f"{__name__}:numbers"}, r"y has the type float64 .* needed are masks, integers of shape \(30, H"),
        ({"dataset": f"{__name__}:one_hot"}, r"y has the type uint8 and the shape \(30, 4, 5, 6, 3\); needed"),
        ({"dataset": f"{__name__}:cut"}, r"x has the shape \(30, 1, 7, 8\) and y \(30, 6, 8\); .* the same sides"),
        ({"task": "classification"}, r"needed are integers of shape \(30,\).*at each pixel set task=segmentation"),
        ({"dataset": f"{__name__}:pooled", "partition": {"name": "dirichlet", "num_clients": 3, "alpha": 1.0}},
         r"'dirichlet' divides samples by their classes, and those of .* have one at each pixel: choose iid"),
        ({"dataset": f"{__name__}:pooled", "partition": {"name": "pathological", "num_clients": 3}},
         r"'pathological' divides .* have one at each pixel: choose iid"),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: .* have one at each pixel: leave out the section noise"),
        ({"transform": {"resize": 4}}, r"transform.resize: images would no longer fit their masks"),
        ({"dataset": f"{__name__}:solid", "augment": {"flip": True}}, r"augment: volumes can be cut into patches, but"),
        ({"model": "two_cnn"}, r"two_cnn needs one target each \(unet"),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=segmentation, which has not one class a sample"),
        ({"algorithm": {"name": "fedavg", "aggregation": "tokens"}}, r"tokens"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_masks_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RayflError, match=words):
        _ = parts(**changes).check(), parts(**changes).augmentation


def test_pooled_masks_are_divided_without_looking_at_them() -> None:
    dataset = parts(dataset=f"{__name__}:pooled", partition={"name": "iid", "num_clients": 4}).dataset
    assert dataset.num_clients == 4 and dataset.sizes().sum() == 30


def test_classes_of_masks_are_counted_by_the_samples_that_have_them() -> None:
    def one(seed: int) -> Samples:
        masks = np.zeros((3, 2, 2), dtype=np.int16)
        masks[1, 0, 0], masks[2] = 2, IGNORED
        return Samples(np.zeros((3, 1, 2, 2), np.float32), masks, InputSpec("image", (1, 2, 2), 3, target="mask"))

    samples = one(0)
    division = [np.array([0, 1]), np.array([2])]
    dataset = PooledDataset(samples.x, samples.y, samples.spec, division, HoldoutConfig(), RandomStreams(0))
    stats = dataset_stats(dataset)
    assert stats.label_counts is not None and stats.label_counts.tolist() == [2, 0, 1]
    assert label_matrix(dataset).tolist() == [[2, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize("padding", ["black", "reflect"])
def test_a_mask_is_changed_with_its_image(padding: Any) -> None:
    """Where an image is its own mask, both are the same after any change; outside of the image no pixel counts."""
    spec = InputSpec("image", (1, 9, 7), 64, target="mask")
    augment = AugmentConfig(crop=3, padding=padding, flip=True, rotate=0 if padding == "reflect" else 40)
    augmentation = augment.build(spec, np.array([IGNORED], dtype=np.float32))
    assert augmentation is not None
    y = torch.arange(63).view(1, 9, 7).repeat(20, 1, 1)
    x, masks = augmentation.both(y[:, None].float(), y, augmentation.draw(np.random.default_rng(0), 20))
    assert torch.equal(x[:, 0].long(), masks) and not torch.equal(masks, y)
    assert bool((masks == IGNORED).any()) == (padding == "black")


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_augmented_training_differs_and_is_the_same_looped_and_stacked(mode: str, tmp_path: Path) -> None:
    def trained(name: str, **changes: Any) -> np.ndarray:
        result = rayfl.run(sections(**changes), storage_path=str(tmp_path), name=name)
        return np.array(result.clients["loss"])

    augment = {"crop": 1, "flip": True}
    plain = trained("plain")
    found = trained("augmented", augment=augment, engine={"mode": mode})
    np.testing.assert_allclose(found, trained("looped", augment=augment, engine={"mode": "looped"}), rtol=1e-4)
    assert np.abs(found - plain).max() > 1e-3


def test_made_up_masks_are_what_they_say() -> None:
    streams = RandomStreams(3)
    for dimensions in (2, 3):
        source = SyntheticMasksSource(num_clients=3, samples=30, side=12, dimensions=dimensions, beta=0, noise=0.01)
        samples = source.open(streams)
        assert samples.x.shape == (90, 1, *[12] * dimensions) and samples.y.shape == samples.x[:, 0].shape
        np.testing.assert_allclose(samples.x[:, 0], samples.y, atol=0.1)  # alike at all clients
        assert all((samples.y == label).any(tuple(range(1, dimensions + 1))).mean() > 0.5 for label in range(3))
        again = source.open(RandomStreams(3))
        assert np.array_equal(again.x, samples.x) and np.array_equal(again.y, samples.y)
    apart = SyntheticMasksSource(num_clients=2, samples=30, noise=0, beta=1).open(streams)
    means = [apart.x[rows, 0][apart.y[rows] == 1].mean() for rows in (slice(0, 30), slice(30, 60))]
    assert abs(means[0] - means[1]) > 0.1
    with pytest.raises((ConfigError, DataError, ValueError)):
        SyntheticMasksSource(side=2)
