"""Import the files of TensorFlow Federated into one Parquet file sorted by client."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rayfl.data.files.whole import file_digest
from rayfl.data.sources.leaf.codec import Part, Split
from rayfl.data.sources.leaf.writing import ImportReport, Origin, total, write_clients
from rayfl.data.sources.tff.codecs import (
    Characters,
    ColourImages,
    GreyImages,
    TffCodec,
    Words,
    read_word_counts,
)
from rayfl.data.sources.tff.layouts import LAYOUTS, Kind, Layout
from rayfl.data.sources.tff.reading import ClientFile, Columns, Hdf5File, SqliteFile
from rayfl.errors import DataError

Users = Literal["train", "held-out"]
_WORD_COUNTS = "stackoverflow.word_count"
_VOCABULARY, _WORDS, _CHARACTERS = 10_000, 20, 80
_OPTIONS_OF: Mapping[str, tuple[Kind, ...]] = {
    "vocabulary": ("stackoverflow",),
    "vocabulary_file": ("stackoverflow",),
    "length": ("stackoverflow", "shakespeare"),
    "users": ("stackoverflow",),
}


@dataclass(frozen=True)
class TffOptions:
    """Which samples are imported, and how; None: the default.

    Attributes:
        vocabulary: of Stack Overflow, the most words; 10,000 by default.
        vocabulary_file: of Stack Overflow, TFF's ``stackoverflow.word_count``; by default the one in the source's
            folder, else the words are those that most users of the training part have.
        length: positions of a text; 20 words or 80 characters by default.
        users: of Stack Overflow, the users of the training part (with their test part) or the held-out ones.
        clients: how many clients are drawn; all by default.
        most_samples: the most training samples of a client, drawn at random; all by default.
        train_only: leaves the test part out; each client's test part is then drawn in a run.
        seed: of both draws.
    """

    vocabulary: int | None = None
    vocabulary_file: Path | None = None
    length: int | None = None
    users: Users | None = None
    clients: int | None = None
    most_samples: int | None = None
    train_only: bool = False
    seed: int = 0


_NO_OPTIONS = TffOptions()


def import_tff(kind: Kind, source: Path, destination: Path, options: TffOptions = _NO_OPTIONS) -> ImportReport:
    """Turns files of TensorFlow Federated into one Parquet file; clients are read one after the other.

    Args:
        kind: the data set.
        source: a folder with the HDF5 files, TFF's archive of them (whose checksum is compared with the published one;
            it is unpacked beside the destination for the time of the import), or the SQLite file.
        destination: the Parquet file to write; it appears only when it is complete.
        options: which samples.

    Raises:
        DataError: the files are missing, damaged or others, a client's values cannot be, or an option does not fit;
            names file, client and column.
    """
    _check(kind, options)
    layout = LAYOUTS[kind]
    with _folder(source, layout, destination) as folder:
        files = _files(folder, layout, options)
        codec, vocabulary = _codec(kind, folder if folder.is_dir() else folder.parent, options)
        sizes = _sizes(files, layout, options)
        if codec.surveys:
            sizes = _surveyed(files, sizes, codec, layout, options)
        samples = total(sizes)
        if not samples["train"]:
            raise DataError(f"{source}: no client has a training sample; give TFF's own files")

        def stored(client: str, split: Split) -> Part:
            return _part(files, client, split, codec, layout, options)

        read = source if source.is_file() else None
        paths = (read,) if read is not None else tuple(file.path for file in files.values())
        origin = Origin(
            source, paths + ((vocabulary,) if vocabulary is not None else ()), {"kind": kind, **_given(options)}
        )
        header = codec.header().model_copy(update={"own_test": "test" in files})
        write_clients(destination, header, sizes, stored, origin, codec.metadata())
    return ImportReport(len(sizes), samples, tuple(_warnings(kind, vocabulary, options)), destination)


def _check(kind: Kind, options: TffOptions) -> None:
    for name, kinds in _OPTIONS_OF.items():
        if kind not in kinds and getattr(options, name) is not None:
            raise DataError(
                f"--{name.replace('_', '-')} does not apply to {kind}, only to {' and '.join(kinds)}; leave it out"
            )
    for name in ("clients", "most_samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise DataError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


@contextmanager
def _folder(source: Path, layout: Layout, destination: Path) -> Iterator[Path]:
    """A folder with HDF5 files, or an SQLite file; an archive is compared and unpacked."""
    if not source.exists():
        raise DataError(
            f"{source} does not exist; give a folder with {layout.file('train')}, TFF's archive {layout.stem}.tar.bz2, "
            "or its SQLite file"
        )
    if source.is_dir() or not source.name.endswith((".tar.bz2", ".lzma", ".xz")):
        yield source
        return
    if not source.name.endswith(".tar.bz2"):
        raise DataError(f"{source} is compressed as a whole; unpack it first: unlzma --keep {source.name}")
    if (digest := file_digest(source)) != layout.archive_sha256:
        raise DataError(
            f"{source} has the SHA-256 {digest}, but TFF's {layout.stem}.tar.bz2 has {layout.archive_sha256}; get it "
            "again, or unpack it and give the folder"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tff-", dir=destination.parent) as unpacked:
        _unpack(source, Path(unpacked), layout)
        yield Path(unpacked)


def _unpack(archive: Path, folder: Path, layout: Layout) -> None:
    """The HDF5 files of an archive; everything else in it stays there."""
    wanted = {layout.file(part) for part in layout.tables}
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = Path(member.name).name
                content = opened.extractfile(member) if name in wanted and member.isfile() else None
                if content is not None:
                    with (folder / name).open("wb") as file:
                        shutil.copyfileobj(content, file, 1 << 20)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"{archive} cannot be unpacked: {error}; make room, or get it again") from error


def _files(folder: Path, layout: Layout, options: TffOptions) -> dict[Split, ClientFile]:
    """By split, the file with its clients."""
    parts: dict[Split, str] = {"train": "train", "test": "test"}
    if options.users == "held-out":
        parts = {"train": "held_out"}  # all their examples; a run draws the test parts
    elif options.train_only:
        del parts["test"]
    if folder.is_dir():
        for part in parts.values():
            if not (folder / layout.file(part)).is_file():
                raise DataError(f"{folder} has no {layout.file(part)}; give the folder with TFF's HDF5 files")
        return {split: Hdf5File(folder / layout.file(part), layout.columns) for split, part in parts.items()}
    return {split: SqliteFile(folder, layout.columns, layout.tables[part]) for split, part in parts.items()}


def _codec(kind: Kind, folder: Path, options: TffOptions) -> tuple[TffCodec, Path | None]:
    """The codec, and the file of words that it takes."""
    match kind:
        case "stackoverflow":
            near = folder / _WORD_COUNTS
            file = options.vocabulary_file or (near if near.is_file() else None)
            words = None if file is None else read_word_counts(file)
            size = _VOCABULARY if options.vocabulary is None else options.vocabulary
            return Words(words, size, _WORDS if options.length is None else options.length), file
        case "shakespeare":
            return Characters(_CHARACTERS if options.length is None else options.length), None
        case "cifar100":
            return ColourImages(), None
        case "emnist":
            return GreyImages("tff-emnist", 62), None
        case "emnist-digits":
            return GreyImages("tff-emnist-digits", 10), None


_Sizes = dict[str, dict[Split, int]]


def _sizes(files: Mapping[Split, ClientFile], layout: Layout, options: TffOptions) -> _Sizes:
    """By client and split, how many examples are taken; train before test."""
    names = sorted(name for name, size in files["train"].sizes.items() if size)
    if options.clients is not None:
        if options.clients > len(names):
            raise DataError(f"--clients is {options.clients}, but {files['train'].path} has {len(names)}; ask for less")
        drawn = np.random.default_rng(options.seed).choice(len(names), options.clients, replace=False)
        names = [names[place] for place in sorted(drawn.tolist())]
    most = options.most_samples or np.inf
    sizes: _Sizes = {name: {"train": int(min(files["train"].sizes[name], most))} for name in names}
    if "test" in files:
        for name, size in files["test"].sizes.items():
            own = name if layout.same_clients else _test_name(name)
            if size and (own in sizes or options.clients is None or not layout.same_clients):
                sizes.setdefault(own, {})["test"] = size
    return sizes


def _surveyed(
    files: Mapping[Split, ClientFile], sizes: _Sizes, codec: TffCodec, layout: Layout, options: TffOptions
) -> _Sizes:
    """The sizes in samples, once the codec has seen all clients."""
    return {
        client: {split: codec.survey(*_columns(files, client, split, layout, options)) for split in parts}
        for client, parts in sizes.items()
    }


def _part(
    files: Mapping[Split, ClientFile], client: str, split: Split, codec: TffCodec, layout: Layout, options: TffOptions
) -> Part:
    columns, _, where = _columns(files, client, split, layout, options)
    return codec.part(columns, where)


def _columns(
    files: Mapping[Split, ClientFile], client: str, split: Split, layout: Layout, options: TffOptions
) -> tuple[Columns, str, str]:
    """The examples of a client that are taken, their split, and what to call them in errors."""
    file = files[split]
    name = client.removeprefix(_test_name("")) if split == "test" and not layout.same_clients else client
    columns = file.client(name)
    if split == "train" and options.most_samples is not None and file.sizes[name] > options.most_samples:
        # A client's draw does not depend on which others are imported.
        generator = np.random.default_rng([options.seed, zlib.crc32(name.encode())])
        kept = sorted(generator.choice(file.sizes[name], options.most_samples, replace=False).tolist())
        columns = {column: [values[place] for place in kept] for column, values in columns.items()}
    return columns, split, f"{file.path}, client {name!r}"


def _test_name(name: str) -> str:
    """Returns the name of a client of the test part that is none of the training part's."""
    return f"test-{name}"


def _given(options: TffOptions) -> dict[str, object]:
    values = {key: value for key, value in asdict(options).items() if value is not None}
    return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}


def _warnings(kind: Kind, vocabulary: Path | None, options: TffOptions) -> Iterator[str]:
    if kind == "stackoverflow" and vocabulary is None:
        yield (
            f"there is no {_WORD_COUNTS}, so the vocabulary is made of the imported clients' training sentences and is "
            "not the published one; put TFF's file beside the data, or name it by --vocabulary-file"
        )
    if kind == "cifar100" and not options.train_only:
        yield (
            "the test part has clients of its own, called test-0, ...: no training client has test samples; "
            "evaluation.official_test scores all of them, --train-only leaves them out"
        )
