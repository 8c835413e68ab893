"""What the driver must not forget of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from rayfl.params import Tree
from rayfl.results.tables import ResultTables
from rayfl.system.schedule import Clock
from rayfl.system.unfinished import Unfinished


@dataclass
class Progress:
    """Everything of a run that the driver must not forget.

    Attributes:
        rounds_completed: rounds done.
        server: the server's tree.
        tables: the results so far.
        bytes_down: bytes sent to clients so far.
        bytes_up: bytes received from clients so far.
        clock: the virtual time of a simulated system.
        unfinished: what is under way, where rounds have no barrier.
    """

    rounds_completed: int
    server: Tree
    tables: ResultTables
    bytes_down: int = 0
    bytes_up: int = 0
    clock: Clock = field(default_factory=Clock)
    unfinished: Unfinished = field(default_factory=Unfinished)

    @classmethod
    def after(
        cls,
        rounds_completed: int,
        server: Tree,
        tables: ResultTables,
        counters: Mapping[str, int],
        unfinished: Unfinished,
    ) -> Progress:
        """Returns the progress after some rounds, with the totals that :attr:`counters` gave then."""
        return cls(
            rounds_completed,
            server,
            tables,
            **{name: counters.get(name, 0) for name in ("bytes_down", "bytes_up")},
            clock=Clock(**{name: counters.get(f"clock_{name}", 0) for name in asdict(Clock())}),
            unfinished=unfinished,
        )

    @property
    def counters(self) -> dict[str, int]:
        """The totals that a manifest has: bytes, and the virtual time."""
        clock = {f"clock_{name}": value for name, value in asdict(self.clock).items() if value}
        return {"bytes_down": self.bytes_down, "bytes_up": self.bytes_up, **clock}
