"""AG News: headlines and first sentences of news, in four classes."""

from __future__ import annotations

import shlex
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pydantic import Field

from rayfl.data.files.whole import new_file
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.columns.texts import TextOptions, read_texts
from rayfl.data.sources.preparation.download import fetch, is_url
from rayfl.data.sources.preparation.pooled_file import Part
from rayfl.data.sources.preparation.preparing import Order, no_checksum
from rayfl.data.sources.remarks import Remark, on_texts
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.sources.tokens.tokenizers import tokenizer_digest
from rayfl.errors import DataError

FOLDER = "ag_news_csv"
_COLUMNS = ["class", "title", "description"]
_CLASSES = 4
_ADDRESS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_MD5 = {"train.csv": "b1a00f826fdfbd249f79597b59e1dc12", "test.csv": "d52ea96a97a2d943681189a97654912d"}
"""As torchtext has them."""


class AgNewsSource(CopiedSource):
    """Configuration of AG News: 120,000 training and 7,600 test texts, 4 classes (Zhang, Zhao and LeCun, 2015).

    The files are the official ``train.csv`` and ``test.csv``: class (1 to 4), title and description, which are joined
    by a blank. The defaults are PFLlib's: ``basic_english`` tokens, 200 a text. With ``part=both`` a tokenizer is
    learned from all texts, as there; else from the part ``train``.
    """

    name: Literal["ag_news"] = Field(default="ag_news", description="The texts of AG News.")
    part: Part = Field(
        default="train",
        description="The official part whose samples are divided among the clients; both: train, then test.",
    )
    tokenizer: str = Field(
        default="basic_english",
        description="How texts become tokens: words, basic_english or characters, or a tokenizer.json of the library "
        "tokenizers, or a folder with one.",
    )
    length: int = Field(default=200, ge=1, description="Tokens of a text; longer ones are cut.")
    vocabulary: int | None = Field(default=None, ge=3, description="Most tokens that are learned; null: all.")

    @property
    def files(self) -> tuple[Path, ...]:
        """The official files on this machine."""
        return tuple(self._folder / name for name in _MD5)

    def prepare(self, order: Order) -> Path:
        """Gets the official files, unless they are there, and makes the copy.

        ``--source`` is a folder with them, or path or address of the archive ``ag_news_csv.tar.gz``.
        """
        no_checksum(order, "ag_news consists of two")
        if order.place is not None and not order.force and all(path.is_file() for path in self.files):
            raise DataError(
                f"{self._folder} has the files already: add --force to get them again, or leave out --source"
            )
        if order.place is not None:
            self._take(order, order.place)
        else:
            for path in self.files:
                digest = f"md5:{_MD5[path.name]}"
                if not path.is_file():
                    fetch(_ADDRESS + path.name, path, digest, offline=order.offline, progress=order.progress)
        return super().prepare(replace(order, place=None))

    def _check_there(self) -> None:
        for path in self.files:
            if not path.is_file():
                root = "" if self.root is None else f" --root {shlex.quote(str(self.resolved_root))}"
                raise DataError(
                    f"ag_news is not there: {path} does not exist; get it with `rayfl data prepare ag_news{root}` (add "
                    "--source for files you have), or set the source's root or RAYFL_DATA to the folder that has it"
                )

    def _choices(self) -> Mapping[str, Any]:
        options = self.model_dump(mode="json", exclude={"root"})
        if (digest := tokenizer_digest(self.tokenizer)) is not None:
            options["tokenizer_sha256"] = digest
        return options

    def _num_classes(self, rows: Rows) -> int:
        return _CLASSES

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        return on_texts(rows.cut, 0, rows.x.shape)

    def _rows(self) -> Rows:
        filled = [(path, _read(path)) for path in self.files]
        splits = np.repeat(np.array(["train", "test"], dtype=object), [table.num_rows for _, table in filled])
        training = np.ones(len(splits), dtype=bool) if self.part == "both" else splits == "train"
        options = TextOptions(self.tokenizer, self.length, self.vocabulary)
        found = read_texts(filled, "text", None, training, options)
        y = np.concatenate([table.column("class").to_numpy() for _, table in filled]) - 1
        return Rows(
            found.x, y, None, splits, False, _CLASSES, vocabulary=found.vocabulary, cut=found.cut, padding=found.padding
        )

    @property
    def _folder(self) -> Path:
        return self.resolved_root / FOLDER

    def _take(self, order: Order, place: str) -> None:
        """The official files, from a folder or an archive."""
        given = Path(place).expanduser()
        if not is_url(place) and given.is_dir():
            given = given / FOLDER if (given / FOLDER).is_dir() else given
            for path in self.files:
                if not (given / path.name).is_file():
                    raise DataError(f"--source {place}: there is no {path.name} in {given}")
                with (given / path.name).open("rb") as own, new_file(path) as file:
                    shutil.copyfileobj(own, file)
            return
        archive = given
        if is_url(place):
            archive = self.resolved_root / f"{FOLDER}.tar.gz"
            if order.force:
                archive.unlink(missing_ok=True)
            fetch(place, archive, offline=order.offline, progress=order.progress)
        try:
            with tarfile.open(archive) as opened:
                for path in self.files:
                    member = opened.extractfile(f"{FOLDER}/{path.name}")
                    assert member is not None
                    content = member.read()
                    with new_file(path) as file:
                        file.write(content)
        except (OSError, EOFError, KeyError, AssertionError, tarfile.TarError) as error:
            raise DataError(
                f"{archive} is not the archive of AG News, with {FOLDER}/train.csv and test.csv: {error}; give another"
            ) from error


def _read(path: Path) -> pa.Table:
    """The columns ``class``, from 1 to 4, and ``text``."""
    options = pyarrow.csv.ConvertOptions(
        column_types={"class": pa.int64(), "title": pa.string(), "description": pa.string()}
    )
    try:
        table = pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(column_names=_COLUMNS),
            parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
            convert_options=options,
        )
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not AG News's file of class, title and description: {str(error).strip()}"
        ) from error
    classes = table.column("class").to_numpy()
    wrong = np.flatnonzero(~((classes >= 1) & (classes <= _CLASSES)))
    if wrong.size:
        raise DataError(f"{path}: row {wrong[0]} has the class {classes[wrong[0]]}; AG News has 1 to {_CLASSES}")
    pairs = zip(table.column("title").to_pylist(), table.column("description").to_pylist(), strict=True)
    return pa.table({"class": table.column("class"), "text": [f"{title} {about}" for title, about in pairs]})
