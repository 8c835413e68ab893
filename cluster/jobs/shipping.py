"""Ships what a run needs to a cluster that has rayfl's dependencies: its own version, and users' modules."""

from __future__ import annotations

import base64
import hashlib
import importlib
import logging
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rayfl
from rayfl.config.schema import ExperimentConfig
from rayfl.diagnosis.tracebacks import is_own
from rayfl.errors import ConfigError
from rayfl.naming.objects import module_file, names_an_object

_log = logging.getLogger("rayfl")
_PACKAGES = ("actors", "algorithms", "cluster", "rayfl")
_NAMING = ("name", "factory", "function", "optimizer")
"""Fields whose value may be ``module:name``."""
_TIMESTAMP = (2020, 1, 1, 0, 0, 0)
_WITHOUT_GITIGNORE = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"
"""Environment variable with which Ray goes by .rayignore alone."""


def own_modules(config: ExperimentConfig) -> dict[Path, Path]:
    """Finds the files of users' own modules that a run needs: on the cluster nobody would know them.

    These are the modules that a configuration names as ``module:name``, and what has been imported from beside them: of
    a package all its Python files.

    Args:
        config: names methods, models or data; they have been imported here.

    Returns:
        By the path below a folder on the cluster's search path, the file here.
    """
    found: dict[Path, Path] = {}
    for _, folder, module in _own(config):
        file = Path(str(module_file(f"{module}:")))
        top = folder / module.partition(".")[0]
        files = sorted(top.rglob("*.py")) if top.is_dir() else [file]
        imported = [getattr(other, "__file__", None) for other in list(sys.modules.values())]
        # Modules that are made at run time (torch.ops) name files that are not there.
        there = [Path(other) for other in imported if other and is_own(other) and Path(other).is_absolute()]
        beside = [path.resolve() for path in there if path.is_file()]
        files += [other for other in beside if other.suffix == ".py" and _top(other, folder)]
        found |= {path.resolve().relative_to(folder): path for path in files}
    return found


def _top(file: Path, folder: Path) -> bool:
    """Returns whether a file is a module of a folder on the search path, or of a package in it."""
    if not file.is_relative_to(folder):
        return False
    parents = file.relative_to(folder).parents
    return all((folder / parent / "__init__.py").is_file() for parent in parents if parent != Path("."))


def check_places(config: ExperimentConfig) -> None:
    """Makes sure that a job's results do not lie in its working folder, which Ray deletes.

    Raises:
        ConfigError: when a folder that the run writes to is a relative path.
    """
    for option, place in (("storage_path", config.storage_path), ("storage.copies_path", config.storage.copies_path)):
        if place is not None and "://" not in place and not place.startswith(("/", "~")):
            raise ConfigError(
                f"{option}={place} would lie in the folder where the job runs, which Ray deletes: give a path on the "
                "cluster that begins with / or ~, or a URI"
            )


def check_modules(config: ExperimentConfig, working_dir: Path) -> None:
    """Makes sure that users' own modules are in the folder that is sent along.

    Args:
        config: names methods, models or data as ``module:name``; they have been imported here.
        working_dir: the folder that is sent, where the run starts.

    Raises:
        ConfigError: naming the module, its file, and what to write.
    """
    for place, folder, module in _own(config):
        if working_dir.resolve() != folder:
            raise ConfigError(
                f"{place}: the module {module!r} ({module_file(f'{module}:')}) is not in --working-dir {working_dir}, "
                f"and the cluster would not find it: give --working-dir {folder}, leave the option out (the module is "
                "sent along then), or say where the nodes have it with --env PYTHONPATH=FOLDER"
            )


def warn_of_left_out(config: ExperimentConfig, working_dir: Path) -> None:
    """Warns of files that the run needs, but that Ray does not send with a folder, by their paths.

    Args:
        config: names files by paths below the folder where the run starts, and users' own modules.
        working_dir: the folder that is sent.
    """
    folder = working_dir.resolve()
    modules = [Path(str(module_file(f"{module}:"))).resolve() for _, _, module in _own(config)]
    named = [folder / path for path in _paths(config.model_dump()) if not path.is_absolute()]
    for file in [*named, *modules]:
        if file.exists() and file.is_relative_to(folder) and (by := _left_out_by(file.relative_to(folder), folder)):
            fix = "" if by.name == ".rayignore" else f", or set {_WITHOUT_GITIGNORE}=1"
            _log.warning("--working-dir: %s is not sent, because of %s: take it out there%s", file, by, fix)


def warn_of_unsent(config: ExperimentConfig) -> None:
    """Warns of files of the current folder that the run needs, where no folder is sent.

    Args:
        config: names files by paths below the folder where the run starts.
    """
    for path in _paths(config.model_dump()):
        if not path.is_absolute() and path.exists():
            _log.warning(
                "%s lies in the current folder, which is not sent: give --working-dir . if the nodes do not have it in "
                "their data root (RAYFL_DATA), or a path that begins with /",
                path,
            )


def _left_out_by(path: Path, folder: Path) -> Path | None:
    """Returns the file by which Ray leaves out a path below a folder that it sends; None if it sends it."""
    names = [".rayignore"] if os.environ.get(_WITHOUT_GITIGNORE) == "1" else [".gitignore", ".rayignore"]
    for parent in path.parents:
        for file in [folder / parent / name for name in names]:
            below = path.relative_to(parent)
            # With a slash for what is in the path, if it is a folder.
            tried = [f"{below}/", *map(str, [below, *below.parents][:-1])]
            if file.is_file() and any(map(_matcher(file), tried)):
                return file
    return None


def _matcher(file: Path) -> Callable[[str], bool]:
    """Returns whether an ignore file names a path, by Ray's own copy of pathspec."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    patterns = importlib.import_module("ray._private.thirdparty.pathspec").PathSpec.from_lines("gitwildmatch", lines)
    matches: Callable[[str], bool] = patterns.match_file
    return matches


def _paths(content: Any) -> Iterator[Path]:
    """Yields the paths of files and folders in a configuration."""
    if isinstance(content, Path):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _paths(value)


def _own(config: ExperimentConfig) -> Iterator[tuple[str, Path, str]]:
    """Yields where a configuration names a user's own module, the folder that has it, and its name."""
    for field, path in _objects(config.model_dump(mode="json")):
        module = path.partition(":")[0]
        file = module_file(path)
        if file is None or not is_own(file):
            continue
        parts = len(module.split(".")) + (Path(file).name == "__init__.py")
        yield f"{field}: {path!r}", Path(file).resolve().parents[parts - 1], module


def _objects(content: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yields where a configuration names an object of a module, and which."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            if key in _NAMING and names_an_object(value):
                yield f"{place}{key}", value
            else:
                yield from _objects(value, f"{place}{key}.")
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _objects(value, f"{place}{number}.")


def build_wheel(folder: Path) -> Path:
    """Writes a wheel of the rayfl that is running, installed or from a checkout.

    It differs from a released one on purpose. It names no dependencies, because Ray installs what it is given with
    all of them, which would be another PyTorch on every node. And its version ends with a hash of its content, because
    Ray tells wheels apart by their file names.

    Args:
        folder: where to.

    Returns:
        The file, ``rayfl-<version>+<hash>-py3-none-any.whl``; the same content gives the same bytes.
    """
    home = Path(rayfl.__file__).resolve().parent.parent
    paths = [path for package in _PACKAGES for path in sorted((home / package).rglob("*")) if path.is_file()]
    files = {
        str(path.relative_to(home)): path.read_bytes()
        for path in paths
        if "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name} {len(data)}\n".encode() + data)
    version = f"{rayfl.__version__}+{digest.hexdigest()[:12]}"
    info = f"rayfl-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: rayfl\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: rayfl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"rayfl-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIMESTAMP), data, zipfile.ZIP_DEFLATED)
    return wheel


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
