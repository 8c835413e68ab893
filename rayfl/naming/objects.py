"""Users' own classes and functions, named in a configuration as ``my_package.my_module:name``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from rayfl.errors import ConfigError, text_of
from rayfl.naming.spelling import nearest

Named = TypeVar("Named")


class ByName(Mapping[str, Named], Generic[Named]):
    """Objects by short names, each imported when it is asked for: a process that needs few does not load them all.

    Args:
        paths: ``module:name`` by short name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    def __getitem__(self, name: str) -> Named:
        module, _, within = self.paths[name].partition(":")
        found: Named = getattr(importlib.import_module(module), within)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.paths

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


def names_an_object(text: Any) -> bool:
    """Returns whether a value of a configuration has the form ``module:name``."""
    return isinstance(text, str) and ":" in text


def as_custom(content: Any, option: str) -> Any:
    """``{name: my_module:what}`` as ``{name: custom, <option>: my_module:what}``; everything else as it is.

    Args:
        content: a section of a configuration.
        option: which names the object.
    """
    if isinstance(content, dict) and names_an_object(content.get("name")) and option not in content:
        return {**content, "name": "custom", option: content["name"]}
    return content


def import_object(path: str, field: str) -> Any:
    """The object that ``module:name`` names; the current folder is searched for modules too.

    Args:
        path: dotted module, a colon, and the name within it.
        field: where in the configuration the path is, for messages.

    Raises:
        ConfigError: the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    here = _search_here()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {text_of(error)}"
        missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        advice = (
            f"; it must be installed or lie in the current folder {here} (`rayfl submit --working-dir FOLDER` sends a "
            "folder along)"
        )
        raise ConfigError(
            f"{field}: {path!r}: module {module_name!r} cannot be imported ({why}){advice if missing else ''}"
        ) from error
    if not hasattr(module, name):
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError(f"{field}: module {module_name!r} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def module_file(path: str) -> str | None:
    """The file of the module in ``module:name``, which is not imported; None if there is no such file here."""
    _search_here()
    try:
        found = importlib.util.find_spec(path.partition(":")[0])
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None else None


def _search_here() -> str:
    """Has Python look for modules in the current folder too, as `python -m` does; Ray's workers get the same path."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return here
