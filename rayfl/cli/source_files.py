"""The classes that a configuration may name, as their source files have them: without importing PyTorch."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECTIONS = {
    "algorithm": "algorithms.registry:METHODS",
    "dataset": "rayfl.data.sources.registry:DatasetConfig",
    "partition": "rayfl.data.partitions.registry:Partition",
    "task": "rayfl.tasks.registry:TaskConfig",
    "model": "rayfl.models.zoo:ModelConfig",
    "stages": "rayfl.data.partitions.stages:Stages",
    "selection": "rayfl.selection.strategies:Selection",
    "system": "rayfl.system.config:System",
    "compression": "rayfl.messages.compressors:Compression",
    "aggregator": "rayfl.messages.aggregator_section:Aggregator",
    "contribution": "rayfl.valuation.section:Contribution",
}
"""By section, where all its classes are named: a union, or a table of their paths."""

_HOME = Path(__file__).resolve().parent.parent.parent
"""The folder of all packages: ``import rayfl`` has made sure that ``algorithms`` is there."""


_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Named:
    """A class with a field ``name: Literal[word]``.

    Attributes:
        name: the word.
        sentence: the first paragraph of its docstring, on one line.
        texts: attributes of the class, or of one that it is made from, that are plain texts.
    """

    name: str
    sentence: str
    texts: dict[str, str]


@cache
def named_classes(section: str) -> tuple[Named, ...]:
    """All classes of a section of a configuration, by name; none for an unknown section.

    Args:
        section: a key of :data:`SECTIONS`.
    """
    if section not in SECTIONS:
        return ()
    module, _, listing = SECTIONS[section].partition(":")
    wanted = _listed(_file(module), listing)
    found = {}
    for file, title in wanted:
        node = _classes(file).get(title)
        word = None if node is None else _word(node)
        if node is not None and word is not None:
            paragraph = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n\n")[0]
            found[word] = Named(word, " ".join(paragraph.split()), _texts(file, title))
    return tuple(found[name] for name in sorted(found))


def _file(module: str) -> Path:
    return _HOME.joinpath(*module.split(".")).with_suffix(".py")


@cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


@cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _body(path) if isinstance(node, ast.ClassDef)}


@cache
def _imported(path: Path) -> dict[str, tuple[Path, str]]:
    """Every class that a file imports from this repository, by its name there: the file it is in, and its own name."""
    return {
        alias.asname or alias.name: (_file(node.module), alias.name)
        for node in _body(path)
        if isinstance(node, ast.ImportFrom) and node.module and _file(node.module).is_file()
        for alias in node.names
    }


def _listed(path: Path, listing: str) -> list[tuple[Path, str]]:
    """The classes that the value of a name in a file names: by their own names, or in texts, as ``module:Class``."""
    values = [node.value for node in _body(path) if listing in _targets(node) and isinstance(node, _ASSIGNMENTS)]
    parts = [part for value in values if value is not None for part in ast.walk(value)]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    here = [(path, name) for name in names if name in _classes(path)]
    imported = [_imported(path)[name] for name in names if name in _imported(path)]
    unions = [one for name in names if name not in _imported(path) for one in _listed(path, name)]
    texts = [str(part.value).partition(":") for part in parts if isinstance(part, ast.Constant)]
    return [*here, *imported, *unions, *((_file(module), title) for module, _, title in texts if title)]


def _targets(node: ast.stmt) -> list[str]:
    """The names that a statement gives a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _word(node: ast.ClassDef) -> str | None:
    """The word of the field ``name: Literal[word]``."""
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id == "name":
            kind = field.annotation
            if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Constant):
                return str(kind.slice.value)
    return None


def _texts(path: Path, title: str) -> dict[str, str]:
    """Attributes of a class that are texts, with those of its bases in this repository."""
    found: dict[str, str] = {}
    # As in Python's order of resolution, a base comes after all that are made from it.
    for file, name in dict.fromkeys(reversed(_ancestry(path, title))):
        for field in _classes(file)[name].body:
            value = field.value if isinstance(field, ast.AnnAssign) else None
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[field.target.id] = value.value
    return found


def _ancestry(path: Path, title: str) -> list[tuple[Path, str]]:
    """A class and those that it is made from, as far as they are in this repository; some more than once."""
    node = _classes(path).get(title)
    if node is None:
        return []
    names = [base.id for base in node.bases if isinstance(base, ast.Name)]
    places = [(path, name) if name in _classes(path) else _imported(path).get(name) for name in names]
    return [(path, title), *(one for place in places if place is not None for one in _ancestry(*place))]
