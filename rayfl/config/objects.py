"""Users' own classes and functions, named in a configuration as ``my_package.my_module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rayfl.config.messages import nearest
from rayfl.errors import ConfigError, text_of


def names_an_object(text: Any) -> bool:
    """Whether a value of a configuration has the form ``module:name``."""
    return isinstance(text, str) and ":" in text


def import_object(path: str, field: str) -> Any:
    """The object that ``module:name`` names; the current folder is searched for modules too.

    Args:
        path: dotted module, a colon, and the name within it.
        field: where in the configuration the path is, for messages.

    Raises:
        ConfigError: the module cannot be imported or has no such name.
    """
    module_name, _, name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as `python -m` has it; Ray gives its workers the driver's path
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
