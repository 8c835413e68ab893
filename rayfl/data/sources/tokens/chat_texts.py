"""Conversations as texts by a tokenizer's own chat template, of which what the assistant says is learned."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rayfl.data.sources.tokens.tokenizers import CHAT_FILE, SETTINGS, tokenizer_file
from rayfl.errors import DataError

CHAT = "chat"
"""The name of the template of a tokenizer's own."""

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names of roles in other files, and what templates call them."""

_FIELDS = ("role", "from"), ("content", "value")

_TRACKED = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Marks what the assistant says, which is known here without it."""

Message = Mapping[str, str]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template of a tokenizer: it runs in a sandbox of jinja2, and has no clock.

    Attributes:
        text: the template.
        tokens: its special tokens by role, such as ``bos_token``.
        path: where it is from, for messages.
    """

    text: str
    tokens: Mapping[str, str]
    path: Path

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(_TRACKED.sub("", self.text))
        except jinja2.TemplateError as error:
            raise DataError(f"dataset.template: the chat template in {self.path} is none of jinja2: {error}") from error

    def rendered(self, messages: Sequence[Message], opens: bool) -> str:
        """A conversation as text.

        Args:
            messages: each with ``role`` and ``content``.
            opens: whether the beginning of the assistant's next turn follows.

        Raises:
            DataError: the template refuses the messages.
        """
        try:
            # Templates ask of tools and documents whether they are none, as transformers has them.
            nothing = {"tools": None, "documents": None}
            return self._template.render(messages=messages, add_generation_prompt=opens, **nothing, **self.tokens)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise DataError(f"the chat template in {self.path} refuses it: {error}") from error

    def pieces(self, messages: Sequence[Message]) -> tuple[list[str], bool]:
        """A conversation in pieces: what is read, what is learned, what is read, and so on.

        A turn of the assistant is learned from where the template has it speak to where its turn ends. Templates that
        write earlier turns otherwise than the last one (without its thoughts, for instance) have pieces for the last
        turn alone.

        Returns:
            The pieces, and whether they have all turns of the assistant.

        Raises:
            DataError: nothing is learned, or the template refuses the messages.
        """
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError("it has no message of the assistant")
        found, written = list[str](), ""
        for place in turns:
            before, after = self.rendered(messages[:place], True), self.rendered(messages[: place + 1], False)
            if not (before.startswith(written) and after.startswith(before)):
                return self.last(messages[: turns[-1] + 1]), False
            found += [before.removeprefix(written), after.removeprefix(before)]
            written = after
        return found, True

    def last(self, messages: Sequence[Message]) -> list[str]:
        """A conversation in two pieces: all before the last message, which is the assistant's, and that.

        Raises:
            DataError: the template refuses the messages, or does not begin an answer as it writes one.
        """
        before, after = self.rendered(messages[:-1], True), self.rendered(messages, False)
        if not after.startswith(before):
            raise DataError(
                f"the chat template in {self.path} begins an answer otherwise than it writes one: give a template in "
                "braces"
            )
        return [before, after.removeprefix(before)]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def chat_template_of(tokenizer: str) -> ChatTemplate:
    """The chat template beside a tokenizer's file.

    Raises:
        DataError: there is none.
    """
    file = tokenizer_file(tokenizer)
    if file is None:
        raise DataError(f"dataset.template is {CHAT}, but tokenizer={tokenizer} has no chat template: give a folder")
    beside, own = file.with_name(SETTINGS), file.with_name(CHAT_FILE)
    try:
        settings = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        text = own.read_text(encoding="utf-8") if own.is_file() else settings.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"dataset.tokenizer: {beside} is not readable JSON: {error}") from error
    if isinstance(text, list):  # several, each with a name
        text = next((one["template"] for one in text if one.get("name") == "default"), None)
    if not isinstance(text, str):
        raise DataError(
            f"dataset.template is {CHAT}, but neither {beside} nor {own.name} has a chat template: give the tokenizer "
            "of a base that was made for conversations, or another template"
        )
    tokens = {role: _named(value) for role, value in settings.items() if role.endswith("_token")}
    return ChatTemplate(text, {role: value for role, value in tokens.items() if value is not None}, file)


def _named(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def asking(prompt: str, answer: str) -> list[Message]:
    """The messages of one question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def messages_of(value: Any) -> list[dict[str, str]]:
    """The messages of a row, by ``role`` and ``content`` or, as ShareGPT has them, ``from`` and ``value``.

    Raises:
        DataError: it is no list of such, or a content is no text.
    """
    if not isinstance(value, list) or not value:
        raise DataError("it is no list of messages")
    found = []
    for one in value:
        one = one if isinstance(one, dict) else {}
        role, content = (next((one[key] for key in keys if one.get(key) is not None), None) for keys in _FIELDS)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError("a message has no role (or from) and content (or value) that are texts")
        found.append({"role": _ROLES.get(role, role), "content": content})
    return found
