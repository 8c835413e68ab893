"""Waveforms of WAV files."""

from __future__ import annotations

import io
import wave

import numpy as np

from rayfl.errors import DataError

_BYTES = 2


def read_wav(content: bytes, place: str, rate: int) -> np.ndarray:
    """Returns the samples of a WAV file of one channel and 16 bits, int16 of shape (n,), n at least 1.

    Args:
        content: the file's bytes.
        place: the file, for messages.
        rate: samples a second that it must have.

    Raises:
        DataError: it is no such file, or is cut off.
    """
    try:
        with wave.open(io.BytesIO(content)) as file:
            found = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            count = file.getnframes()
            samples = file.readframes(count)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last for a place outside of the file
        raise DataError(f"{place} is not a readable WAV file: {str(error) or 'it ends early'}; get it again") from error
    if found != (1, 8 * _BYTES, rate):
        raise DataError(
            f"{place} has {found[0]} channels of {found[1]} bits at {found[2]} Hz; it must have one of {8 * _BYTES} "
            f"bits at {rate} Hz"
        )
    if not count or len(samples) != _BYTES * count:
        raise DataError(
            f"{place} has {len(samples) // _BYTES} samples where its head says {count}, and needs at least one; get it "
            "again"
        )
    return np.frombuffer(samples, dtype="<i2")
