"""Folders that hold a model or an adapter only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from rayfl.errors import ConfigError


@contextmanager
def whole_folder(folder: Path, last: str) -> Iterator[Path]:
    """A place to write files, which go to a folder when the block ends; none of a block that fails does.

    Args:
        folder: is made; may hold other files.
        last: name of the file without which the others are no model: it goes to the folder after them.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    missing = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Within the folder, which may be a link or the only place there that can be written to.
        with TemporaryDirectory(prefix=".partial-", dir=folder) as place:
            yield Path(place)
            for file in sorted(Path(place).iterdir(), key=lambda file: file.name == last):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                file.replace(folder / file.name)
    except (OSError, SafetensorError) as error:  # the latter where a disk is full
        raise ConfigError(f"--out: {folder} cannot be written: {error}") from error
    finally:
        if missing:
            with suppress(OSError):  # it has the files
                folder.rmdir()
