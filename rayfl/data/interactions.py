"""Users as clients: what each has chosen, and drawn items that it has not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.files.content import checksum
from rayfl.errors import DataError
from rayfl.examples import SPLITS, Examples, InputSpec
from rayfl.randomness import RandomStreams

Unknown = Literal["training", "all"]
"""Which of a user's items are never among those that are drawn for training."""


class InteractionDataset(FederatedDataset):
    """Clients that are users; a sample is an item that the user chose, and n others that it did not.

    Of a user's items, in their order, the last is the test split and the one before it the validation split (He et al.,
    Neural Collaborative Filtering, WWW 2017, section 4.1, without validation). The others are drawn when a split is
    read, by the seed, the user and the split: for validation and test n distinct items that the user has in no split,
    for training with repetition. x is int64 of shape (1 + n,), the chosen item first; y is 0.

    Args:
        names: the users.
        items: by user, item numbers in the order of time, int of shape (at least 2,), without repetition.
        num_items: how many items there are.
        others: n.
        unknown: ``training``: others of the training split are drawn from all items that are not in it, so that
            held-out items can be among them, as in the paper's code; ``all``: from those that the user has in no split,
            which tells a model that validation and test items are none of these.
        validation: whether there is a validation split.
        streams: the experiment's randomness; uses the streams ``negatives``, ``negatives.validation`` and
            ``negatives.test`` of each client.
        remarks: looks for what a user should be warned of.

    Raises:
        DataError: a user has chosen all but fewer than n items.
    """

    sound = True

    def __init__(
        self,
        names: Sequence[str],
        items: Sequence[np.ndarray],
        num_items: int,
        others: int,
        unknown: Unknown,
        validation: bool,
        streams: RandomStreams,
        remarks: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        counts = np.array([len(own) for own in items], dtype=np.int64)
        most = int(counts.argmax())
        if num_items - counts[most] < others:
            raise DataError(
                f"dataset.negatives is {others}, but client {names[most]!r} has chosen {counts[most]} of {num_items} "
                f"items, so that {num_items - counts[most]} are left: set dataset.negatives to that at most, or leave "
                "such clients out"
            )
        self.names = tuple(names)
        self.spec = InputSpec("tokens", (1 + others,), 1, num_items, "ranking")
        self.remarks = remarks
        self.content_hash = self._checksum
        self._bounds = np.concatenate([[0], np.cumsum(counts)])
        self._items = np.concatenate(list(items)).astype(np.int32)
        self._others, self._unknown, self._held = others, unknown, 1 + validation
        self._streams = streams

    def sizes(self) -> np.ndarray:
        """See the base class."""
        counts = np.diff(self._bounds)
        held = np.ones_like(counts)
        return np.stack([counts - self._held, held * (self._held - 1), held], 1)

    def load(self, client: int) -> Mapping[str, Examples]:
        """See the base class; negatives of a split are drawn when it is read."""
        return OnDemand(lambda split: self._split(client, split))

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """See the base class."""
        sizes = self.sizes()[client].tolist()
        return {split: np.zeros(size, dtype=np.int64) for split, size in zip(SPLITS, sizes, strict=True)}

    def chosen(self, client: int) -> np.ndarray:
        """Returns a user's items in the order of time: training, validation, test; int32."""
        return self._items[self._bounds[client] : self._bounds[client + 1]]

    def _split(self, client: int, split: str) -> Examples:
        own = self.chosen(client)
        end = len(own) - self._held
        part = {"train": own[:end], "validation": own[end:-1], "test": own[-1:]}[split]
        training = split == "train"
        left = np.ones(self.spec.vocabulary, dtype=bool)
        left[part if training and self._unknown == "training" else own] = False
        among = np.flatnonzero(left)
        generator = self._streams.generator("negatives" if training else f"negatives.{split}", client=client)
        if training:
            drawn = among[generator.integers(len(among), size=(len(part), self._others))]
        else:
            drawn = np.stack([generator.choice(among, self._others, replace=False) for _ in part]) if len(part) else (
                np.empty((0, self._others), dtype=np.int64)
            )  # fmt: skip
        x = np.concatenate([part[:, None].astype(np.int64), drawn], 1)
        return Examples(torch.from_numpy(x), torch.zeros(len(x), dtype=torch.int64))

    def _checksum(self) -> str:
        owners = np.repeat(np.array(self.names, dtype=object), np.diff(self._bounds))
        return checksum(self._items[:, None], np.zeros(len(self._items), dtype=np.int64), owners)
