"""The clients' devices: speed, bandwidth, and when they can be reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams
from rayfl.system.config import GivenSystem, SampledSystem, TraceSystem
from rayfl.system.traces import Hours, read_devices, read_hours

DEVICES_SCHEMA = pa.schema(
    [
        ("client", pa.int32()),
        ("computation", pa.float64()),
        ("communication", pa.float64()),
        ("availability", pa.float64()),
        ("active", pa.list_(pa.float64())),
        ("inactive", pa.list_(pa.float64())),
        ("finish_time", pa.float64()),
    ]
)
"""One row per client: milliseconds of a forward pass of a sample, kbit/s, probability of being available in a round,
and, where there is a trace, the seconds at which it becomes available and unavailable until the trace begins again."""

_MANY = 10**18
"""More samples, or bytes, than a client has in a round."""


@dataclass(frozen=True)
class Device:
    """One client's device.

    Attributes:
        computation: milliseconds of a forward pass of one sample.
        communication: kilobit per second, both ways.
        availability: probability of being available in a round.
        hours: when it is available, None for always.
    """

    computation: float
    communication: float
    availability: float = 1.0
    hours: Hours | None = None

    def duration_us(self, samples: float, down: int, up: int) -> int:
        """Microseconds of a client's part of a round.

        As FedScale does (Lai et al., ICML 2022; ``get_completion_time`` of its code): time of the samples, plus bytes
        both ways through one bandwidth.

        Args:
            samples: forward passes of single samples.
            down: bytes to the client.
            up: bytes from the client.
        """
        return round(1000 * samples * self.computation + 8000 * (down + up) / self.communication)


def make_devices(
    config: GivenSystem | SampledSystem | TraceSystem, num_clients: int, streams: RandomStreams
) -> list[Device]:
    """The devices of all clients.

    Args:
        config: where they come from.
        num_clients: K.
        streams: of the experiment; each client has draws of its own.

    Raises:
        ConfigError: when lists have another length than there are clients, what was drawn is no probability, a device
            would take infinitely long, or none would ever be available.
        DataError: when a trace cannot be read, naming file and row.
    """
    devices = _made(config, num_clients, streams)
    for client, device in enumerate(devices):
        try:
            device.duration_us(config.forward_passes * _MANY, _MANY, _MANY)
        except (OverflowError, ValueError):
            raise ConfigError(
                f"system: client {client} has a computation of {device.computation:g} ms and a communication of "
                f"{device.communication:g} kbit/s, whose times are too long for a number: lower computation (and "
                "forward_passes), raise communication"
            ) from None
    if not any(device.availability for device in devices):
        raise ConfigError("system.availability is 0 for all clients: nobody would ever train. Raise it for some")
    return devices


def _made(config: GivenSystem | SampledSystem | TraceSystem, num_clients: int, streams: RandomStreams) -> list[Device]:
    if isinstance(config, GivenSystem):
        return _given(config, num_clients)
    if isinstance(config, SampledSystem):
        return [_sampled(config, client, streams) for client in range(num_clients)]
    found = read_devices(config.devices)
    hours = None if config.availability is None else read_hours(config.availability)
    rows, days = (_rows(config, what, count, num_clients, streams) for what, count in _counts(found, hours))
    return [Device(*found[row], hours=hours[day] if hours else None) for row, day in zip(rows, days, strict=True)]


def devices_table(devices: Sequence[Device]) -> pa.Table:
    """The devices as a table, schema :data:`DEVICES_SCHEMA`."""
    rows = [
        {
            "client": client,
            "computation": device.computation,
            "communication": device.communication,
            "availability": device.availability,
            **(
                {"active": device.hours.active, "inactive": device.hours.inactive, "finish_time": device.hours.period}
                if device.hours
                else {}
            ),
        }
        for client, device in enumerate(devices)
    ]
    return pa.Table.from_pylist(rows, schema=DEVICES_SCHEMA)


def _given(config: GivenSystem, num_clients: int) -> list[Device]:
    lists = {"computation": config.computation, "communication": config.communication}
    if config.availability is not None:
        lists["availability"] = config.availability
    for name, values in lists.items():
        if len(values) != num_clients:
            raise ConfigError(f"system.{name} has {len(values)} values, but there are {num_clients} clients")
    return [Device(*values) for values in zip(*lists.values(), strict=True)]


def _sampled(config: SampledSystem, client: int, streams: RandomStreams) -> Device:
    fields = ("computation", "communication", "availability")
    values = [getattr(config, name).draw(streams.generator(f"system.{name}", client=client)) for name in fields]
    if values[2] > 1:
        raise ConfigError(f"system.availability is a probability, but client {client} has drawn {values[2]:g}")
    if values[1] <= 0:
        raise ConfigError(f"system.communication must be above 0, but client {client} has drawn {values[1]:g}")
    return Device(*values)


def _counts(found: Sequence[object], hours: Sequence[object] | None) -> list[tuple[str, int]]:
    return [("device", len(found)), ("hours", len(hours) if hours else 1)]


def _rows(config: TraceSystem, what: str, count: int, num_clients: int, streams: RandomStreams) -> list[int]:
    """Returns which row of a file each client has."""
    if config.order == "file":
        return [client % count for client in range(num_clients)]
    return [int(streams.generator(f"system.{what}", client=k).integers(count)) for k in range(num_clients)]
