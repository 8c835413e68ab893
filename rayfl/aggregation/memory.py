"""What a rule of aggregation remembers from round to round, beside the server's tree in its file."""

from __future__ import annotations

from rayfl.errors import MethodError
from rayfl.params import Tree

KEY = "(aggregator)"
"""Where the file of a server's tree has it; no method may have this key."""


def with_memory(content: Tree, remembered: Tree) -> Tree:
    """Returns the content of the server's file with what is remembered.

    Args:
        content: without it.
        remembered: by call of a round; nothing is added where it is empty.

    Raises:
        MethodError: when the method uses the key itself.
    """
    if KEY in content:
        raise MethodError(f"the server's tree has the key {KEY!r}, which rayfl uses itself: choose another one")
    return {**content, KEY: remembered} if remembered else content


def without_memory(content: Tree) -> tuple[Tree, Tree]:
    """Returns the content of the server's file without what is remembered, and that."""
    return {name: value for name, value in content.items() if name != KEY}, content.get(KEY, {})


def key_of(rule: str, call: int) -> str:
    """Returns under what a rule remembers a call of each round, which has this number in the round."""
    return f"{rule} {call}"


def of_rule(remembered: Tree, rule: str) -> Tree:
    """Returns what one rule remembers: a fork may go on with another one."""
    return {key: tree for key, tree in remembered.items() if key.partition(" ")[0] == rule}
