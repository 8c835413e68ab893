"""Settings of the memory allocator of this process."""

from __future__ import annotations

import ctypes
import sys

# <malloc.h> of glibc. mallopt takes an int, and no threshold for mmap above 32 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST_KEPT = 32 << 20
_KEPT_AT_MOST = 256 << 20


def reuse_freed_memory() -> bool:
    """Has glibc keep freed blocks of up to 32 MiB, up to 256 MiB in all, for the next local step.

    By default the kernel maps every large tensor of a step again and clears its pages, which takes up to a tenth of
    a large model's step. Does nothing without glibc.

    Returns:
        Whether glibc took the settings.
    """
    library = _glibc()
    if library is None:
        return False
    settings = {
        _MMAP_THRESHOLD: _LARGEST_KEPT,
        _TRIM_THRESHOLD: _KEPT_AT_MOST,
        # an actor trains in a thread that is not the main one: an arena of its own would end at 64 MiB
        _ARENA_MAX: 1,
    }
    taken = [library.mallopt(option, value) == 1 for option, value in settings.items()]
    return all(taken)


def return_freed_memory() -> bool:
    """Gives the kernel back what is free now, wherever it lies. By itself glibc returns the end of its heap alone.

    Returns:
        Whether there was any; False without glibc.
    """
    library = _glibc()
    return library is not None and library.malloc_trim(0) == 1


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
