"""Translates Ray's errors about lost processes, and about processes that could not be set up."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.processes.pool import HostDiedError
from rayfl.errors import DeviceLostError, MethodError, RayflError, ResourceError

_UNREADABLE = ("Failed to deserialize exception", "Failed to unpickle serialized exception")
"""How Ray 2.60, and Ray 2.40, which has no class for it, say that pickle cannot make an error again."""
_IDS = ("class_name:", "actor_id:", "namespace:")
_LONGEST = 600
_ADDRESS = re.compile(r"\bip[:=]\s*([^\s,]+)")


def result_of(handle: Any, host: int) -> Any:
    """Returns a call's result. Errors lose Ray's wrappers; those that mean a lost process become HostDiedError.

    Raises:
        MethodError: when the call raised an error that cannot be sent between processes. It is no death of the host.
    """
    try:
        return ray.get(handle)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, DeviceLostError):
            raise HostDiedError(host, str(cause)) from cause
        if isinstance(cause, RayflError):
            raise cause from None
        if type(cause) is RayError:  # stands for a cause that pickle cannot write
            raise _unsendable(host, error) from None
        if isinstance(cause, RayError):
            raise HostDiedError(host, in_words(cause)) from None
        raise
    except RayActorError as error:
        said = str(error)
        if "The actor died because of an error raised in its creation task" in said:
            failed = ResourceError(f"host {host}{_where(said)} could not be set up: {_last_line(error)}")
            failed.add_note(said)
            raise failed from None
        # Other reasons are a node that has died, or a connection that broke.
        alone = "worker process has died" in said
        raise HostDiedError(host, in_words(error), suspicious=alone) from None
    except RayError as error:
        if any(words in str(error) for words in _UNREADABLE):
            raise _unsendable(host, error) from None
        raise HostDiedError(host, in_words(error)) from None


def in_words(error: RayError) -> str:
    """Returns the kind of Ray's error and its text in one line, without ids that say nothing to a user."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(_IDS))
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}"


def _where(said: str) -> str:
    """Returns the address of the node that an error names, in brackets; empty if it names none."""
    found = _ADDRESS.search(said)
    return "" if found is None else f" ({found[1]})"


def _unsendable(host: int, error: RayError) -> MethodError:
    """Returns the error in place of one of which only the text has arrived."""
    failed = MethodError(
        f"host {host}: {_last_line(error)} (an error that cannot be sent to another process: raise one whose "
        "arguments are those of its constructor, and which holds nothing but data)"
    )
    failed.add_note(str(error))
    return failed


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1]
