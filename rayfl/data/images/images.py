"""Encoded images (PNG, JPEG, WebP, ...) as arrays."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from PIL import Image, UnidentifiedImageError

from rayfl.errors import DataError

_GREY = ("1", "L")
_DEEP = ("I", "F")
"""How the names of Pillow's modes begin whose pixels are one integer of 16 or 32 bits, or a float."""
_NUMBERED = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")
"""Modes of Pillow whose pixels are one integer each; of P they are places in a palette."""

_ORIENTATION = 0x0112
"""EXIF's tag of the orientation: 1 as it is stored, 2 to 8 turned or mirrored."""


def decode_images(
    count: int,
    read: Callable[[int], bytes],
    place: Callable[[int], str],
    progress: Callable[[int], None] = lambda done: None,
    side: int | None = None,
    remedy: str = "",
) -> np.ndarray:
    """Decodes images of one size, or brings them to one.

    Args:
        count: how many, at least 1.
        read: the bytes of an image.
        place: what to call an image in messages.
        progress: told how many are done, now and then.
        side: height and width to which images are brought (bilinear, without keeping their proportions); None: all
            have one size.
        remedy: of images of several sizes, beside bringing them to one.

    Returns:
        uint8 of shape (count, channels, height, width): one channel if all images are grey, else three (RGB).

    Raises:
        DataError: an image cannot be decoded, is larger than any can be meant to be, has more than 8 bits a value, or
            has another size than the first; names it.
    """
    heads = [_head(read(position), place(position)) for position in range(count)]
    for position, (_, own_mode) in enumerate(heads):
        if own_mode.startswith(_DEEP):  # Pillow would cut values off at 255
            raise DataError(
                f"{place(position)}: the pixels have more than 8 bits (Pillow's mode {own_mode}), and images are read "
                "with 8: convert them, scaled as they should be, or give the values as numbers (lists of floats and "
                "dataset.shape, or .npy files with dataset=arrays)"
            )
    size = heads[0][0] if side is None else (side, side)
    mode = "L" if all(own_mode in _GREY for _, own_mode in heads) else "RGB"
    shape = (count, 1 if mode == "L" else 3, size[1], size[0])
    try:
        result = np.empty(shape, dtype=np.uint8)
    except MemoryError as error:
        raise DataError(
            f"{place(0)}: {count} images of {size[0]} x {size[1]} pixels do not fit into memory "
            f"({math.prod(shape) / 2**30:,.0f} GiB); make them smaller"
        ) from error
    for position, (own, _) in enumerate(heads):
        if own != size and side is None:
            raise _other_size(place(position), own, place(0), size, remedy)
        try:
            with Image.open(io.BytesIO(read(position))) as image:
                result[position] = pixels_of(image, mode, size)
        except (OSError, ValueError, SyntaxError) as error:
            raise _undecodable(place(position), error) from error
        if position % 256 == 0 or position + 1 == count:
            progress(position + 1)
    return result


def pixels_of(image: Image.Image, mode: str, size: tuple[int, int]) -> np.ndarray:
    """Returns an image's pixels, uint8 of shape (channels, height, width).

    Args:
        image: read, or to be read.
        mode: L for one grey channel, RGB for three of colours.
        size: width and height to which it is brought (bilinear, without keeping its proportions).
    """
    converted = image.convert(mode)
    pixels = np.asarray(converted if image.size == size else converted.resize(size, Image.Resampling.BILINEAR))
    return pixels[np.newaxis] if mode == "L" else pixels.transpose(2, 0, 1)


def decode_masks(count: int, read: Callable[[int], bytes], place: Callable[[int], str]) -> np.ndarray:
    """Decodes images of one size whose pixels are classes: grey ones of 1 to 16 bits, or places in a palette.

    Args:
        count: how many, at least 1.
        read: the bytes of an image.
        place: what to call an image in messages.

    Returns:
        int32 of shape (count, height, width). The colours of palettes are not looked at.

    Raises:
        DataError: an image cannot be decoded, is in colour, is a JPEG, or has another size than the first; names it.
    """
    masks: list[np.ndarray] = []
    for position in range(count):
        where = place(position)
        data = read(position)
        _head(data, where)
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.format == "JPEG":
                    raise DataError(f"{where}: JPEG does not keep the values of pixels: save masks as PNG")
                if image.mode not in _NUMBERED:
                    raise DataError(
                        f"{where}: the image is in colour ({image.mode}); a mask's pixels are its classes, grey values "
                        "or places in a palette: convert it"
                    )
                mask = np.asarray(image).astype(np.int32) // _scale_of(data)
        except (OSError, ValueError, SyntaxError) as error:
            raise _undecodable(where, error) from error
        if masks and mask.shape != masks[0].shape:
            raise _other_size(where, mask.shape[::-1], place(0), masks[0].shape[::-1])
        masks.append(mask)
    return np.stack(masks)


def count_turned(images: Iterable[bytes]) -> int:
    """Returns how many images, which can be decoded, say in their EXIF data that they are to be turned or mirrored."""
    found = 0
    for data in images:
        with Image.open(io.BytesIO(data)) as image:
            found += image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    return found


def _scale_of(data: bytes) -> int:
    """By what Pillow multiplies the pixels of a PNG of 2 or 4 grey bits, to span 0 to 255; 1 for other files."""
    bits, colour_type = data[24:25], data[25:26]  # of the header IHDR, which comes first
    if not data.startswith(_SIGNATURES[0]) or colour_type != b"\0":
        return 1
    return {b"\2": 85, b"\4": 17}.get(bits, 1)


def is_encoded(start: bytes) -> bool:
    """Returns whether bytes begin as an image file does, rather than with pixels."""
    return start.startswith(_SIGNATURES) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


_SIGNATURES: tuple[bytes, ...] = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")


def _head(data: bytes, place: str) -> tuple[tuple[int, int], str]:
    """Size and Pillow's mode of an image, without decoding it: a few bytes may stand for more than a memory holds."""
    try:
        # From Pillow's limit on, not from twice that; without filters of warnings, which other threads share.
        with Image.open(io.BytesIO(data)) as image:
            if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError
            return image.size, image.mode
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"{place}: the image unpacks to more than the {Image.MAX_IMAGE_PIXELS:,} pixels that Pillow takes; make it "
            "smaller, or remove it"
        ) from error
    except (OSError, ValueError, SyntaxError) as error:
        raise _undecodable(place, error) from error


def _other_size(place: str, own: Sequence[int], first: str, size: Sequence[int], remedy: str = "") -> DataError:
    return DataError(
        f"{place}: the image has {own[0]} x {own[1]} pixels, but {first} has {size[0]} x {size[1]}; bring all images "
        f"to one size{remedy}"
    )


def _undecodable(place: str, error: Exception) -> DataError:
    # Pillow's own words name the place in memory
    why = "it is no image" if isinstance(error, UnidentifiedImageError) else error
    return DataError(
        f"{place}: the image cannot be decoded ({why}); it must be PNG, JPEG, WebP or another kind Pillow knows"
    )
