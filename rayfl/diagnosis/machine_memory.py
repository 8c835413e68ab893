"""How much memory this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or the container's or batch job's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def group_limits(groups: Path, mounted: Path) -> Iterator[int]:
    """Yields the limits of the control groups that a process is in, innermost first.

    A container sees its own group as the root; a job of SLURM's is in a group below it, of version 2 or 1.
    """
    with suppress(OSError):
        for line in groups.read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, name = (mounted, "memory.max") if not controllers else (mounted / "memory", "memory.limit_in_bytes")
            inside = root / path.lstrip("/")
            for folder in (inside, *inside.parents):
                if folder != root and root not in folder.parents:
                    break
                with suppress(OSError):
                    limit = (folder / name).read_text(encoding="ascii").strip()
                    if limit.isdigit():
                        yield int(limit)
