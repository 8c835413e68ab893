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

LabelValue = Annotated[str, StringConstraints(pattern=r"^!?([\w.-]+|in\( *[\w.-]+( *, *[\w.-]+)* *\))$")]
"""What a label must be: a value, ``!value``, ``in(one, other)`` or ``!in(one, other)``."""
