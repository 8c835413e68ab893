"""Fed-ISIC2019: photographs of skin lesions from six centers, each a client, in the form of FLamby."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from PIL import Image
from pydantic import Field

from rayfl.data.files.natural_file import NaturalHeader
from rayfl.data.sources.images.packed import Listed, PackedImages
from rayfl.errors import DataError

_TABLES = ("train_test_split", "train_test_split.csv", "train_test_folds.csv")
_PREPROCESSED, _RAW = "ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Input"
_COLUMNS = {"image": pa.string(), "target": pa.int64(), "center": pa.int64(), "fold": pa.string()}
_CLASSES, _CENTERS = 8, 6
_SHORTER = 224
"""Pixels of the shorter side that FLamby's ``resize_images.py`` brings photographs to."""
_NORM = 6
"""Of the Minkowski norm that estimates the colour of the light."""


class Isic2019Source(PackedImages):
    """Configuration of Fed-ISIC2019: 23,247 photographs of skin lesions, 8 classes, six centers (FLamby, 2022).

    The centers are clients, with FLamby's own training and test parts. Photographs are those that FLamby's script
    ``resize_images.py`` writes, or are made of the challenge's own in the same way: the shorter side becomes 224 pixels
    (bilinear), colours are those under white light (Shades of Gray, Finlayson and Trezzi, 2004, with the 6-norm), and
    the result is a JPEG file of Pillow's quality. Of each the square in the middle is kept, without further loss.
    """

    folder: ClassVar[str] = "fed_isic2019"
    wanted: ClassVar[str] = (
        f"the folder with FLamby's train_test_split and with {_PREPROCESSED}/ (of FLamby's resize_images.py) or "
        f"{_RAW}/ (of the challenge)"
    )

    name: Literal["isic2019"] = Field(default="isic2019", description="Photographs of skin lesions, by center.")
    side: int = Field(
        default=200,
        ge=8,
        le=_SHORTER,
        description="Height and width in pixels of the square in the middle of a photograph that is kept.",
    )

    @property
    def _header(self) -> NaturalHeader:
        return NaturalHeader(
            version=2,
            kind=f"isic2019-{self.side}",
            input="image",
            shape=(3, self.side, self.side),
            num_classes=_CLASSES,
            storage="encoded",
        )

    def _choices(self) -> dict[str, str]:
        return {"name": self.name, "side": str(self.side)}

    def _listed(self, folder: Path) -> tuple[Path, list[Listed]]:
        path = next((found for name in _TABLES if (found := folder / name).is_file()), folder / _TABLES[0])
        images = next((found for name in (_PREPROCESSED, _RAW) if (found := folder / name).is_dir()), None)
        if images is None:
            raise DataError(f"{folder} has neither {_PREPROCESSED}/ nor {_RAW}/; give {self.wanted}")
        options = pa.csv.ConvertOptions(include_columns=list(_COLUMNS), column_types=_COLUMNS)
        try:
            table = pa.csv.read_csv(path, convert_options=options)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}; give {self.wanted}") from error
        columns = [table.column(name).to_pylist() for name in _COLUMNS]
        rows = []
        for row, (image, target, center, fold) in enumerate(zip(*columns, strict=True)):
            for column, value, allowed in (
                ("target", target, range(_CLASSES)),
                ("center", center, range(_CENTERS)),
                ("fold", fold, ("train", "test")),
            ):
                if value not in allowed:
                    raise DataError(f"{path}, row {row}: column {column!r} is {value!r}; get FLamby's file again")
            rows.append(Listed(f"center_{center}", fold, f"{images}/{image}.jpg", target))
        return path, rows

    def _image(self, file: Path) -> bytes:
        """See the base class; a PNG file of the square in the middle."""
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{file}: the image cannot be decoded ({error}); get it again") from error
        if file.parent.name == _RAW:
            image = _preprocessed(image)
        if min(image.size) < self.side:
            raise DataError(
                f"{file}: {image.width} x {image.height} pixels, but a square of {self.side} is wanted; set "
                f"side to {min(image.size)} at most"
            )
        left, top = (image.width - self.side) // 2, (image.height - self.side) // 2
        buffer = io.BytesIO()
        image.crop((left, top, left + self.side, top + self.side)).save(buffer, "PNG")
        return buffer.getvalue()


def _preprocessed(image: Image.Image) -> Image.Image:
    """The photograph as FLamby's ``resize_images.py`` writes it."""
    ratio = _SHORTER / min(image.size)
    small = image.resize((int(image.width * ratio), int(image.height * ratio)), Image.Resampling.BILINEAR)
    pixels = np.asarray(small).astype(np.float32)
    light = np.power(np.power(pixels, _NORM).mean((0, 1)), 1 / _NORM)
    gains = np.linalg.norm(light) / (np.maximum(light, np.finfo(np.float32).tiny) * np.sqrt(3))
    buffer = io.BytesIO()
    # FLamby's own conversion to bytes wraps values above 255 around; here they stay white.
    Image.fromarray(np.clip(pixels * gains, 0, 255).astype(np.uint8)).save(buffer, "JPEG")
    return Image.open(buffer)
