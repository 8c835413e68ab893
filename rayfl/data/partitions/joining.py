"""Clients that join or leave over the stages of a run."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.data.partitions.stage import Staged
from rayfl.randomness import RandomStreams


class ClientStages(Staged):
    """Clients that join in groups, or leave in groups: a federation that grows or shrinks.

    They are divided at random into S groups, as alike in size as can be. A client that is not there has no training
    samples; it is scored like any other that never was sampled.
    """

    name: Literal["clients"] = "clients"
    course: Literal["join", "leave"] = Field(
        default="join",
        description="join: the first group is there from the beginning, another one joins with each stage; leave: all "
        "are there in the first stage, a group leaves with each later one, and the last group stays.",
    )

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: they belong to none."""
        return False

    def there(self, clients: int, streams: RandomStreams) -> np.ndarray:
        """Returns which clients are there in which stage, bool of shape (clients, S).

        Args:
            clients: how many may train.
            streams: the experiment's randomness; uses the stream ``stages.clients``.
        """
        group = np.empty(clients, dtype=np.int64)
        order = streams.generator("stages.clients").permutation(clients)
        for stage, members in enumerate(np.array_split(order, self.count)):
            group[members] = stage
        stages = np.arange(self.count)
        found: np.ndarray = group[:, None] <= stages if self.course == "join" else group[:, None] >= stages
        return found
