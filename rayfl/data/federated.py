"""The interface every data source is turned into: clients, each with three splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayfl.data.files.content import Content, unknown
from rayfl.examples import SPLITS, UNLABELLED, Examples, InputSpec, Places
from rayfl.naming.splits import stage_in

if TYPE_CHECKING:
    from rayfl.data.images.transform import Preprocessing


class OnDemand(Mapping[str, Examples]):
    """The splits of one client, each read when it is first asked for.

    An evaluation of all clients then reads, and keeps, what it scores, and not what they train on.

    Args:
        read: gives a split by its name.
    """

    def __init__(self, read: Callable[[str], Examples]) -> None:
        self._read = read
        self._known: dict[str, Examples] = {}

    def __getitem__(self, split: str) -> Examples:
        if split not in (*SPLITS, UNLABELLED) and stage_in(split) is None:
            raise KeyError(split)
        if split not in self._known:
            self._known[split] = self._read(split)
        return self._known[split]

    def __iter__(self) -> Iterator[str]:
        return iter(SPLITS)

    def __len__(self) -> int:
        return len(SPLITS)


class FederatedDataset(ABC):
    """Clients 0..K-1, each with the splits train, validation and test.

    Opening one is cheap; samples are read by :meth:`load`, so an actor reads only its clients.

    Attributes:
        spec: the shape and kind of the inputs.
        names: the clients' own names in the source (writer ids, roles), position = client id.
        preprocess: what stored inputs go through; None for a data set that stores what models see.
        remarks: looks for what a user should be warned of, a sentence each; asked once, by who starts a run.
        sound: whether all samples are known to be finite and their labels to be in range; else each is looked at when
            it is read.
        own_splits: whether they come with the data, so that the section ``holdout`` has no part in them.
        reads_ahead: whether a thread may read clients before they are asked for: reading has no effect but what it
            returns, and takes longer than handing it over.
        content_hash: gives the checksum of the source's samples, by which a run notices that they have changed.
        domains: names of the domains that samples are from, for data that have some.
        domain: which of them each sample of the source is from, integers by its place (:meth:`places`); else None.
    """

    spec: InputSpec
    names: tuple[str, ...]
    preprocess: Preprocessing | None = None
    remarks: Callable[[], Sequence[str]] = tuple
    sound: bool = False
    own_splits: bool = False
    reads_ahead: bool = False
    content_hash: Content = staticmethod(unknown)
    domains: tuple[str, ...] = ()
    domain: np.ndarray | None = None

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.names)

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""

    @abstractmethod
    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU; :class:`OnDemand` if they can be read one by one."""

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split (``Examples.y``); cheaper than :meth:`load` where inputs are large."""
        return {split: examples.y.numpy() for split, examples in self.load(client).items()}

    def places(self, client: int) -> Places:
        """Returns which samples of the source (or of the client's own rows in it) each split of a client holds."""
        bounds = np.concatenate([[0], np.cumsum(self.sizes()[client])])
        return {split: np.arange(bounds[i], bounds[i + 1]) for i, split in enumerate(SPLITS)}

    def made_by(self, client: int) -> dict[str, Any]:
        """What a client's inputs were made by, as plain data, for who has nothing but a model (``rayfl export``).

        ``mean`` and ``std``: what is subtracted from each channel of an image (of values in [0, 1]), and divided by; of
        time series from each series. ``columns``: of a table, see :meth:`rayfl.data.tables.TabularDataset.made_by`.
        """
        found = self.preprocess
        if found is None or found.mean is None or found.std is None:
            return {}
        return {"mean": found.mean.tolist(), "std": found.std.tolist()}

    def unlabelled_sizes(self) -> np.ndarray:
        """Returns how many training samples without a label each client has beside its splits, int64 of shape (K,)."""
        return np.zeros(self.num_clients, dtype=np.int64)

    def unlabelled_places(self, client: int) -> np.ndarray:
        """Returns which samples of the source are a client's training samples without a label, int64."""
        return np.empty(0, dtype=np.int64)

    def load_unlabelled(self, client: int) -> torch.Tensor:
        """Returns the inputs of a client's training samples without a label, on the CPU, (count, *input shape)."""
        return self.load(client)["train"].x[:0]

    def stage_of(self, round: int) -> int:
        """Returns the stage of a round (the section ``stages``), both from 0."""
        return 0

    def at(self, stage: int) -> FederatedDataset:
        """Returns the clients with the samples that they have in a stage."""
        return self

    def tested(self, client: int) -> Examples:
        """Returns a client's test samples that belong to the stage of :meth:`at`, on the CPU."""
        return self.load(client)["test"]

    def public_places(self) -> np.ndarray:
        """Returns which samples of the source are public, int64."""
        return np.empty(0, dtype=np.int64)

    def load_public(self) -> torch.Tensor:
        """The samples that belong to no client, on the CPU, shape (count, *input shape); may be empty."""
        return self.load(0)["train"].x[:0]

    def public_labels(self) -> np.ndarray:
        """The targets of the public samples (``Examples.y``), which clients never see."""
        return self.labels(0)["train"][:0]


class Derived(FederatedDataset):
    """The clients of another data set; what a subclass does not define is as there.

    Args:
        inner: the other data set.
    """

    def __init__(self, inner: FederatedDataset) -> None:
        self._inner = inner
        self.spec, self.names, self.preprocess = inner.spec, inner.names, inner.preprocess
        self.remarks, self.sound, self.reads_ahead = inner.remarks, inner.sound, inner.reads_ahead
        self.own_splits = inner.own_splits
        self.content_hash = inner.content_hash
        self.domains, self.domain = inner.domains, inner.domain

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        return self._inner.sizes()

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        return self._inner.load(client)

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        return self._inner.labels(client)

    def places(self, client: int) -> Places:
        """Returns which samples of the source each split of a client holds."""
        return self._inner.places(client)

    def made_by(self, client: int) -> dict[str, Any]:
        """What a client's inputs were made by."""
        return self._inner.made_by(client)

    def unlabelled_sizes(self) -> np.ndarray:
        """Returns how many training samples without a label each client has, int64 of shape (K,)."""
        return self._inner.unlabelled_sizes()

    def unlabelled_places(self, client: int) -> np.ndarray:
        """Returns which samples of the source are a client's training samples without a label, int64."""
        return self._inner.unlabelled_places(client)

    def load_unlabelled(self, client: int) -> torch.Tensor:
        """Returns the inputs of a client's training samples without a label, on the CPU."""
        return self._inner.load_unlabelled(client)

    def public_places(self) -> np.ndarray:
        """Returns which samples of the source are public, int64."""
        return self._inner.public_places()

    def load_public(self) -> torch.Tensor:
        """The samples that belong to no client, on the CPU."""
        return self._inner.load_public()

    def public_labels(self) -> np.ndarray:
        """The targets of the public samples."""
        return self._inner.public_labels()
