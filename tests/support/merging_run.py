"""A run that counts the sums that its driver receives: ``merging_run.py CONFIG [PIECE]``; prints them as JSON.

The actor that has sent a piece is killed, after as many as ``PIECE`` of all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

import rayfl
from actors.processes.ray_host import RayHost

received: Counter[str] = Counter()
last_piece = 0
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
        if received["pieces"] == last_piece:
            os.kill(self.description["pid"], signal.SIGKILL)
    return found


class Told(rayfl.Callback):
    """Counts the failures between the sums of a call."""

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        received[f"lost sums, round {rounds_completed}"] += "it had the sums of" in reason


if __name__ == "__main__":
    last_piece = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    RayHost.submit_apart, RayHost.result = submit_apart, result  # type: ignore[method-assign]
    rayfl.run(yaml.safe_load(Path(sys.argv[1]).read_text()), callbacks=[Told()])
    print("COUNTED " + json.dumps(received))
