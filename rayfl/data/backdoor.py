"""Clients some of whose samples carry a trigger and the label of one class.

Sources: Gu et al., 2017 (BadNets); Bagdasaryan et al., AISTATS 2020 (backdoors in federated learning); Xie et al., ICLR
2020 (DBA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from rayfl.data.federated import Derived, FederatedDataset, OnDemand
from rayfl.data.triggers import Trigger
from rayfl.examples import SPLITS, Examples
from rayfl.randomness import RandomStreams


@dataclass(frozen=True)
class Backdoor:
    """What malicious clients have models learn.

    Attributes:
        trigger: what marks a sample.
        target: the class that marked samples are to be taken for.
        share: of a client's training and of its validation samples that it poisons, in (0, 1]; rounded up.
        parts: among how many clients the trigger is divided; 1: each uses the whole of it.
    """

    trigger: Trigger
    target: int
    share: float
    parts: int = 1

    def triggered(self, examples: Examples) -> Examples:
        """Returns the samples of other classes with the whole trigger, and the target as their class.

        Args:
            examples: on any device.
        """
        others = examples.y != self.target
        return Examples(self.trigger.put(examples.x[others]), torch.full_like(examples.y[others], self.target))


class WithBackdoor(Derived):
    """The clients of a data set, some of whom poison what they train on; test parts stay as they are.

    Of several parts of a trigger, the malicious clients take one each, by ascending client, over and over.

    Args:
        inner: the data set.
        malicious: the clients that poison their samples.
        backdoor: what they do to them.
        streams: the experiment's randomness; uses the streams ``attack.backdoor.train`` and
            ``attack.backdoor.validation`` by client.
    """

    def __init__(
        self, inner: FederatedDataset, malicious: frozenset[int], backdoor: Backdoor, streams: RandomStreams
    ) -> None:
        super().__init__(inner)
        self._backdoor, self._streams = backdoor, streams
        trigger, parts = backdoor.trigger, backdoor.parts
        self._which = {client: trigger.part(place % parts, parts) for place, client in enumerate(sorted(malicious))}

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU."""
        found = self._inner.load(client)
        if client not in self._which:
            return found
        return OnDemand(lambda split: self._poisoned(client, split, found[split]))

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split."""
        found = self._inner.labels(client)
        if client not in self._which:
            return found
        return {
            split: self._relabelled(found[split], self._chosen(client, split, len(found[split]))) for split in SPLITS
        }

    def _poisoned(self, client: int, split: str, examples: Examples) -> Examples:
        chosen = self._chosen(client, split, len(examples))
        x = examples.x.clone()
        x[chosen] = self._backdoor.trigger.put(x[chosen], self._which[client])
        return replace(examples, x=x, y=torch.from_numpy(self._relabelled(examples.y.numpy(), chosen)))

    def _relabelled(self, y: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        found = y.copy()
        found[chosen] = self._backdoor.target
        return found

    def _chosen(self, client: int, split: str, samples: int) -> np.ndarray:
        """Returns the indices of the samples that a client poisons, int64."""
        if split == "test":
            return np.empty(0, dtype=np.int64)
        count = math.ceil(self._backdoor.share * samples - 1e-9)
        return self._streams.generator(f"attack.backdoor.{split}", client=client).permutation(samples)[:count]
