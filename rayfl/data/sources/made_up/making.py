"""What sources that make their samples up have in common: every process makes all of them, in memory of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from rayfl.data.sources.base import Source
from rayfl.diagnosis.machine_memory import machine_memory
from rayfl.errors import ResourceError

_GIB = 1 << 30
_WHILE_MADE = 2
"""How often samples are there while they are made, and divided among splits."""


class MadeUpSource(Source):
    """A source whose samples are functions of the seed.

    Class attributes:
        amounts: the options on which it depends how much is made.
    """

    amounts: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def least_bytes(self) -> int:
        """Returns the bytes that a process needs at least for all samples; on average, where sizes are drawn."""

    def check_room(self, copies: int = 1, memory: int | None = None) -> None:
        """Makes sure that samples can fit into this machine's memory, before they are made.

        The kernel ends a process that takes more, which can then say nothing.

        Args:
            copies: how many processes of this machine make all of them.
            memory: bytes of the machine; None: this one's.

        Raises:
            ResourceError: with numbers, and what to lower.
        """
        memory = machine_memory() if memory is None else memory
        if copies * self.least_bytes > memory:
            raise ResourceError(f"{self._needs(copies, 'needs at least', memory)}: lower {self._fixes(copies)}")

    def room_warning(self, copies: int, memory: int | None = None) -> str | None:
        """Returns a warning if samples may not fit while they are made; None if they do. See :meth:`check_room`."""
        memory = machine_memory() if memory is None else memory
        if _WHILE_MADE * copies * self.least_bytes <= memory:
            return None
        needs = self._needs(_WHILE_MADE * copies, "may need", memory)
        return f"{needs}: if a process dies without a word, lower {self._fixes(copies)}"

    def _needs(self, copies: int, what: str, memory: int) -> str:
        needed, own = copies * self.least_bytes / _GIB, self.least_bytes / _GIB
        each = f", {copies} times {own:.1f} GiB" if copies > 1 else ""
        return (
            f"dataset={self.name} {what} {needed:.1f} GiB for made-up samples{each}, and this machine has "
            f"{memory / _GIB:.1f} GiB"
        )

    def _fixes(self, copies: int) -> str:
        *others, last = (f"dataset.{option}" for option in self.amounts)
        actors = "cluster.num_actors (driver and actors make them each), " if copies > 2 else ""
        return f"{actors}{', '.join(others)} or {last}"
