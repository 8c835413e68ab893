"""Label noise: wrong labels in what clients train on."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams

_ROUND_OFF = 1e-9
"""Without it 0.29 of 100 clients, which is 28.999... in floating point, would be 28."""


class LabelNoise(BaseModel):
    """Labels that are wrong with a fixed probability (SuPerFed, KDD 2022, section 4.3).

    ``pair``: a sample of class i is labelled (i + 1) mod C; ``symmetric``: any of the other classes, all equally
    likely. Train and validation parts are noisy, test parts are clean. Which samples are wrong does not depend on
    who owns them, but only some of the clients may have wrong labels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "pair", "symmetric"] = Field(default="none", description="Which wrong labels occur.")
    ratio: float = Field(default=0.0, ge=0, le=1, description="Probability that a label is wrong.")
    clients: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the clients whose labels may be wrong, drawn at random; all labels of the others are "
        "right. 1: all.",
    )
    legacy: bool = Field(
        default=False,
        description="As SuPerFed's published code, which its Table 4 was made with: the two kinds swapped, and test "
        "parts noisy too.",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> LabelNoise:
        for option in ("ratio", "legacy", "clients"):
            if self.kind == "none" and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(
                    f"{option}={getattr(self, option)} does nothing with kind=none: set kind=pair or symmetric"
                )
        return self

    @property
    def active(self) -> bool:
        """Returns whether any label changes."""
        return self.kind != "none" and self.ratio > 0

    @property
    def in_test(self) -> bool:
        """Returns whether test parts are noisy."""
        return self.active and self.legacy

    def owners(self, num_clients: int, streams: RandomStreams) -> frozenset[int]:
        """Returns the ids of the clients whose labels may be wrong; none where no label is.

        Args:
            num_clients: K.
            streams: the experiment's randomness; uses the stream ``noise.clients``.

        Raises:
            ConfigError: the share is not one client.
        """
        if not self.active:
            return frozenset()
        if self.clients == 1:
            return frozenset(range(num_clients))
        count = int(self.clients * num_clients + _ROUND_OFF)
        if not count:
            raise ConfigError(
                f"noise.clients is {self.clients}, which of {num_clients} clients is not a single one: raise it, or "
                "leave out the section noise"
            )
        drawn = streams.generator("noise.clients").choice(num_clients, size=count, replace=False)
        return frozenset(int(client) for client in drawn)

    def transitions(self, num_classes: int) -> np.ndarray:
        """T with T[i, j] = P(label j | class i), float64 of shape (C, C)."""
        kind = self.kind
        if self.legacy:
            kind = {"none": "none", "pair": "symmetric", "symmetric": "pair"}[kind]  # type: ignore[assignment]
        identity = np.eye(num_classes)
        if kind == "none" or num_classes == 1:
            return identity
        wrong = np.roll(identity, 1, axis=1) if kind == "pair" else (1 - identity) / (num_classes - 1)
        return (1 - self.ratio) * identity + self.ratio * wrong

    def corrupt(self, labels: np.ndarray, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        """Noisy labels.

        Args:
            labels: true classes, int64 of shape (N,).
            num_classes: C.
            generator: one number is drawn per sample, whatever its class.

        Returns:
            int64 of shape (N,), fresh memory.
        """
        draws = generator.random(len(labels))
        if not self.active:
            return labels.copy()
        cumulative = np.cumsum(self.transitions(num_classes), axis=1)
        # The row's total may round to just below 1.
        chosen = (draws[:, np.newaxis] >= cumulative[labels]).sum(1)
        noisy: np.ndarray = np.minimum(chosen, num_classes - 1)
        return noisy.astype(np.int64)
