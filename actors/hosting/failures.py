"""Failures of clients: how they are reported, and how a round continues without them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayfl.aggregation.magnitudes import NonFiniteError
from rayfl.diagnosis.device_errors import memory_beside, ran_out_of_memory
from rayfl.errors import MethodError as MethodError
from rayfl.errors import text_of

_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE)
_LONGEST_REASON = 300
_NAMED_AT_MOST = 8


GIVEN_UP = "round given up"
"""What ``skipped.parquet`` calls the cause of clients that take no part because too few others do."""


@dataclass(frozen=True)
class Failure:
    """Why a client was left out.

    Attributes:
        procedure: the name of the procedure that failed.
        reason: the same in every process, so that it can be part of the results.
        trace: the complete traceback, for the log.
    """

    procedure: str
    reason: str
    trace: str = field(default="", compare=False)


class ClientsFailedError(Exception):
    """Clients failed in the first call of a round: the round restarts without them, without a rollback."""


class RoundUndoneError(Exception):
    """A round must be rolled back and repeated: clients failed after taking part in it, or ended their process.

    Attributes:
        round: 0-indexed.
        failures: all clients that must not take part in it.
        unscorable: all clients that must not take part in the evaluations after it.
        deaths: how many earlier deaths of hosts were clients' doing.
    """

    def __init__(
        self,
        round: int,
        failures: Mapping[int, Failure],
        unscorable: Mapping[int, Failure] | None = None,
        deaths: int = 0,
    ) -> None:
        left_out = {**failures, **(unscorable or {})}
        super().__init__(
            f"round {round + 1} is done again" + (f" without clients {named(left_out)}" if left_out else "")
        )
        self.round = round
        self.failures = dict(failures)
        self.unscorable = dict(unscorable or {})
        self.deaths = deaths


def reason_of(error: Exception) -> str:
    """Returns the first line of an error, without memory addresses."""
    if isinstance(error, NonFiniteError):
        return str(error)
    if ran_out_of_memory(error):
        return "the memory of the device is too small for this client alone"
    line = (text_of(error).strip().splitlines() or [""])[0]
    return _ADDRESS.sub("0x...", f"{type(error).__name__}: {line}".removesuffix(": "))[:_LONGEST_REASON]


def too_little_memory(error: Exception) -> str:
    """Returns advice for a device whose memory is too small for one thing at a time."""
    line = (str(error).strip().splitlines() or [""])[0]
    return (
        f"the memory of the device is too small ({line}); lower train.batch_size, cluster.data_memory or "
        f"cluster.actors_per_gpu, or take a smaller model{memory_beside()}"
    )


def named(clients: Mapping[int, object] | list[int]) -> str:
    """Formats client ids for a message; at most the first few."""
    ids = sorted(clients)
    more = f" and {len(ids) - _NAMED_AT_MOST} more" if len(ids) > _NAMED_AT_MOST else ""
    return ", ".join(str(id) for id in ids[:_NAMED_AT_MOST]) + more
