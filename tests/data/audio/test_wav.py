"""WAV files: their samples, and every way in which they may be none."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
from scipy.io import wavfile

from rayfl.data.audio.wav import read_wav
from rayfl.errors import DataError

SAMPLES = np.array([0, 1, -1, 32767, -32768, 300], dtype=np.int16)


def written(channels: int = 1, width: int = 2, rate: int = 16_000, content: bytes = SAMPLES.tobytes()) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(content)
    return buffer.getvalue()


def test_samples_are_those_that_scipy_writes_and_reads() -> None:
    buffer = io.BytesIO()
    wavfile.write(buffer, 16_000, SAMPLES)
    for content in (buffer.getvalue(), written()):
        assert read_wav(content, "a.wav", 16_000).tolist() == SAMPLES.tolist()
        assert wavfile.read(io.BytesIO(content))[1].tolist() == SAMPLES.tolist()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "words/a.wav is not a readable WAV file: it ends early; get it again"),
        (b"no sound at all", "is not a readable WAV file: file does not start with RIFF id"),
        (written()[:30], "is not a readable WAV file"),
        (written().replace(b"data", b"dat4"), "is not a readable WAV file"),
        (written()[:16] + b"\xff" * 4 + written()[20:], "is not a readable WAV file: it ends early"),
        (
            written(channels=2),
            "words/a.wav has 2 channels of 16 bits at 16000 Hz; it must have one of 16 bits at 16000",
        ),
        (written(width=1), "has 1 channels of 8 bits at 16000 Hz"),
        (written(rate=8000), "has 1 channels of 16 bits at 8000 Hz"),
        (written()[:-3], "words/a.wav has 4 samples where its head says 6, and needs at least one; get it again"),
        (written(content=b""), "has 0 samples where its head says 0, and needs at least one"),
    ],
)
def test_what_is_no_such_file_is_named(content: bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_wav(content, "words/a.wav", 16_000)


def test_floats_are_no_samples_of_16_bits() -> None:
    buffer = io.BytesIO()
    wavfile.write(buffer, 16_000, SAMPLES.astype(np.float32))
    with pytest.raises(DataError, match=r"is not a readable WAV file: unknown format: 3"):
        read_wav(buffer.getvalue(), "a.wav", 16_000)
