"""CelebA: names of image files in the JSON, and the files themselves in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from rayfl.data.sources.leaf.codec import Codec, Part, Split, labels, malformed
from rayfl.data.sources.leaf.pictures import CELEBA_SIDE, celeba_pixels
from rayfl.data.sources.natural import NaturalHeader
from rayfl.data.sources.preparation.trees import open_tree
from rayfl.errors import DataError

_LARGEST_IMAGE = 16 << 20
_HEADER = NaturalHeader(kind="celeba", input="image", shape=(3, CELEBA_SIDE, CELEBA_SIDE), num_classes=2)


class CelebaCodec(Codec):
    """x: the name of an image file; y: 1 if the face smiles, else 0.

    The images are reduced to 84 x 84 and stored as uint8. They are read one row group at a time while the file is
    written, so that not all of them have to fit into memory.

    Args:
        images: CelebA's ``img_align_celeba``, a folder or a zip archive.

    Raises:
        DataError: no such folder or archive.
    """

    def __init__(self, images: Path) -> None:
        self._tree = open_tree(images, _LARGEST_IMAGE)
        self._of_name = {name.rpartition("/")[2]: name for name in self._tree.names}
        if len(self._of_name) < len(self._tree.names):
            raise DataError(f"{images}: two image files have the same name; give the folder that holds CelebA's only")
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def part(self, x: list[object], y: list[object], split: Split, where: str) -> Part:
        for sample, name in enumerate(x):
            if not isinstance(name, str):
                raise malformed(where, f"x[{sample}] is not the name of an image file")
            if name not in self._of_name:
                raise DataError(f"{where}: the image {name!r} of x[{sample}] is not in {self._tree.root}; add it there")
        numbers = np.array([[self._number(str(name))] for name in x], dtype=np.int32).reshape(len(x), 1)
        return Part(numbers, labels(y, 2, where, floats=True))

    def header(self, parts: Iterable[Part]) -> NaturalHeader:
        return _HEADER

    def stored(self, part: Part, header: NaturalHeader) -> Part:
        pixels = np.empty((len(part.y), 3 * CELEBA_SIDE * CELEBA_SIDE), dtype=np.uint8)
        for row, number in zip(pixels, part.x[:, 0].tolist(), strict=True):
            name = self._of_name[self._names[number]]
            row[:] = celeba_pixels(self._tree.read(name), self._tree.place(name))
        return Part(pixels, part.y)

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        return number
