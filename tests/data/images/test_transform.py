"""Resizing and normalization, and the moments they need."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.images.transform import Normalization, TransformConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec

COLOUR = InputSpec("image", (3, 8, 8), 10)
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)


def no_moments() -> Moments:
    raise AssertionError("not needed")


def test_as_stored_is_the_unit_interval_in_fresh_memory() -> None:
    preprocess = TransformConfig().build(COLOUR, no_moments)
    floats = PIXELS.astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(preprocess(PIXELS), floats)
    again = preprocess(floats)
    np.testing.assert_array_equal(again, floats)
    again += 1
    assert preprocess.spec == COLOUR and floats.max() <= 1


def test_resizing_is_what_pillow_does_with_the_whole_image() -> None:
    preprocess = TransformConfig(resize=6).build(COLOUR, no_moments)
    whole = Image.fromarray(PIXELS[3].transpose(1, 2, 0)).resize((6, 6), Image.Resampling.BILINEAR)
    found = preprocess(PIXELS)
    assert found.shape == (40, 3, 6, 6) and preprocess.spec.shape == (3, 6, 6)
    np.testing.assert_array_equal(found[3], np.asarray(whole).transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    floats = preprocess(PIXELS.astype(np.float32) / np.float32(255))
    np.testing.assert_allclose(floats, found, atol=1.01 / 255)


def test_an_image_of_the_right_size_and_an_empty_split_pass() -> None:
    preprocess = TransformConfig(resize=8).build(COLOUR, no_moments)
    np.testing.assert_array_equal(preprocess(PIXELS), PIXELS.astype(np.float32) / np.float32(255))
    assert TransformConfig(resize=4).build(COLOUR, no_moments)(PIXELS[:0]).shape == (0, 3, 4, 4)


def test_dataset_normalization_gives_mean_0_and_deviation_1() -> None:
    preprocess = TransformConfig(normalize="dataset").build(COLOUR, lambda: moments_of(PIXELS))
    found = preprocess(PIXELS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.mean((0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(found.std((0, 2, 3)), 1, atol=1e-5)


def test_given_numbers_are_used_per_channel_or_for_all() -> None:
    scaled = PIXELS.astype(np.float32) / np.float32(255)
    three = Normalization(mean=(0.1, 0.2, 0.3), std=(1, 2, 4))
    found = TransformConfig(normalize=three).build(COLOUR, no_moments)(PIXELS)
    np.testing.assert_allclose(found[:, 2], (scaled[:, 2] - 0.3) / 4, rtol=1e-5, atol=1e-6)
    one = TransformConfig(normalize=Normalization(mean=(0.5,), std=(0.5,))).build(COLOUR, no_moments)
    np.testing.assert_allclose(one(PIXELS), scaled * 2 - 1, rtol=1e-5, atol=1e-6)


def test_constant_values_become_0() -> None:
    constant = np.full((5, 1, 2, 2), 7, dtype=np.uint8)
    preprocess = TransformConfig(normalize="dataset").build(
        InputSpec("image", (1, 2, 2), 2), lambda: moments_of(constant)
    )
    np.testing.assert_allclose(preprocess(constant), 0, atol=1e-6)


def test_vectors_are_normalized_number_by_number() -> None:
    x = np.random.default_rng(1).normal([1, 50], [3, 0.1], (500, 2)).astype(np.float32)
    found = TransformConfig(normalize="dataset").build(InputSpec("image", (2,), 2), lambda: moments_of(x))(x)
    np.testing.assert_allclose(found.std(0), 1, rtol=1e-3)


def test_tokens_become_int64_and_are_not_transformed() -> None:
    words = InputSpec("tokens", (4,), 5, 9)
    assert TransformConfig().build(words, no_moments)(np.ones((2, 4), np.uint16)).dtype == np.int64
    with pytest.raises(ConfigError, match="transform: the inputs are tokens"):
        TransformConfig(normalize="dataset").build(words, no_moments)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 numbers for images of 3 channels"):
        TransformConfig(normalize=Normalization(mean=(0, 0), std=(1, 1))).build(COLOUR, no_moments)
    with pytest.raises(ConfigError, match=r"transform.resize: inputs of the shape"):
        TransformConfig(resize=3).build(InputSpec("image", (5,), 2), no_moments)
    for mean, std in (((0,), (1, 1)), ((0,), (0,)), ((float("nan"),), (1,)), ((), ())):
        with pytest.raises(ValidationError):
            Normalization(mean=mean, std=std)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(0, 60), st.booleans(), st.integers(0, 5))
def test_moments_do_not_depend_on_how_inputs_are_divided(size: int, cut: int, pixels: bool, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 256, (size, 2, 3), dtype=np.uint8)
    values = x / 255
    if not pixels:
        x = values.astype(np.float32)
    whole, parts = moments_of(x), moments_of(x[:cut]) + moments_of(x[cut:])
    np.testing.assert_allclose(whole.mean, values.mean((0, 2)), rtol=1e-5)
    np.testing.assert_allclose(whole.std, values.std((0, 2)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose([*parts.total, *parts.squares], [*whole.total, *whole.squares], rtol=1e-12)
    assert parts.count == whole.count


def test_sums_of_pixels_are_exact_over_many_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = moments_of(PIXELS)
    monkeypatch.setattr("rayfl.data.images.moments.CHUNK_VALUES", 1000)
    assert moments_of(PIXELS) == whole
