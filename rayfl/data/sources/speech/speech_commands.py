"""Speech Commands: a second of sound in which somebody says a word; each speaker is a client."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.audio.features import LogMel
from rayfl.data.audio.wav import read_wav
from rayfl.data.files.whole import file_digest
from rayfl.data.sources.base import Samples
from rayfl.data.sources.preparation.download import Progress, fetch, is_url
from rayfl.data.sources.preparation.pooled_file import Part, PooledFile, PooledHeader
from rayfl.data.sources.preparation.pooled_writing import write_rows
from rayfl.data.sources.preparation.preparing import Order, PreparedSource, RawFiles, no_checksum
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.speech.speech_files import CORE, PARTS, WORDS, Clip, files, parts_of
from rayfl.errors import DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

Version = Literal["v0.02", "v0.01"]

_CLIPS = {"v0.01": 64_721, "v0.02": 105_829}
_RATE = 16_000
_BATCH = 256
_OF_LOG_MEL = ("mels", "window_ms", "hop_ms")


class SpeechCommandsSource(PreparedSource):
    """Configuration of Speech Commands (Warden, 2018): 105,829 clips of 35 words by 2,618 speakers, or version 0.01.

    A clip is a second at 16 kHz: shorter ones are filled up with zeros at their end, longer ones cut. Models see the
    logarithms of energies in bands of frequencies along time (:class:`rayfl.data.audio.features.LogMel`), images of
    shape (1, mels, times), or the waveform in [-1, 1), of shape (1, 1, 16000).

    Speakers are clients, by the hash in the names of their files; ``client=none`` pools the clips. The official parts
    divide speakers, so nobody has clips in two of them.
    """

    sha256: ClassVar[dict[str, str]] = {
        "v0.01": "743935421bb51cccdb6bdd152e04c5c70274e935c82119ad7faeec31780d811d",
        "v0.02": "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
    }
    """Of the official archives, as torchaudio and TensorFlow Datasets have them."""

    name: Literal["speech_commands"] = Field(
        default="speech_commands", description="Words that 2,618 people say, a second of sound each."
    )
    version: Version = Field(default="v0.02", description="Of the data set: 35 words, or 30 in v0.01.")
    words: Literal["all", "core", "core_unknown"] = Field(
        default="all",
        description="The classes: all words; the ten core words (yes, no, up, down, left, right, on, off, stop, go); "
        "or these, and one class of all other words.",
    )
    features: Literal["log_mel", "waveform"] = Field(
        default="log_mel",
        description="What a sample is: a log-mel spectrogram, shape (1, mels, times); or the waveform, (1, 1, 16000).",
    )
    mels: int = Field(default=40, ge=2, le=256, description="Bands of frequencies of log_mel.")
    window_ms: int = Field(default=25, ge=2, le=500, description="Milliseconds of a window of log_mel.")
    hop_ms: int = Field(
        default=10, ge=1, le=500, description="Milliseconds from the beginning of a window of log_mel to the next."
    )
    client: Literal["speaker", "none"] = Field(
        default="speaker",
        description="speaker: speakers are clients (partition=natural); none: clips are pooled, and the partition "
        "makes clients of them.",
    )
    part: Part = Field(
        default="both",
        description="Whose clips are used: of the speakers of the official training part, of the test part, or of "
        "both. With train, the official test part is of other speakers. Each client's own test part is drawn by "
        "holdout.test.",
    )
    validation: Literal["train", "leave_out"] = Field(
        default="train",
        description="What becomes of the speakers of the official validation part: they belong to the training part, "
        "or are left out.",
    )

    @model_validator(mode="after")
    def _features_exist(self) -> Self:
        if self.features == "waveform":
            fields = type(self).model_fields
            if given := [name for name in _OF_LOG_MEL if getattr(self, name) != fields[name].default]:
                raise ValueError(f"{given[0]}: waveforms have none; leave it out, or set features=log_mel")
        elif not (self._log_mel.filters.sum(1) > 0).all():
            raise ValueError(
                f"mels: some of {self.mels} bands lie between the frequencies of windows of {self.window_ms} ms, "
                f"{1000 / self.window_ms:g} Hz apart; set fewer mels or a larger window_ms"
            )
        return self

    @property
    def parts(self) -> tuple[str, ...]:
        """See the base class."""
        return PARTS

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """The samples of :attr:`part`; they are prepared first if the archive or its folder is in the data root."""
        if not self.prepared_path.exists():
            if not any(place.exists() for place in (self._archive, self._folder)):
                raise DataError(f"{self.prepared_path} does not exist; {self.how_to_prepare()}")
            self.prepare(Order(offline=True))
        file = PooledFile(self.prepared_path)
        found = file.neighbours([part for part in PARTS if part in self._parts])
        if self.client == "none":
            found = replace(found, clients=None)
        return replace(found, remarks=lambda: self._remarks(file.header))

    def class_names(self) -> tuple[str, ...]:
        """See the base class."""
        if self.words == "all":
            return WORDS[self.version]
        return CORE if self.words == "core" else (*CORE, "unknown")

    @property
    def _parts(self) -> tuple[str, ...]:
        validation = ("validation",) if self.validation == "train" and self.part != "test" else ()
        return (*validation, *(("train", "test") if self.part == "both" else (self.part,)))

    @property
    def _log_mel(self) -> LogMel:
        return LogMel(_RATE, self.window_ms * _RATE // 1000, self.hop_ms * _RATE // 1000, self.mels)

    @property
    def _spec(self) -> InputSpec:
        shape = (1, _RATE) if self.features == "waveform" else (self.mels, self._log_mel.times(_RATE))
        return InputSpec("image", (1, *shape), len(self.class_names()))

    @property
    def _stem(self) -> str:
        what = "waveform" if self.features == "waveform" else f"mel-{self.mels}-{self.window_ms}-{self.hop_ms}"
        return f"{self.name}-{self.version}-{self.words}-{what}"

    def _choices(self) -> Mapping[str, str]:
        names = ("version", "words", "features", *(_OF_LOG_MEL if self.features == "log_mel" else ()))
        return {"name": self.name, **{name: str(getattr(self, name)) for name in names}}

    @property
    def _archive(self) -> Path:
        return self.resolved_root / f"speech_commands_{self.version}.tar.gz"

    @property
    def _folder(self) -> Path:
        return self.resolved_root / f"speech_commands_{self.version}"

    def _remarks(self, header: PooledHeader) -> Sequence[Remark]:
        count = sum(part.rows for part in header.parts.values())
        if self.words == "core" or count == _CLIPS[self.version]:
            return []
        return [
            Remark(
                f"the files of speech_commands have {count} clips, but the official ones of {self.version} have "
                f"{_CLIPS[self.version]}: get them again, if the official ones are meant"
            )
        ]

    def _obtain(self, order: Order) -> RawFiles:
        """--source is the unpacked folder, or path or address of the archive, which is read without being unpacked."""
        if order.place is not None and not is_url(order.place):
            place = Path(order.place).expanduser()
        elif order.place is None and not self._archive.exists() and self._folder.is_dir():
            place = self._folder
        else:
            url = order.place or f"http://download.tensorflow.org/data/{self._archive.name}"
            digest = f"sha256:{order.sha256 or self.sha256[self.version]}"
            fetch(url, self._archive, digest, offline=order.offline, progress=order.progress)
            return RawFiles(self._archive, (self._archive,))
        if place.is_dir():
            no_checksum(order, f"{place} is a folder")
            return RawFiles(place, ())
        if not place.is_file():
            raise DataError(f"--source: {place} does not exist; give the official archive or its unpacked folder")
        self._check(place, order.sha256 or self.sha256[self.version])
        return RawFiles(place, (place,))

    def _check(self, archive: Path, digest: str) -> None:
        if (found := file_digest(archive)) == digest.lower():
            return
        fix = "it is damaged or another file; get it again, or say with --sha256 that it is meant"
        for version, known in self.sha256.items():
            if found == known:
                fix = f"it is that of {version}; set version={version}"
        raise DataError(f"{archive} has the sha256 {found}, not {digest}: {fix}")

    def _write(self, path: Path, folder: Path, source: str, progress: Progress) -> PooledHeader:
        progress("listing the clips", 0, None)
        numbers = {word: number for number, word in enumerate(self.class_names())}
        known = {clip: part for clip, part in parts_of(folder, WORDS[self.version]).items() if self._has(clip)}
        if not known:
            raise DataError(f"{folder} has no clip of a core word; set dataset.words=all")
        clips = sorted(known, key=lambda clip: (PARTS.index(known[clip]), clip.speaker, clip.word, clip.number))
        place = {clip: row for row, clip in enumerate(clips)}
        y = np.array([numbers.get(clip.word, numbers.get("unknown", -1)) for clip in clips], dtype=np.int64)
        rows = Counter(dict.fromkeys(PARTS, 0))
        clients: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
        for clip in clips:
            rows[known[clip]] += 1
            clients[known[clip]][clip.speaker] += 1
        with _spool(path) as spool:
            done = 0
            for at, waveforms in self._batches(folder, place):
                for row, x in zip(at, self._features(waveforms), strict=True):
                    spool.seek(row * x.nbytes)
                    spool.write(x.tobytes())
                done += len(at)
                progress("reading the clips", done, len(clips))
            spool.flush()
            mapped = np.memmap(spool, np.float32, "r", shape=(len(clips), *self._spec.shape))
            return write_rows(path, self.name, mapped, y, rows, len(numbers), source, self._spec, clients=clients)

    def _has(self, clip: Clip) -> bool:
        return self.words != "core" or clip.word in CORE

    def _batches(self, folder: Path, place: Mapping[Clip, int]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yields rows and waveforms, int16 of shape (n, 16000), in the order of the files."""
        at, waveforms = list[int](), np.zeros((_BATCH, _RATE), np.int16)
        for name, read in files(folder):
            clip = Clip.of(name)
            if clip is None or clip not in place:
                continue
            found = read_wav(read(), f"{folder}/{name}", _RATE)[:_RATE]
            waveforms[len(at), : len(found)] = found
            at.append(place[clip])
            if len(at) == _BATCH:
                yield at, waveforms
                at, waveforms = [], np.zeros_like(waveforms)
        if at:
            yield at, waveforms[: len(at)]

    def _features(self, waveforms: np.ndarray) -> np.ndarray:
        """float32 of shape (n, *shape) of int16 of shape (n, 16000)."""
        scaled = waveforms.astype(np.float32) / np.float32(2**15)
        found = scaled if self.features == "waveform" else self._log_mel(scaled)
        return found.reshape(len(waveforms), *self._spec.shape)


@contextmanager
def _spool(path: Path) -> Iterator[IO[bytes]]:
    """A file beside another one for features of clips, which come in another order than they are written in.

    Raises:
        DataError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as spool:
            yield spool
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be written to: {error}; choose another folder with RAYFL_DATA"
        ) from error
