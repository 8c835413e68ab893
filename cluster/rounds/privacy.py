"""Protects the Ray that rayfl starts from other users of the machine, by a token and a private folder.

Ray writes its token with the permissions of the shell's umask, usually readable by everybody, and makes the folder
with its sockets, logs and packages writable by everybody.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from rayfl.errors import ResourceError

_log = logging.getLogger("rayfl")
_MODE, _TOKEN, _TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_TOKEN_BYTES = 32
_LONGEST_FOLDER = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Maximum length in bytes of a folder's path: the names of Ray's sockets must fit behind it."""


@contextmanager
def require_token() -> Iterator[None]:
    """Has a Ray that is started inside accept only requests with a token, which only this user can read.

    Ray has tokens from 2.52 on, and uses them by default from 2.60 on. Environment variables take precedence. The
    file is Ray's own, ``~/.ray/auth_token``, so that this user's other programs reach the cluster.
    """
    if os.environ.get(_MODE, "token").lower() != "token" or not _enable_tokens():
        yield
        return
    if os.environ.get(_TOKEN) or os.environ.get(_TOKEN_FILE):
        yield
        return
    try:
        keep_token(token_file())
    except (OSError, RuntimeError) as error:
        # Without a writable home, as in many containers, the token exists only as long as this Ray.
        _log.info("Ray's token is in no file: %s", error)
        with mock.patch.dict(os.environ, {_TOKEN: secrets.token_hex(_TOKEN_BYTES)}):
            yield
        return
    yield


def _enable_tokens() -> bool:
    """Turns on tokens in this process's Ray; returns whether it has them."""
    raylet: Any = importlib.import_module("ray._raylet")
    if not hasattr(raylet, "get_authentication_mode"):
        return False
    if os.environ.get(_MODE) is None:
        os.environ[_MODE] = "token"
        raylet.Config.initialize("")  # it read the environment when it was imported
    return True


def token_file() -> Path:
    """Returns where Ray looks for this user's token.

    Raises:
        RuntimeError: when the user has no home.
    """
    return Path.home() / ".ray" / "auth_token"


def open_to_others(about: os.stat_result) -> bool:
    """Returns whether other users can read or change a file."""
    return bool(stat.S_IMODE(about.st_mode) & 0o077)


def keep_token(file: Path) -> None:
    """Makes sure that there is a token that only this user can read.

    Raises:
        OSError: when it can be neither read nor written.
    """
    try:
        about = file.stat()
    except FileNotFoundError:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(file, secrets.token_hex(_TOKEN_BYTES))
        return
    file.read_bytes()
    if open_to_others(about) and about.st_uid == os.getuid() and not file.is_symlink():
        file.chmod(0o600)
        _log.warning(
            "other users of this machine could read Ray's token in %s, and no longer can: if one of them may have, "
            "stop your clusters and delete it, and the next one gets a new token",
            file,
        )


def _write_once(file: Path, text: str) -> None:
    """Writes a file atomically, unless another process has written it first."""
    descriptor, ready = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)  # readable by its owner only
    try:
        with os.fdopen(descriptor, "w") as content:
            content.write(text)
        with suppress(FileExistsError):
            os.link(ready, file)
    finally:
        os.unlink(ready)


def private_folder() -> Path | None:
    """Returns a folder for Ray's sessions that only this user can enter, the same at every call.

    Returns:
        The folder; None if its path would be too long for Ray's sockets, so that Ray's default folder is used.

    Raises:
        ResourceError: when the folder belongs to another user.
    """
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / f"rayfl-user-{os.getuid()}"
    sessions = folder / "ray"
    if len(os.fsencode(sessions)) > _LONGEST_FOLDER:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise ResourceError(
                f"{folder} belongs to somebody else: set RAY_TMPDIR to a folder of your own for Ray's files"
            )
        folder.chmod(0o700)
    except OSError as error:
        raise ResourceError(
            f"cannot make {folder} for Ray's files: {error.strerror}; set RAY_TMPDIR to a folder of your own"
        ) from error
    return sessions
