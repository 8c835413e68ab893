"""The splits of a data set of Hugging Face in a folder: as `save_to_disk` writes them, a cache, or a repository."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.data.sources.preparation.preparing import PREPARED
from rayfl.data.sources.root import nor_here
from rayfl.data.sources.split_names import SPLIT_NAMES
from rayfl.errors import DataError

_DICT, _STATE = "dataset_dict.json", "state.json"
_SHARD = re.compile(r"[-_]\d+[-_]of[-_]\d+.*$")


@dataclass(frozen=True)
class Split:
    """A split of a data set.

    Attributes:
        path: where it is, for messages.
        features: by column, the library's description of it.
        schema: the columns as they are stored.
        read: reads some columns of all rows, in their order.
    """

    path: Path
    features: Mapping[str, Any]
    schema: pa.Schema
    read: Callable[[Sequence[str]], pa.Table]


def library(why: str) -> Any:
    """The library `datasets`.

    Args:
        why: what needs it.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module("datasets")
    except ImportError:
        raise DataError(f"{why} needs the package datasets: pip install 'rayfl[hf]'") from None


def data_files(folder: Path) -> list[Path]:
    """The files of a data set's rows and of what is known of them, sorted.

    Raises:
        DataError: there is no such folder, or none of a data set.
    """
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else f"does not exist{nor_here(folder)}"
        raise DataError(
            f"dataset.path: {folder} {what}: name a folder that save_to_disk wrote, or one of a cache or repository "
            "with Arrow or Parquet files; nothing is downloaded but by `rayfl data prepare huggingface path=FOLDER "
            "--source NAME`, which saves a data set of the Hub there"
        )
    kept = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".arrow", ".parquet")
        and not path.name.startswith(("cache-", "tmp"))
        and PREPARED not in path.relative_to(folder).parts  # copies, where the folder is the data root
    ]
    if not kept:
        raise DataError(
            f"dataset.path: {folder} has no Arrow or Parquet files: name a folder that save_to_disk wrote, or one of a "
            "cache or repository that has some"
        )
    return [*(path for name in (_DICT, _STATE) if (path := folder / name).is_file()), *kept]


def splits_of(folder: Path) -> dict[str, Split]:
    """The splits of the data set in a folder, none of which is read.

    Raises:
        DataError: the library is missing, or the folder holds no data set, several, or a damaged one.
    """
    files = [path for path in data_files(folder) if path.suffix != ".json"]
    datasets = library(f"dataset.path: {folder}")
    try:
        if (folder / _DICT).is_file() or (folder / _STATE).is_file():
            saved = datasets.load_from_disk(str(folder))
            found = dict(saved) if (folder / _DICT).is_file() else {str(saved.split or "train"): saved}
            place = {name: folder / name if (folder / _DICT).is_file() else folder for name in found}
            return {name: _of_arrow(place[name], split) for name, split in found.items()}
        return {name: _of_files(folder / name, paths, datasets) for name, paths in _by_split(folder, files).items()}
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"dataset.path: {folder} cannot be read as a data set ({type(error).__name__}: {str(error).strip()}): save "
            "it again with save_to_disk"
        ) from error


def _of_files(place: Path, paths: Sequence[Path], datasets: Any) -> Split:
    if paths[0].suffix == ".arrow":
        return _of_arrow(place, datasets.concatenate_datasets([datasets.Dataset.from_file(str(p)) for p in paths]))
    schema = pq.read_schema(paths[0])

    def read(names: Sequence[str]) -> pa.Table:
        return pa.concat_tables([pq.read_table(path, columns=list(names)).select(list(names)) for path in paths])

    return Split(place, datasets.Features.from_arrow_schema(schema), schema.remove_metadata(), read)


def _of_arrow(place: Path, dataset: Any) -> Split:
    def read(names: Sequence[str]) -> pa.Table:
        # The rows as they are shuffled and selected, which the stored table does not tell.
        table: pa.Table = dataset.select_columns(list(names)).with_format("arrow")[:]
        return table

    return Split(place, dataset.features, dataset.data.schema.remove_metadata(), read)


def _by_split(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Files by the split that their names, or those of their folders, say; files that say none are ``train``."""
    found: dict[str, list[Path]] = {}
    homes = dict[Path, None]()
    for path in files:
        inside = path.relative_to(folder).parts[:-1]
        stem = _SHARD.sub("", path.stem)
        names = (stem, *reversed(inside))
        said = next((SPLIT_NAMES[name] for name in names if name in SPLIT_NAMES), None)
        if said is None and path.suffix == ".arrow" and "-" in stem:  # a cache's: NAME-SPLIT
            ending = stem.rpartition("-")[2]
            said = SPLIT_NAMES.get(ending, ending)
        if said is None:
            words = [word for word in re.split(r"[^a-zA-Z0-9]+", stem) if word in SPLIT_NAMES]
            said = SPLIT_NAMES[words[0]] if words else "train"
        found.setdefault(said, []).append(path)
        homes[folder.joinpath(*(part for part in inside if part not in SPLIT_NAMES))] = None
    if len(homes) > 1:
        raise DataError(
            f"dataset.path: {folder} has files of several data sets: name the folder of one, such as "
            f"{', '.join(map(str, list(homes)[:3]))}"
        )
    if mixed := [name for name, paths in found.items() if len({path.suffix for path in paths}) > 1]:
        raise DataError(f"dataset.path: {folder} has Arrow and Parquet files of the split {mixed[0]}: keep one kind")
    return found
