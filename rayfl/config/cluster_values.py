"""Kinds of values in the section ``cluster``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, StringConstraints


def _ordered(text: str) -> str:
    least, most = map(int, text.split(":"))
    if least > most:
        raise ValueError(f"{text}: the first number is the least, the second the most")
    return text


ActorRange = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$"), AfterValidator(_ordered)]
"""``2:16``: the least and the largest number of actors."""

_WORD = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[str, StringConstraints(pattern=rf"^([A-Za-z0-9.-]+/)?{_WORD}$")]
LabelValue = Annotated[
    str,
    StringConstraints(pattern=rf"^!?({_WORD}|in\( *{_WORD}( *, *{_WORD})* *\))$"),
    AfterValidator(lambda text: text.replace(" ", "")),
]
"""What a label must be: a value, ``!value``, ``in(one, other)`` or ``!in(one, other)``; spaces are taken out."""
