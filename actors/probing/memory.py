"""Meters the memory of a device, a GPU or the machine, that a process uses."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from actors.hosting.allocator import return_freed_memory
from rayfl.diagnosis.machine_memory import machine_memory

_LARGEST_CONTEXT = 1 << 30
"""Bytes. What a GPU's memory is used for other than tensors is taken for this process's context up to here, for other
processes' beyond: nothing says whose it is."""
STATUS_FILE = Path("/proc/self/status")
"""In which Linux tells a process its memory; where it is absent, the peak so far stands in."""
RESET_FILE = Path("/proc/self/clear_refs")
"""To which a process writes to have its peak start again; without it the peak is that of its life."""


@dataclass(frozen=True)
class Room:
    """The memory of a device, in bytes.

    Attributes:
        own: what this process takes of it before it trains anybody: the context, or libraries and interpreter.
        free: what the run's processes may take altogether, this one's ``own`` included.
        total: of the device.
    """

    own: int
    free: int
    total: int

    @property
    def taken(self) -> int:
        """What processes take that are not the run's."""
        return self.total - self.free


class DeviceMemory(Protocol):
    """Meters the memory of the device that this process computes on."""

    def mark(self) -> None:
        """:meth:`peak` counts from here on."""
        ...

    def peak(self) -> int:
        """The most bytes in use at a time since the mark, beyond those in use at it."""
        ...

    def room(self) -> Room:
        """Returns the device's memory as of the last mark."""
        ...


class GpuMemory:
    """The memory of a GPU: of PyTorch's tensors, and of what else is there.

    Args:
        device: what torch calls it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def mark(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return max(torch.cuda.max_memory_allocated(self._device) - self._before, 0)

    def room(self) -> Room:
        free, total = torch.cuda.mem_get_info(self._device)
        beside = max(total - free - torch.cuda.memory_reserved(self._device), 0)
        context = min(beside, _LARGEST_CONTEXT)
        return Room(context + self._before, total - (beside - context), total)


class ProcessMemory:
    """The memory of the machine, or of this process's container, and this process's resident part of it.

    Without ``/proc`` the peak is that of the process's life so far: a client that needs no more than starting did
    seems to need nothing.
    """

    def __init__(self) -> None:
        self._before = 0

    def mark(self) -> None:
        return_freed_memory()  # what a step reuses would not show
        with suppress(OSError):
            RESET_FILE.write_text("5", encoding="ascii")
        self._before = _resident("VmRSS")

    def peak(self) -> int:
        return max(_resident("VmHWM") - self._before, 0)

    def room(self) -> Room:
        total = machine_memory()
        free = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
        return Room(self._before, min(total if free is None else free + self._before, total), total)


def memory_of(device: torch.device) -> DeviceMemory:
    """The meter for a device."""
    return GpuMemory(device) if device.type == "cuda" else ProcessMemory()


def _resident(field: str) -> int:
    found = _kilobytes(STATUS_FILE, field)
    if found is not None:
        return found
    # kilobytes, but bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _kilobytes(file: Path, field: str) -> int | None:
    """A field of one of the kernel's tables, in bytes; None where there is none."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return next((int(amount) * 1024 for amount in found), None)
