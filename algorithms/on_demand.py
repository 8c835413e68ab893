"""Trees of single clients that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rayfl.params import Tree


class OnDemand(Mapping[int, Tree]):
    """What clients are served, made for few of them at a time and not kept: never are those of all in memory.

    Args:
        clients: who has a tree.
        size: bytes of a client's tree, at least about.
        make: returns the trees of some of these clients; a client's may not depend on who else is asked for.
    """

    def __init__(self, clients: Sequence[int], size: int, make: Callable[[Sequence[int]], Mapping[int, Tree]]) -> None:
        self._clients = dict.fromkeys(clients)
        self.size = size
        self._make = make

    def of(self, clients: Sequence[int]) -> Mapping[int, Tree]:
        """Returns the trees of those of the clients that have one."""
        return self._make([client for client in clients if client in self._clients])

    def __getitem__(self, client: int) -> Tree:
        if client not in self._clients:
            raise KeyError(client)
        return self._make([client])[client]

    def __contains__(self, client: object) -> bool:
        return client in self._clients

    def __iter__(self) -> Iterator[int]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


def trees_of(trees: Mapping[int, Tree], clients: Sequence[int]) -> Mapping[int, Tree]:
    """Returns the trees of those of the clients that have one, made together where they are made on demand."""
    if isinstance(trees, OnDemand):
        return trees.of(clients)
    return {client: trees[client] for client in clients if client in trees}
