"""Errors a user can act on: each message names the place (file, field, client) and the fix.

The command line prints these without a traceback; everything else is a defect in rayfl.
"""

from __future__ import annotations

import traceback
from types import FrameType


class RayflError(Exception):
    """Base of every error that a user of rayfl can cause and mend."""


class ConfigError(RayflError):
    """A configuration, preset or override that cannot be run; lists every problem at once."""


class DataError(RayflError):
    """A data file or partition that cannot be used; names the file and, where known, the client."""


class ModelError(RayflError):
    """A model that does not fit the data set or the method."""


class ClientError(RayflError):
    """A client's procedure failed or returned non-finite values; names the client, round and phase.

    Attributes:
        printed: what clients' code of the same call had printed before, in lines that name the client.
    """

    printed: tuple[str, ...] = ()


class MethodError(RayflError, TypeError):
    """A method's code does something that no client's data can be blamed for; says what it has to do instead."""


class DeviceLostError(RayflError):
    """A process can no longer compute on its device; another process can."""


class ResourceError(RayflError):
    """The cluster has too little of something; says what is missing and how much is there."""


class RunError(RayflError):
    """A run folder that cannot be continued, or a run that failed too often."""


class DamageError(RunError):
    """A file of a run is missing, truncated or changed; names it and says what is wrong."""


class ExitError(Exception):
    """Code of a method or a model has raised what ends a process, such as SystemExit."""


class StopSignal(BaseException):
    """A signal asks this process to stop. It is raised wherever the process is: no failure of the code there."""


def as_error(error: BaseException) -> Exception:
    """What somebody's code has raised, as an error of that code, though it may have been meant to end the process.

    Raises:
        StopSignal: when it is one.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, StopSignal):
        raise error
    what = f"{type(error).__name__}({text_of(error)})"
    found = ExitError(f"{what} would end the whole process: raise an Exception")
    return found.with_traceback(error.__traceback__)


def text_of(error: BaseException) -> str:
    """The message of an error, also of one that cannot say it."""
    try:
        return str(error)
    except Exception as failure:
        return f"no message: its __str__ raised {type(failure).__name__}"


def forget_frames(error: BaseException) -> None:
    """Clears the local variables of the calls that an error and its causes went through; its trace stays readable.

    An error that is kept keeps these calls, and an error in a variable of one of them is a cycle, which keeps all
    variables of all of them until garbage is collected.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            for frame, _ in traceback.walk_tb(found.__traceback__):
                _clear(frame)
            left += [found.__cause__, found.__context__]


def _clear(frame: FrameType | None) -> None:
    """Clears the variables of a call that is over, and of those it was made by as far as they are over, too."""
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # it is still running, and so are those above it
            return
        frame = frame.f_back
