"""Log-mel spectrograms: sums of squares written out, SciPy's transform, and what a tone must give."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from rayfl.data.audio.features import LogMel

PLAIN = LogMel(16_000, 400, 160, 40)


def noise(count: int, samples: int) -> np.ndarray:
    return np.random.default_rng(4).uniform(-1, 1, (count, samples))


def by_hand(waveform: np.ndarray, rate: int, window: int, hop: int, bands: int) -> np.ndarray:
    """The formula as sums over samples and frequencies, with bands found corner by corner."""
    n, k = np.arange(window), np.arange(window // 2 + 1)
    hann = np.sin(np.pi * n / window) ** 2
    waves = np.exp(-2j * np.pi * np.outer(k, n) / window)
    mels = [i * 2595 * np.log10(1 + rate / 1400) / (bands + 1) for i in range(bands + 2)]
    corners = [700 * (10 ** (mel / 2595) - 1) for mel in mels]
    columns = []
    for start in range(0, len(waveform) - window + 1, hop):
        power = np.abs(waves @ (hann * waveform[start : start + window])) ** 2
        column = []
        for low, middle, high in zip(corners, corners[1:], corners[2:], strict=False):
            weights = np.interp(k * rate / window, [low, middle, high], [0, 1, 0], left=0, right=0)
            column.append(np.log((weights * power).sum() + 1e-6))
        columns.append(column)
    return np.array(columns).T


@pytest.mark.parametrize(
    ("rate", "window", "hop", "bands", "samples"), [(16_000, 400, 160, 40, 4000), (8_000, 128, 64, 9, 1000)]
)
def test_features_are_the_sums_of_the_formula(rate: int, window: int, hop: int, bands: int, samples: int) -> None:
    features = LogMel(rate, window, hop, bands)
    waveforms = noise(3, samples)
    found = features(waveforms)
    assert found.dtype == np.float32 and found.shape == (3, bands, features.times(samples))
    for one, waveform in zip(found, waveforms, strict=True):
        np.testing.assert_allclose(one, by_hand(waveform, rate, window, hop, bands), rtol=1e-6)


def test_spectra_are_those_of_scipy() -> None:
    (waveform,) = noise(1, 16_000)
    hann = signal.get_window("hann", 400)
    _, _, spectrum = signal.stft(
        waveform, window=hann, nperseg=400, noverlap=240, boundary=None, padded=False, scaling="spectrum"
    )
    energies = PLAIN.filters @ np.abs(spectrum * hann.sum()) ** 2
    assert energies.shape == (40, 98)
    np.testing.assert_allclose(PLAIN(waveform[None])[0], np.log(energies + 1e-6), rtol=1e-6)


def test_bands_share_what_lies_between_their_middles() -> None:
    """Between the middles of the first and the last band the triangles of each frequency sum to 1."""
    frequencies = np.arange(201) * 40
    mels = np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 42)
    corners = 700 * (10 ** (mels / 2595) - 1)
    inside = (frequencies >= corners[1]) & (frequencies <= corners[-2])
    np.testing.assert_allclose(PLAIN.filters.sum(0)[inside], 1, atol=1e-12)
    assert (PLAIN.filters.sum(1) > 0).all() and PLAIN.filters.max() <= 1


@pytest.mark.parametrize("frequency", [200, 1000, 3520])
def test_a_tone_is_in_the_band_of_its_frequency(frequency: int) -> None:
    found = PLAIN(0.5 * np.sin(2 * np.pi * frequency * np.arange(16_000) / 16_000)[None])[0]
    assert (found.argmax(0) == PLAIN.filters[:, frequency // 40].argmax()).all()
    # A tone of amplitude a has |X| = a / 2 * sum(h) = a w / 4 at its frequency, and half of it at both neighbours.
    power = np.zeros(201)
    power[frequency // 40 + np.arange(-1, 2)] = (0.5 * 400 / 4) ** 2 * np.array([0.25, 1, 0.25])
    expected = np.log(PLAIN.filters @ power + 1e-6)
    loud = expected > 0
    np.testing.assert_allclose(found[loud], np.repeat(expected[loud, None], 98, 1), atol=1e-6)


def test_silence_is_the_floor_and_short_waveforms_have_no_window() -> None:
    np.testing.assert_allclose(PLAIN(np.zeros((1, 800))), np.log(1e-6), rtol=1e-6)
    assert [PLAIN.times(samples) for samples in (399, 400, 559, 560, 16_000)] == [0, 1, 1, 2, 98]
