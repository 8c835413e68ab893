"""The section engine of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.engine.precision import Precision


class EngineConfig(BaseModel):
    """How local updates are executed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "looped", "vectorized"] = Field(
        "auto",
        description="client by client, or many clients stacked; auto: vectorized on CUDA and with engine.compile, "
        "else looped",
    )
    width: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="clients stacked at a time when vectorized; halved if a GPU's memory is too small; auto: as many "
        "of an actor's clients in a round as its memory was measured to have room for (32 where nothing is measured: "
        "cluster.probe); null: auto on GPUs, 32 on CPUs, whose results then do not depend on what is measured",
    )
    rows_per_step: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto",
        description="pretrained models: clients are stacked, within the width, until the base's products have this "
        "many rows (samples times tokens) in a step or a pass of evaluation; auto: 65536 on GPUs whose memory was "
        "measured or with a number as width, else 16384; null: as many as the width says",
    )
    precision: Precision = Field(
        "float32",
        description="float32: factors as they are; tf32: GPUs round the factors of float32 to 10 bits of mantissa; "
        "bfloat16: networks compute in bfloat16 in steps and evaluation (autocast), while parameters, momenta, losses "
        "and sums stay float32",
    )
    capture: bool = Field(
        False,
        description="record a step of stacked clients as a CUDA graph, and replay it for those that are alike: the "
        "host then launches one graph a step; the results are the same. Texts keep their padding, which costs time",
    )
    compile: bool = Field(
        False,
        description="have Inductor compile the steps of stacked clients, which takes about a minute for each form of a "
        "step and needs a C++ compiler; results agree up to rounding. Texts keep their padding, as with capture",
    )

    @model_validator(mode="after")
    def _compiles_stacks(self) -> EngineConfig:
        if self.compile and self.mode == "looped":
            raise ValueError("engine.compile compiles the steps of stacked clients: set engine.mode=vectorized")
        if self.compile and self.capture:
            raise ValueError("engine.compile and engine.capture do not go together: leave out one of them")
        return self

    @property
    def stacked(self) -> bool:
        """Whether clients are stacked on any device."""
        return self.mode == "vectorized" or (self.mode == "auto" and self.compile)
