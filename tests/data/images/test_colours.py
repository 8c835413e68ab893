"""Random colours, blur and stretched windows of training images, against torchvision and by their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import functional

from rayfl.data.images import colours
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec

SPEC = InputSpec("image", (3, 8, 6), 4)
BLACK, WHITE = np.array([-1, -0.5, 0], np.float32), np.array([1, 1.5, 4], np.float32)
ALL = AugmentConfig(crop=1, flip=True, resized_crop=0.3, jitter=0.8, grayscale=0.3, blur=0.5)


def built(config: AugmentConfig, spec: InputSpec = SPEC, **options: Any) -> Augmentation:
    channels = spec.shape[0]
    found = config.build(spec, BLACK[:channels], WHITE[:channels], **options)
    assert found is not None
    return found


def plain(count: int = 5, channels: int = 3) -> Tensor:
    return torch.rand(count, channels, 8, 6, generator=torch.Generator().manual_seed(0))


def seen(x: Tensor) -> Tensor:
    """Values from 0 to 1 as the model sees them."""
    black, white = (torch.from_numpy(one[: x.shape[1]])[:, None, None] for one in (BLACK, WHITE))
    return x * (white - black) + black


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_contrast_and_saturation_are_torchvisions(channels: int) -> None:
    x, factors = plain(channels=channels), (1.3, 0.6, 1.7)
    drawn = {
        "jittered": torch.tensor([True] * 5),
        "tone": torch.tensor([factors] * 5),
        "hue": torch.from_numpy(colours._turns(np.zeros(5))).float(),
    }
    black, white = (torch.from_numpy(one[:channels]) for one in (BLACK, WHITE))
    expected = functional.adjust_contrast(functional.adjust_brightness(x, factors[0]), factors[1])
    expected = functional.adjust_saturation(expected, factors[2]) if channels == 3 else expected
    torch.testing.assert_close(
        colours.changed(seen(x), drawn, black, white), seen(expected), rtol=0, atol=4e-3
    )  # torchvision's brightness of a pixel has other digits


def test_hue_keeps_brightness_and_greys_and_a_whole_turn_changes_nothing() -> None:
    turns = colours._turns(np.array([0.0, 1.0, 2 * np.pi]))
    np.testing.assert_allclose(turns[[0, 2]], np.broadcast_to(np.eye(3), (2, 3, 3)), atol=1e-9)
    np.testing.assert_allclose(turns[1] @ np.ones(3), np.ones(3), atol=2e-3)
    np.testing.assert_allclose(np.array([0.299, 0.587, 0.114]) @ turns[1], [0.299, 0.587, 0.114], atol=1e-9)
    assert np.abs(turns[1] - np.eye(3)).max() > 0.3


def test_grey_images_have_one_value_a_pixel_and_others_stay_bit_by_bit() -> None:
    x = plain()
    grey = torch.tensor([True, False, True, False, False])
    found = colours.changed(seen(x), {"grey": grey}, torch.from_numpy(BLACK), torch.from_numpy(WHITE))
    assert torch.equal(found[~grey], seen(x)[~grey])
    expected = functional.rgb_to_grayscale(x[grey], 3)
    torch.testing.assert_close(found[grey], seen(expected), rtol=0, atol=2e-3)


def test_blur_is_torchvisions() -> None:
    x = plain(1)
    drawn = colours.draw(np.random.default_rng(3), 1, 0, 0, 1, (8, 6))
    taps = drawn["blur_rows"][0]
    deviation = float((-1 / (2 * (taps[0] / taps[1]).log())).sqrt())
    expected = functional.gaussian_blur(x, [3, 3], [deviation, deviation])
    torch.testing.assert_close(colours.changed(x, drawn, torch.zeros(3), torch.ones(3)), expected)


def test_a_stretched_window_is_made_of_its_pixels() -> None:
    x = torch.arange(8.0 * 6).view(1, 1, 8, 6)
    apply = Augmentation(AugmentConfig(resized_crop=0.2), torch.zeros(1), sides=(8, 6))
    area = torch.tensor([[0.25, 0.5, 0.5, 0.5]], dtype=torch.float64)  # rows 2 to 5, columns 3 to 5
    found = apply(x, {"area": area})
    expected = x[:, :, 2:6, 3:6].repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.equal(found, expected)
    whole = torch.tensor([[0, 0, 1, 1]], dtype=torch.float64)
    assert torch.equal(apply(x, {"area": whole}), x)


def test_draws_keep_within_their_limits() -> None:
    count = 20_000
    drawn = built(ALL).draw(np.random.default_rng(0), count)
    top, left, height, width = drawn["area"].unbind(1)
    assert (top + height).max() <= 1 and (left + width).max() <= 1 and min(top.min(), left.min()) >= 0
    inner = (height < 1) & (width < 1)
    assert (height * width)[inner].min() >= 0.3 - 1e-9
    assert (height / width)[inner].max() <= 4 / 3 + 1e-9
    assert drawn["jittered"].double().mean() == pytest.approx(0.8, abs=0.02)
    assert drawn["grey"].double().mean() == pytest.approx(0.3, abs=0.02)
    tone = drawn["tone"]
    assert 0.36 <= tone.min() < 0.4 and 1.6 < tone.max() <= 1.6401
    torch.testing.assert_close(drawn["blur_rows"].sum(1), torch.ones(count))


@given(count=st.integers(1, 5), seed=st.integers(0, 2**32), views=st.sampled_from([1, 2]))
def test_an_image_has_the_same_bits_alone_and_in_a_batch(count: int, seed: int, views: int) -> None:
    apply = built(ALL, views=views)
    x, y = seen(plain(count)), torch.arange(count)
    drawn = apply.draw(np.random.default_rng(seed), count)
    together = apply.both(x, y, drawn)[0]
    for i in range(count):
        one = {name: values[i : i + 1] for name, values in drawn.items()}
        assert torch.equal(apply.both(x[i : i + 1], y[i : i + 1], one)[0][0], together[i])


def test_views_are_an_axis_and_each_is_an_image_changed_by_its_own_numbers() -> None:
    both, alone = built(ALL, views=2), built(ALL)
    x = seen(plain())
    drawn = both.draw(np.random.default_rng(1), 5)
    found = both.both(x, torch.zeros(5), drawn)[0]
    assert found.shape == (5, 2, *SPEC.shape) and not torch.equal(found[:, 0], found[:, 1])
    for view in (0, 1):
        own = {name: values[:, view] for name, values in drawn.items()}
        assert torch.equal(found[:, view], alone(x, own))


def test_older_sections_draw_what_they_drew() -> None:
    older = AugmentConfig(crop=1, flip=True).build(SPEC, BLACK)
    assert older is not None
    before, now = (one.draw(np.random.default_rng(2), 4) for one in (older, built(ALL)))
    assert all(torch.equal(before[name], now[name]) for name in ("shift", "flip"))


@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        (AugmentConfig(jitter=0.5), (2, 8, 8), r"images of 1 or 3 channels, but these have 2: leave out jitter"),
        (AugmentConfig(grayscale=0.2), (1, 8, 8), r"augment.grayscale: images of one channel have no colours"),
        (AugmentConfig(blur=0.2), (3, 8, 8, 8), r"nor coloured: leave out all but patch"),
    ],
)
def test_images_without_such_colours_are_refused(config: AugmentConfig, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.build(InputSpec("image", shape, 4), np.zeros(shape[0], np.float32))
