"""The samples of the clients that a host has: read when they are needed, kept while there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from actors.hosting.memory import LeastRecentlyUsed, Lookups
from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.soundness import check_examples, check_finite, check_inputs, check_own
from rayfl.engine.untouched import Untouched
from rayfl.examples import SPLITS, Examples

_log = logging.getLogger(__name__)
_Key = tuple[int, str]
"""Client and split."""
_OFFICIAL = -2
"""Stands for a client in the keys of pieces of the official test part."""


class Samples:
    """Clients' samples on a device, split by split.

    Args:
        dataset: where they come from.
        device: where they go.
        limit: bytes that stay loaded; None for no limit.
        unseen: how many of the last clients take no part in training.

    Attributes:
        lookups: how often clients' splits were in memory, until it is set back.
    """

    def __init__(self, dataset: FederatedDataset, device: torch.device, limit: int | None, unseen: int = 0) -> None:
        self._dataset = dataset
        self._everybody = range(dataset.num_clients - unseen)
        self._device = device
        self._loaded: dict[_Key, Examples] = {}
        self._lent: dict[int, dict[str, Untouched]] = {}
        self._recent = LeastRecentlyUsed[_Key](limit, self._unload)
        self._public: torch.Tensor | None = None
        self._lent_public = Untouched({})
        self._sizes: np.ndarray | None = None
        self.lookups = Lookups()

    def of(self, client: int) -> Mapping[str, Examples]:
        """A client's splits, whose tensors nobody changes; the one after the last client owns everybody's samples."""
        return OnDemand(lambda split: self._get(client, split))

    def sizes(self, splits: Sequence[str]) -> np.ndarray:
        """Returns how many samples each client has in some splits together; the one after the last has everybody's.

        Returns:
            int64 of shape (K + 1,).
        """
        if self._sizes is None:
            self._sizes = self._dataset.sizes()
        found = self._sizes[:, [SPLITS.index(split) for split in splits]].sum(1)
        return np.append(found, found[: len(self._everybody)].sum())

    def _get(self, client: int, split: str) -> Examples:
        self.lookups.note((client, split) in self._loaded)
        if (client, split) not in self._loaded:
            self._load(client, split)
        found = self._loaded[client, split]
        self._recent.touch((client, split), found.x.nbytes + found.y.nbytes)
        return found

    def _load(self, client: int, split: str) -> None:
        parts = self._read(client) if client < self._dataset.num_clients else OnDemand(self._everybodys)
        # What comes as a whole is there as a whole: it is counted, and not read again for the next split.
        names = (split,) if isinstance(parts, OnDemand) else SPLITS
        # All or none: a split that stays loaded where the next one fails would be in nobody's count.
        moved = {name: Examples(parts[name].x.to(self._device), parts[name].y.to(self._device)) for name in names}
        for name, part in moved.items():
            self._loaded[client, name] = part
            self._lent.setdefault(client, {})[name] = Untouched({"inputs": part.x, "labels": part.y})
            if name != split:
                self._recent.touch((client, name), part.x.nbytes + part.y.nbytes)

    def _read(self, client: int) -> Mapping[str, Examples]:
        """A client's splits on the CPU, looked at before they reach the device."""
        parts, spec, name = self._dataset.load(client), self._dataset.spec, self._dataset.names[client]

        def checked(split: str) -> Examples:
            part, whose = parts[split], f"client {client} ({name}), {split}"
            if not self._dataset.sound:
                check_own(part, spec, whose)
            # On a device an index out of range would end the context, with all clients in it.
            check_examples(part, spec, whose)
            return part

        return OnDemand(checked) if isinstance(parts, OnDemand) else {split: checked(split) for split in SPLITS}

    def give_way(self) -> None:
        """Unloads all samples, and keeps at most half as many bytes from now on: the memory is needed."""
        if self._loaded:
            self._recent.give_way()
            most = self._recent.limit
            _log.warning(
                "the device's memory is too small for what it has to hold: %d bytes of samples from now on", most
            )

    def _unload(self, key: _Key) -> None:
        client, split = key
        del self._loaded[key], self._lent[client][split]
        if not self._lent[client]:
            del self._lent[client]

    def _everybodys(self, split: str) -> Examples:
        """The samples of a split of all clients that may train, in ascending order of the clients."""
        parts = [self._read(client)[split] for client in self._everybody]
        return Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def official(self, first: int, read: Callable[[], Examples]) -> Examples:
        """A piece of the official test part on the device, kept like clients' samples.

        Args:
            first: the number of its first sample.
            read: gives the piece, on the CPU; what it gives is looked at.

        Raises:
            DataError: when a sample is not what the data set says.
        """
        key = (_OFFICIAL, str(first))
        if key not in self._loaded:
            part = read()
            check_examples(part, self._dataset.spec, "the official test part", first)
            self._loaded[key] = Examples(part.x.to(self._device), part.y.to(self._device))
            lent = Untouched({"inputs": self._loaded[key].x, "labels": self._loaded[key].y})
            self._lent.setdefault(_OFFICIAL, {})[str(first)] = lent
        found = self._loaded[key]
        self._recent.touch(key, found.x.nbytes + found.y.nbytes)
        return found

    def public(self) -> torch.Tensor:
        """The samples that belong to no client, on the device, loaded at the first call."""
        if self._public is None:
            public = self._dataset.load_public()
            if not self._dataset.sound:
                check_finite(public, "the public samples")
            check_inputs(public, self._dataset.spec, "the public samples")
            self._public = public.to(self._device)
            self._lent_public = Untouched({"samples": self._public})
        return self._public

    def written(self, client: int) -> str | None:
        """Returns which samples a client has written to in place, its own or the public ones; None for none."""
        if self._public is not None and self._lent_public.written() is not None:
            return "the public samples"
        if any(lent.written() is not None for lent in self._lent.get(_OFFICIAL, {}).values()):
            return "the official test samples"
        for split, lent in self._lent.get(client, {}).items():
            if (part := lent.written()) is not None:
                return f"its {split} {part}"
        return None
