"""What errors say that this machine's memory does not suffice."""

from __future__ import annotations

import re

_TOO_LARGE = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|Storage size calculation overflowed"  # more bytes than 64 bits can count
    r"|Overflow when unpacking long"  # a side that 64 bits cannot hold
)


def lacks_host_memory(error: BaseException) -> bool:
    """Returns whether an error says that a tensor or an array is larger than this machine's memory."""
    return isinstance(error, MemoryError) or bool(_TOO_LARGE.search(str(error)))
