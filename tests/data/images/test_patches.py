"""Patches of images and volumes: where they are, that masks follow, and that only training sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.runs.rows import where
from rayfl.tasks.base import Batch
from rayfl.tasks.further_tasks import Segmentation
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches

torch.set_num_threads(1)
SIDES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"flat": ((7, 9), (4, 9)), "solid": ((6, 7, 8), (3, 4, 1))}
"""By kind, the sides of images and of their patches."""


def augmentation(sides: tuple[int, ...], **options: Any) -> Augmentation:
    spec = InputSpec("image", (2, *sides), 3, target="mask")
    found = AugmentConfig(**options).build(spec, np.zeros(2, dtype=np.float32))
    assert found is not None
    return found


def scans(count: int, sides: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose values say where a pixel was, and masks of which few pixels are no background."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(count * 2 * int(np.prod(sides)), dtype=torch.float32).view(count, 2, *sides)
    return places, (torch.rand(count, *sides, generator=generator) < 0.05).long() * 2


def begins(patches: Tensor, x: Tensor) -> np.ndarray:
    """Where patches begin, by what their first pixels hold."""
    numbers = patches[:, 0].flatten(1)[:, 0].long() - x[:, 0].flatten(1)[:, 0].long()
    return np.stack(np.unravel_index(numbers.numpy(), x.shape[2:]), 1)


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("foreground", [0.0, 0.5])
def test_a_patch_is_a_window_of_the_image_and_of_its_mask(kind: str, foreground: float) -> None:
    sides, patch = SIDES[kind]
    apply, (x, y) = augmentation(sides, patch=patch, foreground=foreground), scans(200, sides)
    found, masks = apply.both(x, y, apply.draw(np.random.default_rng(0), 200))
    assert found.shape == (200, 2, *patch) and masks.shape == (200, *patch)
    starts = begins(found, x)
    for number, start in enumerate(starts):
        window = tuple(slice(first, first + side) for first, side in zip(start, patch, strict=True))
        assert torch.equal(found[number], x[(number, slice(None), *window)])
        assert torch.equal(masks[number], y[(number, *window)])
    room = np.array(sides) - patch
    assert (starts.min(0) == 0).all() and (starts.max(0) == room).all(), "all places are reached"


def test_a_patch_around_a_pixel_has_it_in_its_middle_or_touches_the_edge() -> None:
    sides, patch = (11, 9), (3, 5)
    apply, (x, y) = augmentation(sides, patch=patch, foreground=1.0), scans(300, sides)
    y.zero_()
    for number in range(100, 300):
        y[number].view(-1)[number % y[0].numel()] = 1
    starts = begins(apply.both(x, y, apply.draw(np.random.default_rng(0), 300))[0], x)
    hit = set()
    for number in range(100, 300):
        (pixel,) = y[number].nonzero().numpy()
        inside = np.clip(pixel - np.array(patch) // 2, 0, np.array(sides) - patch)
        assert (starts[number] == inside).all()
        hit.add(tuple(starts[number]))
    assert len(hit) > 30
    assert len(set(map(tuple, starts[:100]))) > 20, "images without such a pixel have patches at random"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_patches_around_pixels_is_what_was_asked_for(share: float) -> None:
    apply = augmentation((8, 8), patch=(3, 3), foreground=share)
    drawn = apply.draw(np.random.default_rng(0), 4000)
    assert drawn["around"].double().mean() == pytest.approx(share, abs=0.03) if share else "around" not in drawn


@PRETENDED
def test_on_a_device_the_patches_are_the_same_and_nothing_is_sent_there() -> None:
    apply, (x, y) = augmentation((6, 7, 8), patch=(3, 4, 1), foreground=0.5), scans(20, (6, 7, 8))
    drawn = apply.draw(np.random.default_rng(0), 20)
    expected = apply.both(x, y, drawn)
    with elsewhere() as device:
        moved = {name: values.to(device) for name, values in drawn.items()}
        there = (x.to(device), y.to(device))
        with Launches() as counted:
            found = apply.both(*there, moved)
        assert not counted.waits
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)


def test_images_are_moved_before_patches_are_cut_out() -> None:
    sides, (x, y) = (8, 8), scans(40, (8, 8))
    both = augmentation(sides, patch=(5, 4), flip=True, crop=2)
    drawn = both.draw(np.random.default_rng(0), 40)
    moved = augmentation(sides, flip=True, crop=2).both(x, y, drawn)
    cut = augmentation(sides, patch=(5, 4)).both(*moved, {"window": drawn["window"]})
    for found, expected in zip(both.both(x, y, drawn), cut, strict=True):
        assert torch.equal(found, expected)


class Watched(Segmentation):
    """Segmentation that remembers the sides of what is learned and of what is predicted."""

    learned: ClassVar[set[tuple[int, ...]]] = set()
    scored: ClassVar[set[tuple[int, ...]]] = set()

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        self.learned.add(tuple(outputs.shape[-4:-1]))
        return super().loss_of(outputs, batch)

    def predicted(self, outputs: Tensor) -> Tensor:
        self.scored.add(tuple(outputs.shape[-4:-1]))
        return super().predicted(outputs)


def sections(augment: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "dataset": {"name": "synthetic_masks", "num_clients": 4, "samples": 9, "side": 8, "dimensions": 3},
        "partition": "natural",
        "task": "segmentation",
        "model": {"name": "unet", "width": 2, "depth": 1},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 3, "local_epochs": 2, "batch_size": 4, "lr": 0.1},
        "augment": augment,
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
        **changes,
    }


def test_training_sees_patches_and_evaluation_whole_volumes_looped_and_stacked(tmp_path: Path) -> None:
    runs = {}
    for mode in ("looped", "vectorized"):
        content = sections({"patch": [4, 6, 5], "foreground": 0.5}, task=f"{__name__}:Watched")
        runs[mode] = rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
    assert Watched.learned == {(4, 6, 5)} and Watched.scored == {(8, 8, 8)}
    for column in ("loss", "dice"):
        rows = [where(run.clients, round=2, cohort="all", split="test")[column].to_pylist() for run in runs.values()]
        np.testing.assert_allclose(*rows, rtol=1e-3)
    whole = rayfl.run(sections({}), storage_path=str(tmp_path), name="whole").clients
    assert where(whole, round=2, split="test")["loss"] != where(runs["looped"].clients, round=2, split="test")["loss"]


@pytest.mark.parametrize(
    ("augment", "changes", "words"),
    [
        ({"patch": [4, 4]}, {}, r"augment.patch is 4 x 4, but the inputs have the sides 8 x 8 x 8"),
        ({"patch": [4, 4, 9]}, {}, r"augment.patch is 4 x 4 x 9, .*: give as many sides, none larger"),
        (
            {"patch": [4, 4, 4], "flip": True},
            {},
            r"volumes can be cut into patches, but not shifted, mirrored or rotat",
        ),
        ({"flip": True}, {}, r"volumes can be cut into patches, but not shifted"),
        (
            {"patch": [4, 4]},
            {
                "dataset": "digits",
                "task": "classification",
                "partition": {"name": "iid", "num_clients": 4},
                "model": "two_nn",
            },
            r"augment.patch is for images with a class at each pixel, but the data set has images of 1 x 8 x 8",
        ),
        (
            {"patch": [4, 4, 4]},
            {"model": {"name": f"{__name__}:of_whole_images", "head": "body"}},
            r"augment.patch: model custom has other parameters for patches than for the data's whole inputs",
        ),
    ],
)
def test_patches_that_cannot_be_are_refused_before_the_start(
    augment: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Parts(load_config(Experiment, sections(augment, **changes), {})).check()


def of_whole_images(spec: InputSpec) -> torch.nn.Module:
    """A layer that adds a number to each voxel, and one that classifies each."""
    places = torch.nn.Parameter(torch.zeros(1, *spec.shape[1:]))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.body = places, torch.nn.Conv3d(1, spec.num_classes, 1)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.body(x + self.places)
            return found

    return Net()


def test_patches_too_small_for_the_model_are_refused_before_the_start() -> None:
    content = sections({"patch": [4, 4, 3]}, model={"name": "unet", "width": 2, "depth": 2})
    with pytest.raises(ModelError, match=r"unet needs sides of at least 4 pixels for depth=2"):
        Parts(load_config(Experiment, content, {})).check()


@pytest.mark.parametrize("section", [{"foreground": 0.5}, {"patch": [0, 3]}, {"patch": [3, 3], "foreground": 1.5}])
def test_a_section_that_says_nothing_is_refused(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AugmentConfig.model_validate(section)
