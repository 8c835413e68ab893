"""What the official parts of data sets are called by others."""

from __future__ import annotations

from collections.abc import Mapping

SPLIT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The part that a name of a file or a folder stands for: ``train``, ``validation`` or ``test``."""
