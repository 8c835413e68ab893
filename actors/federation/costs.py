"""What the clients' procedures of a round took, over all hosts."""

from __future__ import annotations

from dataclasses import dataclass

from actors.hosting.job import JobResult


@dataclass
class Costs:
    """The costs of a round.

    Attributes:
        client_seconds: of processors, or of GPUs, in clients' procedures; evaluation is no part of it.
        flops: floating-point operations of local steps; None where they are not counted.
        peak_bytes: the most memory that a host's process, or its GPU's allocator, has had since it began.
    """

    client_seconds: float = 0.0
    flops: int | None = 0
    peak_bytes: int = 0

    def add(self, result: JobResult) -> None:
        """Adds what one host's share of a call took."""
        self.client_seconds += result.busy_s
        self.flops = None if self.flops is None or result.flops is None else self.flops + result.flops
        self.peak_bytes = max(self.peak_bytes, result.peak_bytes)

    def as_line(self) -> dict[str, float]:
        """The numbers by name, without those that are not known."""
        known = {} if self.flops is None else {"flops": self.flops}
        return {"client_seconds": self.client_seconds, "peak_bytes": self.peak_bytes, **known}
