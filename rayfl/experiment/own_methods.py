"""What of a user's own method nothing would ever call."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType

from pydantic import BaseModel

from rayfl.diagnosis.tracebacks import is_own

_ALIKE = 0.85
"""How much a name must be like that of a hook to be taken for a misspelt one (``difflib``, 1: equal)."""

_DEFINED = (FunctionType, property, classmethod, staticmethod)


def misspelt_hooks(method: type) -> list[str]:
    """Returns which functions and class variables look like hooks of methods but are none, a sentence each.

    A class that defines ``local_updates`` for ``local_update`` would be run as the method that it derives from, and
    nothing in its results would say so. Names that the class's module uses anywhere are no such mistake.

    Args:
        method: the class of a user's own method.
    """
    bases = [base for base in method.__mro__ if base not in BaseModel.__mro__]
    own = [base for base in bases if _is_own(sys.modules.get(base.__module__))]
    hooks = {name for base in bases if base not in own for name in vars(base)}
    remarks = []
    for base in own:
        variables: set[str] = getattr(base, "__class_vars__", set())
        defined = [name for name, value in vars(base).items() if isinstance(value, _DEFINED) or name in variables]
        unknown = [
            name for name in defined if not name.startswith("_") and name not in hooks and not hasattr(BaseModel, name)
        ]
        unused = _unused(unknown, sys.modules[base.__module__]) if unknown else []
        for name in unused:
            if meant := difflib.get_close_matches(name, sorted(hooks), n=1, cutoff=_ALIKE):
                remarks.append(f"nothing uses {base.__name__}.{name}: did you mean {meant[0]!r}?")
    return remarks


def _is_own(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_own(file)


def _unused(names: Sequence[str], module: ModuleType) -> list[str]:
    """Returns the names that a module's code does not mention beyond their definition; none if it cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    except (OSError, SyntaxError, TypeError):
        return []
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [name for name in names if name not in used]
