"""Instructions and their responses from a user's own files, as tokens of which those of the responses are learned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from rayfl.data.files.whole import file_digest
from rayfl.data.sources.column_layout import AUTO, NONE
from rayfl.data.sources.columns import Rows, client_names, split_names
from rayfl.data.sources.copied import CopiedSource
from rayfl.data.sources.instruction_texts import TEMPLATES, Encoder, begins_with_blank, encoder_of, template_of
from rayfl.data.sources.parquet import located
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.table_files import TableFile, no_column, owner
from rayfl.data.sources.tokenizers import SETTINGS, tokenizer_file
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.metrics.language import IGNORED
from rayfl.naming.texts import Checksum

_RESPONSES = ("response", "output", "completion", "answer")


class InstructionsSource(CopiedSource):
    """Configuration of your own instructions and responses, in Alpaca's form or another: a language model's.

    A row's prompt is made of its columns by a template, and followed by its response and the token that ends it. The
    next token is learned at the positions of the response alone. Prompt and response become tokens each apart, so that
    where the response begins is known. At the first use a copy is made in the data root that is read in place; it is
    made again when a file, the tokenizer or an option changes.
    """

    name: Literal["instructions"] = Field(
        default="instructions", description="Your own instructions and responses; Parquet, CSV or JSON."
    )
    path: Path | None = Field(
        default=None,
        description="The file: Parquet, CSV, JSON (a list of objects) or JSON lines. A relative path that does not "
        "exist in the working directory is looked up in the data root.",
    )
    paths: tuple[Path, ...] = Field(default=(), description="Several files with the same columns, in place of path.")
    tokenizer: str = Field(
        min_length=1,
        description="The base's tokenizer.json of the library tokenizers, or a folder with one; bytes: the bytes of "
        "UTF-8.",
    )
    tokenizer_sha256: Checksum | None = Field(
        default=None, description="Checksum of the tokenizer: found out and recorded; texts need the same one again."
    )
    template: str = Field(
        default="alpaca",
        description=f"How a prompt is made: {', '.join(TEMPLATES)}, or a text with names of columns in braces.",
    )
    response: str = Field(
        default=AUTO, description=f"Column of the responses; auto: the one of {', '.join(_RESPONSES)} that there is."
    )
    end: str = Field(
        default=AUTO,
        min_length=1,
        description="Token that ends a response, and is learned with it; auto: the tokenizer's own; none: no token.",
    )
    length: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that the model reads of a row; of longer ones the end is cut off; null: those of the "
        "longest.",
    )
    client: str = Field(
        default=AUTO, description="Column of the clients' names; auto: client, if there is one; none: pool the samples."
    )
    split: str = Field(
        default=AUTO, description="Column with train or test; auto: split, if there is one; none: ignore the division."
    )

    @field_validator("template")
    @classmethod
    def _readable(cls, template: str) -> str:
        template_of(template)
        return template

    @model_validator(mode="after")
    def _one_way(self) -> InstructionsSource:
        if (self.path is None) == (not self.paths):
            raise ValueError("give either path, a file, or paths, several files")
        return self

    def settled(self) -> Self:
        """The source with the checksum of its tokenizer; unchanged where there is no such file here."""
        if self.tokenizer_sha256 is not None or (found := tokenizer_digest(self.tokenizer)) is None:
            return self
        return self.model_copy(update={"tokenizer_sha256": found})

    @property
    def files(self) -> tuple[Path, ...]:
        """See the base class."""
        given = self.paths if self.path is None else (self.path,)
        return tuple(located(path.expanduser()) for path in given)

    @property
    def _learns(self) -> Target:
        return "tokens"

    def _choices(self) -> Mapping[str, Any]:
        return {
            **self.model_dump(mode="json", exclude={"root", "path", "paths", "tokenizer", "tokenizer_sha256"}),
            "template": template_of(self.template).text,
            "tokenizer": self._tokenizer_checked() or self.tokenizer,
        }

    def _noted(self) -> dict[str, Any]:
        return {**super()._noted(), "tokenizer_sha256": self._tokenizer_checked()}

    def _tokenizer_checked(self) -> str | None:
        """The tokenizer's checksum; None for one without a file.

        Raises:
            DataError: it is another one than the recorded.
        """
        found = tokenizer_digest(self.tokenizer)
        if None not in (found, self.tokenizer_sha256) and found != self.tokenizer_sha256:
            raise DataError(
                f"dataset.tokenizer: {self.tokenizer} has the checksum {found}, but dataset.tokenizer_sha256 is "
                f"{self.tokenizer_sha256}: it was changed. Restore it, or leave tokenizer_sha256 out to begin a new run"
            )
        return found or self.tokenizer_sha256

    def _rows(self) -> Rows:
        encoder = encoder_of(self.tokenizer, self.end)
        tables = [file for file in map(TableFile, self.files) if file.schema.names]
        filled = [(file.path, table) for file in tables if (table := self._prompts_of(file)).num_rows]
        if not filled:
            raise DataError(f"{', '.join(map(str, self.files))}: no rows")
        names = set(filled[0][1].column_names)
        clients = client_names(filled, "client" if "client" in names else None)
        splits = split_names(filled, "split" if "split" in names else None)
        prompts, responses = (
            [text for _, table in filled for text in table.column(name).to_pylist()] for name in ("prompt", "response")
        )
        return _spans(prompts, responses, clients, splits, encoder, self.length, self.files)

    def _prompts_of(self, file: TableFile) -> pa.Table:
        """The columns prompt and response of a file, and client and split where it has them."""
        client, split = self._named(file, "client", self.client), self._named(file, "split", self.split)
        response = self._response(file)
        template = template_of(self.template)
        for name in template.columns:
            if name not in file.schema.names and name != template.optional:
                raise DataError(
                    f"dataset.template: {file.path} has no column {name!r}, only {', '.join(file.schema.names)}; write "
                    "a template out that names the columns of the prompt in braces"
                )
        read = [name for name in template.columns if name in file.schema.names]
        wanted = dict.fromkeys([*read, response, *(name for name in (client, split) if name is not None)])
        table = file.read(list(wanted))
        columns = {
            name: self._texts(file, table, name, client, name == template.optional) for name in (*read, response)
        }
        rows = [dict(zip(read, values, strict=True)) for values in zip(*(columns[name] for name in read), strict=True)]
        found = {"prompt": [template.prompt(row) for row in rows], "response": columns[response]}
        more = {key: table.column(name) for key, name in (("client", client), ("split", split)) if name is not None}
        return pa.table({**found, **more})

    def _named(self, file: TableFile, field: str, given: str) -> str | None:
        if given == NONE or (given == AUTO and field not in file.schema.names):
            return None
        name = field if given == AUTO else given
        if name not in file.schema.names:
            raise no_column(field, file.path, name, file.schema)
        return name

    def _response(self, file: TableFile) -> str:
        names = file.schema.names
        found = [name for name in _RESPONSES if name in names] if self.response == AUTO else [self.response]
        if len(found) != 1 or found[0] not in names:
            there = f"columns {' and '.join(found)}" if len(found) > 1 else f"only {', '.join(names)}"
            raise DataError(f"dataset.response: {file.path} has {there}; name the column of the responses")
        return found[0]

    def _texts(
        self, file: TableFile, table: pa.Table, name: str, client: str | None, optional: bool
    ) -> list[str | None]:
        column = table.column(name)
        if not (
            pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_null(column.type)
        ):
            raise DataError(f"{file.path}: column {name!r} has the type {column.type}; prompts and responses are text")
        values: list[str | None] = column.to_pylist()
        if not optional and None in values:
            row = values.index(None)
            raise DataError(
                f"{file.path}: column {name!r}, row {row}{owner(table, client, row)} is null; fill it or remove the row"
            )
        return values

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        found = []
        if rows.cut:
            found.append(
                f"{rows.cut} of {len(rows.y)} responses are cut, since with their prompts they are longer than "
                f"{rows.x.shape[1]} tokens: raise dataset.length to keep them whole"
            )
        if rows.left_out:
            found.append(
                f"{rows.left_out} rows are left out, since no token of their responses would be learned: their prompts "
                f"have {rows.x.shape[1]} tokens (dataset.length) or more, or the response is empty and dataset.end=none"
            )
        return [Remark(text) for text in found]


def tokenizer_digest(tokenizer: str) -> str | None:
    """The checksum of a tokenizer's file, and of the one beside it that names its special tokens; None without one."""
    file = tokenizer_file(tokenizer)
    if file is None or not file.is_file():
        return None
    beside = file.with_name(SETTINGS)
    parts = [file_digest(one) for one in (file, beside) if one.is_file()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _spans(
    prompts: Sequence[str],
    responses: Sequence[str],
    clients: np.ndarray | None,
    splits: np.ndarray | None,
    encoder: Encoder,
    length: int | None,
    files: Sequence[Path],
) -> Rows:
    """Rows of tokens, and the next tokens at the positions of the responses."""
    before = encoder.prompts(prompts)
    blanks = [" " if begins_with_blank(prompt, encoder) else "" for prompt in prompts]
    after = encoder.responses([blank + response for blank, response in zip(blanks, responses, strict=True)])
    ending = [] if encoder.end is None else [encoder.end]
    whole = [[*first, *second, *ending] for first, second in zip(before, after, strict=True)]
    width = length or max(max(map(len, whole)) - 1, 1)
    begins = np.maximum([len(first) for first in before], 1)
    ends = np.minimum([len(row) for row in whole], width + 1)
    kept = np.flatnonzero(begins < ends)
    if not kept.size:
        raise DataError(
            f"{', '.join(map(str, files))}: no response has a token within {width} tokens: raise dataset.length, or "
            "name the columns of prompts and responses"
        )
    tokens = np.full((len(kept), width + 1), encoder.padding, dtype=np.int32)
    for place, row in enumerate(kept):
        tokens[place, : ends[row]] = whole[row][: width + 1]
    places = np.arange(1, width + 1)
    asked = (places >= begins[kept, np.newaxis]) & (places < ends[kept, np.newaxis])
    cut = int((np.array([len(whole[row]) for row in kept]) > width + 1).sum())
    return Rows(
        tokens[:, :-1],
        np.where(asked, tokens[:, 1:], IGNORED),
        None if clients is None else clients[kept],
        None if splits is None else splits[kept],
        integers=False,
        num_labels=0,
        vocabulary=encoder.vocabulary,
        cut=cut,
        padding=encoder.padding,
        left_out=len(whole) - len(kept),
    )
