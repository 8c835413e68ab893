"""Clients whose samples are drawn when they are asked for: a data set of any size for runs on Ray.

Runs name :func:`clients` in their configuration, and every process of a run imports this module: Ray's workers find it
beside the script that started them. How many there are is in the environment variable ``CAMPAIGN_CLIENTS``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset
from rayfl.examples import Examples, InputSpec
from rayfl.randomness import RandomStreams


class MadeUpClients(FederatedDataset):
    """Images of noise whose labels are the largest of ten sums of pixels."""

    def __init__(self, clients: int, samples: int) -> None:
        self.spec = InputSpec("image", (1, 28, 28), 10)
        self.names = tuple(str(client) for client in range(clients))
        self._samples = samples
        self._rule = torch.randn(784, 10, generator=torch.Generator().manual_seed(0))

    def sizes(self) -> np.ndarray:
        return np.tile([self._samples, 0, self._samples // 10], (len(self.names), 1))

    def load(self, client: int) -> Mapping[str, Examples]:
        counts = zip(("train", "validation", "test"), self.sizes()[client].tolist(), strict=True)
        return {split: self._drawn(1 + 3 * client + part, count) for part, (split, count) in enumerate(counts)}

    def _drawn(self, seed: int, count: int) -> Examples:
        x = torch.randn(count, 784, generator=torch.Generator().manual_seed(seed))
        return Examples(x.view(count, 1, 28, 28), (x @ self._rule).argmax(1))


def clients(streams: RandomStreams) -> MadeUpClients:
    """As many clients, with as many samples, as the environment says."""
    return MadeUpClients(*json.loads(os.environ["CAMPAIGN_CLIENTS"]))
