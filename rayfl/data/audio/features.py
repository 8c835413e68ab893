"""Log-mel spectrograms of waveforms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_FLOOR = 1e-6
"""What is added to an energy before its logarithm; of a full-scale tone it is some 10^4."""


@dataclass(frozen=True)
class LogMel:
    """Logarithms of the energies in bands of frequencies that are evenly spaced in mel, along time.

    With w = ``window`` samples x_n of a window that begins every ``hop`` samples (no padding, so all lie inside), the
    spectrum is X_k = sum_n h_n x_n exp(-2 pi i k n / w) at the frequencies f_k = k rate / w, k = 0..w/2, with the
    periodic Hann window h_n = sin(pi n / w)^2. Band b of B has the energy E_b = sum_k W_bk |X_k|^2, and the feature is
    ln(E_b + 1e-6).

    The bands are triangles of height 1: with B + 2 corners c_0..c_(B+1) evenly spaced from 0 to rate / 2 on HTK's scale
    mel(f) = 2595 log10(1 + f / 700), W_b rises linearly in f from c_b to 1 at c_(b+1) and falls to 0 at c_(b+2). These
    are the filters of torchaudio and librosa with ``htk`` and without norm.

    Attributes:
        rate: samples a second.
        window: samples of a window, even.
        hop: samples from the beginning of a window to that of the next.
        bands: B.
    """

    rate: int
    window: int
    hop: int
    bands: int

    @cached_property
    def filters(self) -> np.ndarray:
        """W, float64 of shape (bands, window // 2 + 1)."""
        top = 2595 * np.log10(1 + self.rate / 2 / 700)
        corners = 700 * (10 ** (np.linspace(0, top, self.bands + 2) / 2595) - 1)
        frequencies = np.arange(self.window // 2 + 1) * self.rate / self.window
        rising = (frequencies - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
        falling = (corners[2:, None] - frequencies) / (corners[2:] - corners[1:-1])[:, None]
        found: np.ndarray = np.maximum(0, np.minimum(rising, falling))
        return found

    def times(self, samples: int) -> int:
        """How many windows waveforms of a number of samples have; 0 if they are shorter than one."""
        return max(0, 1 + (samples - self.window) // self.hop)

    def __call__(self, waveforms: np.ndarray) -> np.ndarray:
        """The features of some waveforms.

        Computed in float64, so that processors that round otherwise give the same float32, but for rare last bits.

        Args:
            waveforms: in [-1, 1], of shape (n, samples), at least one window long.

        Returns:
            float32 of shape (n, bands, times).
        """
        x = torch.from_numpy(waveforms.astype(np.float64))
        spectrum = torch.stft(
            x,
            self.window,
            self.hop,
            window=torch.hann_window(self.window, dtype=x.dtype),
            center=False,
            return_complex=True,
        )
        power = spectrum.real.square() + spectrum.imag.square()
        energies: Tensor = torch.from_numpy(self.filters) @ power
        found: np.ndarray = torch.log(energies + _FLOOR).float().numpy()
        return found
