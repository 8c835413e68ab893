"""FEMNIST and Shakespeare from their sources, by LEAF's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from rayfl.data.sources.leaf.codec import Part, Split
from rayfl.data.sources.leaf.letters import NO_LETTER, SHAKESPEARE, WINDOW, letters
from rayfl.data.sources.leaf.nist import NistImages
from rayfl.data.sources.leaf.plays import read_text, speaking_roles
from rayfl.data.sources.leaf.sampling import Plan, Sampling, plan
from rayfl.data.sources.leaf.vectors import FEMNIST
from rayfl.data.sources.leaf.writing import ImportReport, Origin, total, write_clients
from rayfl.data.sources.natural import NaturalHeader
from rayfl.errors import DataError

_ALL = Sampling()


def import_femnist_raw(
    source: Path, destination: Path, sampling: Sampling = _ALL, repeat_first: bool = False
) -> ImportReport:
    """Turn NIST's images into one Parquet file that :class:`rayfl.data.sources.natural.NaturalDataset` reads.

    See :mod:`rayfl.data.sources.leaf.nist` for the rules. Images are read while the file is written, which appears
    under its name only when it is complete.

    Args:
        source: the folder that holds ``by_class`` and ``by_write``, folders or zip archives.
        destination: the Parquet file to write.
        sampling: which clients and samples, and how they are divided.
        repeat_first: take the first image of every writer but the first twice, as LEAF does by mistake.

    Raises:
        DataError: a missing, malformed or unlabelled file, an archive that leads out of itself, nobody left, or a
            destination that cannot be written.
    """
    images = NistImages(source)
    sizes, places = _repeating(images.writers) if repeat_first else (images.writers, None)

    def part(chosen: np.ndarray) -> Part:
        return images.part((chosen if places is None else places[chosen]).tolist())

    warnings = []
    if images.ambiguous:
        warnings.append(f"{source}: {images.ambiguous} images are in several classes; the first counts")
    options = {"kind": "femnist", **asdict(sampling), "repeat_first": repeat_first}
    origin = Origin(source, tuple(sorted(source.glob("*.zip"))), options)
    return _write(destination, FEMNIST, plan(sizes, sampling), part, origin, warnings)


def import_shakespeare_raw(source: Path, destination: Path, sampling: Sampling = _ALL) -> ImportReport:
    """Turn the text of the plays into one Parquet file that :class:`rayfl.data.sources.natural.NaturalDataset` reads.

    See :mod:`rayfl.data.sources.leaf.plays` for the roles. A role's samples are its windows of 80 characters, each with
    the character that follows. Divided by sample, the first ones are the train part, and the next 79, which share
    characters with both parts, are left out.

    Args:
        source: the file.
        destination: the Parquet file to write.
        sampling: which roles and windows, and how they are divided.

    Raises:
        DataError: a file without speaking roles, a character that is not in LEAF's alphabet (names the role), nobody
            left, or a destination that cannot be written.
    """
    windows = Windows({role: _letters(text, role, source) for role, text in speaking_roles(read_text(source)).items()})
    if not windows.sizes:
        raise DataError(
            f"{source}: no role speaks more than {WINDOW} characters; give Project Gutenberg's Complete Works of "
            "Shakespeare in the edition of 1994"
        )
    origin = Origin(source, (source,), {"kind": "shakespeare", **asdict(sampling)})
    return _write(destination, SHAKESPEARE, plan(windows.sizes, sampling, WINDOW - 1), windows.part, origin, [])


class Windows:
    """All windows of several texts.

    Args:
        texts: tokens by role, uint8 of shape (length,).

    Attributes:
        sizes: for every role with a window, how many there are; sorted by name.
    """

    def __init__(self, texts: Mapping[str, np.ndarray]) -> None:
        self.sizes = {role: len(texts[role]) - WINDOW for role in sorted(texts) if len(texts[role]) > WINDOW}
        self._tokens = np.concatenate([texts[role] for role in self.sizes] or [np.empty(0, dtype=np.uint8)])
        # A role's windows begin as many characters later as the ends of the texts before it have no window.
        self._ends = np.cumsum(list(self.sizes.values()), dtype=np.int64)

    def part(self, places: np.ndarray) -> Part:
        """Windows and what follows them.

        Args:
            places: positions in the windows of all roles, one role after the other.

        Returns:
            x uint8 of shape (n, 80), y int16 of shape (n,).
        """
        starts = places + WINDOW * np.searchsorted(self._ends, places, side="right")
        x = self._tokens[starts[:, np.newaxis] + np.arange(WINDOW)]
        return Part(x, self._tokens[starts + WINDOW].astype(np.int16))


def _letters(text: str, role: str, source: Path) -> np.ndarray:
    tokens = letters(text)
    unknown = np.flatnonzero(tokens == NO_LETTER)
    if unknown.size:
        raise DataError(
            f"{source}, role {role!r}: {text[int(unknown[0])]!r} is not in LEAF's alphabet; give Project Gutenberg's "
            "edition of 1994, or replace the character"
        )
    return tokens


def _repeating(sizes: Mapping[str, int]) -> tuple[dict[str, int], np.ndarray]:
    """Sizes, and places in the source, with the first sample of all clients but the first twice."""
    starts = np.cumsum([0, *sizes.values()], dtype=np.int64)[:-1]
    places = np.insert(np.arange(sum(sizes.values())), starts[1:], starts[1:])
    return {client: size + (rank > 0) for rank, (client, size) in enumerate(sizes.items())}, places


def _write(
    destination: Path,
    header: NaturalHeader,
    planned: tuple[Plan, list[str]],
    part: Callable[[np.ndarray], Part],
    origin: Origin,
    warnings: list[str],
) -> ImportReport:
    chosen, said = planned
    sizes = {client: {split: len(places) for split, places in parts.items()} for client, parts in chosen.items()}

    def stored(client: str, split: Split) -> Part:
        return part(chosen[client][split])

    write_clients(destination, header, sizes, stored, origin)
    return ImportReport(
        len(chosen), total(sizes), (*warnings, *(f"{origin.source}: {sentence}" for sentence in said)), destination
    )
