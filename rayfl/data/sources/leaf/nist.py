"""FEMNIST from NIST's Special Database 19: the same images by class and by writer.

LEAF takes writers from ``by_write/<part>/<writer>/<type>/<image>.png`` and labels from
``by_class/<class>/hsf_<part>/<image>.png``, where <class> is the character's code in hexadecimal; a writer's
image has the class of the file with the same content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rayfl.data.sources.leaf.codec import Part
from rayfl.data.sources.leaf.pictures import femnist_pixels
from rayfl.data.sources.preparation.trees import FileTree, open_tree
from rayfl.errors import DataError

_LARGEST_IMAGE = 1 << 20
_BY_CLASS = re.compile(r"(?:by_class/)?([0-9a-f]{2})/hsf_[^/]*/[^/]+\.png")
_BY_WRITE = re.compile(r"(?:by_write/)?[^/]+/([^/]+)/[^/]+/[^/]+\.png")
_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FETCH = "fetch by_class.zip and by_write.zip of NIST's Special Database 19"


class NistImages:
    """The images of all writers, with their labels; images are read when they are asked for.

    Args:
        source: the folder that holds ``by_class`` and ``by_write``, each a folder or a zip archive (``by_class.zip``).

    Attributes:
        writers: for every writer, how many images there are; sorted by name.
        ambiguous: how many images are in several classes; the first of these counts, as in LEAF.

    Raises:
        DataError: a folder or archive is missing or empty, or a class is none of the 62.
    """

    def __init__(self, source: Path) -> None:
        self._classes, self.ambiguous = _labels(_tree(source, "by_class"))
        self._tree = _tree(source, "by_write")
        images: dict[str, list[str]] = {}
        for name in self._tree.names:
            if found := _BY_WRITE.fullmatch(name):
                images.setdefault(found.group(1), []).append(name)
        if not images:
            raise DataError(f"{self._tree.root} has no file <part>/<writer>/<type>/<image>.png; {_FETCH}")
        self.writers = {writer: len(images[writer]) for writer in sorted(images)}
        self._images = [name for writer in self.writers for name in images[writer]]

    def part(self, places: Sequence[int]) -> Part:
        """Images and labels.

        Args:
            places: positions in the images of all writers, one writer after the other.

        Returns:
            x uint8 of shape (n, 784), y int16 of shape (n,).

        Raises:
            DataError: an unreadable image, or one that is in no class.
        """
        x = np.empty((len(places), 784), dtype=np.uint8)
        y = np.empty(len(places), dtype=np.int16)
        for row, place in enumerate(places):
            name = self._images[place]
            content, where = self._tree.read(name), self._tree.place(name)
            label = self._classes.get(_digest(content))
            if label is None:
                raise DataError(f"{where} has the content of no file in by_class; {_FETCH}, both complete")
            x[row], y[row] = femnist_pixels(content, where), label
        return Part(x, y)


def _tree(source: Path, name: str) -> FileTree:
    for path in (source / name, source / f"{name}.zip"):
        if path.exists():
            return open_tree(path, _LARGEST_IMAGE)
    raise DataError(f"{source} has neither {name} nor {name}.zip; {_FETCH}, and give the folder that holds them")


def _labels(tree: FileTree) -> tuple[dict[bytes, int], int]:
    """Label by digest of the image, and how many images have several labels."""
    labels: dict[bytes, int] = {}
    ambiguous: set[bytes] = set()
    for name in tree.names:
        if not (found := _BY_CLASS.fullmatch(name)):
            continue
        character = chr(int(found.group(1), 16))
        if character not in _CHARACTERS:
            raise DataError(f"{tree.place(name)}: {found.group(1)} is the code of no digit and no letter; remove it")
        digest, label = _digest(tree.read(name)), _CHARACTERS.index(character)
        # The classes come in ascending order, digits first.
        if labels.setdefault(digest, label) != label:
            ambiguous.add(digest)
    if not labels:
        raise DataError(f"{tree.root} has no file <class>/hsf_<part>/<image>.png; {_FETCH}")
    return labels, len(ambiguous)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
