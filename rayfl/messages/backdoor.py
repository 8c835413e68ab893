"""The section attack.backdoor of a configuration: which samples malicious clients poison, and how."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.backdoor import Backdoor
from rayfl.data.federated import FederatedDataset
from rayfl.data.triggers import Columns, Patch, Phrase, Trigger
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec

_PATCH = 3


class BackdoorConfig(BaseModel):
    """Samples of malicious clients that carry a trigger, and the class that these are to be taken for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: int = Field(ge=0, description="the class that samples with the trigger are to be taken for")
    poisoned: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of a malicious client's training samples, and of its validation samples, that carry the "
        "trigger and the target; drawn by the seed, rounded up",
    )
    patch: int | None = Field(
        None, ge=1, description="of images, side in pixels of the square in the lower right corner; null: 3"
    )
    value: float | None = Field(
        None,
        allow_inf_nan=False,
        description="value of its pixels in all channels, in the scale of images before normalization, where 0 is "
        "black and 1 white; null: 1",
    )
    tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, min_length=1, description="of texts, the tokens at their end"
    )
    columns: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        None, min_length=1, description="of rows of numbers, values by column, as models see them"
    )
    parts: int = Field(
        1,
        ge=1,
        description="among how many malicious clients the trigger is divided; tests have the whole of it",
    )

    @model_validator(mode="after")
    def _one_trigger(self) -> BackdoorConfig:
        kinds = {"patch and value": (self.patch, self.value), "tokens": (self.tokens,), "columns": (self.columns,)}
        given = [kind for kind, values in kinds.items() if any(value is not None for value in values)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} are of another trigger than {given[1]}: leave one out")
        return self

    def build(self, dataset: FederatedDataset, malicious: int) -> Backdoor:
        """Returns the backdoor for the samples of a data set.

        Args:
            dataset: the honest data.
            malicious: how many clients poison theirs.

        Raises:
            ConfigError: the samples have no class, or no trigger of this kind, or there is no such target, or the
                trigger cannot be divided into the parts.
        """
        spec = dataset.spec
        if spec.target != "class":
            raise ConfigError(
                "attack.backdoor: samples with the trigger are to be taken for a class, and these samples have no class"
                f" of their own ({spec.target}): leave it out, or set attack.message"
            )
        if self.target >= spec.num_classes:
            raise ConfigError(
                f"attack.backdoor.target: there is no class {self.target}; there are 0 to {spec.num_classes - 1}"
            )
        trigger = self._trigger(dataset)
        for most, what in ((trigger.elements, "elements of the trigger"), (malicious, "malicious clients")):
            if self.parts > most:
                raise ConfigError(f"attack.backdoor.parts is {self.parts}, but there are only {most} {what}: lower it")
        return Backdoor(trigger, self.target, self.poisoned, self.parts)

    def _trigger(self, dataset: FederatedDataset) -> Trigger:
        spec = dataset.spec
        kind = "tokens" if spec.kind == "tokens" else {1: "columns", 3: "patch", 4: "patch"}.get(len(spec.shape))
        if kind is None:
            raise ConfigError(
                f"attack.backdoor: there is no trigger for arrays of the shape {spec.shape}: leave it out"
            )
        given = {"patch": self.patch, "value": self.value, "tokens": self.tokens, "columns": self.columns}
        for name, value in given.items():
            if value is not None and kind != {"value": "patch"}.get(name, name):
                raise ConfigError(
                    f"attack.backdoor.{name} does not fit: the data set has {spec.words()}, whose trigger is given by "
                    f"attack.backdoor.{kind}"
                )
        if kind != "patch" and given[kind] is None:
            raise ConfigError(f"attack.backdoor: the data set has {spec.words()}: set attack.backdoor.{kind}")
        if kind == "tokens":
            return self._phrase(spec)
        return self._columns(spec) if kind == "columns" else self._patch(dataset)

    def _patch(self, dataset: FederatedDataset) -> Patch:
        size, value = self.patch or _PATCH, 1.0 if self.value is None else self.value
        channels, *sides = dataset.spec.shape
        if size >= min(sides):
            raise ConfigError(
                f"attack.backdoor.patch is {size}, but images have the sides {' x '.join(map(str, sides))}: choose less"
            )
        seen = np.full(channels, value, np.float32) if dataset.preprocess is None else dataset.preprocess.pixel(value)
        return Patch(size, seen, len(sides))

    def _phrase(self, spec: InputSpec) -> Phrase:
        tokens = self.tokens or ()
        if len(tokens) >= spec.shape[0]:
            raise ConfigError(f"attack.backdoor.tokens are {len(tokens)}, and texts have {spec.shape[0]}: give fewer")
        if (largest := max(tokens)) >= spec.vocabulary:
            raise ConfigError(
                f"attack.backdoor.tokens: there is no token {largest}; there are 0 to {spec.vocabulary - 1}"
            )
        if spec.padding in tokens:
            raise ConfigError(
                f"attack.backdoor.tokens: {spec.padding} fills texts up, which is no trigger: choose another"
            )
        return Phrase(tokens, spec.padding)

    def _columns(self, spec: InputSpec) -> Columns:
        columns = self.columns or {}
        if (last := max(columns)) >= spec.shape[0]:
            raise ConfigError(f"attack.backdoor.columns: there is no column {last}; there are 0 to {spec.shape[0] - 1}")
        for column in columns:
            if any(first <= column < first + size for first, size in spec.categories):
                raise ConfigError(
                    f"attack.backdoor.columns: column {column} is a value of a category, of which a row has one: "
                    "choose columns of numbers"
                )
        return Columns(columns)
