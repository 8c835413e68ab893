"""What errors and the kernel say of this machine's memory that does not suffice."""

from __future__ import annotations

import re
from pathlib import Path

_TOO_LARGE = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Storage size calculation overflowed"  # more bytes than 64 bits can count
    r"|Overflow when unpacking long"  # a side that 64 bits cannot hold
)


def lacks_host_memory(error: BaseException) -> bool:
    """Returns whether an error says that a tensor or an array is larger than this machine's memory."""
    return isinstance(error, MemoryError) or bool(_TOO_LARGE.search(str(error)))


class MemoryKills:
    """Counts the processes that this machine's kernel ends for lack of memory, from now on.

    A process that is ended so can say nothing itself.

    Args:
        counters: file of the kernel's counters; elsewhere than on Linux there is none, and nothing is counted.
    """

    def __init__(self, counters: Path = Path("/proc/vmstat")) -> None:
        self._counters = counters
        self._before = self._now()

    def remark(self) -> str:
        """Returns what to add to the reason of a process's death; empty if the kernel has ended none."""
        found = self._now() - self._before
        if not found:
            return ""
        processes = "a process" if found == 1 else f"{found} processes"
        return (
            f" [this machine's kernel has ended {processes} for lack of memory since the run began, perhaps this "
            "actor: then lower cluster.num_actors, or take a smaller model or smaller inputs]"
        )

    def _now(self) -> int:
        try:
            lines = self._counters.read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
