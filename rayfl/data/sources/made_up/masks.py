"""Images and volumes of made-up shapes, with the class of each pixel; clients differ in how bright the shapes are."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples
from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.data.sources.made_up.source import client_names
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams


class SyntheticMasksSource(MadeUpSource):
    """Noisy images of a ball and a box each, and masks: 0 background, 1 ball, 2 box, which lies in front.

    Sizes and places are uniform. At client k, what has class c is as bright as c + beta v_kc, with v_kc from N(0, 1):
    clients differ as scanners of several hospitals do. Each pixel's noise is from N(0, noise^2).
    """

    amounts: ClassVar[tuple[str, ...]] = ("num_clients", "samples", "side")

    name: Literal["synthetic_masks"] = Field(
        default="synthetic_masks", description="Made-up images with a class at each pixel."
    )
    num_clients: int = Field(default=20, ge=1, description="Number of clients.")
    samples: int = Field(default=20, ge=1, description="Images of a client.")
    side: int = Field(default=16, ge=6, le=512, description="Pixels of a side.")
    dimensions: Literal[2, 3] = Field(default=2, description="2: images; 3: volumes.")
    beta: float = Field(default=0.7, ge=0, le=1e6, description="How much the clients' brightnesses differ.")
    noise: float = Field(default=0.5, ge=0, le=1e6, description="Standard deviation of a pixel's noise.")

    @property
    def least_bytes(self) -> int:
        pixels = math.prod([self.side] * self.dimensions)
        return 5 * self.num_clients * self.samples * pixels

    def open(self, streams: RandomStreams) -> Samples:
        """All clients' images, one client after the other; uses the stream ``synthetic`` of each client."""
        self.check_room()
        drawn = [self._client(streams.generator("synthetic", client=client)) for client in range(self.num_clients)]
        x, y = (np.concatenate(column) for column in zip(*drawn, strict=True))
        spec = InputSpec("image", (1, *[self.side] * self.dimensions), 3, target="mask")
        return Samples(x, y, spec, client_names(self.num_clients, self.samples))

    def _client(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        brightness = np.arange(3) + self.beta * generator.normal(size=3)
        # Of ball and box: half a side of each, and the middle, so that all of it is inside.
        radius = generator.uniform(self.side / 8, self.side / 4, (2, self.samples, 1))
        middle = generator.uniform(radius, self.side - 1 - radius, (2, self.samples, self.dimensions))
        places = np.moveaxis(np.indices([self.side] * self.dimensions), 0, -1)
        apart = np.abs(places - np.expand_dims(middle, tuple(range(2, 2 + self.dimensions))))
        radius = radius.reshape(2, self.samples, *[1] * self.dimensions)
        y = np.zeros(apart.shape[1:-1], dtype=np.uint8)
        y[(apart[0] ** 2).sum(-1) <= radius[0] ** 2] = 1
        y[apart[1].max(-1) <= radius[1]] = 2
        x = brightness[y] + self.noise * generator.normal(size=y.shape)
        return x.astype(np.float32)[:, np.newaxis], y
