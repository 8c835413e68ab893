"""Import LEAF's own JSON (folders ``train/`` and ``test/``) into one Parquet file sorted by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from rayfl.data.sources.leaf.celeba import CelebaCodec
from rayfl.data.sources.leaf.codec import Codec, Part, Split, malformed
from rayfl.data.sources.leaf.letters import ShakespeareCodec
from rayfl.data.sources.leaf.reading import json_files, read_users
from rayfl.data.sources.leaf.vectors import FemnistCodec, SyntheticCodec, as_floats
from rayfl.data.sources.leaf.words import DEFAULT_VOCABULARY, RedditCodec, Sent140Codec, TokenKind, VocabularyChoice
from rayfl.data.sources.leaf.writing import ImportReport, Origin, total, write_clients
from rayfl.errors import DataError

Kind = Literal["femnist", "shakespeare", "sent140", "celeba", "synthetic", "reddit"]

_OPTIONS_OF: dict[Kind, tuple[str, ...]] = {
    "sent140": ("tokens", "length", "vocabulary", "vocabulary_file"),
    "celeba": ("images",),
    "reddit": ("vocabulary", "vocabulary_file", "sequences"),
}


@dataclass(frozen=True)
class LeafOptions:
    """What some of LEAF's data sets need in addition to their JSON; None: the default, or not needed.

    Attributes:
        images: for CelebA, the folder or zip archive with the image files.
        tokens: for Sent140, what a text is cut into; ``words`` by default.
        length: for Sent140, tokens in one input; 25 words or 140 characters by default.
        vocabulary: for Sent140 and Reddit, the most tokens of the vocabulary that is built from the train part,
            padding and unknown included; 10,000 by default.
        vocabulary_file: for Sent140 and Reddit, a list of tokens to take instead, one a line.
        sequences: for Reddit, whether a sample is a sequence of 10 words whose every next word is learned (the task
            ``language_model``), in place of one next word.
    """

    images: Path | None = None
    tokens: TokenKind | None = None
    length: int | None = None
    vocabulary: int | None = None
    vocabulary_file: Path | None = None
    sequences: bool | None = None


_NO_OPTIONS = LeafOptions()


def import_leaf(kind: Kind, source: Path, destination: Path, options: LeafOptions = _NO_OPTIONS) -> ImportReport:
    """Turn a LEAF folder into one Parquet file that :class:`rayfl.data.sources.natural.NaturalDataset` reads.

    Pixels of FEMNIST are stored as uint8 k where every pixel of the data set is k/255 within 1e-6, else as float32.
    Characters of Shakespeare are stored as their place in ``ALPHABET``. The other data sets are described by their
    codecs. All JSON is checked before anything is written, and the file appears under its name only when it is
    complete; an existing one is replaced. Its record (:mod:`rayfl.data.files.records`) lies beside it.

    Args:
        kind: the LEAF data set.
        source: the folder with ``train/`` and ``test/``, LEAF's ``data/<kind>/data``.
        destination: the Parquet file to write; its folder is made where it is missing.
        options: what else this data set needs.

    Raises:
        DataError: malformed input (names the file and the user), an option that this data set has not, or a
            destination that cannot be written.
    """
    codec = _codec(kind, options)
    splits: tuple[Split, Split] = ("train", "test")
    files = {split: json_files(source, split) for split in splits}
    clients: dict[str, dict[Split, Part]] = {}
    warnings: list[str] = []
    if (source / "val").is_dir():
        warnings.append(f"{source / 'val'} is left out; runs draw their validation parts from train/")
    for split, paths in files.items():
        origin: dict[str, Path] = {}
        for path in paths:
            parts, found = read_users(path, split, codec)
            for user, part in parts.items():
                if user in origin:
                    raise malformed(f"{path}, user {user!r}", f"the user is also in {origin[user]}")
                origin[user] = path
                clients.setdefault(user, {})[split] = part
            warnings += found
            if split == "test" and (repeated := sum(_repeated(clients[user]) for user in parts)):
                warnings.append(f"{path}: {repeated} samples also occur in the train part of their user; they are kept")
    clients = {user: parts for user, parts in clients.items() if any(len(part.y) for part in parts.values())}
    sizes = {user: {split: len(part.y) for split, part in parts.items()} for user, parts in clients.items()}
    samples = total(sizes)
    if not samples["train"]:
        raise DataError(f"{source / 'train'}: no user has a sample; check that LEAF's preprocess.sh ran to its end")
    header = codec.header(part for parts in clients.values() for part in parts.values())

    def stored(user: str, split: Split) -> Part:
        return codec.stored(clients[user][split], header)

    given = {key: value for key, value in asdict(options).items() if value is not None}
    chosen = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    read = Origin(source, _on_record(files.values(), options), {"kind": kind, **chosen})
    write_clients(destination, header, sizes, stored, read, codec.metadata())
    return ImportReport(len(clients), samples, tuple(warnings), destination)


def _on_record(parts: Iterable[Sequence[Path]], options: LeafOptions) -> tuple[Path, ...]:
    """The JSON files, and what else the options name, but for the single images of a folder."""
    further = [path for path in (options.images, options.vocabulary_file) if path is not None and path.is_file()]
    return (*(path for part in parts for path in part), *further)


def _codec(kind: Kind, options: LeafOptions) -> Codec:
    allowed = _OPTIONS_OF.get(kind, ())
    for field in fields(options):
        if field.name not in allowed and getattr(options, field.name) is not None:
            kinds = " and ".join(other for other, names in _OPTIONS_OF.items() if field.name in names)
            raise DataError(f"--{field.name.replace('_', '-')} does not apply to {kind}, only to {kinds}; leave it out")
    if options.vocabulary is not None and options.vocabulary_file is not None:
        raise DataError("--vocabulary and --vocabulary-file exclude each other; the file decides its size itself")
    size = DEFAULT_VOCABULARY if options.vocabulary is None else options.vocabulary
    choice = VocabularyChoice(size, options.vocabulary_file)
    match kind:
        case "femnist":
            return FemnistCodec()
        case "shakespeare":
            return ShakespeareCodec()
        case "synthetic":
            return SyntheticCodec()
        case "sent140":
            return Sent140Codec(choice, options.tokens or "words", options.length)
        case "reddit":
            return RedditCodec(choice, bool(options.sequences))
        case "celeba":
            if options.images is None:
                raise DataError("celeba needs --images, the folder or zip archive with CelebA's image files")
            return CelebaCodec(options.images)


def _repeated(parts: dict[Split, Part]) -> int:
    """Test samples of one user that are also train samples, label included."""
    if "train" not in parts:
        return 0
    train, test = parts["train"], parts["test"]
    same_type = train.x.dtype == test.x.dtype
    seen, asked = (
        [(x.tobytes(), y.tobytes()) for x, y in zip(part.x if same_type else as_floats(part.x), part.y, strict=True)]
        for part in (train, test)
    )
    known = set(seen)
    return sum(sample in known for sample in asked)
