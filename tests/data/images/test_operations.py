"""Operations of RandAugment on tensors, against Pillow and torchvision and by their definitions, and grey squares."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from rayfl.data.images import operations
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.operations import OPERATIONS
from rayfl.data.images.views import Views
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec

SIDES = (24, 32)
SPEC = InputSpec("image", (3, *SIDES), 4)
BLACK, WHITE = torch.zeros(3), torch.ones(3)


def pictures(count: int = 6, channels: int = 3) -> Tensor:
    """Smooth images of whole levels, so that equalizing has an effect."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 6, 8, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, SIDES, mode="bilinear")
    return (fine * 180 + 30).round() / 255


def applied(name: str, x: Tensor, amount: float) -> Tensor:
    """An operation on all images."""
    kind = np.full((len(x), 1), OPERATIONS.index(name))
    amounts = np.full((len(x), 1), amount)
    drawn = {
        "operation": torch.from_numpy(kind),
        "amount": torch.from_numpy(amounts.astype(np.float32)),
        "affine": torch.from_numpy(operations._affine(kind, amounts, SIDES)),
    }
    return operations.changed(x, drawn, BLACK[: x.shape[1]], WHITE[: x.shape[1]])


def by_pillow(name: str, x: Tensor, amount: float) -> Tensor:
    found = []
    for one in x:
        image = Image.fromarray((one.permute(1, 2, 0) * 255).round().byte().numpy())
        made: dict[str, Any] = {
            "identity": lambda image=image: image,
            "autocontrast": lambda image=image: ImageOps.autocontrast(image),
            "equalize": lambda image=image: ImageOps.equalize(image),
            "posterize": lambda image=image: ImageOps.posterize(image, int(amount)),
            "solarize": lambda image=image: ImageOps.solarize(image, math.ceil(amount * 255)),
            "brightness": lambda image=image: ImageEnhance.Brightness(image).enhance(amount),
            "contrast": lambda image=image: ImageEnhance.Contrast(image).enhance(amount),
            "color": lambda image=image: ImageEnhance.Color(image).enhance(amount),
            "sharpness": lambda image=image: ImageEnhance.Sharpness(image).enhance(amount),
        }
        found.append(torch.from_numpy(np.array(made[name]())).permute(2, 0, 1) / 255)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("identity", 0),
        ("autocontrast", 0),
        ("equalize", 0),
        ("posterize", 4.7),
        ("solarize", 0.43),
        ("brightness", 0.3),
        ("contrast", 0.6),
        ("color", 0.2),
        ("sharpness", 0.4),
    ],
)
def test_operations_on_values_are_those_of_pillow(name: str, amount: float) -> None:
    x = pictures()
    # Pillow rounds to whole levels, some of them twice
    assert (applied(name, x, amount) - by_pillow(name, x, amount)).abs().max() <= 2.01 / 255
    assert name == "identity" or not torch.equal(applied(name, x, amount), x)


def test_operations_on_places_move_pixels() -> None:
    x = pictures()
    right = applied("translate_x", x, 0.25)
    assert torch.equal(right[..., :24], x[..., 8:]) and not right[..., 24:].any()
    down = applied("translate_y", x, -0.25)
    assert torch.equal(down[:, :, 6:], x[:, :, :18]) and not down[:, :, :6].any()
    square = x[..., :24]
    assert torch.equal(applied_square(square, 90.0), square.rot90(-1, (2, 3)))
    sheared = applied("shear_x", x, 2 / 23)
    assert torch.equal(sheared[:, :, 0, 1:], x[:, :, 0, :-1]) and torch.equal(sheared[:, :, 23, :-1], x[:, :, 23, 1:])
    sheared = applied("shear_y", x, 2 / 31)
    assert torch.equal(sheared[:, :, 1:, 0], x[:, :, :-1, 0]) and torch.equal(sheared[:, :, :-1, 31], x[:, :, 1:, 31])


def applied_square(x: Tensor, degrees: float) -> Tensor:
    kind = np.full((len(x), 1), OPERATIONS.index("rotate"))
    affine = torch.from_numpy(operations._affine(kind, np.full((len(x), 1), degrees), (24, 24)))
    drawn = {"operation": torch.from_numpy(kind), "amount": torch.zeros(len(x), 1), "affine": affine}
    return operations.changed(x, drawn, BLACK, WHITE)


def test_draws_have_all_operations_alike_and_magnitudes_in_their_ranges() -> None:
    drawn = operations.draw(np.random.default_rng(0), 7000, 2, 0.5, SIDES)
    counts = torch.bincount(drawn["operation"].flatten(), minlength=14)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(1000)
    for place, name in enumerate(OPERATIONS):
        least, most = operations._RANGES.get(name, (0.0, 0.0))
        own = drawn["amount"][drawn["operation"] == place]
        assert own.min() >= np.float32(least) and own.max() <= np.float32(most)
        assert (own.mean() - (least + most) / 2).abs() <= (most - least) * 0.05
    square = drawn["square"]
    sides = square[:, 2:] - square[:, :2]
    assert torch.equal(sides[:, 0], sides[:, 1]) and sides.min() == 0 and sides.max() == 15


def test_a_square_is_grey_and_the_rest_stays() -> None:
    x = pictures(2)
    drawn = {"square": torch.tensor([[2, -3, 7, 4], [20, 30, 26, 36]])}
    found = operations.changed(x, drawn, BLACK, WHITE)
    assert (found[0, :, 2:7, :4] == 0.5).all() and (found[1, :, 20:, 30:] == 0.5).all()
    found[0, :, 2:7, :4], found[1, :, 20:, 30:] = x[0, :, 2:7, :4], x[1, :, 20:, 30:]
    assert torch.equal(found, x)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_has_the_same_bits_in_any_batch(channels: int, dtype: torch.dtype) -> None:
    spec = InputSpec("image", (channels, *SIDES), 4)
    black, white = np.full(channels, -1, np.float32), np.full(channels, 2, np.float32)
    config = AugmentConfig(crop=2, operations=3, cutout=0.5)
    made = config.build(spec, black, white)
    assert made is not None
    x = (pictures(40, channels) * 3 - 1).to(dtype)
    drawn = made.draw(np.random.default_rng(1), 40)
    whole = made(x, drawn)
    for first, last in ((0, 1), (1, 4), (4, 17), (17, 40)):
        part = {name: values[first:last] for name, values in drawn.items()}
        assert torch.equal(made(x[first:last], part), whole[first:last])
    assert whole.min() >= -1 - 1e-6 and whole.max() <= 2 + 1e-6 and not torch.equal(whole, x)


def built(config: AugmentConfig) -> Augmentation:
    found = config.build(SPEC, BLACK.numpy(), WHITE.numpy())
    assert found is not None
    return found


def test_views_are_made_each_by_changes_of_its_own() -> None:
    weak, strong = built(AugmentConfig(crop=2)), built(AugmentConfig(crop=2, operations=2))
    views = Views((weak, strong, None)).on(torch.device("cpu"))
    x, y = pictures(), torch.arange(6)
    drawn = views.draw(np.random.default_rng(0), 6)
    found, kept = views.both(x, y, drawn)
    generator = np.random.default_rng(0)
    assert torch.equal(found[:, 0], weak(x, weak.draw(generator, 6)))
    assert torch.equal(found[:, 1], strong(x, strong.draw(generator, 6)))
    assert torch.equal(found[:, 2], x) and kept is y


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (InputSpec("image", (2, 8, 8), 4), AugmentConfig(operations=1), "leave out jitter, grayscale and operations"),
        (
            InputSpec("image", (3, 8, 8), 4, target="mask"),
            AugmentConfig(cutout=0.5),
            "operations and cutout change images and not their masks",
        ),
    ],
)
def test_images_without_these_changes_are_refused(spec: InputSpec, config: AugmentConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.build(spec, np.zeros(spec.shape[0], np.float32))
