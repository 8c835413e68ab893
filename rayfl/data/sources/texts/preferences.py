"""Pairs of answers to a prompt from a user's own files, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rayfl.data.sources.columns.files import TableFile, no_column, owner
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.texts.prompted import Pieces, PromptedSource, is_list
from rayfl.data.sources.tokens.chat_texts import CHAT, Message, asking, chat_template_of, messages_of
from rayfl.data.sources.tokens.instruction_texts import TEMPLATES, template_of
from rayfl.errors import DataError
from rayfl.examples import Target

_PROMPT = "prompt"
_OF_PROMPT = f"{{{_PROMPT}}}"


class PreferencesSource(PromptedSource):
    """Configuration of your own pairs of answers, in the forms that TRL reads: what language models are aligned with.

    A row has two answers to a prompt, as texts or as conversations that differ in their last message. Prompts and
    answers become two rows of tokens as in :class:`rayfl.data.sources.texts.prompted.PromptedSource`.
    """

    name: Literal["preferences"] = Field(
        default="preferences", description="Your own pairs of answers; Parquet, CSV or JSON."
    )
    template: str = Field(
        default=_OF_PROMPT,
        description="How a prompt is made: a text with names of columns in braces; where there is no column "
        f"{_PROMPT}, {_OF_PROMPT} is what both answers begin with; {', '.join(TEMPLATES)}; {CHAT}: the tokenizer's own "
        f"chat template, for conversations, which follow those of a column {_PROMPT}, if there is one.",
    )
    chosen: str = Field(default="chosen", description="Column of the answers that are preferred.")
    rejected: str = Field(default="rejected", description="Column of the other answers.")

    answers: ClassVar[int] = 2

    @property
    def _learns(self) -> Target:
        return "preference"

    def _pieces(self, file: TableFile, client: str | None) -> tuple[Pieces, list[bool]]:
        """Prompt and answer, twice a row."""
        for field, name in (("chosen", self.chosen), ("rejected", self.rejected)):
            if name not in file.schema.names:
                raise no_column(field, file.path, name, file.schema)
        if self._chats:
            found = list(self._conversations(file, client))
        else:
            found = [[[asked, said] for said in both] for asked, both in self._texts_of(file, client, self.template)]
        return found, [True] * len(found)

    def _texts_of(self, file: TableFile, client: str | None, template: str) -> list[tuple[str, Sequence[str]]]:
        """Prompts, and both answers, as texts."""
        names = [self.chosen, self.rejected]
        for name in names:
            if is_list(file.schema.field(name).type):
                raise DataError(
                    f"{file.path}: column {name!r} has lists, such as those of messages: set dataset.template={CHAT}"
                )
        if template == _OF_PROMPT and _PROMPT not in file.schema.names:
            table = file.read(list(dict.fromkeys([*names, *([client] if client is not None else [])])))
            both = (self._texts(file, table, name, client, optional=False) for name in names)
            return [_divided(one or "", other or "") for one, other in zip(*both, strict=True)]
        prompts, columns = self._prompts(file, client, template_of(template), names)
        return list(zip(prompts, zip(*columns, strict=True), strict=True))

    def _conversations(self, file: TableFile, client: str | None) -> Iterator[list[list[str]]]:
        """Yields both conversations of each row, up to the last answer and from there on."""
        template, names = chat_template_of(self.tokenizer), (self.chosen, self.rejected)
        kinds = [is_list(file.schema.field(name).type) for name in names]
        if not any(kinds):
            for asked, both in self._texts_of(file, client, _OF_PROMPT):
                yield [template.last(asking(asked, said)) for said in both]
            return
        if not all(kinds):
            one, other = names if kinds[0] else names[::-1]
            raise DataError(f"{file.path}: column {one!r} has conversations, and {other!r} has none: store one kind")
        prompt = [_PROMPT] if _PROMPT in file.schema.names else []
        table = file.read(list(dict.fromkeys([*prompt, *names, *([client] if client is not None else [])])))
        for row, values in enumerate(table.select([*prompt, *names]).to_pylist()):
            try:
                yield self._both(values, template.last)
            except DataError as error:
                raise DataError(f"{file.path}: row {row}{owner(table, client, row)}: {error}") from error

    def _both(self, values: dict[str, Any], pieces: Any) -> list[list[str]]:
        """The pieces of a row's conversations.

        Raises:
            DataError: they are no conversations that end with an answer each, and are the same before.
        """
        before = _messages(values.get(_PROMPT), _PROMPT)
        whole = []
        for name in (self.chosen, self.rejected):
            own = _messages(values[name], name)
            if not own or own[-1]["role"] != "assistant":
                raise DataError(f"column {name!r}: its last message is not of the assistant: end it with an answer")
            whole.append(own if own[: len(before)] == before else [*before, *own])
        if whole[0][:-1] != whole[1][:-1]:
            raise DataError(
                f"columns {self.chosen!r} and {self.rejected!r} differ before their last answers, and pairs are "
                "answers to the same: cut both after the first answer in which they differ, or remove the row"
            )
        found: list[list[str]] = [pieces(messages) for messages in whole]
        return found

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        width, found = rows.x.shape[-1], []
        if rows.cut:
            found.append(
                f"{rows.cut} of {len(rows.y)} pairs have an answer that is cut, since with its prompt it is longer "
                f"than {width} tokens: raise dataset.length to keep them whole"
            )
        if rows.left_out:
            found.append(
                f"{rows.left_out} rows are left out, since no token of one of their answers would be learned: the "
                f"prompt has {width} tokens (dataset.length) or more, or the answer is empty and dataset.end=none"
            )
        if rows.alike:
            found.append(
                f"{rows.alike} rows are left out, since both of their answers are the same within {width} tokens"
            )
        return [Remark(text) for text in found]


def _divided(chosen: str, rejected: str) -> tuple[str, tuple[str, str]]:
    """What two texts begin with, up to the word in which they differ, and how they go on; its blank belongs to that."""
    both = zip(chosen, rejected, strict=False)
    alike = next((place for place, (one, other) in enumerate(both) if one != other), min(len(chosen), len(rejected)))
    last = next((place for place in range(alike - 1, -1, -1) if chosen[place].isspace()), -1)
    place = last if chosen[last : last + 1] == " " else last + 1
    return chosen[:place], (chosen[place:], rejected[place:])


def _messages(value: Any, name: str) -> list[Message]:
    """The messages of a column; a text is one of the user's."""
    if value is None and name == _PROMPT:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    try:
        return [*messages_of(value)]
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from error
