"""Time, operations and memory of a round's client procedures, over all hosts."""

from __future__ import annotations

from dataclasses import dataclass

from actors.hosting.job import JobResult


@dataclass
class Costs:
    """The costs of a round.

    Attributes:
        client_seconds: CPU or GPU seconds in clients' procedures, without evaluation.
        flops: floating-point operations of local steps; None where they are not counted.
        peak_bytes: largest peak memory of any host's process, or its GPU's allocator, since its start.
    """

    client_seconds: float = 0.0
    flops: int | None = 0
    peak_bytes: int = 0

    def add(self, result: JobResult) -> None:
        """Adds the costs of one host's share of a call."""
        self.client_seconds += result.busy_s
        self.flops = None if self.flops is None or result.flops is None else self.flops + result.flops
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)

    def as_line(self) -> dict[str, float]:
        """Returns the known numbers by name."""
        known = {} if self.flops is None else {"flops": self.flops}
        return {"client_seconds": self.client_seconds, "peak_bytes": self.peak_bytes, **known}
