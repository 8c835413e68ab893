"""Whether a folder is a run's, and what killed drivers have left in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rayfl.commits import FOLDER
from rayfl.errors import RunError
from rayfl.lease import FILE as LEASE
from rayfl.own_files import BEGINNING, is_lease, is_of_commits, is_of_run, is_probe, is_temporary
from rayfl.storage import Storage

CONFIG = "config.yaml"
_NAMED = 5
"""So many names a message has at most."""


def check_run_folder(storage: Storage) -> None:
    """Makes sure that a folder is a run's, or may become one: it writes nothing.

    A folder may become a run's if there is nothing in it but what a start leaves that was cut short.

    Raises:
        RunError: when it has other files, or its commits lie behind a link.
    """
    leads_to = storage.link_target(FOLDER)
    if leads_to is not None:
        raise RunError(
            f"{storage.uri}/{FOLDER} is a link to {leads_to}: rayfl deletes old commits, and only in a folder of its "
            "own. Put the folder itself in the link's place, or set storage_path to the other disk"
        )
    if not storage.exists(CONFIG):
        refuse_others(storage, _of_a_beginning, f"no {CONFIG}")


def refuse_others(storage: Storage, owns: Callable[[str], bool], lacks: str) -> None:
    """Refuses a folder that is somebody else's.

    Args:
        storage: the folder.
        owns: whether a file or folder of this name may be in it.
        lacks: what it would have if it were not somebody else's, in words.

    Raises:
        RunError: naming what is in it.
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


def _of_a_beginning(name: str) -> bool:
    return _at_the_beginning(name) or is_probe(name) or is_temporary(name, _at_the_beginning)


def _at_the_beginning(name: str) -> bool:
    return name in BEGINNING or is_lease(name)


def remove_leftovers(storage: Storage, lease_timeout_s: float) -> None:
    """Deletes the temporary files of drivers that were killed; call it only with the run's lease.

    Args:
        storage: the run's folder.
        lease_timeout_s: what belongs to a lease, which others may be trying to take just now, is deleted when it is
            so much older than the lease, in seconds.
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
