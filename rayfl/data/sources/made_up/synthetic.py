"""Synthetic(alpha, beta): clients with linear models and inputs of their own, made up from the seed."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

_FEWEST_SAMPLES = 50
_SIZE_MEAN, _SIZE_DEVIATION = 4.0, 2.0
_VARIANCE_DECAY = -1.2


class SyntheticSource(MadeUpSource):
    """Vectors with labels from a linear model, both differing from client to client (Li et al., FedProx, 2020, 5.1).

    Client k labels x with argmax(x W_k + b_k). The entries of W_k and b_k are drawn from N(u_k, 1) with
    u_k ~ N(0, alpha); x from N(v_k, Sigma), where Sigma is diagonal with the variances j^-1.2 (j = 1, 2, ...), the
    entries of v_k from N(B_k, 1) and B_k ~ N(0, beta). As in the published code, alpha and beta are standard
    deviations, and a client has 50 + floor(exp(z)) samples with z ~ N(4, 2^2). After Shamir et al. (DANE, 2014).
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "dimension")

    name: Literal["synthetic"] = "synthetic"
    alpha: float = Field(
        default=1.0, ge=0, le=1e6, description="How much the clients' models differ; 0 still leaves them different."
    )
    beta: float = Field(
        default=1.0, ge=0, le=1e6, description="How much the clients' inputs differ; 0 still leaves them different."
    )
    num_clients: int = Field(default=30, ge=1, description="Number of clients.")
    dimension: int = Field(default=60, ge=1, description="Numbers in one input.")
    num_classes: int = Field(default=10, ge=2, le=1000, description="Number of labels.")
    iid: bool = Field(
        default=False,
        description="All clients have one model, from N(0, 1), and inputs around 0; alpha and beta have to be 0 then.",
    )

    @model_validator(mode="after")
    def _iid_has_no_differences(self) -> SyntheticSource:
        if self.iid and (self.alpha or self.beta):
            raise ValueError("with iid=true no clients differ: set alpha=0 and beta=0")
        return self

    @property
    def least_bytes(self) -> int:
        samples = self.num_clients * (_FEWEST_SAMPLES + math.exp(_SIZE_MEAN + _SIZE_DEVIATION**2 / 2))
        return int(samples * (4 * self.dimension + 8))

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' samples, one client after the other; uses the stream ``synthetic`` of each client.

        x is float32 of shape (N, dimension).
        """
        self.check_room()
        digits = len(str(self.num_clients - 1))
        names = np.array([f"{client:0{digits}d}" for client in range(self.num_clients)])
        sizes = [_size(streams.generator("synthetic", client=client)) for client in range(self.num_clients)]
        # Filled in place: two copies of all samples at a time may be more than the memory holds.
        x = np.empty((sum(sizes), self.dimension), dtype=np.float32)
        y = np.empty(len(x), dtype=np.int64)
        stop = 0
        for client, size in enumerate(sizes):
            start, stop = stop, stop + size
            x[start:stop], y[start:stop] = self._client(client, streams)
        return Samples(x, y, InputSpec("image", (self.dimension,), self.num_classes), np.repeat(names, sizes))

    def _client(self, client: int, streams: RandomStreams) -> tuple[np.ndarray, np.ndarray]:
        generator = streams.generator("synthetic", client=client)
        size = _size(generator)
        shape = (self.dimension, self.num_classes)
        if self.iid:
            shared = streams.generator("synthetic")
            weights, biases = shared.normal(size=shape), shared.normal(size=self.num_classes)
            center = np.zeros(self.dimension)
        else:
            model = generator.normal(0, self.alpha)
            weights, biases = generator.normal(model, size=shape), generator.normal(model, size=self.num_classes)
            center = generator.normal(generator.normal(0, self.beta), size=self.dimension)
        deviations = np.arange(1, self.dimension + 1) ** (_VARIANCE_DECAY / 2)
        x = center + deviations * generator.normal(size=(size, self.dimension))
        # Without BLAS, whose sums depend on its number of threads: all processes have to find the same labels.
        scores = np.einsum("nd,dc->nc", x, weights) + biases
        return x.astype(np.float32), scores.argmax(axis=1)


def _size(generator: np.random.Generator) -> int:
    """Draws how many samples a client has: the first number of its generator."""
    return _FEWEST_SAMPLES + int(generator.lognormal(_SIZE_MEAN, _SIZE_DEVIATION))
