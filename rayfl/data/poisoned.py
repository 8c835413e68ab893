"""Clients some of which train on wrong labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import torch

from rayfl.data.federated import Derived, FederatedDataset, OnDemand
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples
from rayfl.randomness import RandomStreams


class WithWrongLabels(Derived):
    """The clients of a data set, of which some have wrong labels; test parts stay right.

    Sources: Tolpegin et al., ESORICS 2020 (flipped labels); Li et al., ICML 2021 (random labels).

    Args:
        inner: the data set.
        malicious: the clients with wrong labels.
        kind: ``flipped``: C - 1 - y; ``random``: any class, all equally likely.
        streams: the experiment's randomness; uses the stream ``attack.labels`` by client.

    Raises:
        ConfigError: samples have no class.
    """

    def __init__(
        self,
        inner: FederatedDataset,
        malicious: frozenset[int],
        kind: Literal["flipped", "random"],
        streams: RandomStreams,
    ) -> None:
        if inner.spec.target != "class":
            raise ConfigError(
                f"attack.labels: wrong labels are those of another class, and these samples have no class of their own "
                f"({inner.spec.target}): leave it out, or set attack.message"
            )
        super().__init__(inner)
        self._malicious, self._kind, self._streams = malicious, kind, streams

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)
        return OnDemand(lambda split: self._poisoned(client, split, found[split])) if self._has(client) else found

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        found = self._inner.labels(client)
        if not self._has(client):
            return found
        return {split: self._wrong(client, split, found[split]) for split in SPLITS}

    def _has(self, client: int) -> bool:
        return client in self._malicious

    def _poisoned(self, client: int, split: str, examples: Examples) -> Examples:
        return replace(examples, y=torch.as_tensor(self._wrong(client, split, examples.y.numpy())))

    def _wrong(self, client: int, split: str, y: np.ndarray) -> np.ndarray:
        if split == "test":
            return y
        classes = self.spec.num_classes
        if self._kind == "flipped":
            return classes - 1 - y
        generator = self._streams.generator(f"attack.labels.{split}", client=client)
        return generator.integers(classes, size=y.shape, dtype=y.dtype)
