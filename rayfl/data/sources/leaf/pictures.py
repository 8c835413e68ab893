"""Image files as arrays, at the sizes that LEAF uses."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image

from rayfl.errors import DataError

NIST_SIDE, FEMNIST_SIDE, CELEBA_SIDE = 128, 28, 84

_MOST_PIXELS = 1 << 24


def femnist_pixels(content: bytes, where: str) -> np.ndarray:
    """A PNG of NIST (128 x 128) as LEAF's grey levels.

    Turned grey, then reduced to 28 x 28 with Lanczos' filter over all pixels.

    Args:
        content: the file.
        where: its name, for errors.

    Returns:
        uint8 of shape (784,), row after row; the background is 255.

    Raises:
        DataError: another file than such an image.
    """
    with _opened(content, where, ["PNG"]) as image:
        if image.size != (NIST_SIDE, NIST_SIDE):
            raise DataError(
                f"{where} has {image.width} x {image.height} pixels; NIST's have {NIST_SIDE} x {NIST_SIDE}, fetch them "
                "again"
            )
        small = image.convert("L").resize((FEMNIST_SIDE, FEMNIST_SIDE), Image.Resampling.LANCZOS)
        return np.asarray(small).reshape(-1)


def celeba_pixels(content: bytes, where: str) -> np.ndarray:
    """A photograph as LEAF's 84 x 84 pixels in RGB.

    Reduced with the bicubic filter, the present default of the library that LEAF calls.

    Args:
        content: the file, JPEG or PNG.
        where: its name, for errors.

    Returns:
        uint8 of shape (3 * 84 * 84,), channel after channel.

    Raises:
        DataError: another file than such an image, or one of more than 16 megapixels.
    """
    with _opened(content, where, ["JPEG", "PNG"]) as image:
        small = image.resize((CELEBA_SIDE, CELEBA_SIDE), Image.Resampling.BICUBIC).convert("RGB")
        return np.asarray(small).transpose(2, 0, 1).reshape(-1)


@contextmanager
def _opened(content: bytes, where: str, formats: list[str]) -> Iterator[Image.Image]:
    try:
        with Image.open(io.BytesIO(content), formats=formats) as image:
            # Known from the file's head, before any pixel is unpacked.
            if image.width * image.height > _MOST_PIXELS:
                raise DataError(f"{where} has {image.width} x {image.height} pixels; no image of this data set has")
            yield image
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} is not a readable {' or '.join(formats)} image: {error}; fetch it again") from error
