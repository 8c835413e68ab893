"""Random changes of the colours of training images, and blur.

Results have the same bits wherever and in whatever batch an image is changed: they are made of sums and products by
pixel in a fixed order, of factors that are drawn on the host, and the mean of an image is that of whole numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.places import mirrored

APPLIED = 0.8
"""Probability of colour jitter (Chen et al., 2020, appendix A)."""
_GREY = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in the brightness of a pixel (ITU-R BT.601)."""
_TO_YIQ = np.array([_GREY, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
_BLUR = (0.1, 2.0)
"""Smallest and largest standard deviation of the blur, in pixels."""
_UNITS = 1 << 24


def draw(
    generator: np.random.Generator, count: int, jitter: float, grayscale: float, blur: float, sides: tuple[int, int]
) -> dict[str, Tensor]:
    """Draws the changes of ``count`` images.

    Args:
        generator: the stream of a client, round and pass.
        count: how many images.
        jitter: s; brightness, contrast and saturation are multiplied by a number from 1 - 0.8 s to 1 + 0.8 s, and hue
            is turned by up to 0.2 s of a full turn, with the probability :data:`APPLIED`.
        grayscale: probability that an image loses its colours.
        blur: probability that it is blurred.
        sides: height and width in pixels, for the width of the blur.

    Returns:
        As far as the options are above 0: ``jittered`` bool of shape (count,), ``tone`` float32 of shape (count, 3)
        and ``hue`` float32 of shape (count, 3, 3); ``grey`` bool of shape (count,); ``blurred`` bool of shape (count,),
        ``blur_rows`` and ``blur_columns`` float32 of shape (count, taps).
    """
    drawn: dict[str, Tensor] = {}
    if jitter:
        drawn["jittered"] = torch.from_numpy(generator.random(count) < APPLIED)
        tone = generator.uniform(max(1 - 0.8 * jitter, 0), 1 + 0.8 * jitter, (count, 3))
        drawn["tone"] = torch.from_numpy(tone.astype(np.float32))
        angle = 2 * np.pi * generator.uniform(-0.2 * jitter, 0.2 * jitter, count)
        drawn["hue"] = torch.from_numpy(_turns(angle).astype(np.float32))
    if grayscale:
        drawn["grey"] = torch.from_numpy(generator.random(count) < grayscale)
    if blur:
        drawn["blurred"] = torch.from_numpy(generator.random(count) < blur)
        deviation = generator.uniform(*_BLUR, (count, 1))
        for name, side in zip(("blur_rows", "blur_columns"), sides, strict=True):
            reach = min(max(round(side / 20), 1), side - 1)
            taps = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
            drawn[name] = torch.from_numpy((taps / taps.sum(1, keepdims=True)).astype(np.float32))
    return drawn


def changed(x: Tensor, drawn: Mapping[str, Tensor], black: Tensor, white: Tensor) -> Tensor:
    """Returns images with brightness, contrast, saturation and hue changed in that order, then grey, then blurred.

    Pixels are cut off at black and white after each of the first four.

    Args:
        x: shape (n, channels, rows, columns), of 1 or 3 channels.
        drawn: see :func:`draw`; without any of its names the images stay as they are.
        black: value of a black pixel by channel, shape (channels,).
        white: value of a white one.
    """
    lowest, span = black[:, None, None], (white - black)[:, None, None]
    if "jittered" in drawn or "grey" in drawn:
        plain = (x - lowest) / span
        altered = _jittered(plain, drawn) if "jittered" in drawn else plain
        moved = drawn.get("jittered")
        if "grey" in drawn:
            altered = torch.where(wide(drawn["grey"]), brightness(altered).expand_as(altered), altered)
            moved = drawn["grey"] if moved is None else moved | drawn["grey"]
        assert moved is not None
        x = torch.where(wide(moved), altered * span + lowest, x)
    if "blurred" in drawn:
        soft = _blurred(_blurred(x, drawn["blur_rows"], 2), drawn["blur_columns"], 3)
        x = torch.where(wide(drawn["blurred"]), soft, x)
    return x


def _jittered(plain: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
    """Returns images of values from 0 to 1, jittered where ``jittered`` says so."""
    bright, contrast, saturation = (wide(one) for one in drawn["tone"].to(plain).unbind(1))
    found = (plain * bright).clamp(0, 1)
    found = (found * contrast + mean_brightness(found) * (1 - contrast)).clamp(0, 1)
    if plain.shape[1] == 3:
        found = (found * saturation + brightness(found) * (1 - saturation)).clamp(0, 1)
        turn = drawn["hue"].to(plain)
        channels = [
            sum(found[:, source] * turn[:, channel, source, None, None] for source in range(3)) for channel in range(3)
        ]
        found = torch.stack(channels, 1).clamp(0, 1)  # type: ignore[arg-type]
    return torch.where(wide(drawn["jittered"]), found, plain)


def brightness(plain: Tensor) -> Tensor:
    """Returns the brightness of pixels, shape (n, 1, rows, columns)."""
    if plain.shape[1] == 1:
        return plain
    red, green, blue = (share * plain[:, channel] for channel, share in enumerate(_GREY))
    return (red + green + blue)[:, None]


def mean_brightness(plain: Tensor) -> Tensor:
    """Returns the mean brightness of each image, shape (n, 1, 1, 1); that of whole numbers, in any order the same."""
    units = (brightness(plain) * _UNITS).round().to(torch.int64).sum((1, 2, 3))
    return wide(units.to(plain.dtype) / (_UNITS * plain[0, 0].numel()))


def _blurred(x: Tensor, taps: Tensor, axis: int) -> Tensor:
    """Returns images filtered along an axis, mirrored at their edges."""
    size, reach = x.shape[axis], taps.shape[1] // 2
    found = torch.zeros_like(x)
    for tap in range(taps.shape[1]):
        place = mirrored(torch.arange(size, device=x.device) + (tap - reach), size)
        found = found + x.index_select(axis, place) * wide(taps[:, tap].to(x))
    return found


def _turns(angle: np.ndarray) -> np.ndarray:
    """Returns the matrices, shape (n, 3, 3), that turn hues: rotations of I and Q of the colour space YIQ."""
    turn = np.zeros((len(angle), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = np.cos(angle)
    turn[:, 1, 2], turn[:, 2, 1] = -np.sin(angle), np.sin(angle)
    found: np.ndarray = np.linalg.inv(_TO_YIQ) @ turn @ _TO_YIQ
    return found


def wide(values: Tensor) -> Tensor:
    """Returns a value by image, shape (n,), as shape (n, 1, 1, 1)."""
    return values[:, None, None, None]
