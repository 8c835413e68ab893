"""Who keeps what and what travels in a method, read from its docstring, and the picture of it on the method's page."""

from __future__ import annotations

import re
from typing import Any

from mathematics import with_symbols

from algorithms.parts.peers import Peers
from rayfl.cli.catalog import describe_method

KEPT, SENT = ("Server", "Client"), ("Down", "Up")
_LABELS = (*KEPT, *SENT, "Evaluated")
_LABEL = re.compile(rf"(?:^|(?<=[.;)] ))({'|'.join(_LABELS)}): ")
_AS_IN = {"floco_plus": "floco"}
"""Methods whose docstring says that messages are those of another."""


def messages_of(name: str, methods: dict[str, Any]) -> dict[str, str]:
    """By label (Server, Client, Down, Up), the first sentence that a method's docstring has of it.

    Raises:
        SystemExit: the docstring lacks one.
    """
    text = " ".join(describe_method(methods[_AS_IN.get(name, name)]).partition("\nReferences:")[0].split())
    pieces = _LABEL.split(text.replace("``", "`"))
    found = {label: _sentence(said) for label, said in zip(pieces[1::2], pieces[2::2], strict=True)}
    missing = [label for label in (*KEPT, *SENT) if label not in found]
    if missing:
        raise SystemExit(f"{name}: its docstring does not say what is meant by {', '.join(missing)}")
    if name in _AS_IN:
        found["Client"] = f"{methods[name].client_keeps}, never sent"
    return found


def picture(name: str, methods: dict[str, Any]) -> str:
    """The picture, as HTML that is readable text without a style sheet."""
    said = {label: with_symbols(text) for label, text in messages_of(name, methods).items()}
    peers = issubclass(methods[name], Peers)
    down, up = ("from its neighbours", "to its neighbours") if peers else ("to a client", "to the server")
    return "\n".join(
        [
            '<div class="messages" markdown="1">',
            *_part("server", "Server keeps", said["Server"]),
            *_part("down", f"Down, {down}", said["Down"]),
            *_part("up", f"Up, {up}", said["Up"]),
            *_part("client", "Client keeps", said["Client"]),
            "</div>",
        ]
    )


def _part(kind: str, title: str, text: str) -> list[str]:
    return [f'<div class="{kind}" markdown="1">', f"**{title}**", "", text, "</div>"]


def _sentence(text: str) -> str:
    """The text up to its first full stop outside of brackets, or up to a semicolon."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign in "([") - (sign in ")]")
        if depth <= 0 and (sign == ";" or (sign == "." and text[place + 1 : place + 2] in ("", " "))):
            return text[:place]
    return text
