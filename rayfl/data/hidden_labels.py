"""Clients most of whose training samples have no labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from rayfl.data.federated import Derived, FederatedDataset, OnDemand
from rayfl.data.partitions.labelled import Labelled
from rayfl.errors import ConfigError
from rayfl.examples import SPLITS, Examples, Places
from rayfl.randomness import RandomStreams


class WithHiddenLabels(Derived):
    """The clients of a data set, of whose training samples only some keep their labels.

    The split ``train`` has those that do. The inputs of the others are apart (:meth:`load_unlabelled`), and nothing
    gives their labels.

    Args:
        inner: the data set; its samples have one class each.
        labelled: which samples keep their labels.
        streams: the experiment's randomness; uses the stream ``labelled`` of each client.

    Raises:
        ConfigError: the samples have something else than a class.
    """

    def __init__(self, inner: FederatedDataset, labelled: Labelled, streams: RandomStreams) -> None:
        super().__init__(inner)
        if inner.spec.target != "class":
            raise ConfigError(
                f"labelled: it hides the classes of samples, but the data set has {inner.spec.words()}: leave out the "
                "section labelled"
            )
        self._labelled, self._streams = labelled, streams
        self._kept: dict[int, np.ndarray] = {}
        self._train = inner.sizes()[:, 0]

    @cached_property
    def _known(self) -> np.ndarray:
        """How many training samples of each client keep their labels, int64 of shape (K,)."""
        return np.array([len(self._places(client)) for client in range(self.num_clients)], dtype=np.int64)

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3); training samples are those with labels."""
        sizes = self._inner.sizes().copy()
        sizes[:, 0] = self._known
        return sizes

    def unlabelled_sizes(self) -> np.ndarray:
        """Returns how many training samples without a label each client has, int64 of shape (K,)."""
        found: np.ndarray = self._train - self._known
        return found

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)

        def read(split: str) -> Examples:
            return found[split][torch.from_numpy(self._places(client))] if split == "train" else found[split]

        return OnDemand(read)

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split, without those that are hidden."""
        found = self._inner.labels(client)
        return {split: found[split][self._places(client)] if split == "train" else found[split] for split in SPLITS}

    def places(self, client: int) -> Places:
        """Returns which samples of the source each split of a client holds."""
        found = dict(self._inner.places(client))
        return {**found, "train": found["train"][self._places(client)]}

    def unlabelled_places(self, client: int) -> np.ndarray:
        """Returns which samples of the source are a client's training samples without a label, int64."""
        found: np.ndarray = np.delete(self._inner.places(client)["train"], self._places(client))
        return found

    def load_unlabelled(self, client: int) -> torch.Tensor:
        """Returns the inputs of a client's training samples without a label, on the CPU, (count, *input shape)."""
        others = np.delete(np.arange(self._train[client]), self._places(client))
        return self._inner.load(client)["train"].x[torch.from_numpy(others)]

    def _places(self, client: int) -> np.ndarray:
        """Returns which of a client's training samples keep their labels."""
        if client not in self._kept:
            # a share is drawn without reading labels, which would be a pass over all samples of some sources
            by_class = self._labelled.per_class is not None
            count = int(self._train[client])
            labels = self._inner.labels(client)["train"] if by_class else np.zeros(count, dtype=np.int64)
            self._kept[client] = self._labelled.kept(labels, self._streams.generator("labelled", client=client))
        return self._kept[client]
