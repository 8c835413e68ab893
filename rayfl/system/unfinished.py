"""The local updates under way when a round without a barrier ends, beside the server's tree in its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rayfl.errors import MethodError
from rayfl.params import Tree
from rayfl.system.schedule import DROPPED_OUT, TOO_LATE, UNAVAILABLE, Update

KEY = "(unfinished)"
"""Where the file of a server's tree has it; no method may have this key."""

_LOSSES = ("", DROPPED_OUT, UNAVAILABLE, TOO_LATE)
"""Stored as their place here, as a tree has no texts."""


@dataclass(frozen=True)
class Unfinished:
    """The local updates that are under way when a round ends.

    Attributes:
        updates: by client ascending.
        past: what was sent in the rounds in which they began (``Algorithm.sent``), by round.
    """

    updates: tuple[Update, ...] = ()
    past: Mapping[int, Tree] = field(default_factory=dict)

    def after(self, round: int, sent: Tree, updates: Iterable[Update]) -> Unfinished:
        """Those after one more round.

        Args:
            round: the round, 0-indexed.
            sent: what clients were sent that began in it.
            updates: that are under way when it ends.
        """
        updates, trees = tuple(updates), {**self.past, round: sent}
        return Unfinished(updates, {began: trees[began] for began in sorted({update.began for update in updates})})

    def beside(self, server: Tree) -> Tree:
        """The content of the server's file: its tree, and this.

        Raises:
            MethodError: when the method uses the key itself.
        """
        if KEY in server:
            raise MethodError(f"the server's tree has the key {KEY!r}, which rayfl uses itself: choose another one")
        if not self.updates:
            return server
        updates = {
            str(one.client): {"began": one.began, "ends_us": one.ends_us, "lost": _LOSSES.index(one.lost)}
            for one in self.updates
        }
        return {**server, KEY: {"updates": updates, "past": {str(round): tree for round, tree in self.past.items()}}}


def separated(content: Tree) -> tuple[Tree, Unfinished]:
    """The server's tree and what is unfinished, from the content of the server's file."""
    if KEY not in content:
        return content, Unfinished()
    server = {name: value for name, value in content.items() if name != KEY}
    updates = tuple(
        Update(int(client), one["began"], one["ends_us"], _LOSSES[one["lost"]])
        for client, one in content[KEY]["updates"].items()
    )
    return server, Unfinished(updates, {int(round): tree for round, tree in content[KEY]["past"].items()})
