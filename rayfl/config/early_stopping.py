"""The section ``early_stopping``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EarlyStoppingConfig(BaseModel):
    """When a run ends before its last round: by the mean over clients of a metric on their validation samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    patience: int | None = Field(
        None,
        ge=1,
        description="evaluations of all clients in a row that are no better than the best so far, after which the run "
        "ends; null: however many there are",
    )
    min_delta: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="by how much an evaluation must be better than the best to count"
    )
    target: float | None = Field(
        None, allow_inf_nan=False, description="value with which a run ends when it is reached; null: none"
    )
    metric: str | None = Field(None, description="what is watched; null: the task's first metric")
    model: Literal["personalized", "global"] = Field(
        "personalized", description="whose metric: the method's personalized models, or the global one"
    )
    min_rounds: int = Field(0, ge=0, description="rounds whose evaluations are left out")

    @property
    def on(self) -> bool:
        """Returns whether a run may end before its last round."""
        return self.patience is not None or self.target is not None

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> EarlyStoppingConfig:
        fields = type(self).model_fields.items()
        if not self.on and (given := [name for name, field in fields if getattr(self, name) != field.default]):
            raise ValueError(f"{', '.join(given)}: nothing ends the run early without patience or target")
        if self.min_delta and self.patience is None:
            raise ValueError("min_delta: it is about patience, which is not set")
        return self
