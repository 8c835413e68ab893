"""Matplotlib's settings for figures whose texts are data."""

from __future__ import annotations

from typing import Any

PLAIN_TEXT: Any = {"text.parse_math": False, "text.usetex": False}
"""A name such as ``$x$`` is no formula."""
