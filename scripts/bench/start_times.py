"""Measures how long it takes until a command answers: ``python scripts/bench/start_times.py [REPEATS]``.

Each is started in a process of its own; printed are the median and the fastest, in seconds of wall time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python": ["-c", ""],
    "import rayfl": ["-c", "import rayfl"],
    "rayfl --version": ["-m", "rayfl", "--version"],
    "rayfl list": ["-m", "rayfl", "list"],
    "rayfl show quickstart": ["-m", "rayfl", "show", "quickstart"],
}


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main(repeats: int) -> None:
    """Prints a line for each command."""
    for name, arguments in COMMANDS.items():
        times = [seconds(arguments) for _ in range(repeats)]
        print(f"{name:24} {statistics.median(times):6.2f} s   fastest {min(times):6.2f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
