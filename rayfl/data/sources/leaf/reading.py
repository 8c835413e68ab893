"""LEAF's JSON files: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayfl.data.sources.leaf.codec import Codec, Part, Split, malformed
from rayfl.errors import DataError
from rayfl.naming.plain_json import RepeatedKeyError, read_json


def json_files(source: Path, split: Split) -> list[Path]:
    """The files of one split, sorted.

    Raises:
        DataError: no such folder, or an empty one.
    """
    folder = source / split
    if not folder.is_dir():
        raise DataError(f"{source} has no folder {split!r}; give the folder in which LEAF made train/ and test/")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder} has no *.json file; give the folder in which LEAF made train/ and test/")
    return files


def read_users(path: Path, split: Split, codec: Codec) -> tuple[dict[str, Part], list[str]]:
    """The users of one file as arrays, and warnings.

    Raises:
        DataError: malformed JSON, users, or samples; names the file and, where it can, the user.
    """
    document = _parse(path)
    for key in ("users", "num_samples", "user_data"):
        if key not in document:
            raise malformed(str(path), f"the key {key!r} is missing")
    users, declared, data = document["users"], document["num_samples"], document["user_data"]
    if not isinstance(data, dict):
        raise malformed(str(path), "'user_data' is not an object of users")
    _check_users(users, data, path)
    if not isinstance(declared, list) or len(declared) != len(users) or not set(map(type, declared)) <= {int}:
        raise malformed(str(path), "'num_samples' is not a list of one integer for each of 'users'")
    parts: dict[str, Part] = {}
    sizes: list[int] = []
    for user in users:
        # Popped, so that a user's lists of Python floats (30 times the array's size) are freed at once.
        x, y = _samples(data.pop(user), f"{path}, user {user!r}")
        sizes.append(len(y))
        parts[user] = codec.part(x, y, split, f"{path}, user {user!r}")
    warnings = []
    if differing := sum(says != size for says, size in zip(declared, sizes, strict=True)):
        warnings.append(
            f"{path}: num_samples differs from the data of {differing} of {len(sizes)} users "
            f"({sum(declared)} declared, {sum(sizes)} present); the data are used"
        )
    if empty := [user for user, size in zip(users, sizes, strict=True) if not size]:
        warnings.append(f"{path}: {len(empty)} users have no sample here, the first is {empty[0]!r}")
    return parts, warnings


def _parse(path: Path) -> dict[str, Any]:
    try:
        # NaN and Infinity, which json accepts, are refused with the user's name when the values are checked.
        document = read_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions") from error
    except RepeatedKeyError as error:
        raise malformed(str(path), str(error)) from error
    except (ValueError, RecursionError) as error:
        raise malformed(str(path), f"truncated or not JSON ({error})") from error
    if not isinstance(document, dict):
        raise malformed(str(path), "the file does not hold a JSON object")
    return document


def _check_users(users: object, data: dict[str, object], path: Path) -> None:
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise malformed(str(path), "'users' is not a list of names")
    seen: set[str] = set()
    for user in users:
        where = f"{path}, user {user!r}"
        if not user or "\0" in user or any("\ud800" <= letter <= "\udfff" for letter in user):
            raise malformed(where, "a name must not be empty nor hold NUL or half a surrogate pair")
        if user in seen:
            raise malformed(where, "the name occurs twice in 'users'")
        if user not in data:
            raise malformed(where, "the name is in 'users' but not in 'user_data'")
        seen.add(user)
    for user in data:
        if user not in seen:
            raise malformed(f"{path}, user {user!r}", "the name is in 'user_data' but not in 'users'")


def _samples(entry: object, where: str) -> tuple[list[object], list[object]]:
    if not isinstance(entry, dict) or "x" not in entry or "y" not in entry:
        raise malformed(where, "the key 'x' or 'y' is missing")
    x, y = entry["x"], entry["y"]
    if not isinstance(x, list) or not isinstance(y, list):
        raise malformed(where, "'x' or 'y' is not a list")
    if len(x) != len(y):
        raise malformed(where, f"'x' has {len(x)} samples and 'y' has {len(y)}")
    return x, y
