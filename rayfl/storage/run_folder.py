"""Checks whether a folder is a run's, and removes files of killed drivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from rayfl.errors import RunError
from rayfl.storage.commits import FOLDER
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE as LEASE
from rayfl.storage.manifest import Manifest
from rayfl.storage.own_files import BEGINNING, is_lease, is_of_commits, is_of_run, is_probe, is_temporary

CONFIG = "config.yaml"
COPY = "copy"
"""Folder of the copies inside a run's, unless ``storage.copies_path`` names another place."""
_NAMED = 5
"""Maximum number of names in a message."""


def check_run_folder(storage: Storage, copy: Storage | None = None) -> None:
    """Checks that a folder is a run's, or may become one; writes nothing.

    A folder may become a run's if it is empty or has only files of an interrupted first start.

    Args:
        storage: the folder.
        copy: folder of the run's copies, if it has one.

    Raises:
        RunError: when a folder has other files, its commits are behind a link, or both are the same folder.
    """
    _refuse_link(storage, FOLDER)
    if copy is None:
        if not storage.exists(CONFIG):
            refuse_foreign_folder(storage, _of_first_start, f"no {CONFIG}")
        return
    inside = copy == storage.inside(COPY)
    if inside:
        _refuse_link(storage, COPY)
    _refuse_link(copy, FOLDER)
    _refuse_one_place(storage, copy)
    known = copy.exists(CONFIG)
    if not (known or storage.exists(CONFIG)):
        refuse_foreign_folder(storage, lambda name: _of_first_start(name) or (inside and name == COPY), f"no {CONFIG}")
    if not known:
        ours = all(is_of_commits(name) for name in copy.names(FOLDER))
        refuse_foreign_folder(copy, lambda name: _of_first_start(name) or (ours and name == FOLDER), f"no {CONFIG}")


def _refuse_link(place: Storage, folder: str) -> None:
    leads_to = place.link_target(folder)
    if leads_to is not None:
        raise RunError(
            f"{place.uri}/{folder} is a link to {leads_to}: rayfl deletes old commits, and only in folders of its own. "
            "Put the folder itself in the link's place, or set storage_path (storage.copies_path) to the other disk"
        )


def _refuse_one_place(storage: Storage, copy: Storage) -> None:
    one, other = storage.local_path, copy.local_path
    if storage.uri == copy.uri or (one is not None and other is not None and one.resolve() == other.resolve()):
        raise RunError(
            f"{copy.uri} is the run's own folder: copies in it would share its bits. Choose another storage.copies_path"
        )


def refuse_foreign_folder(storage: Storage, owns: Callable[[str], bool], lacks: str) -> None:
    """Refuses a folder with files that are not rayfl's.

    Args:
        storage: the folder.
        owns: returns whether a file or folder of this name may be in it.
        lacks: the missing file that shows that the folder is not rayfl's, in words.

    Raises:
        RunError: naming the files.
    """
    others = [name for name in storage.entries() if not owns(name)]
    if not others:
        return
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    lost = ". If this is a run, restore its config.yaml" if FOLDER in others else ""
    raise RunError(
        f"{storage.uri} is not a folder of rayfl's: it has {lacks}, but {', '.join(others[:_NAMED])}{more}. Nothing "
        f"was written; choose another name or storage_path{lost}"
    )


def _of_first_start(name: str) -> bool:
    return _written_first(name) or is_probe(name) or is_temporary(name, _written_first)


def _written_first(name: str) -> bool:
    return name in BEGINNING or is_lease(name)


def input_digests(storage: Storage) -> dict[str, str]:
    """Returns the SHA-256 of the files that identify a run, by name, for its commits.

    ``partition.parquet`` is not among them: it may be written again in other bytes, and the tables have its hash.
    """
    names = (CONFIG, "devices.parquet", "initial.safetensors")
    return {name: storage.digest(name) for name in names if storage.exists(name)}


def changed_inputs(manifest: Manifest, found: Mapping[str, str]) -> list[str]:
    """Returns the names of files that identify a run and have changed since a commit.

    Args:
        manifest: manifest of the commit.
        found: result of :func:`input_digests`.
    """
    return [name for name, digest in manifest.inputs.items() if found.get(name) != digest]


def remove_leftovers(storage: Storage, lease_timeout_s: float) -> None:
    """Deletes the temporary files of drivers that were killed; call it only with the run's lease.

    Args:
        storage: the run's folder.
        lease_timeout_s: files of a lease, which others may be trying to take, are deleted if they are this many seconds
            older than the lease.
    """
    for name in storage.names():
        if is_probe(name) or is_temporary(name, is_of_run):
            storage.delete(name)
        elif name != LEASE and (is_lease(name) or is_temporary(name, is_lease)):
            with suppress(FileNotFoundError):
                if storage.modified(LEASE) - storage.modified(name) > lease_timeout_s:
                    storage.delete(name)
    for name in storage.names(FOLDER):
        if is_temporary(name, is_of_commits):
            storage.delete(f"{FOLDER}/{name}")
