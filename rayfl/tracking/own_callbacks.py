"""What is wrong with a user's own listeners, found out before the run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from rayfl.errors import ConfigError
from rayfl.tracking.callback import Callback

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Callback]) -> list[str]:
    """Refuses what a run could not tell anything.

    Args:
        callbacks: as a user gave them.

    Returns:
        Which of their functions look like hooks but are none, a sentence each.

    Raises:
        ConfigError: there is no list of callbacks, or a hook is ``async def`` or does not take what it is given.
    """
    given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    wrong = [callback for callback in given if not isinstance(callback, Callback)]
    if wrong or given is not callbacks:
        raise ConfigError(f"callbacks is {callbacks!r}; needed is a list of objects whose class is a rayfl.Callback")
    for callback in callbacks:
        for hook in HOOKS:
            _check_hook(callback, hook)
    kinds = dict.fromkeys(type(callback) for callback in callbacks)
    return [sentence for kind in kinds for sentence in _misspelt(kind)]


def _check_hook(callback: Callback, hook: str) -> None:
    own: Any = getattr(callback, hook)
    where = f"callbacks: {type(callback).__name__}.{hook}"
    if inspect.iscoroutinefunction(own):
        raise ConfigError(f"{where} is async def, and would never run: write def")
    names = list(inspect.signature(getattr(Callback, hook)).parameters)[1:]
    try:
        signature = inspect.signature(own)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ConfigError(f"{where} must take ({', '.join(names)}), got {signature}: {error}") from None


def _misspelt(kind: type) -> list[str]:
    """Returns which functions of a class are called as hooks are, and are none, unless its code uses them itself."""
    own = {
        name: value
        for base in reversed(kind.__mro__)
        if issubclass(base, Callback) and not base.__module__.startswith("rayfl.")
        for name, value in vars(base).items()
        if isinstance(value, FunctionType)
    }
    used = {name for value in own.values() for name in value.__code__.co_names}
    found = []
    for name in own:
        if name.startswith("on_") and name not in HOOKS and name not in used:
            meant = difflib.get_close_matches(name, HOOKS, n=1)
            hint = f"did you mean {meant[0]!r}?" if meant else f"hooks are {', '.join(HOOKS)}"
            found.append(f"callbacks: nothing calls {kind.__name__}.{name}: {hint}")
    return found
