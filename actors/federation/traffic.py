"""Counts the bytes that a real deployment would send."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes between server and clients in a round, as a deployment would send them (before any aggregation on hosts).

    Attributes:
        by_client: bytes down and up of each client that took part.
    """

    by_client: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def down(self) -> int:
        """Returns the bytes sent to clients."""
        return sum(down for down, _ in self.by_client.values())

    @property
    def up(self) -> int:
        """Returns the bytes sent by clients."""
        return sum(up for _, up in self.by_client.values())

    def add(self, client: int, down: int = 0, up: int = 0) -> None:
        """Counts a message."""
        before = self.by_client.get(client, (0, 0))
        self.by_client[client] = (before[0] + down, before[1] + up)
