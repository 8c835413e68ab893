"""The section compression of a configuration: what clients' messages lose on their way to the server."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
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


Compression = Annotated[NoCompression | TopK | RandomK | Quantize | Sign, Field(discriminator="name")]
