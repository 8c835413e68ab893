"""Folders of images: what their folders are, how classes are numbered, and what is refused or said of odd files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.images.own_folder import ImageFolderSource
from rayfl.errors import ConfigError, DataError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams

SIDE = 4


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))


def save(path: Path, value: int, size: tuple[int, int] = (SIDE, SIDE), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def photographs(folder: Path, *above: str, count: int = 4, first: int = 0) -> int:
    """Images of two classes below some folders, each of one value, which is told apart from all others."""
    value = first
    for label in ("cat", "ant"):
        for number in range(count):
            save(folder.joinpath(*above, label, f"{number}.png"), value)
            value += 1
    return value


def samples(folder: Path, **options: Any) -> Samples:
    opened = ImageFolderSource(path=folder, **options).open()
    assert isinstance(opened, Samples)
    return opened


def values(opened: Samples) -> list[int]:
    return [int(value) for value in opened.x[:, 0, 0, 0]]


def remarks(opened: Samples | NaturalPath) -> list[str]:
    return [remark.text for remark in opened.remarks()]


def data_of(folder: Path, *overrides: str, **dataset: Any) -> Any:
    given = [f"dataset.{name}={value}" for name, value in dataset.items()]
    plain = ["holdout={validation: 0}", "model=two_nn", "algorithm=fedavg"]
    sections = ["dataset.name=image_folder", f"dataset.path={folder}", *given, *plain, *overrides]
    config = load_config(Experiment, "quickstart", sections)
    return open_dataset(config, RandomStreams(config.seed))


def test_classes_are_numbered_by_their_names(tmp_path: Path) -> None:
    photographs(tmp_path / "mine")
    opened = samples(tmp_path / "mine")
    assert opened.spec.shape == (1, SIDE, SIDE)
    assert opened.spec.num_classes == 2
    assert opened.y.tolist() == [0] * 4 + [1] * 4
    assert values(opened) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert ImageFolderSource(path=tmp_path / "mine").class_names() == ("ant", "cat")
    assert remarks(opened) == []


def test_a_relative_path_is_looked_up_in_the_data_root(tmp_path: Path) -> None:
    photographs(tmp_path / "mine")
    assert len(samples(Path("mine")).y) == 8


def test_domains_are_divided_among_clients(tmp_path: Path) -> None:
    after = photographs(tmp_path, "sketch")
    photographs(tmp_path, "art", first=after)
    levels = "[domain,class]"
    data = data_of(tmp_path, "partition=domains", levels=levels)
    assert data.names == ("art", "sketch")
    for place, expected in enumerate((set(range(after, 2 * after)), set(range(after)))):
        splits = data.load(place)
        x = torch.cat([splits["train"].x, splits["test"].x])
        assert set((x[:, 0, 0, 0] * 255).round().int().tolist()) == expected
    assert data_of(tmp_path, "partition={name: iid, num_clients: 4}", levels=levels).num_clients == 4


def test_without_domains_the_partition_names_what_has_some(tmp_path: Path) -> None:
    photographs(tmp_path, "sketch")
    with pytest.raises(ConfigError, match=r"have none: choose .*image_folder"):
        data_of(tmp_path, "partition=domains", levels="[any,class]")


def test_folders_of_clients_are_clients_and_keep_their_splits(tmp_path: Path) -> None:
    after = 0
    for client in ("south", "north"):
        for split in ("train", "test"):
            after = photographs(tmp_path, split, client, first=after)
    data = data_of(tmp_path, "partition=natural", levels="[split,client,class]")
    assert data.names == ("north", "south")
    south = data.load(1)
    assert (south["train"].x[:, 0, 0, 0] * 255).round().int().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert (south["test"].x[:, 0, 0, 0] * 255).round().int().tolist() == [12, 13, 14, 15, 8, 9, 10, 11]


def test_the_split_test_is_an_official_test_part(tmp_path: Path) -> None:
    after = photographs(tmp_path, "train")
    photographs(tmp_path, "Testing", first=after, count=1)
    save(tmp_path / "Testing" / "bee" / "0.png", 99)
    photographs(tmp_path, "val", first=after + 3)
    levels = ("split", "class")
    source = ImageFolderSource(path=tmp_path, levels=levels, part="train")
    opened, official = source.open(), source.official_test(RandomStreams(0))
    assert isinstance(opened, Samples)
    assert isinstance(official, Samples)
    assert opened.spec.num_classes == official.spec.num_classes == 3
    assert values(opened) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert official.y.tolist() == [0, 1, 2]
    assert values(official) == [after + 1, 99, after]
    both = samples(tmp_path, levels=levels)
    assert len(both.y) == 11
    assert "any in place of split in dataset.levels" in remarks(both)[0]
    assert len(samples(tmp_path, levels=levels, part="train", validation="train").y) == 16
    assert remarks(samples(tmp_path, levels=("any", "class"))) == []
    save(tmp_path / "extra" / "cat" / "0.png", 0)
    with pytest.raises(DataError, match="the folder 'extra' is no split, which are called train, training"):
        samples(tmp_path, levels=levels)


def test_images_of_several_sizes_need_a_side(tmp_path: Path) -> None:
    photographs(tmp_path)
    save(tmp_path / "cat" / "wide.jpg", 200, (8, 6), "RGB")
    with pytest.raises(DataError, match=r"wide\.jpg: the image has 8 x 6 pixels.*or set dataset\.side=224"):
        samples(tmp_path)
    assert samples(tmp_path, side=5).spec.shape == (3, 5, 5)


def test_the_copy_is_made_again_when_a_file_changes(tmp_path: Path) -> None:
    photographs(tmp_path / "mine")
    source = ImageFolderSource(path=tmp_path / "mine")
    first = source.prepared_path
    source.open()
    assert source.prepared_path == first
    save(tmp_path / "mine" / "ant" / "0.png", 77)
    os.utime(tmp_path / "mine" / "ant" / "0.png", (1, 1))
    assert source.prepared_path != first
    assert 77 in values(samples(tmp_path / "mine"))


def test_odd_files_are_named(tmp_path: Path) -> None:
    photographs(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("about cats")
    (tmp_path / "cat" / ".DS_Store").write_bytes(b"hidden")
    (tmp_path / "dog").mkdir()
    save(tmp_path / "Cat" / "0.png", 90)
    said = remarks(samples(tmp_path))
    assert len(said) == 3
    assert said[0].endswith("notes.txt first")
    assert "(dog)" in said[1]
    assert "Cat, cat differ by capital letters only" in said[2]


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    photographs(tmp_path / "mine")
    (tmp_path / "linked").mkdir()
    for label in ("ant", "cat"):
        (tmp_path / "linked" / label).symlink_to(tmp_path / "mine" / label)
    assert len(samples(tmp_path / "linked").y) == 8
    (tmp_path / "mine" / "ant" / "above").symlink_to(tmp_path / "mine")
    with pytest.raises(DataError, match=r"ant/above/ant/0\.png lies in 3 folders"):
        samples(tmp_path / "mine")


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (("class", "class"), "levels names class twice"),
        (("client", "domain"), "levels must name class"),
        (("client", "domain", "class"), "clients have no domains"),
        (("folder",), "'class', 'domain', 'client', 'split' or 'any'"),
    ],
)
def test_levels_that_mean_nothing_are_refused(tmp_path: Path, levels: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageFolderSource.model_validate({"path": tmp_path, "levels": levels})


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="validation is for folders of splits"):
        ImageFolderSource(path=tmp_path, validation="train")
    with pytest.raises(ValidationError, match="part is for folders of splits"):
        ImageFolderSource(path=tmp_path, part="train")
    with pytest.raises(DataError, match="nowhere does not exist"):
        samples(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no images \(\.png"):
        samples(tmp_path)
    photographs(tmp_path, "art")
    with pytest.raises(DataError, match=r"lies in 2 folders below .*names 1 folder \(class\): say what each"):
        samples(tmp_path)
    (tmp_path / "art" / "cat" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"art/cat/0\.png: the image cannot be decoded"):
        samples(tmp_path, levels=("domain", "class"))


def test_a_run_trains_on_it(tmp_path: Path) -> None:
    photographs(tmp_path / "mine", count=20)
    parts = Parts(
        load_config(
            Experiment,
            "quickstart",
            ["dataset.name=image_folder", f"dataset.path={tmp_path / 'mine'}", "partition={name: iid, num_clients: 2}"],
        )
    )
    assert parts.task.network is not None
    assert np.unique(parts.dataset.load(0)["train"].y).tolist() == [0, 1]
