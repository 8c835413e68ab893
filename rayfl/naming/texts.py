"""Texts of a certain form, whose errors say in words what is allowed."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator

_SECRET_OPTION = re.compile(r"key|secret|token|passw|credential|^sig(nature)?$", re.IGNORECASE)


def has_keys(address: str) -> bool:
    """Returns whether an address has a password before its host, or keys among the options after its ``?``."""
    if "://" not in address:
        return False
    parts = urlsplit(address)
    options = parse_qsl(parts.query, keep_blank_values=True)
    return parts.password is not None or any(_SECRET_OPTION.search(name) for name, _ in options)


def matching(pattern: str, words: str) -> AfterValidator:
    """Makes sure that the whole of a text matches a regular expression.

    Args:
        pattern: the expression.
        words: what it allows, to follow "must be".
    """
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if compiled.fullmatch(text) is None:
            raise ValueError(f"must be {words}")
        return text

    return AfterValidator(check)


Name = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
        "1 to 100 letters (a-z, A-Z), digits and the signs . _ and -, the first a letter or a digit",
    ),
]
"""The name of a folder."""

FileName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, . _ and -, the first a letter or a digit")
]
"""The name of a file of rayfl's."""

Checksum = Annotated[str, matching("[0-9a-f]{64}", "a SHA-256: 64 of the digits 0 to 9 and a to f")]
"""A checksum of a file."""

ObjectPath = Annotated[
    str, matching(r"[\w.]+:\w+", "a module, a colon and a name in it, such as my_package.my_module:my_name")
]
"""A user's own class or function."""
