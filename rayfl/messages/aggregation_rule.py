"""What rules of aggregation have in common: how the server makes one message of those of a round's clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rayfl.aggregation.exact_sum import Weighted
from rayfl.params import Tree, leaves

Messages = Sequence[Weighted]
Received = Mapping[str, Tensor]


@dataclass(frozen=True)
class Known:
    """What a rule knows beside the messages.

    Attributes:
        clients: who has sent them, ascending.
        memory: what the rule has kept of earlier rounds (:meth:`Rule.memory_after`); empty before the first one.
        seed: of the rule's random choices, another one in each round.
    """

    clients: Sequence[int] = ()
    memory: Tree = field(default_factory=dict)
    seed: int = 0


NOTHING = Known()


class Rule(BaseModel):
    """How one message is made of several.

    Class attributes:
        weighs: whether the method's weights of clients count; else all clients count alike.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    weighs: ClassVar[bool] = True

    @property
    def least(self) -> int:
        """Returns how many messages the rule needs."""
        return 1

    @abstractmethod
    def combine(self, messages: Messages, received: Received, known: Known = NOTHING) -> Tree:
        """Returns one message, in the types of those that are given.

        Args:
            messages: of one structure, :attr:`least` at least, by ascending client.
            received: by path, what they are changes of.
            known: what else the rule knows.
        """

    def memory_after(self, messages: Messages, received: Received, known: Known, found: Tree) -> Tree:
        """Returns what the rule must know in the next round, to be committed; empty for one without a memory.

        Args:
            messages: as in :meth:`combine`.
            received: as in :meth:`combine`.
            known: as in :meth:`combine`.
            found: what that has returned.
        """
        return {}


def trees_of(messages: Messages) -> list[Tree]:
    """Returns the messages without their weights."""
    return [message.tree for message in messages]


def equal_shares(count: int) -> Tensor:
    """Returns float64 coefficients of a mean."""
    return torch.full((count,), 1 / count, dtype=torch.float64)


def shares_of(messages: Messages) -> Tensor:
    """Returns the messages' weights, float64, such that they sum to 1."""
    weights = torch.tensor([float(message.weight) for message in messages], dtype=torch.float64)
    return weights / weights.sum()


def fitting(memory: Tree, received: Received) -> dict[str, Tensor]:
    """Returns by path what is remembered of tensors that are still sent, in the same shape."""
    known = {path: leaf for path, leaf in leaves(memory) if path in received}
    return {path: leaf for path, leaf in known.items() if leaf.shape == received[path].shape}
