"""A run that counts the sums that its driver receives: ``merging_run.py CONFIG``; prints them as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

import rayfl
from actors.processes.ray_host import RayHost

received: Counter[str] = Counter()
_submit_apart, _result = RayHost.submit_apart, RayHost.result


def submit_apart(self: RayHost, method: str, *args: Any) -> tuple[Any, Any]:
    """Counts calls of hosts whose sums stay on their machine."""
    received[method] += 1
    return _submit_apart(self, method, *args)


def result(self: RayHost, handle: Any, position: int) -> Any:
    """Counts results that have sums, or a piece of one."""
    found = _result(self, handle, position)
    if getattr(found, "totals", None):
        received["sums"] += 1
    if getattr(found, "piece", None):
        received["pieces"] += 1
    return found


if __name__ == "__main__":
    RayHost.submit_apart, RayHost.result = submit_apart, result  # type: ignore[method-assign]
    rayfl.run(yaml.safe_load(Path(sys.argv[1]).read_text()))
    print("COUNTED " + json.dumps(received))
