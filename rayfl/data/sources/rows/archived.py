"""Sources that read named text files of one archive, or of the folder that it unpacks to."""

from __future__ import annotations

import os
import shutil
import zipfile
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rayfl.data.files.whole import file_digest, locked, new_file
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.preparing import Order, no_checksum
from rayfl.data.sources.preparation.trees import FileTree, open_tree
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.errors import DataError

_LARGEST_FILE = 512 << 20


class ArchivedSource(CopiedSource):
    """A source whose files are in an archive of its authors, which UCI packs once more for its download.

    Attributes:
        url: where it can be had.
        archive: name of the authors' archive.
        folder: name of the folder in it.
        download_sha256: checksum of what the url gives; None if none is known.
        archive_sha256: checksum of the authors' archive; None if none is known.
    """

    url: ClassVar[str]
    archive: ClassVar[str]
    folder: ClassVar[str]
    download_sha256: ClassVar[str | None] = None
    archive_sha256: ClassVar[str | None] = None

    @abstractmethod
    def _members(self) -> tuple[str, ...]:
        """Returns the paths of the text files that are read, inside of the folder."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The archive; where it is not there, but the unpacked folder is, the text files that are read."""
        archive, folder = self.resolved_root / self.archive, self.resolved_root / self.folder
        unpacked = tuple(folder / name for name in self._members())
        return unpacked if not archive.exists() and all(file.is_file() for file in unpacked) else (archive,)

    def prepare(self, order: Order) -> Path:
        """Gets the files, unless they are there, and makes the copy.

        ``--source`` is the unpacked folder, or path or address of a zip file: UCI's, or the one in it.
        """
        folder = None if order.place is None or is_url(order.place) else Path(order.place).expanduser()
        if folder is not None and folder.is_dir():
            no_checksum(order, f"{folder} is a folder")
            self._copy(folder / self.folder if (folder / self.folder).is_dir() else folder, order)
        elif order.place is None and len(self.files) > 1:
            no_checksum(order, f"{self.resolved_root / self.folder} is a folder")
        else:
            self._get(order)
        return super().prepare(replace(order, place=None, sha256=None))

    def _tree(self) -> FileTree:
        """Returns the files, packed or not."""
        files = self.files
        return open_tree(files[0] if len(files) == 1 else self.resolved_root / self.folder, _LARGEST_FILE)

    def _content(self, tree: FileTree, name: str) -> tuple[str, bytes]:
        """Returns where a text file is, and what is in it.

        Raises:
            DataError: there is no such file, or it is empty.
        """
        # Beside each file, archives made on a Mac have one that is none, in a folder of its own.
        known = [one for one in tree.names if f"/{one}".endswith(f"/{name}") and not one.startswith("__MACOSX/")]
        if not known:
            raise DataError(
                f"{tree.root} lacks {name}; give the whole folder {self.folder}, or its zip file, with --source"
            )
        place, content = tree.place(known[0]), tree.read(known[0])
        if not content.strip():
            raise DataError(f"{place} is empty; get it again")
        return place, content

    def _copy(self, folder: Path, order: Order) -> None:
        if (archive := self.resolved_root / self.archive).exists():
            raise DataError(f"--source: {archive} is there and is what would be read; delete it to use {folder}")
        for name in self._members():
            path = self.resolved_root / self.folder / name
            if order.force:
                path.unlink(missing_ok=True)
            fetch(str(folder / name), path, offline=order.offline, progress=order.progress)

    def _get(self, order: Order) -> None:
        archive, download = self.resolved_root / self.archive, self.resolved_root / f"{self.name}-download.zip"
        if order.force:
            archive.unlink(missing_ok=True)
        with locked(archive, lambda: order.progress(f"waiting for another process that gets {self.archive}", 0, None)):
            made = not archive.exists()
            if made:
                digest = order.sha256 or (self.download_sha256 if order.place is None else None)
                known = None if digest is None else f"sha256:{digest}"
                fetch(order.place or self.url, download, known, offline=order.offline, progress=order.progress)
                _unwrap(download, archive)
            found = file_digest(archive)
            if order.sha256 is None and self.archive_sha256 not in (None, found):
                if made:
                    archive.unlink()
                raise DataError(
                    f"{order.place if made else archive} has the sha256 {found}, but {self.archive} has "
                    f"{self.archive_sha256}: it is damaged or another file; get it again, or say with --sha256 that it "
                    "is meant"
                )

    def _check_there(self) -> None:
        if not self.files[0].is_file():
            raise DataError(
                f"{self.name} is not there: neither {self.files[0]} exists, nor all files of "
                f"{self.resolved_root / self.folder}; get it with `rayfl data prepare {self.name}` (add --source for "
                f"the folder {self.folder} or its zip file), or set the source's root or RAYFL_DATA to the folder that "
                "has it"
            )


def _unwrap(download: Path, archive: Path) -> None:
    """Makes the authors' archive of a file that is it, or that holds it; the file is gone then."""
    try:
        with zipfile.ZipFile(download) as packed:
            inside = archive.name in packed.namelist()
            if inside:
                with packed.open(archive.name) as member, new_file(archive) as file:
                    shutil.copyfileobj(member, file)
    except (OSError, zipfile.BadZipFile) as error:
        download.unlink()
        raise DataError(f"{download} is not a readable zip file: {error}; get it again") from error
    if inside:
        download.unlink()
    else:
        os.replace(download, archive)
