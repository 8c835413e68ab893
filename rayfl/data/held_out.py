"""Clients that are held out from training altogether, to be evaluated as newcomers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rayfl.data.federated import Derived, FederatedDataset
from rayfl.errors import ConfigError
from rayfl.examples import Examples, Places
from rayfl.randomness import RandomStreams


def held_out(num_clients: int, share: float, streams: RandomStreams, last: int = 0) -> list[int]:
    """Draws the clients that take no part in training; a share is rounded down to whole clients.

    Args:
        num_clients: how many there are.
        share: of them, in (0, 1).
        streams: the experiment's randomness; uses the stream ``unseen``.
        last: how many clients, the last ones, the run held out whose clients these are; then it is they. 0: none.

    Returns:
        Their numbers, ascending.

    Raises:
        ConfigError: the share is not one client, or leaves none to train, or it is another than that run's.
    """
    count = int(share * num_clients + 1e-9)
    if not count:
        raise ConfigError(
            f"evaluation.unseen_clients is {share}, which of {num_clients} clients is not a single one: raise it, or "
            "divide the data among more clients"
        )
    if count == num_clients:
        raise ConfigError(
            f"evaluation.unseen_clients is {share}, which leaves none of {num_clients} clients to train: lower it"
        )
    if last not in (0, count):
        raise ConfigError(
            f"evaluation.unseen_clients is {share}, which is {count} of {num_clients} clients, but the run whose "
            f"partition.path this is held out {last}: set it to {last / num_clients:g} for the same clients"
        )
    if last:
        return list(range(num_clients - last, num_clients))
    drawn = streams.generator("unseen").choice(num_clients, size=count, replace=False)
    return sorted(int(client) for client in drawn)


class WithUnseen(Derived):
    """The clients of a data set in another order: first those that train, then those that are held out.

    So the numbers of those that train are 0 to M - 1, whatever the others are. Names stay with their clients.

    Args:
        inner: the data set.
        unseen: the numbers, in it, of the clients that are held out.

    Attributes:
        unseen: how many are held out.
    """

    def __init__(self, inner: FederatedDataset, unseen: list[int]) -> None:
        super().__init__(inner)
        self.unseen = len(unseen)
        apart = set(unseen)
        self._order = [*(client for client in range(inner.num_clients) if client not in apart), *sorted(apart)]
        self.names = tuple(inner.names[client] for client in self._order)

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        found: np.ndarray = self._inner.sizes()[self._order]
        return found

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        return self._inner.load(self._order[client])

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        return self._inner.labels(self._order[client])

    def places(self, client: int) -> Places:
        """Returns which samples of the source each split of a client holds."""
        return self._inner.places(self._order[client])

    def made_by(self, client: int) -> dict[str, Any]:
        """What a client's inputs were made by."""
        return self._inner.made_by(self._order[client])

    def unlabelled_sizes(self) -> np.ndarray:
        """Returns how many training samples without a label each client has, int64 of shape (K,)."""
        found: np.ndarray = self._inner.unlabelled_sizes()[self._order]
        return found

    def unlabelled_places(self, client: int) -> np.ndarray:
        """Returns which samples of the source are a client's training samples without a label, int64."""
        return self._inner.unlabelled_places(self._order[client])

    def load_unlabelled(self, client: int) -> torch.Tensor:
        """Returns the inputs of a client's training samples without a label, on the CPU."""
        return self._inner.load_unlabelled(self._order[client])
