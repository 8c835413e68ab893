"""Small archives in the official layout of Speech Commands: tones in place of words."""

from __future__ import annotations

import io
import tarfile
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

SPEAKERS = {
    "train": ("00176480", "4a294341", "ab00c4b3"),
    "validation": ("026290a7", "8b775397"),
    "test": ("0c40e715", "2aa787cf"),
}
"""By part, of which all but the third are speakers of the official files."""
Made = dict[str, np.ndarray]
"""By name of the file, its samples, int16."""


def speech_files(folder: Path, words: Sequence[str] = ("yes", "no", "tree"), clips: int = 4) -> Made:
    """Writes the unpacked folder, in which each speaker says each word a number of times; lists as well."""
    draw, made = np.random.default_rng(7), Made()
    for number, word in enumerate(words):
        for speakers in SPEAKERS.values():
            for speaker in speakers:
                for take in range(clips):
                    # one of them is shorter than a second and one longer
                    times = np.arange(16_000 - 3000 * (take == 1) + 500 * (take == 2)) / 16_000
                    tone = 0.5 * np.sin(2 * np.pi * (300 * (number + 1) * times + draw.random()))
                    sound = tone + 0.02 * draw.normal(size=len(times))
                    made[f"{word}/{speaker}_nohash_{take}.wav"] = np.round(32_767 * sound.clip(-1, 1)).astype(np.int16)
    for name, samples in made.items():
        write_wav(folder / name, samples)
    write_wav(folder / "_background_noise_" / "white_noise.wav", np.zeros(40_000, np.int16))
    (folder / "README.md").write_text("words\n")
    for part, file in (("validation", "validation_list.txt"), ("test", "testing_list.txt")):
        listed = [name for name in made if name.partition("/")[2].partition("_")[0] in SPEAKERS[part]]
        (folder / file).write_text("".join(f"{name}\n" for name in listed))
    return made


def write_wav(path: Path, samples: np.ndarray, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())


def speech_archive(folder: Path, archive: Path) -> Path:
    """Packs the folder as the official archive is packed; files come in no order."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.rglob("*"), key=lambda path: path.name[::-1])
    with tarfile.open(archive, "w:gz") as packed:
        for path in files:
            packed.add(path, f"./{path.relative_to(folder).as_posix()}", recursive=False)
    return archive


def damaged_archive(archive: Path) -> bytes:
    """The archive with a member that says to be larger than any file of the data set."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        member = tarfile.TarInfo("./yes/00176480_nohash_0.wav")
        member.size = 65 << 20
        packed.addfile(member, io.BytesIO(bytes(member.size)))
    archive.write_bytes(buffer.getvalue())
    return buffer.getvalue()
