"""The section privacy of a configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PrivacyConfig(BaseModel):
    """User-level differential privacy of what clients send (McMahan et al., ICLR 2018)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip_norm: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="C, the largest Euclidean norm of what a client's message differs by from what it received; longer "
        "changes are scaled down; null: no limit, and no privacy",
    )
    noise_multiplier: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="z: the sum of the messages gets normal noise of the standard deviation z C in each element",
    )
    delta: float | None = Field(
        None, gt=0, lt=1, description="of (epsilon, delta)-differential privacy; null: K^-1.1 of K clients"
    )

    @property
    def on(self) -> bool:
        """Returns whether messages are limited."""
        return self.clip_norm is not None

    def delta_of(self, clients: int) -> float:
        """Returns delta for a number of clients."""
        return clients**-1.1 if self.delta is None else self.delta

    @model_validator(mode="after")
    def _noise_of_a_limit(self) -> PrivacyConfig:
        if self.clip_norm is None and (self.noise_multiplier or self.delta is not None):
            raise ValueError(
                "noise_multiplier and delta have no meaning without a limit on messages: set privacy.clip_norm"
            )
        if self.delta is not None and not self.noise_multiplier:
            raise ValueError("delta without noise: set privacy.noise_multiplier, or drop delta")
        return self
