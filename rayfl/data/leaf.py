"""Import LEAF's own JSON (folders ``train/`` and ``test/``) into one Parquet file sorted by client.

LEAF (Caldas et al., 2018) writes files of ``{"users": [...], "num_samples": [...], "user_data":
{user: {"x": [...], "y": [...]}}}``. Everything is checked before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rayfl.data.natural import NaturalHeader, write_natural
from rayfl.errors import DataError

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
ROW_GROUP_TARGET = 1024
_PIXELS = 28 * 28
_WINDOW = 80
_CLASSES = 62
_UINT8_TOLERANCE = 1e-6
_NO_TOKEN = 255
_TOKEN_OF_CODE = np.full(128, _NO_TOKEN, dtype=np.uint8)
_TOKEN_OF_CODE[[ord(letter) for letter in ALPHABET]] = np.arange(len(ALPHABET))


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        clients: number of clients with at least one sample.
        samples: number of samples by split, ``train`` and ``test``.
        warnings: oddities of the source, each with its file; the data were used all the same.
        destination: the file that was written.
    """

    clients: int
    samples: Mapping[str, int]
    warnings: tuple[str, ...]
    destination: Path


@dataclass(frozen=True)
class _Part:
    """One user's samples of one split: ``x`` (n, values) uint8 or float32, ``y`` (n,) int16."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class _Codec:
    """How one of LEAF's data sets becomes arrays; both functions take a JSON list and the place to blame."""

    header: NaturalHeader
    inputs: Callable[[list[object], str], np.ndarray]
    labels: Callable[[list[object], str], np.ndarray]


def import_leaf(kind: Literal["femnist", "shakespeare"], source: Path, destination: Path) -> ImportReport:
    """Turn a LEAF folder into one Parquet file that :class:`rayfl.data.natural.NaturalDataset` reads.

    Pixels are stored as uint8 k where every pixel of the data set is k/255 within 1e-6, else as float32.
    Characters are stored as their place in ``ALPHABET``. The file appears under its name only when it is
    complete; an existing one is replaced.

    Args:
        kind: the LEAF data set.
        source: the folder with ``train/`` and ``test/``, LEAF's ``data/<kind>/data``.
        destination: the Parquet file to write; its folder is made where it is missing.

    Raises:
        DataError: malformed input (names the file and the user), or a destination that cannot be written.
    """
    codec = _CODECS[kind]
    files = {split: _json_files(source, split) for split in ("train", "test")}
    clients: dict[str, dict[str, _Part]] = {}
    warnings: list[str] = []
    for split, paths in files.items():
        origin: dict[str, Path] = {}
        for path in paths:
            parts, found = _read(path, codec)
            for user, part in parts.items():
                if user in origin:
                    raise _malformed(f"{path}, user {user!r}", f"the user is also in {origin[user]}")
                origin[user] = path
                clients.setdefault(user, {})[split] = part
            warnings += found
            if split == "test" and (repeated := sum(_repeated(clients[user]) for user in parts)):
                warnings.append(f"{path}: {repeated} samples also occur in the train part of their user; they are kept")
    clients = {user: clients[user] for user in sorted(clients) if any(len(part.y) for part in clients[user].values())}
    samples = {split: sum(len(parts[split].y) for parts in clients.values() if split in parts) for split in files}
    if not samples["train"]:
        raise DataError(f"{source / 'train'}: no user has a sample; check that LEAF's preprocess.sh ran to its end")
    exact = all(part.x.dtype == np.uint8 for parts in clients.values() for part in parts.values())
    header = codec.header.model_copy(update={"storage": "uint8" if exact else "float32"})
    schema = header.arrow_schema()
    write_natural(destination, schema, (_table(group, schema) for group in _row_groups(clients)))
    return ImportReport(len(clients), samples, tuple(warnings), destination)


def _malformed(where: str, problem: str) -> DataError:
    return DataError(f"{where}: {problem}; correct the file or make it again with LEAF's preprocess.sh")


def _json_files(source: Path, split: str) -> list[Path]:
    folder = source / split
    if not folder.is_dir():
        raise DataError(f"{source} has no folder {split!r}; give the folder in which LEAF made train/ and test/")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder} has no *.json file; give the folder in which LEAF made train/ and test/")
    return files


def _read(path: Path, codec: _Codec) -> tuple[dict[str, _Part], list[str]]:
    """The users of one file as arrays, and warnings."""
    document = _parse(path)
    for key in ("users", "num_samples", "user_data"):
        if key not in document:
            raise _malformed(str(path), f"the key {key!r} is missing")
    users, declared, data = document["users"], document["num_samples"], document["user_data"]
    if not isinstance(data, dict):
        raise _malformed(str(path), "'user_data' is not an object of users")
    _check_users(users, data, path)
    if not isinstance(declared, list) or len(declared) != len(users) or not set(map(type, declared)) <= {int}:
        raise _malformed(str(path), "'num_samples' is not a list of one integer for each of 'users'")
    # Popped, so that a user's lists of Python floats (30 times the array's size) are freed at once.
    parts = {user: _part(data.pop(user), codec, f"{path}, user {user!r}") for user in users}
    warnings = []
    sizes = [len(part.y) for part in parts.values()]
    if differing := sum(says != size for says, size in zip(declared, sizes, strict=True)):
        warnings.append(
            f"{path}: num_samples differs from the data of {differing} of {len(sizes)} users "
            f"({sum(declared)} declared, {sum(sizes)} present); the data are used"
        )
    if empty := [user for user, part in parts.items() if not len(part.y)]:
        warnings.append(f"{path}: {len(empty)} users have no sample here, the first is {empty[0]!r}")
    return parts, warnings


def _parse(path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise _malformed(str(path), f"{key!r} occurs twice in one object")
            result[key] = value
        return result

    try:
        # NaN and Infinity, which json accepts, are refused with the user's name when the values are checked.
        document = json.loads(path.read_bytes(), object_pairs_hook=unique)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise _malformed(str(path), f"truncated or not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _malformed(str(path), "the file does not hold a JSON object")
    return document


def _check_users(users: object, data: dict[str, object], path: Path) -> None:
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise _malformed(str(path), "'users' is not a list of names")
    seen: set[str] = set()
    for user in users:
        where = f"{path}, user {user!r}"
        if not user or "\0" in user or any("\ud800" <= letter <= "\udfff" for letter in user):
            raise _malformed(where, "a name must not be empty nor hold NUL or half a surrogate pair")
        if user in seen:
            raise _malformed(where, "the name occurs twice in 'users'")
        if user not in data:
            raise _malformed(where, "the name is in 'users' but not in 'user_data'")
        seen.add(user)
    for user in data:
        if user not in seen:
            raise _malformed(f"{path}, user {user!r}", "the name is in 'user_data' but not in 'users'")


def _part(entry: object, codec: _Codec, where: str) -> _Part:
    if not isinstance(entry, dict) or "x" not in entry or "y" not in entry:
        raise _malformed(where, "the key 'x' or 'y' is missing")
    x, y = entry["x"], entry["y"]
    if not isinstance(x, list) or not isinstance(y, list):
        raise _malformed(where, "'x' or 'y' is not a list")
    if len(x) != len(y):
        raise _malformed(where, f"'x' has {len(x)} samples and 'y' has {len(y)}")
    return _Part(codec.inputs(x, where), codec.labels(y, where))


def _images(x: list[object], where: str) -> np.ndarray:
    for sample, row in enumerate(x):
        if not isinstance(row, list) or len(row) != _PIXELS or not set(map(type, row)) <= {int, float}:
            raise _malformed(where, f"x[{sample}] is not a list of {_PIXELS} numbers")
    try:
        pixels = np.array(x, dtype=np.float64).reshape(len(x), _PIXELS)
    except OverflowError as error:
        raise _malformed(where, "a pixel is outside [0, 1]") from error
    # Written so that NaN counts as outside.
    outside = ~((pixels >= 0) & (pixels <= 1))
    if outside.any():
        sample, pixel = np.argwhere(outside)[0]
        value = pixels[sample, pixel]
        problem = "outside [0, 1]" if np.isfinite(value) else "not finite"
        raise _malformed(where, f"pixel {pixel} of x[{sample}] is {value}, {problem}")
    levels = np.rint(pixels * 255)
    exact = np.abs(pixels - levels / 255).max(initial=0) <= _UINT8_TOLERANCE
    return levels.astype(np.uint8) if exact else pixels.astype(np.float32)


def _classes(y: list[object], where: str) -> np.ndarray:
    for sample, label in enumerate(y):
        # A bool is an int to Python, but no label.
        if type(label) is not int or not 0 <= label < _CLASSES:
            raise _malformed(where, f"y[{sample}] is {label!r}, not an integer from 0 to {_CLASSES - 1}")
    return np.array(y, dtype=np.int16)


def _windows(x: list[object], where: str) -> np.ndarray:
    return _tokens(x, _WINDOW, "x", where)


def _next_letters(y: list[object], where: str) -> np.ndarray:
    return _tokens(y, 1, "y", where)[:, 0].astype(np.int16)


def _tokens(texts: list[object], length: int, key: str, where: str) -> np.ndarray:
    for sample, text in enumerate(texts):
        if not isinstance(text, str) or len(text) != length:
            raise _malformed(where, f"{key}[{sample}] is not a string of {length} characters")
    joined = "".join(map(str, texts))
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    # The alphabet is ASCII: 127 (delete, no letter of it) stands for everything beyond.
    tokens = _TOKEN_OF_CODE[np.minimum(codes, 127)]
    unknown = np.flatnonzero(tokens == _NO_TOKEN)
    if unknown.size:
        place = int(unknown[0])
        raise _malformed(where, f"{key}[{place // length}] has {joined[place]!r}, which is not in LEAF's alphabet")
    return np.asarray(tokens).reshape(len(texts), length)


_CODECS = {
    "femnist": _Codec(
        NaturalHeader(kind="femnist", input="image", shape=(1, 28, 28), num_classes=_CLASSES), _images, _classes
    ),
    "shakespeare": _Codec(
        NaturalHeader(
            kind="shakespeare", input="tokens", shape=(_WINDOW,), num_classes=len(ALPHABET), vocabulary=len(ALPHABET)
        ),
        _windows,
        _next_letters,
    ),
}


def _repeated(parts: dict[str, _Part]) -> int:
    """Test samples of one user that are also train samples, label included."""
    if "train" not in parts:
        return 0
    train, test = parts["train"], parts["test"]
    same_type = train.x.dtype == test.x.dtype
    seen, asked = (
        [(x.tobytes(), y) for x, y in zip(part.x if same_type else _floats(part.x), part.y.tolist(), strict=True)]
        for part in (train, test)
    )
    known = set(seen)
    return sum(sample in known for sample in asked)


def _floats(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 else x


def _row_groups(clients: dict[str, dict[str, _Part]]) -> Iterator[dict[str, dict[str, _Part]]]:
    """Runs of whole clients of about ``ROW_GROUP_TARGET`` rows, so that loading a client decodes one group."""
    group: dict[str, dict[str, _Part]] = {}
    rows = 0
    for user, parts in clients.items():
        size = sum(len(part.y) for part in parts.values())
        if group and rows + size > ROW_GROUP_TARGET:
            yield group
            group, rows = {}, 0
        group[user] = parts
        rows += size
    yield group


def _table(group: dict[str, dict[str, _Part]], schema: pa.Schema) -> pa.Table:
    parts = [(user, split, parts[split]) for user, parts in group.items() for split in parts]
    x_type = schema.field("x").type
    promote = x_type.value_type == pa.float32()
    x = np.concatenate([_floats(part.x) if promote else part.x for _, _, part in parts])
    columns = [
        pa.array([user for user, _, part in parts for _ in part.y], type=pa.string()),
        pa.array([split for _, split, part in parts for _ in part.y], type=pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), type=x_type),
        pa.array(np.concatenate([part.y for _, _, part in parts])),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
