"""Instructions and their responses from a user's own files, as tokens of which those of the responses are learned."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayfl.data.sources.columns.files import TableFile, owner
from rayfl.data.sources.columns.layout import AUTO
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.texts.prompted import Pieces, PromptedSource, is_list
from rayfl.data.sources.tokens.chat_texts import CHAT, asking, chat_template_of, messages_of
from rayfl.data.sources.tokens.instruction_texts import Template, template_of
from rayfl.errors import DataError
from rayfl.examples import Target

_RESPONSES = ("response", "output", "completion", "answer")
_CONVERSATIONS = ("messages", "conversations")
_PLAIN = Template("{instruction}\n\n{input}", "{instruction}", "input")
"""What a user says in a row of Alpaca's form."""


class InstructionsSource(PromptedSource):
    """Configuration of your own instructions and responses, in Alpaca's form or another: a language model's.

    Prompts and responses become rows of tokens as in :class:`rayfl.data.sources.texts.prompted.PromptedSource`.
    """

    name: Literal["instructions"] = Field(
        default="instructions", description="Your own instructions and responses; Parquet, CSV or JSON."
    )
    response: str = Field(
        default=AUTO,
        description=f"Column of the responses; auto: the one of {', '.join(_RESPONSES)} that there is. With "
        f"template={CHAT} also that of whole conversations; auto: {' or '.join(_CONVERSATIONS)}.",
    )

    @property
    def _learns(self) -> Target:
        return "tokens"

    def _pieces(self, file: TableFile, client: str | None) -> tuple[Pieces, list[bool]]:
        """Conversations in pieces, or prompts and responses."""
        if self._chats:
            return self._turns(file, client)
        found = self._asked(file, client, template_of(self.template))
        return [[[asked, said]] for asked, said in found], [True] * len(found)

    def _turns(self, file: TableFile, client: str | None) -> tuple[Pieces, list[bool]]:
        """Conversations in pieces, and whether these have all turns of the assistant."""
        template, names = chat_template_of(self.tokenizer), file.schema.names
        named = (self.response,) if self.response != AUTO else _CONVERSATIONS
        column = next((name for name in named if name in names and is_list(file.schema.field(name).type)), None)
        if column is None:
            values: list[Any] = [asking(*both) for both in self._asked(file, client, _PLAIN)]
            table = None
        else:
            table = file.read(list(dict.fromkeys([column, *([client] if client else [])])))
            values = table.column(column).to_pylist()
        found = []
        for row, value in enumerate(values):
            try:
                found.append(template.pieces(messages_of(value)))
            except DataError as error:
                where = f"row {row}" if table is None else f"column {column!r}, row {row}{owner(table, client, row)}"
                raise DataError(f"{file.path}: {where}: {error}") from error
        return [[one] for one, _ in found], [whole for _, whole in found]

    def _asked(self, file: TableFile, client: str | None, template: Template) -> list[tuple[str, str]]:
        """Prompts and responses."""
        prompts, (responses,) = self._prompts(file, client, template, [self._response(file)])
        return list(zip(prompts, responses, strict=True))

    def _response(self, file: TableFile) -> str:
        names = file.schema.names
        found = [name for name in _RESPONSES if name in names] if self.response == AUTO else [self.response]
        if len(found) != 1 or found[0] not in names:
            there = f"columns {' and '.join(found)}" if len(found) > 1 else f"only {', '.join(names)}"
            raise DataError(f"dataset.response: {file.path} has {there}; name the column of the responses")
        return found[0]

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
        if rows.shortened:
            found.append(
                f"{rows.shortened} conversations are learned in their last answer alone, since the chat template "
                "writes earlier turns otherwise than the last one"
            )
        return [Remark(text) for text in found]
