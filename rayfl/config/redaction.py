"""Keeps keys and passwords out of what is shown to others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^\s/?#@'\"]+@")
_OPTION = re.compile(r"([?&])([^=&\s'\"]+)=([^&\s'\"]+)")
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s'\"]+")
_HARMLESS = {"region", "scheme", "endpoint_override", "allow_delayed_open", "connect_timeout", "request_timeout"}
"""Options of addresses that say where something is, not who may read it."""
_SECRET = re.compile(r"(passw|secret|token$|credential|api_?key|access_?key|private_?key)", re.IGNORECASE)


def redact(text: str) -> str:
    """The text without users, passwords and signatures in its addresses (``scheme://...``)."""
    return _ADDRESS.sub(lambda found: _address(found.group()), text)


def redacted(value: Any) -> Any:
    """A configuration without secrets: addresses as by :func:`redact`, and texts under names such as ``password``."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(inner, str) and _SECRET.search(str(key)) else redacted(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def _address(text: str) -> str:
    text = _USER.sub(f"{HIDDEN}@", text)
    return _OPTION.sub(lambda o: o.group() if o[2] in _HARMLESS else f"{o[1]}{o[2]}={HIDDEN}", text)
