"""The files of Speech Commands: clips in folders of words, in the official archive or unpacked, and their parts."""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rayfl.data.sources.preparation.trees import FolderTree
from rayfl.errors import DataError

CORE = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_OTHERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "bed", "bird", "cat", "dog",
           "happy", "house", "marvin", "sheila", "tree", "wow")  # fmt: skip
_LATER = ("backward", "follow", "forward", "learn", "visual")
WORDS = {"v0.01": tuple(sorted((*CORE, *_OTHERS))), "v0.02": tuple(sorted((*CORE, *_OTHERS, *_LATER)))}
"""By version."""
PARTS = ("validation", "train", "test")
"""In this order in prepared files, so that validation and train, and train and test, lie side by side."""

_LARGEST_FILE = 64 << 20
_BLOCK = 1 << 20
_LISTS = {"validation_list.txt": "validation", "testing_list.txt": "test"}
_CLIP = re.compile(r"(?:^|/)(?P<word>[^/_][^/]*)/(?P<speaker>[^/.][^/]*)_nohash_(?P<number>\d+)\.wav$")
_HASHES = 2**27 - 1
"""``MAX_NUM_WAVS_PER_CLASS`` of the README."""
_VALIDATION_PERCENT, _TEST_PERCENT = 10, 10


@dataclass(frozen=True, slots=True)
class Clip:
    """A recording of a word.

    Attributes:
        word: what is said.
        speaker: the speaker's hash, eight hexadecimal digits in the official files.
        number: which of the speaker's recordings of the word.
    """

    word: str
    speaker: str
    number: int

    @classmethod
    def of(cls, name: str) -> Clip | None:
        """The clip of a file by its name; None for other files, such as noise in ``_background_noise_``."""
        found = _CLIP.search(name)
        return None if found is None else cls(found["word"], found["speaker"], int(found["number"]))


def part_of(speaker: str) -> str:
    """The part of a speaker by the rule of the data set's README (``which_set`` with 10 % and 10 %).

    The SHA-1 of the speaker's hash, as an integer modulo 2^27 and in percent of 2^27 - 1, says ``validation`` below 10,
    ``test`` below 20, and else ``train``. The official lists were made by it.
    """
    digest = int(hashlib.sha1(speaker.encode(), usedforsecurity=False).hexdigest(), 16)
    percent = digest % (_HASHES + 1) * (100 / _HASHES)
    if percent < _VALIDATION_PERCENT:
        return "validation"
    return "test" if percent < _VALIDATION_PERCENT + _TEST_PERCENT else "train"


def parts_of(place: Path, words: Iterable[str]) -> Mapping[Clip, str]:
    """The clips of the archive or folder, and the official part of each.

    The parts are those of ``validation_list.txt`` and ``testing_list.txt``; without either file, those of
    :func:`part_of`.

    Args:
        place: the archive (tar, compressed by gzip), or the folder that it unpacks to.
        words: those that there may be.

    Raises:
        DataError: neither can be read, there is no clip, one is there twice, a word is none of ``words``, or one of the
            two lists is missing.
    """
    clips, listed, allowed = dict[Clip, str](), dict[str, set[str]](), set(words)
    for name, read in files(place):
        last = PurePosixPath(name).name
        if last in _LISTS:
            listed[last] = set(read().decode(errors="replace").split())
        elif (clip := Clip.of(name)) is not None:
            if clip.word not in allowed:
                raise DataError(
                    f"{place}: {name} is in the folder of {clip.word!r}, which is no word of this version; set "
                    "dataset.version to that of the files, or remove the folder"
                )
            if clip in clips:
                raise DataError(f"{place}: {name} is there twice; give the folder of one version")
            clips[clip] = part_of(clip.speaker)
    if not clips:
        raise DataError(
            f"{place} has no files <word>/<speaker>_nohash_<number>.wav; give the official archive or its unpacked "
            "folder"
        )
    if not listed:
        return clips
    if missing := _LISTS.keys() - listed.keys():
        raise DataError(f"{place} lacks {min(missing)}, but has the other list; get both, or leave out both")
    known = {name: part for file, part in _LISTS.items() for name in listed[file]}
    return {clip: known.get(f"{clip.word}/{clip.speaker}_nohash_{clip.number}.wav", "train") for clip in clips}


def files(place: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yields all files of a folder or an archive: name, and what reads the content, before the next is asked for.

    Nothing is unpacked to the disk.

    Raises:
        DataError: it is no folder and no such archive, is damaged, or a file of it is too large.
    """
    if place.is_dir():
        tree = FolderTree(place, _LARGEST_FILE)
        for name in tree.names:
            yield name, lambda name=name: tree.read(name)  # type: ignore[misc]
        return
    with _of_archive(place), gzip.open(place) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
        for member in archive:
            if member.isfile():
                yield member.name, lambda member=member: _content(place, archive, member)  # type: ignore[misc]
        while unpacked.read(_BLOCK):  # up to the checksum at the end of the file
            pass


def _content(place: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _LARGEST_FILE:
        raise DataError(f"{place}: {member.name} is larger than {_LARGEST_FILE:,} bytes; no file of this data set is")
    with _of_archive(place):
        file = archive.extractfile(member)
        assert file is not None  # of a member that is a file
        return file.read()


@contextmanager
def _of_archive(place: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            f"{place} is neither a folder nor a readable archive (tar.gz): {error}; give the official one"
        ) from error
