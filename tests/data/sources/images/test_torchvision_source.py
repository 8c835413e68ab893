"""Further image data sets of torchvision, from small files of their layouts: parts, sizes, what is missing or wrong."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision.datasets
from pydantic import ValidationError

from rayfl.data.sources.images.torchvision_sets import SETS
from rayfl.data.sources.images.torchvision_source import TorchvisionSetSource
from rayfl.data.sources.preparation.inventory import inventory, verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.torchvision_files import LABELS, LAYOUTS, as_small_as_these, brightness


def source_of(subset: str, **options: Any) -> TorchvisionSetSource:
    return TorchvisionSetSource.model_validate({"subset": subset, **options})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    as_small_as_these(monkeypatch)


def grey_levels(x: np.ndarray) -> list[int]:
    """The brightness of each image, which has one."""
    assert (np.ptp(x.reshape(len(x), -1), axis=1) <= 2).all()
    return [int(level) for level in x.reshape(len(x), -1).mean(axis=1).round()]


@pytest.mark.parametrize("subset", sorted(SETS))
def test_official_parts_are_read_with_their_labels(subset: str, tmp_path: Path, root: Path) -> None:
    LAYOUTS[subset](tmp_path)
    source = source_of(subset)
    with pytest.raises(DataError, match=rf"{subset}-\d+.arrow does not exist; make it with `rayfl data prepare torch"):
        source.open()
    source.prepare(Order(place=str(tmp_path), offline=True))
    assert verify(source.prepared_path) == ([], [])
    parts = {"train": source.open()}
    if "test" in source.parts:
        parts["test"] = source.official_test(RandomStreams(0))
    for part, samples in parts.items():
        assert samples.spec == source.known_spec and samples.x.shape == (len(LABELS), *samples.spec.shape)
        wanted = sorted((brightness(part, row), label) for row, label in enumerate(LABELS))
        found = sorted(zip(grey_levels(samples.x), samples.y.tolist(), strict=True))
        assert [label for _, label in found] == [label for _, label in wanted]
        np.testing.assert_allclose([level for level, _ in found], [level for level, _ in wanted], atol=2)
    assert len(inventory(root)) == 1


def test_every_set_is_one_of_torchvision_and_has_a_name_in_configurations() -> None:
    names = TorchvisionSetSource.model_fields["subset"].annotation
    assert set(names.__args__) == set(SETS) == set(LAYOUTS)  # type: ignore[union-attr]
    for known in SETS.values():
        accepted = inspect.signature(getattr(torchvision.datasets, known.class_name)).parameters
        assert all(official.arguments.keys() <= accepted.keys() for official in known.parts.values())
        assert {"train"} <= known.parts.keys() <= {"train", "val", "test"} and "download" in accepted


def test_validation_images_may_be_training_images(tmp_path: Path, root: Path) -> None:
    LAYOUTS["dtd"](tmp_path)
    source = source_of("dtd", validation="train", side=16)
    source.prepare(Order(place=str(tmp_path)))
    samples = source.open()
    assert samples.x.shape == (6, 3, 16, 16) and samples.y.tolist() == [*LABELS, *LABELS]
    assert source.prepared_path.name == "dtd-16-validation.arrow"
    both = source_of("dtd", validation="train", side=16, part="both").open()
    assert len(both.y) == 9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": "eurosat", "part": "both"}, "part=both: eurosat has no official test part"),
        ({"subset": "gtsrb", "validation": "train"}, "gtsrb has no official validation images"),
        ({"subset": "gtsrb", "side": 4}, "greater than or equal to 8"),
        ({"subset": "gtsbr"}, "Input should be 'country211'"),
        ({}, "Field required"),
    ],
)
def test_what_a_set_does_not_have_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TorchvisionSetSource.model_validate(options)


def test_a_set_without_a_test_part_says_so(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no official test part: leave out evaluation.official_test"):
        source_of("eurosat").official_test(RandomStreams(0))


def test_missing_files_are_named_with_what_to_do(tmp_path: Path, root: Path) -> None:
    with pytest.raises(
        DataError, match=r"gtsrb: torchvision cannot read the train part from .*: Dataset not found; give"
    ):
        source_of("gtsrb").prepare(Order(place=str(tmp_path)))
    with pytest.raises(DataError, match="torchvision has the addresses of its data sets itself"):
        source_of("gtsrb").prepare(Order(place="https://example.org/gtsrb.zip"))
    with pytest.raises(DataError, match="--sha256 is for a single file, but torchvision knows the checksums"):
        source_of("gtsrb").prepare(Order(place=str(tmp_path), sha256="00"))
    with pytest.raises(DataError, match="StanfordCars dataset cannot be downloaded anymore"):
        source_of("stanford_cars").prepare(Order())


def test_torchvision_downloads_what_is_missing_unless_it_must_not(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.GTSRB, "download", lambda dataset: LAYOUTS["gtsrb"](Path(dataset.root)))
    source, told = source_of("gtsrb", side=8), list[str]()
    with pytest.raises(DataError, match="Dataset not found"):
        source.prepare(Order(offline=True))
    source.prepare(Order(progress=lambda what, done, total: told.append(what)))
    assert told[0] == "torchvision downloads GTSRB" and told.count("torchvision downloads GTSRB") == 1
    assert len(source.open().y) == len(LABELS)


@pytest.mark.parametrize("damage", ["missing", "cut", "label"])
def test_incomplete_and_damaged_files_are_refused(damage: str, tmp_path: Path, root: Path) -> None:
    LAYOUTS["gtsrb"](tmp_path)
    image = tmp_path / "gtsrb" / "GTSRB" / "Training" / "class1" / "2.ppm"
    if damage == "missing":
        image.unlink()
        words = r"has 2 images of the train part, and the official one has 3; delete"
    elif damage == "cut":
        image.write_bytes(image.read_bytes()[:60])
        words = "cannot read the train part from .*; give the folder"
    else:
        listed = tmp_path / "gtsrb" / "GT-final_test.csv"
        listed.write_text(listed.read_text().replace(";40;0", ";40;43"))
        words = "the test part in .* has labels from 1 to 43, and the official ones are 0 to 42"
    source = source_of("gtsrb")
    with pytest.raises(DataError, match=words):
        source.prepare(Order(place=str(tmp_path)))
    assert not source.prepared_path.exists()
