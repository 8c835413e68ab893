"""Files on local disks and NFS: written as a whole or not at all, and never through a link."""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path


def link_local(target: Path, data: bytes) -> bool | None:
    """Creates a file atomically unless it exists; None if the file system has no hard links."""
    ready = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.new")
    write_local(ready, data)
    try:
        os.link(ready, target)
    except FileExistsError:
        # Over NFS the answer to a link that was made may be lost, and the repeated request fails.
        return ready.stat().st_nlink == 2
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            return None
        raise
    finally:
        ready.unlink(missing_ok=True)
    return True


def open_to_append(path: Path) -> TextIOWrapper:
    """Opens a text file to append to, or creates it; never follows a link.

    Raises:
        OSError: ``ELOOP`` for a link, or why else it cannot be opened.
    """
    return open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def delete_local(base: Path, path: str) -> None:
    """Deletes a file below a folder, step by step, so that no link can lead elsewhere."""
    *folders, name = path.split("/")
    with ExitStack() as opened:

        def open_folder(place: str | Path, flags: int, within: int | None = None) -> int:
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=within)
            opened.callback(os.close, descriptor)
            return descriptor

        descriptor = open_folder(base, 0)
        for folder in folders:
            descriptor = open_folder(folder, os.O_NOFOLLOW, descriptor)
        os.unlink(name, dir_fd=descriptor)


def write_local(target: Path, data: bytes) -> None:
    """Writes a file so that it has its old content or all of its new one, also after the machine has lost power."""
    created = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # A new name survives power loss once the folder that holds it is on the disk.
    for folder in (target.parent, *(folder.parent for folder in created)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such request for folders: they write names at once.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
