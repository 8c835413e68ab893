"""The server's tree as parts and a rest.

A part is what the server keeps of one client, or of another numbered thing: an entry of a dict whose keys are all
numbers, with a tensor in each. A method, a rule or a selection may keep a model or an update of every client, of which
a round changes a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rayfl.errors import DamageError
from rayfl.params import Tree


def parts_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, part), the outermost ones."""
    for key, value in tree.items():
        if not isinstance(value, Mapping) or not value:
            continue
        if all(name.isdecimal() for name in value) and all(map(_has_tensor, value.values())):
            yield from ((f"{prefix}{key}/{name}", part) for name, part in value.items())
        else:
            yield from parts_of(value, f"{prefix}{key}/")


def rest_of(tree: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> Tree:
    """The tree with an empty dict in the place of each part, so that it has the order of all keys.

    Args:
        tree: the whole one.
        found: its parts by path.
        prefix: of the tree's own path.
    """
    rest: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in found:
            rest[key] = {}
        else:
            rest[key] = rest_of(value, found, f"{path}/") if isinstance(value, Mapping) else value
    return rest


def put_back(rest: Tree, path: str, content: Mapping[str, Any], file: str) -> None:
    """Puts a part in its place, in the tree itself.

    Args:
        rest: see :func:`rest_of`.
        path: of the part.
        content: a tree of the same form that has it.
        file: where the content is from, for errors.

    Raises:
        DamageError: the content or the rest lacks the part.
    """
    *parents, key = path.split("/")
    place: Any = rest
    found: Any = content
    try:
        for name in parents:
            place, found = place[name], found[name]
        if place[key]:
            raise KeyError(key)
        place[key] = found[key]
    except (LookupError, TypeError, RuntimeError) as error:
        raise DamageError(f"{file} lacks the server's {path}, or the rest has no place for it") from error


def has_part(content: Any, path: str) -> bool:
    """Returns whether a tree has a part of this path."""
    for name in path.split("/"):
        if not isinstance(content, Mapping) or name not in content:
            return False
        content = content[name]
    return True


def _has_tensor(part: Any) -> bool:
    if isinstance(part, Tensor):
        return True
    return isinstance(part, Mapping) and any(map(_has_tensor, part.values()))
