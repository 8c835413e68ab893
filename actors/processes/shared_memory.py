"""Sends messages between processes of one machine through memory that is mapped in both.

Ray's object store creates, seals, looks up and frees an object for every message, which takes some milliseconds for any
size. Here the writer keeps a few segments of memory and reuses them, and only a small descriptor is sent. Segments have
no names (``memfd_create``): readers open them through the writer's ``/proc``, and the kernel frees them with the last
process, also after a crash.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import stat
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray import cloudpickle

from rayfl.engine.updates.flat import ALIGNMENT_BYTES

LEAST_BYTES = 1 << 16
"""Messages with fewer bytes in their arrays are sent directly."""

_ROUND_BYTES = 1 << 20
_MAPPED = 16
"""Number of segments of one writer that a reader keeps mapped; the least recently used are unmapped."""

_serials = itertools.count(1)


@dataclass(frozen=True)
class Parcel:
    """A message whose arrays are in a segment.

    Attributes:
        pid: id of the writer's process.
        descriptor: file descriptor of the segment in that process.
        serial: number of the segment, unique for its writer.
        size: bytes of the segment.
        message: pickled message without its arrays.
        places: first byte and size of each array in the segment.
    """

    pid: int
    descriptor: int
    serial: int
    size: int
    message: bytes
    places: tuple[tuple[int, int], ...]


class _Segment:
    def __init__(self, size: int) -> None:
        """Raises OSError when the machine has too little memory, or does not support such segments."""
        self.serial, self.size, self.used = next(_serials), size, False
        self.descriptor = os.memfd_create("rayfl", os.MFD_CLOEXEC)
        try:
            # Without it the process would be killed at the first write when memory is full.
            os.posix_fallocate(self.descriptor, 0, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        weakref.finalize(self, os.close, self.descriptor)


class Outbox:
    """The writer's end.

    Args:
        limit: bytes that all segments may have together. A message takes up to half of it, so that one can be written
            while another is read.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._segments: dict[int, _Segment] = {}

    def pack(self, value: Any, least: int = LEAST_BYTES) -> Parcel | None:
        """Copies a message's arrays into a segment, which is used for nothing else until :meth:`free`.

        Args:
            value: what Ray could send.
            least: bytes of arrays from which on it is worth it.

        Returns:
            None where the message has to travel in another way: too small, too large, or no segment to be had.
        """
        buffers: list[pickle.PickleBuffer] = []
        message = cloudpickle.dumps(value, 5, buffers.append)  # type: ignore[no-untyped-call]
        arrays = [buffer.raw() for buffer in buffers]
        places, size = [], 0
        for array in arrays:
            places.append((size, array.nbytes))
            size += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not max(least, 1) <= size <= self._limit // 2 or (segment := self._segment(size)) is None:
            return None
        for (start, length), array in zip(places, arrays, strict=True):
            segment.memory[start : start + length] = array
        segment.used = True
        return Parcel(os.getpid(), segment.descriptor, segment.serial, segment.size, message, tuple(places))

    def _segment(self, size: int) -> _Segment | None:
        """Returns an unused segment; None if there is no room for one."""
        idle = [segment for segment in self._segments.values() if not segment.used]
        for segment in idle:
            if segment.size >= size:
                return segment
        for segment in idle:
            del self._segments[segment.serial]
        wanted = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        if sum(segment.size for segment in self._segments.values()) + wanted > self._limit:
            return None
        try:
            made = _Segment(wanted)
        except (OSError, AttributeError):
            return None
        self._segments[made.serial] = made
        return made

    def free(self, serial: int) -> None:
        """Marks a segment as unused, after its message was read."""
        if (segment := self._segments.get(serial)) is not None:
            segment.used = False

    def give_up(self, serial: int) -> None:
        """Never writes to a segment again, because a reader may still use its message."""
        self._segments.pop(serial, None)


class Inbox:
    """The reader's end, for one writer.

    Its messages are read-only, and unchanged for as long as any part of them is referenced.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._freed: deque[int] = deque()

    def open(self, parcel: Parcel) -> Any:
        """Returns the message of a parcel.

        Raises:
            OSError: when the segment cannot be opened from this process.
        """
        memory = self._mapped.get(parcel.serial)
        if memory is None:
            memory = self._mapped[parcel.serial] = _map(parcel)
        self._mapped.move_to_end(parcel.serial)
        while len(self._mapped) > _MAPPED:
            self._mapped.popitem(last=False)
        # Every array refers to this one, so that it lives as long as any part of the message is referenced.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._freed.append, parcel.serial)
        buffers = [whole[start : start + length].data for start, length in parcel.places]
        # From processes of this run, as everything that Ray transfers.
        return pickle.loads(parcel.message, buffers=buffers)  # noqa: S301

    def freed(self) -> tuple[int, ...]:
        """Returns the segments whose messages are no longer referenced, since the last call."""
        return tuple(self._freed.popleft() for _ in range(len(self._freed)))


def _map(parcel: Parcel) -> mmap.mmap:
    # Does not block if this is a process of another machine or container whose descriptor is a pipe.
    found = os.open(f"/proc/{parcel.pid}/fd/{parcel.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(found)
        if not stat.S_ISREG(about.st_mode) or about.st_size != parcel.size:
            raise OSError(f"no segment of process {parcel.pid} is reached from process {os.getpid()}")
        return mmap.mmap(found, parcel.size, prot=mmap.PROT_READ)
    finally:
        os.close(found)
