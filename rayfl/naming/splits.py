"""Names of test samples of single stages."""

from __future__ import annotations

import re

_OF_A_STAGE = re.compile(r"stage_([1-9][0-9]*)")


def split_of(stage: int) -> str:
    """Returns the name under which test samples of a stage (from 0) are scored by themselves: ``stage_1``, ..."""
    return f"stage_{stage + 1}"


def stage_in(split: str) -> int | None:
    """Returns the stage, from 0, of a split of :func:`split_of`; None for another split."""
    found = _OF_A_STAGE.fullmatch(split)
    return None if found is None else int(found[1]) - 1
