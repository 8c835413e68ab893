"""What a method asks of clients in one call, and what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rayfl.aggregation.exact_sum import ExactSum
from rayfl.params import Tree


@dataclass(frozen=True)
class Call:
    """What a method asks of some clients.

    Attributes:
        procedure: name of the method's procedure.
        kind: ``mean``; ``each`` for the summands of a mean one by one; or ``map``.
        clients: who is asked.
        broadcast: keyword arguments for all.
        payloads: keyword arguments by client.
        counted: whether the messages count as traffic.
        required: whether none of the clients may be left out; see :meth:`Clients.mean`.
        down: bytes that it takes to send each client the above, if they are fewer than those of the tensors.
    """

    procedure: str
    kind: Literal["mean", "each", "map"]
    clients: tuple[int, ...]
    broadcast: Tree
    payloads: Mapping[int, Tree]
    counted: bool = True
    required: bool | None = None
    down: Mapping[int, int] | None = None

    def of(self, clients: Sequence[int]) -> Call:
        """Returns the call for these clients only."""
        kept = {client: self.payloads[client] for client in clients if client in self.payloads}
        return replace(self, clients=tuple(clients), payloads=kept)

    def same(self, other: Call) -> bool:
        """Returns whether the clients would do the same, to the bit."""
        mine, others = (self.procedure, self.kind, self.clients), (other.procedure, other.kind, other.clients)
        return mine == others and _alike([self.broadcast, self.payloads], [other.broadcast, other.payloads])


@dataclass
class Replies:
    """What the clients of a call have returned.

    Attributes:
        totals: of a ``mean``, the sum of the contributions by group.
        values: of a ``map`` what each client returned; of ``each`` its ``tree`` and ``weight``; by client.
        within: of the summands of a mean, how many changes were within the bound that they were clipped to.
    """

    totals: dict[str, ExactSum] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    within: int = 0


def _alike(left: Any, right: Any) -> bool:
    """Returns whether two trees are equal to the bit."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(_alike(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)
