"""Messages between processes of one machine through memory that stays mapped in both.

Ray's object store makes, seals, looks up and frees an object for every message, which takes it some milliseconds
however small the object is. Here the writer keeps a few segments of memory and uses each of them again, and a message
is as small as an answer without any arrays. Segments have no names (``memfd_create``): readers reach them through the
writer's ``/proc``, and the kernel takes them back with the last process, whatever that died of.
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

from rayfl.engine.flat import ALIGNMENT_BYTES

LEAST_BYTES = 1 << 16
"""Messages with less in their arrays travel well as they are."""

_ROUND_BYTES = 1 << 20
_MAPPED = 16
"""Segments of one writer that a reader keeps mapped; of those that it has not heard of for long the mapping goes."""

_serials = itertools.count(1)


@dataclass(frozen=True)
class Parcel:
    """A message whose arrays lie in a segment.

    Attributes:
        pid: the writer's process.
        descriptor: of the segment, in that process.
        serial: the segment's number; no writer gives one twice.
        size: bytes of the segment.
        message: the pickled message without its arrays.
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
        """Raises OSError when the machine has not so much memory, or no such segments."""
        self.serial, self.size, self.used = next(_serials), size, False
        self.descriptor = os.memfd_create("rayfl", os.MFD_CLOEXEC)
        try:
            # Without it a full machine would end the process at the first write.
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
        """Returns a segment that is not used; None where there is no room for one."""
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
        """Nobody reads the message of a segment any more."""
        if (segment := self._segments.get(serial)) is not None:
            segment.used = False

    def give_up(self, serial: int) -> None:
        """Never writes to a segment again, since a reader may go on with what is there."""
        self._segments.pop(serial, None)


class Inbox:
    """The reader's end, for one writer.

    What it opens is read-only, and stays what it is for as long as any part of it is referred to.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._freed: deque[int] = deque()

    def open(self, parcel: Parcel) -> Any:
        """The message.

        Raises:
            OSError: when the segment cannot be reached from this process.
        """
        memory = self._mapped.get(parcel.serial)
        if memory is None:
            memory = self._mapped[parcel.serial] = _map(parcel)
        self._mapped.move_to_end(parcel.serial)
        while len(self._mapped) > _MAPPED:
            self._mapped.popitem(last=False)
        # Every array refers to this one: it lives until nothing of the message is referred to any more.
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, self._freed.append, parcel.serial)
        buffers = [whole[start : start + length].data for start, length in parcel.places]
        # From our own processes, as all that Ray brings.
        return pickle.loads(parcel.message, buffers=buffers)  # noqa: S301

    def freed(self) -> tuple[int, ...]:
        """Segments of messages that were referred to when last asked, and no longer are."""
        return tuple(self._freed.popleft() for _ in range(len(self._freed)))


def _map(parcel: Parcel) -> mmap.mmap:
    # Not to block, should this be the process of another machine or container, and its descriptor a pipe.
    found = os.open(f"/proc/{parcel.pid}/fd/{parcel.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(found)
        if not stat.S_ISREG(about.st_mode) or about.st_size != parcel.size:
            raise OSError(f"no segment of process {parcel.pid} is reached from process {os.getpid()}")
        return mmap.mmap(found, parcel.size, prot=mmap.PROT_READ)
    finally:
        os.close(found)
