"""Labels that only some of the clients' training samples keep: the setting of semi-supervised learning."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

_ROUND_OFF = 1e-9
"""Without it 0.29 of 100 samples, which is 28.999... in floating point, would be 28."""


class Labelled(BaseModel):
    """Which training samples of a client keep their labels; those of validation and test parts all do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of each client's training samples that keep their labels, drawn at random, rounded down, "
        "and one sample at least; 1: all.",
    )
    per_class: int | None = Field(
        default=None,
        ge=1,
        description="In place of share: how many of each client's training samples of each class keep their labels, "
        "or all of those that it has; null: by share.",
    )
    at: Literal["clients", "server"] = Field(
        default="clients",
        description="Who has labels: clients, each of them as above; server, no client, and the samples of "
        "holdout.public are those that have labels.",
    )

    @model_validator(mode="after")
    def _one_rule(self) -> Labelled:
        if self.per_class is not None and self.share != 1:
            raise ValueError("share and per_class are two ways to say how many samples keep their labels: set one")
        if self.at == "server" and (self.per_class is not None or self.share != 1):
            raise ValueError(
                "at=server leaves clients no labels, so that there is nothing to say of share and per_class: leave "
                "them out, or set at=clients"
            )
        return self

    @property
    def active(self) -> bool:
        """Returns whether any label may be hidden."""
        return self != Labelled()

    def kept(self, labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Draws the samples of a client that keep their labels; with ``share`` the draw does not read the labels.

        Args:
            labels: of its training samples, int64 of shape (n,).
            generator: the stream ``labelled`` of the client.

        Returns:
            Their places in ``labels``, ascending int64.
        """
        count = len(labels)
        if self.at == "server" or not count:
            return np.empty(0, dtype=np.int64)
        order = generator.permutation(count)
        if self.per_class is None:
            return np.sort(order[: max(int(self.share * count + _ROUND_OFF), 1)])
        drawn = [order[labels[order] == number][: self.per_class] for number in np.unique(labels)]
        return np.sort(np.concatenate(drawn))
