"""Kinds of values in the section ``cluster``."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from rayfl.naming.texts import matching


def _ordered(text: str) -> str:
    least, most = map(int, text.split(":"))
    if least > most:
        raise ValueError(f"{text}: the first number is the least, the second the most")
    return text


ActorRange = Annotated[
    str,
    matching(r"[1-9][0-9]*:[1-9][0-9]*", "a number, auto, or the least and the most of them, such as 2:16"),
    AfterValidator(_ordered),
]
"""``2:16``: the least and the largest number of actors."""

_WORD = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LabelKey = Annotated[
    str, matching(rf"([A-Za-z0-9.-]+/)?{_WORD}", "the name of a label, such as ray.io/accelerator-type")
]
LabelValue = Annotated[
    str,
    matching(rf"!?({_WORD}|in\( *{_WORD}( *, *{_WORD})* *\))", "H100, !H100, in(H100, H200) or !in(H100, H200)"),
    AfterValidator(lambda text: text.replace(" ", "")),
]
"""What a label must be: a value, ``!value``, ``in(one, other)`` or ``!in(one, other)``; spaces are taken out."""
