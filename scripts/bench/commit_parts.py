"""Measures what a commit of client states costs by part: ``python scripts/bench/commit_parts.py [CLIENTS] [FOLDER]``.

The states are one TwoNN each, as Ditto keeps them. Printed are the least processor time and the least wall time of
each part, in milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rayfl.storage import treefile

SHAPES = {
    "l1.weight": (200, 784),
    "l1.bias": (200,),
    "l2.weight": (200, 200),
    "l2.bias": (200,),
    "l3.weight": (10, 200),
}
REPEATS = 7


def least(part: Callable[[], object]) -> tuple[float, float]:
    """Least milliseconds of processor and of wall time."""
    times = []
    for _ in range(REPEATS):
        processor, wall = time.process_time(), time.perf_counter()
        part()
        times.append((time.process_time() - processor, time.perf_counter() - wall))
    return min(used for used, _ in times) * 1e3, min(passed for _, passed in times) * 1e3


def main(clients: int, folder: Path) -> None:
    """Prints a line for each part."""
    torch.set_num_threads(1)
    states = {str(i): {"model": {name: torch.randn(shape) for name, shape in SHAPES.items()}} for i in range(clients)}
    data = treefile.dumps(states)
    path = folder / "states.safetensors"

    def write() -> None:
        path.write_bytes(data)

    def reach_the_disk() -> None:
        write()
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    parts = {
        "copy into one safetensors file": lambda: treefile.dumps(states),
        "SHA-256": lambda: hashlib.sha256(data).hexdigest(),
        "write": write,
        "write, and wait for the disk": reach_the_disk,
    }
    print(f"{clients} states, {len(data) / 1e6:.1f} MB")
    for name, part in parts.items():
        processor, wall = least(part)
        print(f"{name:32} {processor:7.1f} ms of a processor {wall:7.1f} ms")
    path.unlink()


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as made:
        main(wanted, Path(made))
