"""Bounded memory with LRU eviction; evicted trees are spilled to disk and restored bit for bit."""

from __future__ import annotations

import itertools
import os
import re
import socket
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from actors.hosting.allocator import return_freed_memory
from rayfl.errors import DamageError, ResourceError
from rayfl.params import Tree, num_bytes
from rayfl.storage import treefile
from rayfl.storage.lease import pid_namespace

_PREFIX = "rayfl-spill"
_OF_PROCESS = re.compile(r"(\d+)-[a-z0-9_]+")
"""The end of a folder's name, after the machine's and the namespace's: the process, and a random part."""
_MOST_HOLES = 64 << 20
"""Bytes let go of before the machine gets them back: rarely enough for its time not to matter."""
Key = TypeVar("Key", bound=Hashable)


@dataclass
class Lookups:
    """Counts of memory hits and misses.

    Attributes:
        hits: found in memory. misses: had to be read.
    """

    hits: int = 0
    misses: int = 0

    def note(self, hit: bool) -> None:
        """Counts one."""
        self.hits += hit
        self.misses += not hit

    def __add__(self, other: Lookups) -> Lookups:
        return Lookups(self.hits + other.hits, self.misses + other.misses)


class LeastRecentlyUsed(Generic[Key]):
    """Tracks the bytes of entries, and evicts the least recently used beyond a limit.

    Evictions fragment the heap; from time to time free memory is returned to the operating system.

    Args:
        limit: bytes that may stay; None for no limit. The newest entry stays even if it alone exceeds it.
        evict: called with a key that has to go.

    Attributes:
        limit: bytes that may stay; None for no limit.
        bytes: of all entries.
    """

    def __init__(self, limit: int | None, evict: Callable[[Key], None]) -> None:
        self.limit = limit
        self._evict = evict
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._holes = 0
        self.bytes = 0

    def touch(self, key: Key, size: int) -> None:
        """Notes that an entry of ``size`` bytes was used just now, and evicts others if there is too much."""
        self.forget(key)
        self._sizes[key] = size
        self.bytes += size
        self._shrink(0, least=1)

    def make_room(self, size: int) -> None:
        """Evicts entries until ``size`` more bytes may stay, or none is left."""
        self._shrink(size, least=0)

    def _shrink(self, size: int, least: int) -> None:
        while self.limit is not None and self.bytes + size > self.limit and len(self._sizes) > least:
            oldest = next(iter(self._sizes))
            self._evict(oldest)
            self._holes += self._sizes[oldest]
            self.forget(oldest)
        if self._holes > _MOST_HOLES:
            return_freed_memory()
            self._holes = 0

    def give_way(self) -> None:
        """Evicts all entries, and halves what may stay from now on."""
        self.limit = self.bytes // 2
        for key in list(self._sizes):
            self._evict(key)
            self.forget(key)

    def forget(self, key: Key) -> None:
        """Takes an entry off the count."""
        self.bytes -= self._sizes.pop(key, 0)


class SpillHandle:
    """A handle of a tree in a :class:`Spill`, which holds the tree as long as the handle is referenced.

    Args:
        serial: its number.
        tree: the stored tree.
        drop: called with the number when nobody refers to the handle any more.
    """

    def __init__(self, serial: int, tree: Tree, drop: Callable[[int], None] | None = None) -> None:
        self.serial = serial
        self._drop = drop
        self.size = num_bytes(tree)
        self.tree: Tree | None = tree
        self.file: Path | None = None

    def __del__(self) -> None:
        # weakref.finalize would do the same, but would double the time to store a state.
        if self._drop is not None:
            self._drop(self.serial)


class Spill:
    """Holds trees in memory up to a limit; spills the least recently used to files, and loads them on demand.

    A tree and its file are deleted when its handle is no longer referenced. Thread-safe.

    Args:
        limit: bytes in memory; None for no limit.
        folder: where files go, on a disk of this machine; None for the folder for temporary files.

    Attributes:
        spilled: how many trees were written to files.
    """

    def __init__(self, limit: int | None = None, folder: str | None = None) -> None:
        self._parent = folder
        self._folder: Path | None = None
        self._serials = itertools.count()
        self._handles: weakref.WeakValueDictionary[int, SpillHandle] = weakref.WeakValueDictionary()
        self._recent = LeastRecentlyUsed[int](limit, self._write)
        # Re-entrant: a handle may die, and so call back, while this thread is inside.
        self._lock = threading.RLock()
        self.spilled = 0

    @property
    def held_bytes(self) -> int:
        """Bytes in memory now."""
        return self._recent.bytes

    def store(self, tree: Tree) -> SpillHandle:
        """Stores a tree, which must not be changed in place afterwards; returns its handle."""
        with self._lock:
            handle = SpillHandle(next(self._serials), tree, self._drop)
            self._handles[handle.serial] = handle
            self._recent.touch(handle.serial, handle.size)
            return handle

    def get(self, handle: SpillHandle) -> Tree:
        """Returns the tree of a handle, from memory or from its file.

        Raises:
            ResourceError: the file is gone or damaged, or another tree had to go and could not be written.
        """
        with self._lock:
            if handle.tree is None:
                assert handle.file is not None
                handle.tree = _loaded(handle.file)
            self._recent.touch(handle.serial, handle.size)
            return handle.tree

    def peek(self, handle: SpillHandle) -> Tree:
        """Returns a handle's tree like :meth:`get` but leaves it where it is: a commit reads every state once."""
        with self._lock:
            tree, file = handle.tree, handle.file
        if tree is not None:
            return tree
        assert file is not None
        return _loaded(file)

    def close(self) -> None:
        """Deletes the files."""
        if self._folder is not None:
            _remove(self._folder)

    def _write(self, serial: int) -> None:
        handle = self._handles.get(serial)
        if handle is None or handle.tree is None:
            return
        if handle.file is None:
            handle.file = self._store(serial, treefile.dumps(handle.tree))
            weakref.finalize(handle, handle.file.unlink, missing_ok=True)
            self.spilled += 1
        handle.tree = None

    def _store(self, serial: int, data: bytes) -> Path:
        place = self._parent or tempfile.gettempdir()
        try:
            if self._folder is None:
                _remove_orphans(Path(place))
                self._folder = Path(tempfile.mkdtemp(prefix=f"{_of_here()}{os.getpid()}-", dir=place))
                # At the end of the process too: an actor that is told to stop does not close anything.
                weakref.finalize(self, _remove, self._folder)
            path = self._folder / f"{serial}.safetensors"
            path.write_bytes(data)
        except OSError as error:
            raise ResourceError(
                f"client states beyond cluster.state_memory cannot be written to {place}: {error.strerror}; raise "
                "cluster.state_memory, or set cluster.spill_dir to a disk with room"
            ) from error
        return path

    def _drop(self, serial: int) -> None:
        with self._lock:
            self._recent.forget(serial)


def check_spill_dir(folder: str | None) -> None:
    """Checks that the folder that was given for client states can be written to; None: none was given.

    Raises:
        ResourceError: it cannot.
    """
    if folder is None:
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ResourceError(
            f"cluster.spill_dir={folder} cannot be written to on {socket.gethostname()} ({error.strerror}): make the "
            "folder on every node, or choose another"
        ) from error


def _loaded(file: Path) -> Tree:
    try:
        return treefile.loads(file.read_bytes(), str(file))
    except (OSError, DamageError) as error:
        raise ResourceError(
            f"a client's state put into {file} is gone or damaged ({error}): set cluster.spill_dir to a folder that "
            "nothing else cleans, and give the same command again"
        ) from error


def _of_here() -> str:
    """How names of folders begin whose process this one can see: of its machine, and of its PID namespace."""
    return f"{_PREFIX}-{socket.gethostname()}-{''.join(filter(str.isdecimal, pid_namespace())) or 0}-"


def _remove_orphans(place: Path) -> None:
    """Deletes what killed processes have left in a folder, of those about which /proc tells whether they live."""
    if not Path("/proc/self").exists():
        return
    mine = _of_here()
    for folder in place.glob(f"{mine}*"):
        found = _OF_PROCESS.fullmatch(folder.name.removeprefix(mine))
        if found is not None and not folder.is_symlink() and not Path(f"/proc/{found[1]}").exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Deletes the states in a folder of spilled ones, and the folder unless somebody has put something else there."""
    with suppress(OSError):
        for file in folder.glob("*.safetensors"):
            if file.stem.isdecimal():
                file.unlink(missing_ok=True)
        folder.rmdir()
