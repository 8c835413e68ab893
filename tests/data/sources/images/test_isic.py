"""Fed-ISIC2019 is read from small made files of FLamby's layout, with its centers and its official parts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.images.camelyon import Camelyon17Source
from rayfl.data.sources.images.isic import Isic2019Source
from rayfl.data.sources.preparation.inventory import verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams

HEADER = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"


def isic_files(folder: Path, images: str = "ISIC_2019_Training_Input_preprocessed", per_center: int = 5) -> Path:
    """Photographs of other widths, of which the last of a center is of its test part."""
    (folder / images).mkdir(parents=True)
    lines, generator = [HEADER], np.random.default_rng(0)
    for row in range(6 * per_center):
        center, fold, target = row % 6, "test" if row // 6 == per_center - 1 else "train", row % 8
        name = f"ISIC_{row:07d}" + ("_downsampled" if center == 4 else "")
        coarse = generator.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((298 + row, 224 + row % 2), Image.Resampling.BICUBIC).save(
            folder / images / f"{name}.jpg"
        )
        classes = ",".join("1.0" if label == target else "0.0" for label in range(9))
        lines.append(f"{name},{classes},{target},{center},{fold},{fold}_{center}")
    (folder / "train_test_split").write_text("\n".join(lines) + "\n")
    return folder


def opened(source: Isic2019Source, *changes: str):  # type: ignore[no-untyped-def]
    own = [f"dataset={{name: isic2019, root: '{source.root}', side: {source.side}}}", "partition=natural", *changes]
    plain = ["holdout.validation=0", "holdout.test=null", "model=two_nn", "algorithm=fedavg"]
    return open_dataset(load_config(Experiment, "quickstart", [*own, *plain]), RandomStreams(0))


def test_centers_are_clients_with_their_official_parts_and_squares_of_the_middle(tmp_path: Path) -> None:
    folder = isic_files(tmp_path / "fed_isic2019")
    source = Isic2019Source(root=tmp_path, side=200)
    with pytest.raises(DataError, match=r"isic2019-200\.arrow does not exist.*prepare isic2019 side=200 --source"):
        source.open()
    path = source.prepare(Order())
    assert verify(path) == ([], [])
    data = opened(source)
    assert data.names == tuple(f"center_{number}" for number in range(6))
    assert data.sizes().tolist() == [[4, 0, 1]] * 6
    assert data.spec.shape == (3, 200, 200) and data.spec.num_classes == 8
    assert source.official_test(RandomStreams(0)) == source.open(), "all centers' test images together"
    with pytest.raises(ConfigError, match="'camelyon17' has no official test part"):
        Camelyon17Source(root=tmp_path).official_test(RandomStreams(0))
    splits = data.load(4)
    assert splits["train"].y.tolist() == [row % 8 for row in (4, 10, 16, 22)] and splits["test"].y.tolist() == [28 % 8]
    with Image.open(folder / "ISIC_2019_Training_Input_preprocessed" / "ISIC_0000010_downsampled.jpg") as image:
        pixels = np.asarray(image)
    top, left = (224 - 200) // 2, (308 - 200) // 2
    square = pixels[top : top + 200, left : left + 200].transpose(2, 0, 1)
    torch.testing.assert_close(splits["train"].x[1], torch.from_numpy(square.astype(np.float32) / 255))


def test_photographs_of_the_challenge_are_brought_to_flambys_form(tmp_path: Path) -> None:
    """The steps of FLamby's resize_images.py, written down once more."""
    folder = isic_files(tmp_path / "mine", "ISIC_2019_Training_Input")
    source = Isic2019Source(root=tmp_path, side=32)
    source.prepare(Order(place=str(folder)))
    with Image.open(folder / "ISIC_2019_Training_Input" / "ISIC_0000001.jpg") as image:
        ratio = 224.0 / min(image.size)
        image = image.resize(tuple(int(side * ratio) for side in image.size), resample=Image.Resampling.BILINEAR)
    img = np.array(image).astype("float32")
    rgb_vec = np.power(np.mean(np.power(img, 6), (0, 1)), 1 / 6)
    rgb_vec = 1 / (rgb_vec / np.sqrt(np.sum(np.power(rgb_vec, 2.0))) * np.sqrt(3))
    img = np.minimum(np.multiply(img, rgb_vec), 255).astype(np.uint8)
    assert not np.array_equal(img, np.array(image)), "the light is not white"
    buffer = io.BytesIO()
    Image.fromarray(img).save(buffer, "JPEG")
    pixels = np.asarray(Image.open(buffer))
    top, left = (pixels.shape[0] - 32) // 2, (pixels.shape[1] - 32) // 2
    square = pixels[top : top + 32, left : left + 32].transpose(2, 0, 1)
    x = opened(source).load(1)["train"].x[0]
    torch.testing.assert_close(x, torch.from_numpy(square.astype(np.float32) / 255))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    folder = isic_files(tmp_path / "mine")
    images, table = folder / "ISIC_2019_Training_Input_preprocessed", folder / "train_test_split"
    source, order, text = Isic2019Source(root=tmp_path), Order(place=str(folder)), table.read_text()
    for line, column in ((",8,0,train", "target"), (",1,6,train", "center"), (",1,0,valid", "fold")):
        table.write_text(f"{HEADER}\nISIC_0000000{',0.0' * 9}{line},x\n")
        with pytest.raises(DataError, match=f"train_test_split, row 0: column '{column}' is"):
            source.prepare(order)
    table.write_text("image,target\n1,2\n")
    with pytest.raises(DataError, match=r"train_test_split cannot be read.*center"):
        source.prepare(order)
    table.write_text(text)
    (images / "ISIC_0000003.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"ISIC_0000003\.jpg: the image cannot be decoded"):
        source.prepare(order)
    Image.new("RGB", (300, 100)).save(images / "ISIC_0000003.jpg")
    with pytest.raises(DataError, match=r"ISIC_0000003\.jpg: 300 x 100 pixels, but a square of 200 .* side to 100"):
        source.prepare(order)
    (images / "ISIC_0000003.jpg").unlink()
    with pytest.raises(DataError, match=r"ISIC_0000003\.jpg cannot be read: No such file"):
        source.prepare(order)
    for image in images.iterdir():
        image.unlink()
    images.rmdir()
    with pytest.raises(DataError, match="has neither ISIC_2019_Training_Input_preprocessed/ nor"):
        source.prepare(order)
    assert not source.prepared_path.exists()
