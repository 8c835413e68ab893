"""The section compression of a configuration: what clients' messages lose on their way to the server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from rayfl.aggregation.compression import (
    at_random,
    dense_bytes,
    entries_kept,
    largest,
    rounded,
    signs,
    sparse_bytes,
)
from rayfl.aggregation.secure_sum import in_levels, most_weight, protocol_bytes, summed_bytes

_FEEDBACK = "whether a client adds to its next change what this message lacks, and keeps that in its state"


class NoCompression(BaseModel):
    """Messages are sent as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["none"] = "none"


class Compressor(BaseModel):
    """What a change becomes on its way, and how many bytes that takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error_feedback: bool = Field(True, description=_FEEDBACK)

    @abstractmethod
    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        """Returns the change as the server decodes it, and its bytes.

        Args:
            change: of shape (P,), the tensors of a message one after another.
            sizes: entries of each tensor.
            generator: for random choices.
        """

    def beside(self, cohort: int) -> int:
        """Returns the bytes that a client sends beside its message, in a round of ``cohort`` clients."""
        return 0

    def within(self, change: Tensor) -> Tensor | None:
        """Returns whether no entry of a change is clipped, a scalar of bool; None where none ever is."""
        return None


class TopK(Compressor):
    """The entries of the largest magnitude, of all tensors together (Stich et al., NeurIPS 2018)."""

    name: Literal["top_k"] = "top_k"
    share: float = Field(0.1, gt=0, le=1, description="k / P, share of the entries that is sent")

    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        kept = entries_kept(len(change), self.share)
        return largest(change, kept), sparse_bytes(len(change), kept, change.itemsize)


class RandomK(Compressor):
    """Entries drawn by a seed that the server knows (Stich et al., NeurIPS 2018).

    Without error feedback they are sent P / k times as large, so that the message is right on average.
    """

    name: Literal["random_k"] = "random_k"
    share: float = Field(0.1, gt=0, le=1, description="k / P, share of the entries that is sent")
    error_feedback: bool = Field(False, description=_FEEDBACK)

    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        kept = entries_kept(len(change), self.share)
        sent = at_random(change, kept, generator)
        return sent if self.error_feedback else sent * (len(change) / kept), kept * change.itemsize


class Quantize(Compressor):
    """Entries rounded at random to evenly spaced levels, right on average (QSGD: Alistarh et al., NeurIPS 2017)."""

    name: Literal["quantize"] = "quantize"
    bits: int = Field(8, ge=2, le=16, description="b of an entry: 2^b - 1 levels up to the tensor's largest magnitude")
    error_feedback: bool = Field(False, description=_FEEDBACK)

    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        return rounded(change, sizes, self.bits, generator), dense_bytes(sizes, self.bits)


class Sign(Compressor):
    """Signs, and each tensor's mean magnitude (EF-signSGD: Karimireddy et al., ICML 2019)."""

    name: Literal["sign"] = "sign"

    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        return signs(change, sizes), dense_bytes(sizes, 1)


class SecureAggregation(Compressor):
    """What the server learns of a sum that alone it sees, without any cryptography (Bonawitz et al., CCS 2017).

    A sum of rounded changes that does not wrap is to the bit what the server of a deployment decodes, so that their
    exact mean is its mean. Models are rounded to their number type when changes are added to what was received.
    """

    name: Literal["secure_aggregation"] = "secure_aggregation"
    clip: float = Field(8.0, gt=0, allow_inf_nan=False, description="largest magnitude of an entry of a change")
    bits: int = Field(22, ge=2, le=24, description="b of an entry: 2^b + 1 levels from minus to plus clip")
    modulus_bits: int = Field(
        32, ge=3, le=64, description="bits of an entry that is sent; sums are modulo 2^modulus_bits"
    )
    neighbours: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description="k, clients that have shares of a client's secrets (SecAgg+); null: all of the round",
    )
    threshold: float = Field(
        0.6, gt=0, le=1, description="share of those that must answer, with the client itself, for a sum to be unmasked"
    )
    error_feedback: bool = Field(False, description=_FEEDBACK)

    @model_validator(mode="after")
    def _room_for_one(self) -> Self:
        if not self.most_weight:
            raise ValueError(
                f"bits={self.bits} leaves no room for a message in modulus_bits={self.modulus_bits}: "
                f"bits must be below modulus_bits"
            )
        return self

    @property
    def most_weight(self) -> int:
        """Returns the largest sum of a round's weights with which no sum wraps."""
        return most_weight(self.bits, self.modulus_bits)

    def holders(self, cohort: int) -> int:
        """Returns how many clients have shares of a client's secrets, with itself; ``cohort`` is those of a round."""
        return cohort if self.neighbours is None else min(self.neighbours + 1, cohort)

    def encoded(self, change: Tensor, sizes: Sequence[int], generator: np.random.Generator) -> tuple[Tensor, int]:
        return in_levels(change, self.clip, self.bits, generator), summed_bytes(len(change), self.modulus_bits)

    def beside(self, cohort: int) -> int:
        return protocol_bytes(self.holders(cohort))

    def within(self, change: Tensor) -> Tensor:
        return (change.abs() <= self.clip).all()


Compression = Annotated[
    NoCompression | TopK | RandomK | Quantize | Sign | SecureAggregation, Field(discriminator="name")
]
