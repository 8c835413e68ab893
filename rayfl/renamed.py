"""Old names of modules: they work through rayfl 0.2, with a DeprecationWarning that says the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "rayfl.inspection": ("rayfl.runs",),
    "rayfl.inspection.folder": ("rayfl.runs.folder",),
    "rayfl.reference": ("rayfl.reproduction.reference",),
    "rayfl.tables": ("rayfl.results.tables", "rayfl.results.schemas"),
}
"""By a module's old name, the modules that have its names now; the first has most."""

NAMES = {
    "rayfl.aggregation": {"Weighted": "rayfl.aggregation.exact_sum"},
    "rayfl.cli": {"main": "rayfl.cli.entry", "app": "rayfl.cli.entry"},
    "rayfl.objectives": {"declared_by": "rayfl.objectives.declared"},
    "rayfl.storage": {"Storage": "rayfl.storage.files"},
    "rayfl.tasks": {
        "Batch": "rayfl.tasks.base",
        "Classification": "rayfl.tasks.classification",
        "Predictor": "rayfl.tasks.base",
        "Task": "rayfl.tasks.base",
    },
}
"""By a folder that was a module, the names that were in it, and the module that has each now."""


def names_of(folder: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a folder that was a module.

    Args:
        folder: its dotted name, a key of ``NAMES``.

    Returns:
        A function of a name: gives what the name stands for, and warns; raises AttributeError for unknown names.
    """

    def find(name: str) -> Any:
        if name not in NAMES[folder]:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        now = NAMES[folder][name]
        _warn(f"{folder}.{name}", f"{now}.{name}", stacklevel=2)
        return getattr(import_module(now), name)

    return find


def install() -> None:
    """Makes ``import`` find the old names; once, however often it is called."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Is asked first, and knows the old names alone: where an older rayfl is installed too, its modules are not
    meant."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return ModuleSpec(fullname, _Loader(), is_package=any(name.startswith(f"{fullname}.") for name in MODULES))


class _Loader(Loader):
    """Makes a module that has the names of the new ones."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        _warn(old, MODULES[old][0], stacklevel=2)  # frames of importlib do not count
        places = [import_module(new) for new in MODULES[old]]

        def find(name: str) -> Any:
            for place in places:
                if hasattr(place, name):
                    return getattr(place, name)
            raise AttributeError(f"module {old!r} has no attribute {name!r}")

        module.__getattr__ = find  # type: ignore[method-assign]
        module.__doc__ = f"The old name of ``{MODULES[old][0]}``."


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(
        f"{old} is {new} since rayfl 0.2, and goes in 0.3: import that", DeprecationWarning, stacklevel=stacklevel + 1
    )
