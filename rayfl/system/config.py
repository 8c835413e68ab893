"""The section ``system`` of a configuration: which devices the clients are on, and how long the server waits."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Constant(_Options):
    """One value for all clients."""

    name: Literal["constant"] = "constant"
    value: float = Field(ge=0, description="the value")

    def draw(self, generator: np.random.Generator) -> float:
        """One client's value."""
        return self.value


class Uniform(_Options):
    """Evenly between two ends."""

    name: Literal["uniform"] = "uniform"
    low: float = Field(ge=0, description="lower end")
    high: float = Field(ge=0, allow_inf_nan=False, description="upper end")

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low is {self.low:g}, above high, {self.high:g}")
        return self

    def draw(self, generator: np.random.Generator) -> float:
        """One client's value."""
        return float(generator.uniform(self.low, self.high))


class LogNormal(_Options):
    """Its logarithm is normal: a few devices are many times slower than most."""

    name: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0, description="half of the clients are below")
    sigma: float = Field(1.0, ge=0, description="standard deviation of the logarithm")

    def draw(self, generator: np.random.Generator) -> float:
        """One client's value."""
        return float(self.median * np.exp(self.sigma * generator.standard_normal()))


Distribution = Annotated[Constant | Uniform | LogNormal, Field(discriminator="name")]


class NoSystem(_Options):
    """All clients are always there, and no time is simulated."""

    name: Literal["none"] = "none"


class Waiting(_Options):
    """How the server samples clients that may be slow or lost; part of every simulated system."""

    mode: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="synchronous: a round's clients begin together, and the server waits for them; buffered: clients "
        "begin and end at any time, and a round is over when clients_per_round updates have arrived (FedBuff)",
    )
    concurrency: int | None = Field(
        None, ge=1, description="clients that train at the same time (buffered); null: clients_per_round"
    )
    over_sampling: float = Field(
        1.0,
        ge=1,
        le=100,
        description="this multiple of clients_per_round is asked, and the first clients_per_round to be done count "
        "(FedScale uses 1.3)",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=1e12,  # more would overflow the clock's microseconds
        description="simulated seconds after which the server no longer waits; null: it waits for all",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability that a client that was asked never answers in that round"
    )
    forward_passes: float = Field(
        3.0,
        gt=0,
        description="time of training on a sample once, in forward passes (3: the backward pass takes two more)",
    )

    @property
    def deadline_us(self) -> int | None:
        """The deadline in microseconds, the clock's unit: rounded, as the times that it is compared with are."""
        return None if self.deadline_s is None else round(self.deadline_s * 1e6)

    @model_validator(mode="after")
    def _options_of_the_mode(self) -> Waiting:
        """No option of the other mode, which would do nothing."""
        if self.mode == "synchronous" and self.concurrency is not None:
            raise ValueError("concurrency needs mode=buffered: in synchronous rounds clients_per_round train together")
        if self.mode == "buffered" and self.over_sampling > 1:
            raise ValueError("mode=buffered uses every update, also late ones: leave over_sampling out")
        return self


class GivenSystem(Waiting):
    """Devices written down client by client."""

    name: Literal["given"] = "given"
    computation: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        min_length=1, description="milliseconds of a forward pass of one sample, by client"
    )
    communication: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        min_length=1, description="kilobit (1000 bits) per second, both ways, by client"
    )
    availability: tuple[Annotated[float, Field(ge=0, le=1)], ...] | None = Field(
        None, description="probability that the client can be asked in a round, by client; null: always"
    )


class SampledSystem(Waiting):
    """Devices drawn from distributions, once per client."""

    name: Literal["sampled"] = "sampled"
    computation: Distribution = Field(
        default=LogNormal(median=40.0, sigma=1.0), description="milliseconds of a forward pass of one sample"
    )
    communication: Distribution = Field(
        default=LogNormal(median=5000.0, sigma=1.0), description="kilobit (1000 bits) per second, both ways"
    )
    availability: Distribution = Field(
        default=Constant(value=1.0), description="probability that a client can be asked in a round, at most 1"
    )


class TraceSystem(Waiting):
    """Devices and hours of real phones, in FedScale's columns."""

    name: Literal["trace"] = "trace"
    devices: str = Field(
        min_length=1,
        description="Parquet, CSV or JSON file with computation (ms per sample) and communication (kbit/s)",
    )
    availability: str | None = Field(
        None, description="Parquet or JSON file with active, inactive and finish_time (s); null: always available"
    )
    order: Literal["file", "random"] = Field(
        "file", description="client k has the file's k-th device, from the start again after the last; or a random one"
    )


System = Annotated[NoSystem | GivenSystem | SampledSystem | TraceSystem, Field(discriminator="name")]
