"""The samples of the clients that a host has: read when they are needed, kept while there is room."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from actors.memory import LeastRecentlyUsed, Lookups
from rayfl.data.checks import check_examples, check_inputs
from rayfl.data.federated import SPLITS, Examples, FederatedDataset, OnDemand

_log = logging.getLogger(__name__)
_Key = tuple[int, str]
"""Client and split."""


class Samples:
    """Clients' samples on a device, split by split.

    Args:
        dataset: where they come from.
        device: where they go.
        limit: bytes that stay loaded; None for no limit.

    Attributes:
        lookups: how often clients' splits were in memory, until it is set back.
    """

    def __init__(self, dataset: FederatedDataset, device: torch.device, limit: int | None) -> None:
        self._dataset = dataset
        self._device = device
        self._loaded: dict[_Key, Examples] = {}
        self._recent = LeastRecentlyUsed[_Key](limit, self._unload)
        self._public: torch.Tensor | None = None
        self.lookups = Lookups()

    def of(self, client: int) -> Mapping[str, Examples]:
        """A client's splits, which whoever has them keeps; the one after the last client owns everybody's samples."""
        return OnDemand(lambda split: self._get(client, split))

    def _get(self, client: int, split: str) -> Examples:
        self.lookups.note((client, split) in self._loaded)
        if (client, split) not in self._loaded:
            self._load(client, split)
        found = self._loaded[client, split]
        self._recent.touch((client, split), found.x.nbytes + found.y.nbytes)
        return found

    def _load(self, client: int, split: str) -> None:
        parts = self._dataset.load(client) if client < self._dataset.num_clients else OnDemand(self._everybodys)
        # What comes as a whole is there as a whole: it is counted, and not read again for the next split.
        for name in (split,) if isinstance(parts, OnDemand) else SPLITS:
            # Before the device: there an index out of range would end the context, with all clients in it.
            check_examples(parts[name], self._dataset.spec, self._called(client, name))
            part = Examples(parts[name].x.to(self._device), parts[name].y.to(self._device))
            self._loaded[client, name] = part
            if name != split:
                self._recent.touch((client, name), part.x.nbytes + part.y.nbytes)

    def _called(self, client: int, split: str) -> str:
        """Returns the name of a client's split for messages."""
        names = self._dataset.names
        return f"client {client} ({names[client]}), {split}" if client < len(names) else f"all clients, {split}"

    def give_way(self) -> None:
        """Unloads all samples, and keeps at most half as many bytes from now on: the memory is needed."""
        if self._loaded:
            self._recent.give_way()
            most = self._recent.limit
            _log.warning(
                "the device's memory is too small for what it has to hold: %d bytes of samples from now on", most
            )

    def _unload(self, key: _Key) -> None:
        del self._loaded[key]

    def _everybodys(self, split: str) -> Examples:
        """All clients' samples of a split, in ascending order of the clients."""
        parts = [self._dataset.load(client)[split] for client in range(self._dataset.num_clients)]
        return Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def public(self) -> torch.Tensor:
        """The samples that belong to no client, on the device, loaded at the first call."""
        if self._public is None:
            public = self._dataset.load_public()
            check_inputs(public, self._dataset.spec, "the public samples")
            self._public = public.to(self._device)
        return self._public
