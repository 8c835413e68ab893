"""What the user's own files of prompts and answers have in common: how they become rows of tokens."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from rayfl.data.sources.columns.files import TableFile, form_of_names, no_column, owner
from rayfl.data.sources.columns.layout import AUTO, NONE
from rayfl.data.sources.columns.reading import Rows, client_names, split_names
from rayfl.data.sources.rows.copied import CopiedSource
from rayfl.data.sources.rows.parquet import located
from rayfl.data.sources.texts.spans import rows_of, tokens_of_responses, tokens_of_turns
from rayfl.data.sources.tokens.chat_texts import CHAT
from rayfl.data.sources.tokens.instruction_texts import TEMPLATES, Encoder, Template, encoder_of, template_of
from rayfl.data.sources.tokens.tokenizers import tokenizer_digest
from rayfl.errors import DataError
from rayfl.naming.lists import EACH_ONCE
from rayfl.naming.texts import Checksum

Pieces = list[list[list[str]]]
"""By row, its texts, each in pieces: one that is read, one that is learned, and so on."""


class PromptedSource(CopiedSource):
    """Configuration of a user's own prompts and answers.

    A row's prompt is made of its columns by a template, and followed by an answer and the token that ends it. The next
    token is learned at the positions of the answer alone. Prompt and answer become tokens each apart, so that where the
    answer begins is known. At the first use a copy is made in the data root that is read in place; it is made again
    when a file, the tokenizer or an option changes.
    """

    path: Path | None = Field(
        default=None,
        description="The file: Parquet, CSV, JSON (a list of objects) or JSON lines. A relative path that does not "
        "exist in the working directory is looked up in the data root.",
    )
    paths: Annotated[tuple[Path, ...], EACH_ONCE] = Field(
        default=(), description="Several files with the same columns, in place of path."
    )
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
        description=f"How a prompt is made: {', '.join(TEMPLATES)}; {CHAT}: the tokenizer's own chat template, for "
        "conversations; or a text with names of columns in braces.",
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

    answers: ClassVar[int] = 1
    """To how many answers of a row its prompt leads, each in a text of its own."""

    @field_validator("template")
    @classmethod
    def _readable(cls, template: str) -> str:
        if template != CHAT:
            template_of(template)
        return template

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.path is None) == (not self.paths):
            raise ValueError("give either path, a file, or paths, several files")
        return self

    def settled(self) -> Self:
        """The source with the checksum of its tokenizer; unchanged where there is no such file here."""
        if self.tokenizer_sha256 is not None or (found := tokenizer_digest(self.tokenizer, self._chats)) is None:
            return self
        return self.model_copy(update={"tokenizer_sha256": found})

    @property
    def files(self) -> tuple[Path, ...]:
        """See the base class."""
        given = self.paths if self.path is None else (self.path,)
        return tuple(located(path.expanduser()) for path in given)

    def decoder(self) -> Encoder:
        """See the base class."""
        # A chat template writes what ends a turn: nothing is added unless it is asked for.
        return encoder_of(self.tokenizer, NONE if self._chats and self.end == AUTO else self.end)

    @property
    def _chats(self) -> bool:
        return self.template == CHAT

    def _choices(self) -> Mapping[str, Any]:
        return {
            **self.model_dump(mode="json", exclude={"root", "path", "paths", "tokenizer", "tokenizer_sha256"}),
            **form_of_names(self.files, self.client),
            "template": CHAT if self._chats else template_of(self.template).text,
            "tokenizer": self._tokenizer_checked() or self.tokenizer,
            # Copies of older releases have tokens of each piece of a conversation.
            **({"tokens_of": "whole conversations"} if self._chats else {}),
        }

    def _noted(self) -> dict[str, Any]:
        return {**super()._noted(), "tokenizer_sha256": self._tokenizer_checked()}

    def _tokenizer_checked(self) -> str | None:
        """The tokenizer's checksum; None for one without a file.

        Raises:
            DataError: it is another one than the recorded.
        """
        found = tokenizer_digest(self.tokenizer, self._chats)
        if None not in (found, self.tokenizer_sha256) and found != self.tokenizer_sha256:
            raise DataError(
                f"dataset.tokenizer: {self.tokenizer} has the checksum {found}, but dataset.tokenizer_sha256 is "
                f"{self.tokenizer_sha256}: it was changed. Restore it, or leave tokenizer_sha256 out to begin a new run"
            )
        return found or self.tokenizer_sha256

    def _rows(self) -> Rows:
        encoder = self.decoder()
        tables = [file for path in self.files if (file := TableFile(path, self.client)).schema.names]
        filled = [(file.path, table) for file in tables if (table := self._pieces_of(file)).num_rows]
        if not filled:
            raise DataError(f"{', '.join(map(str, self.files))}: no rows")
        names = set(filled[0][1].column_names)
        clients = client_names(filled, "client" if "client" in names else None)
        splits = split_names(filled, "split" if "split" in names else None)
        pieces = [text for _, table in filled for row in table.column("pieces").to_pylist() for text in row]
        if self._chats:
            tokens = tokens_of_turns(pieces, encoder)
        else:
            tokens = tokens_of_responses(pieces, encoder, own_blanks=self.answers > 1)
        found = rows_of(tokens, clients, splits, encoder, self.length, self.files, self.answers)
        shortened = sum(not whole for _, table in filled for whole in table.column("whole").to_pylist())
        return dataclasses.replace(found, shortened=shortened)

    def _pieces_of(self, file: TableFile) -> pa.Table:
        """The columns pieces and whole of a file (:meth:`_pieces`), and client and split where it has them."""
        client, split = self._named(file, "client", self.client), self._named(file, "split", self.split)
        more = [name for name in (client, split) if name is not None]
        pieces, whole = self._pieces(file, client)
        table = file.read(list(dict.fromkeys(more)))
        kept = {key: table.column(name) for key, name in (("client", client), ("split", split)) if name is not None}
        return pa.table({"pieces": pieces, "whole": whole, **kept})

    @abstractmethod
    def _pieces(self, file: TableFile, client: str | None) -> tuple[Pieces, list[bool]]:
        """Returns each row's texts in pieces, and whether they have all turns of the assistant."""

    def _prompts(
        self, file: TableFile, client: str | None, template: Template, answers: Sequence[str]
    ) -> tuple[list[str], list[list[str]]]:
        """Returns the rows' prompts, and by column the answers."""
        for name in template.columns:
            if name not in file.schema.names and name != template.optional:
                raise DataError(
                    f"dataset.template: {file.path} has no column {name!r}, only {', '.join(file.schema.names)}; write "
                    "a template out that names the columns of the prompt in braces"
                )
        read = [name for name in template.columns if name in file.schema.names]
        table = file.read(list(dict.fromkeys([*read, *answers, *([client] if client is not None else [])])))
        columns = {
            name: self._texts(file, table, name, client, name == template.optional) for name in (*read, *answers)
        }
        rows = [dict(zip(read, values, strict=True)) for values in zip(*(columns[name] for name in read), strict=True)]
        return [template.prompt(row) for row in rows], [[said or "" for said in columns[name]] for name in answers]

    def _named(self, file: TableFile, field: str, given: str) -> str | None:
        if given == NONE or (given == AUTO and field not in file.schema.names):
            return None
        name = field if given == AUTO else given
        if name not in file.schema.names:
            raise no_column(field, file.path, name, file.schema)
        return name

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


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a column has lists, such as those of messages."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
