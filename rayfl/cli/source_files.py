"""The classes that a configuration may name, as their source files have them: without importing PyTorch."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rayfl.naming.objects import names_an_object

SECTIONS = {
    "algorithm": "algorithms.registry",
    "dataset": "rayfl.data.sources.registry",
    "partition": "rayfl.data.partitions.registry",
    "task": "rayfl.tasks.registry",
    "model": "rayfl.models.zoo",
}
"""By section, the module that imports all its classes, or has them."""

_HOME = Path(__file__).resolve().parent.parent.parent
"""The folder of all packages: ``import rayfl`` has made sure that ``algorithms`` is there."""


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
    listing = _file(SECTIONS[section])
    wanted = [(listing, name) for name in _classes(listing)] + list(_imported(listing).values()) + _by_path(listing)
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


def _by_path(path: Path) -> list[tuple[Path, str]]:
    """The classes of this repository that a file names in texts, as ``module:Class``."""
    constants = [node.value for part in _body(path) for node in ast.walk(part) if isinstance(node, ast.Constant)]
    pairs = [str(text).partition(":") for text in constants if names_an_object(text)]
    return [(_file(module), title) for module, _, title in pairs if _file(module).is_file()]


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
