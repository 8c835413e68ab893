"""Samples of the clients of a host: read on demand, cached on the device up to a limit."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from actors.hosting.ahead import Key, ReadAhead
from actors.hosting.memory import LeastRecentlyUsed, Lookups
from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.soundness import check_examples, check_finite, check_inputs, check_own, check_targets
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.examples import SPLITS, UNLABELLED, Examples
from rayfl.naming.splits import stage_in

_log = logging.getLogger(__name__)
_NUMBER_BYTES = {"image": 4, "tokens": 8, "graph": 4}
_OFFICIAL, _POOLED = -2, -3
"""Take the place of a client in the cache keys of pieces of the official test part, and of samples of many clients."""


class Samples:
    """A cache of clients' samples on a device, one entry a client and split.

    Args:
        dataset: data set that they are read from.
        device: device that they are moved to.
        limit: bytes that stay loaded; None for no limit.
        unseen: number of clients, the last ones, that take no part in training.
        ahead: whether samples of the next clients are read while the current ones run, if the data set allows it.

    Attributes:
        lookups: cache hits and misses, until they are reset.
    """

    def __init__(
        self,
        dataset: FederatedDataset,
        device: torch.device,
        limit: int | None,
        unseen: int = 0,
        ahead: bool = True,
    ) -> None:
        self._all_stages, self._stage = dataset, 0
        self._dataset = dataset.at(0)
        self._everybody = range(dataset.num_clients - unseen)
        self._device = device
        self._loaded: dict[Key, Examples] = {}
        self._lent: dict[int, dict[str, WriteGuard]] = {}
        self._recent = LeastRecentlyUsed[Key](limit, self._unload)
        self._public: torch.Tensor | None = None
        self._public_labels: torch.Tensor | None = None
        self._lent_public = WriteGuard({})
        self._sizes: np.ndarray | None = None
        self.lookups = Lookups()
        self._reading = threading.Lock()  # data sets are read by one thread at a time
        self._ahead = ReadAhead(self._read_split, self._fitting) if ahead and dataset.reads_ahead else None

    @property
    def held_bytes(self) -> int:
        """Bytes of samples on the device."""
        return self._recent.bytes

    def turn_to(self, round: int) -> None:
        """Has clients own what they have in a round (t, 0-indexed); samples of another stage are unloaded."""
        if (stage := self._all_stages.stage_of(round)) == self._stage:
            return
        if self._ahead is not None:
            self._ahead.stop()
        for key in [key for key in self._loaded if key[0] != _OFFICIAL]:
            self._unload(key)
            self._recent.forget(key)
        self._dataset, self._stage, self._sizes = self._all_stages.at(stage), stage, None

    def expect(self, clients: Sequence[int], following: Sequence[int]) -> None:
        """Notes which clients run now and which run next. Splits that the first use are read ahead for the next."""
        if self._ahead is not None:
            self._ahead.expect(clients, following)

    def of(self, client: int) -> Mapping[str, Examples]:
        """Returns a client's splits, whose tensors are not to be changed. Client K owns the samples of all clients.

        Beside the splits there are its training samples without labels, under ``unlabelled``.
        """
        return OnDemand(lambda split: self._get(client, split))

    def sizes(self, splits: Sequence[str]) -> np.ndarray:
        """Returns each client's number of samples in some splits together; client K owns the samples of all clients.

        Returns:
            int64 of shape (K + 1,).
        """
        if self._sizes is None:
            self._sizes = self._dataset.sizes()
        # test samples of one stage are as many as all of them at most, and nobody needs to know better
        known = ["test" if stage_in(split) is not None else split for split in splits]
        found = self._sizes[:, [SPLITS.index(split) for split in known]].sum(1)
        return np.append(found, found[: len(self._everybody)].sum())

    def _get(self, client: int, split: str) -> Examples:
        self.lookups.note((client, split) in self._loaded)
        if (client, split) not in self._loaded:
            self._load(client, split)
        found = self._loaded[client, split]
        self._recent.touch((client, split), found.nbytes)
        if self._ahead is not None:
            self._ahead.asked(client, split, self._loaded.__contains__)
        return found

    def _load(self, client: int, split: str) -> None:
        found = None if self._ahead is None else self._ahead.take((client, split))
        if found is not None:
            parts: Mapping[str, Examples] = OnDemand(lambda name: found)
        elif client >= self._dataset.num_clients:
            parts = OnDemand(self._everybodys)
        elif split == UNLABELLED:
            parts = OnDemand(lambda _: self._read_unlabelled(client))
        elif (stage := stage_in(split)) is not None:
            parts = OnDemand(lambda _: self._read_tested(client, stage))
        else:
            parts = self._read(client)
        # A data set that loads all splits at once has all of them cached and counted, so that none is read again.
        names = (split,) if isinstance(parts, OnDemand) else tuple(parts)
        # All or none: a split that stayed loaded after the next one failed would not be counted.
        moved = {name: parts[name].to(self._device) for name in names}
        for name, part in moved.items():
            self._loaded[client, name] = part
            self._lent.setdefault(client, {})[name] = WriteGuard(part.tensors())
            if name != split:
                self._recent.touch((client, name), part.nbytes)

    def _read(self, client: int) -> Mapping[str, Examples]:
        """Returns a client's splits on the CPU, checked before they are moved to the device."""
        with self._reading:
            parts, spec, name = self._dataset.load(client), self._dataset.spec, self._dataset.names[client]

        def checked(split: str) -> Examples:
            with self._reading:
                part, whose = parts[split], f"client {client} ({name}), {split}"
            if not self._dataset.sound:
                check_own(part, spec, whose)
            # On a GPU an index out of range would destroy the context, and with it all clients of the process.
            check_examples(part, spec, whose)
            return part

        return OnDemand(checked) if isinstance(parts, OnDemand) else {split: checked(split) for split in SPLITS}

    def _read_unlabelled(self, client: int) -> Examples:
        """Returns a client's training samples without labels on the CPU, checked."""
        whose = f"client {client} ({self._dataset.names[client]}), training samples without labels"
        with self._reading:
            x = self._dataset.load_unlabelled(client)
        if not self._dataset.sound:
            check_finite(x, whose)
        check_inputs(x, self._dataset.spec, whose)
        return Examples.unlabelled(x)

    def _read_tested(self, client: int, stage: int) -> Examples:
        """Returns a client's test samples of a stage on the CPU, checked."""
        with self._reading:
            part = self._all_stages.at(stage).tested(client)
        whose = f"client {client} ({self._dataset.names[client]}), test samples of stage {stage + 1}"
        check_examples(part, self._dataset.spec, whose)
        return part

    def _read_split(self, client: int, split: str) -> Examples:
        if (stage := stage_in(split)) is not None:
            return self._read_tested(client, stage)
        return self._read_unlabelled(client) if split == UNLABELLED else self._read(client)[split]

    def _fitting(self, running: Sequence[int], begun: Sequence[Key], wanted: Sequence[Key]) -> Sequence[Key]:
        """Makes room for splits to be read ahead.

        Args:
            running: clients that run now.
            begun: keys of splits whose reading has started.
            wanted: keys of splits to be read next.

        Returns:
            The wanted keys that fit into the limit together with the others.
        """
        if (limit := self._recent.limit) is None:
            return wanted
        split = wanted[0][1]
        beside = sum(self._bytes(client, split) for client in running)
        ahead, fitting = sum(self._bytes(*key) for key in begun), []
        for key in wanted:
            if beside + ahead + self._bytes(*key) <= limit:
                ahead += self._bytes(*key)
                fitting.append(key)
        if fitting:
            self._recent.make_room(ahead)
        return fitting

    def _bytes(self, client: int, split: str) -> int:
        """Returns the bytes of a client's split; 0 for the samples of all clients, which are not read ahead."""
        if client >= self._dataset.num_clients:
            return 0
        spec = self._dataset.spec
        one = math.prod(spec.shape) * _NUMBER_BYTES[spec.kind]
        one += math.prod(spec.target_shape) * np.dtype(spec.target_type).itemsize
        one += np.dtype(np.int64).itemsize * bool(spec.groups)
        if split == UNLABELLED:
            return one * int(self._dataset.unlabelled_sizes()[client])
        if self._sizes is None:
            self._sizes = self._dataset.sizes()
        return one * int(self._sizes[client, SPLITS.index("test" if stage_in(split) is not None else split)])

    def give_way(self) -> None:
        """Unloads all samples and halves the limit, because the device ran out of memory."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._loaded:
            self._recent.give_way()
            most = self._recent.limit
            _log.warning(
                "the device's memory is too small for what it has to hold: %d bytes of samples from now on", most
            )

    def _unload(self, key: Key) -> None:
        client, split = key
        del self._loaded[key], self._lent[client][split]
        if not self._lent[client]:
            del self._lent[client]

    def _everybodys(self, split: str) -> Examples:
        """Returns a split of all clients that may train, in ascending order of the clients."""
        return self._together(self._everybody, split)

    def _together(self, clients: Sequence[int], split: str) -> Examples:
        return Examples.joined([self._read_split(client, split) for client in clients])

    def official(self, first: int, read: Callable[[], Examples]) -> Examples:
        """Returns a piece of the official test part on the device, cached like clients' samples.

        Args:
            first: number of its first sample.
            read: reads the piece on the CPU; its samples are checked.

        Raises:
            DataError: when a sample is not what the data set says.
        """

        def checked() -> Examples:
            part = read()
            check_examples(part, self._dataset.spec, "the official test part", first)
            return part

        return self._cached((_OFFICIAL, str(first)), checked)

    def pooled(self, clients: Sequence[int], split: str) -> Examples:
        """Returns a split of some clients together, in their order, on the device; cached like clients' samples.

        Args:
            clients: those that have samples, at least one; in all calls the same.
            split: the split.
        """
        return self._cached((_POOLED, split), lambda: self._together(clients, split))

    def _cached(self, key: Key, read: Callable[[], Examples]) -> Examples:
        if key not in self._loaded:
            self._loaded[key] = read().to(self._device)
            self._lent.setdefault(key[0], {})[key[1]] = WriteGuard(self._loaded[key].tensors())
        found = self._loaded[key]
        self._recent.touch(key, found.nbytes)
        return found

    def public(self) -> torch.Tensor:
        """Returns the samples that belong to no client, on the device; loaded at the first call."""
        if self._public is None:
            with self._reading:
                public = self._dataset.load_public()
            if not self._dataset.sound:
                check_finite(public, "the public samples")
            check_inputs(public, self._dataset.spec, "the public samples")
            self._public = public.to(self._device)
            self._lent_public = WriteGuard({"samples": self._public})
        return self._public

    def labelled_public(self) -> Examples:
        """Returns the samples that belong to no client, with their labels, on the device; for the server alone."""
        x = self.public()
        if self._public_labels is None:
            with self._reading:
                y = torch.from_numpy(self._dataset.public_labels())
            check_targets(y, self._dataset.spec, "the public samples")
            self._public_labels = y.to(self._device)
            self._lent_public = WriteGuard({"samples": x, "labels": self._public_labels})
        return Examples(x, self._public_labels)

    def written(self, client: int) -> str | None:
        """Returns a description of the samples that a client has modified in place; None if there are none."""
        if self._public is not None and self._lent_public.written() is not None:
            return "the public samples"
        if any(lent.written() is not None for lent in self._lent.get(_OFFICIAL, {}).values()):
            return "the official test samples"
        for split, lent in self._lent.get(client, {}).items():
            if (part := lent.written()) is not None:
                return f"its {split} {part}"
        return None
