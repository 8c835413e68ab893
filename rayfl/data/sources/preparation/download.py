"""Downloads that go on where they stopped, are checked, and appear under their names only when they are complete."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from rayfl.data.files.whole import file_digest, locked, new_file, put
from rayfl.errors import DataError

Progress = Callable[[str, int, int | None], None]
"""``progress(what, done, total)``: bytes (or samples) so far, and of how many if that is known."""

_BLOCK = 1 << 18
_TIMEOUT_S = 60.0
RETRY_PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before each new attempt after one that brought nothing; there is one attempt more than pauses."""


def silent(what: str, done: int, total: int | None) -> None:
    """A progress that nobody sees."""


def is_url(place: str) -> bool:
    """Returns whether a place is an address rather than a path."""
    return "://" in place


def fetch(
    place: str, destination: Path, digest: str | None = None, *, offline: bool = False, progress: Progress = silent
) -> None:
    """Brings a file to ``destination``, unless it is there already. Several processes may ask; one downloads.

    Args:
        place: an http(s) address, or the path of a file, which is copied.
        destination: the file's name here; its folder is made where it is missing. An unfinished download lies beside
            it as ``.<name>.partial``.
        digest: ``sha256:...`` or ``md5:...``, what the file must be; None accepts what comes.
        offline: refuse to download.
        progress: told how far it is.

    Raises:
        DataError: the file cannot be got, or is not what ``digest`` says.
    """
    waiting = f"waiting for another process that gets {destination.name}"
    with locked(destination, lambda: progress(waiting, 0, None)):
        if destination.exists():
            _check(destination, digest, f"{destination} is there, but")
            return
        if not is_url(place):
            _copy(Path(place).expanduser(), destination, digest)
            return
        if urlsplit(place).scheme not in ("http", "https"):
            raise DataError(f"{place}: only http and https addresses can be downloaded; give a path for a local file")
        if offline:
            raise DataError(
                f"{destination} does not exist and nothing is downloaded offline; get {place} by other means and give "
                "its path with --source"
            )
        _Download(place, destination, digest, progress).run()


class _Download:
    def __init__(self, url: str, destination: Path, digest: str | None, progress: Progress) -> None:
        self._url = url
        self._destination = destination
        self._digest = digest
        self._progress = progress
        self._partial = destination.with_name(f".{destination.name}.partial")
        self._notes = destination.with_name(f".{destination.name}.partial.json")
        self._total: int | None = None

    def run(self) -> None:
        failures = 0
        while not self._complete():
            before = self._have()
            try:
                self._attempt()
                problem = "the connection ended early"
            except urllib.error.HTTPError as error:
                if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                    if error.headers.get("Content-Range") == f"bytes */{before}":
                        self._total = before  # all of it is here already
                    else:
                        self._forget()  # what is here is not a beginning of what is there
                elif error.code < 500 and error.code != http.client.TOO_MANY_REQUESTS:
                    raise DataError(f"{self._url} cannot be downloaded: {error}") from error
                problem = str(error)
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            if self._have() > before or self._complete():
                failures = 0
                continue
            if failures == len(RETRY_PAUSES_S):
                raise DataError(
                    f"{self._url} cannot be downloaded: {problem}; the {self._have()} bytes so far are kept, and the "
                    "same command goes on with them"
                )
            time.sleep(RETRY_PAUSES_S[failures])
            failures += 1
        try:
            _check(self._partial, self._digest, f"{self._url}: the download")
        except DataError:
            self._forget()
            raise
        put(self._partial, self._destination)
        self._notes.unlink(missing_ok=True)

    def _complete(self) -> bool:
        return self._total is not None and self._have() == self._total

    def _have(self) -> int:
        return self._partial.stat().st_size if self._partial.exists() else 0

    def _forget(self) -> None:
        self._partial.unlink(missing_ok=True)
        self._notes.unlink(missing_ok=True)
        self._total = None

    def _attempt(self) -> None:
        """Asks for what is missing and appends what comes."""
        headers = {"User-Agent": "rayfl", "Accept-Encoding": "identity"}
        validator = self._validator()
        start = self._have()
        if start and (validator or self._digest):
            headers["Range"] = f"bytes={start}-"
            if validator:
                headers["If-Range"] = validator  # the whole file if it is another one by now
        request = urllib.request.Request(self._url, headers=headers)  # noqa: S310 - http and https only, see fetch
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            if response.status == http.client.PARTIAL_CONTENT:
                begin, _, total = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
                if begin.partition("-")[0] != str(start) or not total.isdecimal():
                    self._forget()
                    raise OSError(f"the server sent other bytes than were asked for ({begin})")
                self._total = int(total)
            else:
                start, length = 0, response.headers.get("Content-Length", "")
                self._total = int(length) if length.isdecimal() else None
                self._note(response.headers)
            with self._partial.open("ab" if start else "wb") as file:
                done = start
                while block := response.read(_BLOCK):
                    file.write(block)
                    done += len(block)
                    self._progress(self._destination.name, done, self._total)
                file.flush()
                os.fsync(file.fileno())
            if self._total is None:
                self._total = done  # a server that does not say how much: the end is the end

    def _note(self, headers: http.client.HTTPMessage) -> None:
        """Remembers which file this is the beginning of."""
        tag = headers.get("ETag") or ""
        validator = tag if tag.startswith('"') else headers.get("Last-Modified")
        self._notes.write_text(json.dumps({"url": self._url, "validator": validator}))

    def _validator(self) -> str | None:
        """Returns what tells the file that was begun from another; a beginning of unknown origin is dropped."""
        if not self._have():
            return None
        try:
            notes = json.loads(self._notes.read_text())
            if notes["url"] == self._url:
                validator: str | None = notes["validator"]
                return validator
        except (OSError, ValueError, KeyError, TypeError):
            pass
        self._forget()
        return None


def _copy(source: Path, destination: Path, digest: str | None) -> None:
    if not source.is_file():
        raise DataError(f"{source} does not exist or is no file; give the path or the address of the file")
    _check(source, digest, f"{source}")
    with source.open("rb") as given, new_file(destination) as file:
        shutil.copyfileobj(given, file)


def _check(path: Path, digest: str | None, what: str) -> None:
    if digest is None:
        return
    algorithm, _, wanted = digest.partition(":")
    if algorithm not in ("sha256", "md5") or len(wanted) != 2 * hashlib.new(algorithm).digest_size:
        raise DataError(f"{digest!r} is no checksum; give sha256: or md5: and hexadecimal digits")
    found = file_digest(path, algorithm)
    if found != wanted.lower():
        raise DataError(
            f"{what} has the {algorithm} {found}, not {wanted}: it is damaged or another file; delete it and try again"
        )
