"""Paths on the command line: ``--out=~/x`` is meant as ``--out ~/x``, which a shell expands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rayfl.errors import ConfigError

_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
"""How an address such as s3://bucket/x begins, once it was taken for a path."""


def at_home(given: Any) -> Any:
    """Returns a path, or each of a list, with ``~`` replaced by the home folder; what was not given is as it is.

    Raises:
        ConfigError: it is an address, of which a local folder named ``s3:`` would be made.
    """
    if isinstance(given, list | tuple):
        return [at_home(one) for one in given]
    if given is None:
        return None
    if _ADDRESS.match(str(given)):
        raise ConfigError(f"{given} is an address, and a path on this machine is needed: write there, and copy it")
    return Path(given).expanduser()
