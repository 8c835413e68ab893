"""A second folder with true copies of a run's files: either makes good what is damaged in the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import yaml
from pydantic import ValidationError

from rayfl.config.plain_yaml import read_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.config.storage_section import StorageConfig
from rayfl.errors import DamageError, RunError
from rayfl.storage.commit_files import FOLDER, damage_in
from rayfl.storage.files import Storage, absolute
from rayfl.storage.manifest import StoredFile, manifest_name, newest_rounds, parse
from rayfl.storage.own_files import BEGINNING, NEWEST, manifest_rounds
from rayfl.storage.run_folder import CONFIG, COPY

Decoded = TypeVar("Decoded")


def copy_of(storage: Storage, settings: StorageConfig, name: str) -> Storage | None:
    """Returns where a run's copies are; None where it has none.

    Args:
        storage: the run's folder.
        settings: the section ``storage`` of its configuration.
        name: of the run.
    """
    if settings.copies == 1:
        return None
    place = settings.copies_path
    if place is None:
        return storage.inside(COPY)
    return Storage(absolute(place)).inside(name)


def with_absolute_places(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration for other processes, which may have another working folder and another home."""
    copies = config.storage.copies_path
    storage = config.storage.model_copy(update={"copies_path": copies if copies is None else absolute(copies)})
    return config.model_copy(update={"storage_path": absolute(config.storage_path), "storage": storage})


def settings_of(storage: Storage) -> StorageConfig:
    """The section ``storage`` of a run's ``config.yaml``, read as plain data.

    Raises:
        RunError: when there is no such file.
        DamageError: when it cannot be read.
    """
    try:
        content = read_yaml(storage.read(CONFIG))
        return StorageConfig.model_validate(content.get("storage") or {})
    except FileNotFoundError as error:
        raise RunError(f"{storage.uri} is no run's folder: it has no {CONFIG}") from error
    except (yaml.YAMLError, ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise DamageError(f"{CONFIG} in {storage.uri} is damaged: {error}") from error


def copy_by_config(storage: Storage) -> Storage | None:
    """Returns where the copies of the run in a folder are, by its ``config.yaml``; raises like :func:`settings_of`."""
    address = storage.uri.partition("?")[0].rstrip("/")
    name = address.rpartition("/")[2] if storage.local_path is None else storage.local_path.name
    return copy_of(storage, settings_of(storage), name)


def share_beginning(storage: Storage, copy: Storage, right: Callable[[str, bytes], bool]) -> list[str]:
    """Gives each of two folders what says what the run is, where the other has it and it lacks it.

    Args:
        storage: the run's folder.
        copy: its copies.
        right: whether the content of a file of this name can be the run's.

    Returns:
        What was restored in the run's folder, a sentence each.

    Raises:
        RunError: when the copies are another run's.
    """
    said = []
    for name in sorted(BEGINNING):
        mine, other = (_content(place, name) for place in (storage, copy))
        whole, usable = (content is not None and right(name, content) for content in (mine, other))
        if whole and usable and mine != other and name == CONFIG:
            raise RunError(
                f"{copy.uri}/{name} is not a copy of {storage.uri}/{name}: one of them was changed, or the copies are "
                "another run's. Make them equal, or choose another storage.copies_path"
            )
        if whole and mine is not None and mine != other:
            copy.write(name, mine)
        elif usable and other is not None and not whole:
            storage.write(name, other)
            said.append(_restored(name, storage, copy))
    return said


def share_commits(storage: Storage, copy: Storage) -> list[str]:
    """Makes the commits of two folders whole from each other; reads all files, and compares their checksums.

    Only commits count that the run's folder has; those of the copy do if it has none, or lacks its newest.

    Args:
        storage: the run's folder.
        copy: its copies.

    Returns:
        What was restored in the run's folder, a sentence each.

    Raises:
        RunError: when something cannot be written, or is of another format version.
    """
    names = {name for name in storage.names(FOLDER) if manifest_rounds(name) is not None}
    newest = _decoded(storage, NEWEST, newest_rounds)
    if newest is None:
        newest = _decoded(copy, NEWEST, newest_rounds)
    if not names:
        names = {name for name in copy.names(FOLDER) if manifest_rounds(name) is not None}
    elif newest is not None:
        names.add(manifest_name(newest))
    sources, files = dict[str, Storage](), set[StoredFile]()
    for name in sorted(names):
        for place in (storage, copy):
            manifest = _decoded(place, name, partial(parse, name))
            if manifest is not None:
                sources[name] = place
                files.update(manifest.stored())
                break
    said, chosen = list[str](), sorted(files, key=lambda file: file.name)
    bad, bad_copies = (damage_in(place, chosen, thoroughly=True, copied=True) for place in (storage, copy))
    for name in [file.name for file in chosen if (file.name in bad) != (file.name in bad_copies)]:
        said += _shared(name, storage, copy, mend_first=name in bad)
    # As in a commit: what says what makes it up comes last.
    for name, place in sources.items():
        if _content(storage, f"{FOLDER}/{name}") != _content(copy, f"{FOLDER}/{name}"):
            said += _shared(name, storage, copy, mend_first=place is copy)
    if newest is not None and _content(storage, f"{FOLDER}/{NEWEST}") != _content(copy, f"{FOLDER}/{NEWEST}"):
        said += _shared(NEWEST, storage, copy, mend_first=_decoded(storage, NEWEST, newest_rounds) is None)
    return said


def _shared(name: str, storage: Storage, copy: Storage, mend_first: bool) -> list[str]:
    path = f"{FOLDER}/{name}"
    if mend_first:
        storage.write(path, copy.read(path))
        return [_restored(path, storage, copy)]
    copy.write(path, storage.read(path))
    return []


def _restored(name: str, storage: Storage, copy: Storage) -> str:
    return f"{name} in {storage.uri} was missing or damaged and is restored from {copy.uri}"


def _content(place: Storage, path: str) -> bytes | None:
    return place.read(path) if place.exists(path) else None


def _decoded(place: Storage, name: str, decode: Callable[[bytes, str], Decoded]) -> Decoded | None:
    data = _content(place, f"{FOLDER}/{name}")
    if data is None:
        return None
    try:
        return decode(data, f"{FOLDER}/{name} in {place.uri}")
    except DamageError:
        return None
