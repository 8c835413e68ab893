"""YAML as plain data, also of others' files: no code, and no few lines that stand for more than a memory holds."""

from __future__ import annotations

import re
from typing import Any

import yaml

_MOST = 100_000
"""A text whose aliases make more values of it, and at least twice as many as are written, cannot be meant."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_LONG = 100
"""Every 100 characters of a scalar count as one more value."""

_DEEPEST = 200
"""Sections in sections, as far as they are followed: as deep as Python itself goes, and no deeper in C."""

_OCTAL = re.compile("[-+]?0[0-9_]+")


class _Plain(yaml.resolver.Resolver):
    """Without numbers to the bases of 60 (``2:16`` for 136) and 8 (``010`` for 8), which YAML 1.2 does not have so.

    They are texts. A field that is a number takes the second for 10.
    """

    _depth = 0

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if kind is yaml.ScalarNode and tag in _NUMBERS and (":" in value or _OCTAL.fullmatch(value)):
            return "tag:yaml.org,2002:str"
        return tag

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise RecursionError(f"its values are nested more than {_DEEPEST} deep")

    def ascend_resolver(self) -> None:
        self._depth -= 1


class _Loader(_Plain, yaml.SafeLoader):
    """In Python: its errors show the line."""


class _FastLoader(_Plain, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """In C, where PyYAML was built with it, and several times as fast."""


class AliasError(yaml.YAMLError):
    """Aliases (``*name``) that repeat parts of a text, or themselves, without measure."""


def read_yaml(text: str | bytes) -> Any:
    """The content of a text; None if it is empty.

    Raises:
        AliasError: it would be too large with its aliases resolved, or never end.
        yaml.YAMLError, ValueError, RecursionError: it is no YAML of plain values, or a key is in a section twice.
    """
    try:
        return _read(_FastLoader(text))  # type: ignore[call-arg]
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError):
        return _read(_Loader(text))


def write_yaml(content: Any) -> str:
    """Plain data as YAML, keys in their order."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    written: str = yaml.dump(content, Dumper=dumper, sort_keys=False, allow_unicode=True)
    return written


def _read(loader: Any) -> Any:
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        sizes: dict[int, int] = {}
        written: list[int] = []
        if _size(node, sizes, written, set()) > max(_MOST, 2 * sum(written)):
            raise AliasError(f"its aliases (*name) stand for more than {_MOST:,} values: write out what is meant")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, sizes: dict[int, int], written: list[int], above: set[int]) -> int:
    """Returns how many values a node stands for, its aliases resolved.

    Args:
        node: a part of a text.
        sizes: of the nodes that were met, by identity.
        written: receives what each node has without those below.
        above: the nodes that this one is in.
    """
    if id(node) in above:
        raise AliasError("an alias (*name) stands for something that it is a part of")
    if id(node) not in sizes:
        _refuse_twice(node)
        own = 1 + (len(node.value) // _LONG if isinstance(node, yaml.ScalarNode) else 0)
        written.append(own)
        above.add(id(node))
        sizes[id(node)] = own + sum(_size(part, sizes, written, above) for part in _parts(node))
        above.remove(id(node))
    return sizes[id(node)]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse_twice(node: yaml.Node) -> None:
    """Refuses a mapping with a key twice, of which YAML's readers keep the last alone."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            line, known = key.start_mark.line + 1, (key.tag, key.value)
            if known in lines:
                raise yaml.YAMLError(
                    f"{key.value!r} is there twice, in line {lines[known]} and in line {line}: write all that belongs "
                    "to it in one place"
                )
            lines[known] = line
