"""What is trained in a base: the sections ``model.adapter`` and ``model.head``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rayfl.naming.lists import EACH_ONCE
from rayfl.naming.texts import Checksum


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AdapterConfig(_Part):
    """Low-rank adapters (LoRA) in linear layers of the base: W x + s B A x; with magnitudes: DoRA."""

    name: Literal["lora"] = Field(default="lora", description="The kind of adapter.")
    r: int = Field(default=8, ge=1, description="Rank of the adapters.")
    alpha: float = Field(default=16, gt=0, allow_inf_nan=False, description="Numerator of their scale s.")
    targets: Annotated[
        Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | None, EACH_ONCE
    ] = Field(
        default=None,
        description="Which linear layers get an adapter: a list of last parts of their names; all-linear: all but "
        "those that make the outputs; another text: a regular expression that whole names match; null: the family's "
        "projections to queries and values.",
    )
    layers: Annotated[Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...], EACH_ONCE] = Field(
        default="all", description="Numbers of the blocks whose layers get one, from 0; all: every block."
    )
    scaling: Literal["alpha_over_r", "alpha_over_sqrt_r"] = Field(
        default="alpha_over_r", description="s = alpha / r, or alpha / sqrt(r) (rank-stabilised)."
    )
    use_dora: bool = Field(
        default=False,
        description="Whether every output of such a layer has a magnitude of its own, which is always trained (DoRA): "
        "m (W x + s B A x) / ||W + s B A||, divided by rows, and then the bias.",
    )
    trains: Annotated[tuple[Literal["a", "b"], ...], EACH_ONCE] = Field(
        default=("a", "b"),
        min_length=1,
        description="Which factors are trained and travel; the other stays as the seed has drawn it. [b] is FFA-LoRA.",
    )

    start: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with an adapter that peft or `rayfl export --format peft` has written, from which every "
        "model begins; null: A is drawn, B is zero.",
    )
    sha256: Checksum | None = Field(
        default=None, description="Checksum of that adapter: found out and recorded, and what results depend on."
    )

    @field_validator("targets")
    @classmethod
    def _readable(cls, targets: Any) -> Any:
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"{targets!r} is no regular expression: {error}") from error
        return targets

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> AdapterConfig:
        if self.sha256 is not None and self.start is None:
            raise ValueError("sha256 needs start, the folder of an adapter")
        return self

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (self.r if self.scaling == "alpha_over_r" else self.r**0.5)


class HeadConfig(_Part):
    """The last layers, for the data set's classes."""

    train: bool = Field(
        default=True,
        description="Whether the head is trained and travels; else it is the folder's, as a language model's must be.",
    )
    init: Literal["new", "folder"] = Field(
        default="new", description="new: drawn from the seed; folder: the folder's, of just as many classes."
    )
