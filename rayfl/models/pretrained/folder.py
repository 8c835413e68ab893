"""A pretrained model as a local folder: its files, what they hold, and the checksum by which it is known."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from rayfl.errors import ModelError
from rayfl.models.pretrained.peft_files import SETTINGS

RECORD = "rayfl-base.json"
"""Where the checksum of a folder is kept, with size and time of the files that it is of."""

_INDEX, _SINGLE, _CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_FREE = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"})
"""Fields of ``config.json`` that do not say what the modules compute."""

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Entry:
    """A tensor in a file, as the header of the file describes it.

    Attributes:
        file: the file.
        dtype: as safetensors calls it, for example ``F32``.
        shape: its shape.
        start: first byte in the file.
        stop: the byte behind it.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class BaseFolder:
    """A folder with ``config.json`` and weights as safetensors, in one file or in shards.

    Args:
        path: the folder.

    Raises:
        ModelError: there is no such folder, a file is missing or damaged, the weights are pickled, or an adapter lies
            beside them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            small = self.path.name if self.path.name.startswith("tiny-") else "tiny-vit"
            raise ModelError(
                f"model.folder: {self.path} is no folder. Give one with config.json and *.safetensors, as "
                "`save_pretrained` of transformers writes it (nothing is ever downloaded), or make a small one: "
                f"rayfl model make {small} --out {self.path}"
            )
        self.config = _json(self.path / _CONFIG)
        if (self.path / SETTINGS).exists():
            raise ModelError(
                f"model.folder: {self.path} has an adapter ({SETTINGS}) beside its weights, which transformers would "
                "add to them where peft is installed: give a folder of the base alone; model.adapter.start names one "
                "with an adapter to begin from"
            )
        self.files = self._weight_files()
        self.entries = {name: entry for file in self.files for name, entry in _header(file)}

    @property
    def model_type(self) -> str:
        """The family's name, for example ``vit``."""
        return str(self.config.get("model_type"))

    @property
    def vision_config(self) -> dict[str, Any]:
        """What the configuration says of images, where it says apart what a model makes of images and of texts."""
        found: dict[str, Any] = self.config.get("vision_config", self.config)
        return found

    @cached_property
    def sha256(self) -> str:
        """The checksum of all tensors and of the configuration: the same for one file and for many shards.

        It is SHA-256 of JSON of each tensor's name, type, shape and SHA-256 of its bytes, sorted by name, and of the
        fields of ``config.json`` that say what is computed. A record beside the weights spares reading them, as long as
        size and time of every file are those of the record.
        """
        stamp = self._stamp()
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((self.path / RECORD).read_text(encoding="utf-8"))
            if record["files"] == stamp and len(record["sha256"]) == 64:
                return str(record["sha256"])
        found = self.digest()
        self._write_record({"sha256": found, "files": stamp})
        return found

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.stop - entry.start for entry in self.entries.values())

    def check(self, expected: str) -> None:
        """Makes sure that the folder is the one that is meant.

        Args:
            expected: its checksum.

        Raises:
            ModelError: it is another one, naming both.
        """
        if self.sha256 != expected:
            raise ModelError(
                f"model.folder: the base in {self.path} has the checksum {self.sha256}, but model.base is {expected}: "
                "its weights or its config.json were changed. Restore them, or leave model.base out to begin a new run"
            )

    def tensor(self, name: str) -> Tensor | None:
        """A tensor by its name in the files; None if they have none of that name."""
        if name not in self.entries:
            return None
        with safetensors.safe_open(self.entries[name].file, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    def _weight_files(self) -> list[Path]:
        # Where a folder was saved to twice it may have both. transformers reads the one file then.
        if (self.path / _SINGLE).is_file():
            return [self.path / _SINGLE]
        if (self.path / _INDEX).is_file():
            index = _json(self.path / _INDEX)
            names = index.get("weight_map")
            if not isinstance(names, Mapping) or not all(_is_file_name(name) for name in names.values()):
                raise ModelError(f"model.folder: {self.path / _INDEX} has no weight_map that names files beside it")
            files = [self.path / name for name in sorted(set(names.values()))]
            if missing := [file.name for file in files if not file.is_file()]:
                raise ModelError(f"model.folder: {self.path} lacks the shards {missing}, which {_INDEX} names")
            return files
        pickled = sorted(file.name for file in self.path.iterdir() if file.suffix in _PICKLED)
        if pickled:
            raise ModelError(
                f"model.folder: {self.path} has its weights in {pickled[0]}, which is pickled and can run code when it "
                "is read: convert it to safetensors (`save_pretrained` of transformers)"
            )
        raise ModelError(f"model.folder: {self.path} has neither {_SINGLE} nor {_INDEX}")

    def _stamp(self) -> dict[str, list[int]]:
        stats = {file.name: file.stat() for file in (self.path / _CONFIG, *self.files)}
        return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}

    def digest(self) -> str:
        """The checksum as all bytes say it, whatever the record says."""
        rows = []
        for name, entry in sorted(self.entries.items()):
            rows.append([name, entry.dtype, list(entry.shape), _digest(entry)])
        fields = {key: value for key, value in self.config.items() if key not in _FREE}
        return hashlib.sha256(json.dumps([rows, fields], sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _write_record(self, record: dict[str, Any]) -> None:
        # A folder that may not be written to is read once more by the next process.
        with suppress(OSError):
            handle, name = tempfile.mkstemp(dir=self.path, prefix=f".{RECORD}")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(name, self.path / RECORD)


def bases_in(section: Any) -> Iterator[tuple[str, str]]:
    """Folder and checksum of each base that the section ``model`` of a recorded configuration is tied to."""
    if not isinstance(section, Mapping):
        return
    folder, checksum = section.get("folder"), section.get("base")
    if isinstance(folder, str) and isinstance(checksum, str):
        yield folder, checksum
    candidates = section.get("candidates")
    for one in candidates if isinstance(candidates, list) else ():
        yield from bases_in(one)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model.folder: {file.parent} has no {file.name}: give a folder as `save_pretrained` writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model.folder: {file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"model.folder: {file} holds no JSON object")
    return content


def _header(file: Path) -> Iterator[tuple[str, Entry]]:
    """Names and places of the tensors in a file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > _LONGEST_HEADER:
                raise ValueError(f"its header would have {size} bytes")
            header = json.loads(opened.read(size))
        for name, about in header.items():
            if name != "__metadata__":
                start, stop = about["data_offsets"]
                shape = tuple(int(length) for length in about["shape"])
                yield name, Entry(file, str(about["dtype"]), shape, 8 + size + start, 8 + size + stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model.folder: {file} is no whole safetensors file: {error}") from error


def _digest(entry: Entry) -> str:
    found, left = hashlib.sha256(), entry.stop - entry.start
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        while left:
            part = file.read(min(left, 1 << 22))
            if not part:
                raise ModelError(f"model.folder: {entry.file} ends before its last tensor: copy it again")
            found.update(part)
            left -= len(part)
    return found.hexdigest()
