"""What shells complete on the command line: presets, methods, and the names of data sets, partitions and models.

A shell waits for every answer, so nothing here imports PyTorch: names are read from the source files of the classes
that have them, not from the classes.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import typer

from rayfl.config.paper_presets import preset_names

_SECTIONS = {
    "algorithm": "algorithms.registry",
    "dataset": "rayfl.data.sources.registry",
    "partition": "rayfl.data.partitions.registry",
    "task": "rayfl.engine.task_sections",
    "model": "rayfl.models.zoo",
}
"""By section, the module that imports all its classes, or has them."""

_HOME = Path(__file__).resolve().parent.parent.parent
"""The folder of all packages: ``import rayfl`` has made sure that ``algorithms`` is there."""

_UNNAMED = {"custom"}
"""Stands for ``module:function``, and is not written itself."""


def configurations(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets for a first argument; and overrides, which may stand in its place."""
    presets = [name for name in preset_names() if name.startswith(incomplete)] if not _word_before(ctx) else []
    return presets + (overrides(ctx, incomplete) if incomplete else [])


def targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods and presets, for ``rayfl show``."""
    return [name for name in [*names("algorithm"), *preset_names()] if name.startswith(incomplete)]


def overrides(ctx: typer.Context, incomplete: str) -> list[str]:
    """``section=name`` for the sections that have names.

    bash takes the equals sign for a word of its own and asks for the rest: then the rest is the answer.
    """
    section = _word_before(ctx)
    if section is not None:
        begin = incomplete.removeprefix("=")
        return [_Rest(name) for name in names(section) if name.startswith(begin)]
    known = (f"{section}={name}" for section in _SECTIONS for name in names(section))
    return [text for text in known if text.startswith(incomplete)]


@cache
def names(section: str) -> tuple[str, ...]:
    """The names that a section of a configuration may have, sorted; none for an unknown section.

    Args:
        section: ``algorithm``, ``dataset``, ``partition``, ``task`` or ``model``.
    """
    if section not in _SECTIONS:
        return ()
    listing = _file(_SECTIONS[section])
    wanted = [(listing, name) for name in _named_classes(listing)] + _imported(listing)
    classes = {file: _named_classes(file) for file, _ in wanted}
    found = {classes[file][name] for file, name in wanted if name in classes[file]}
    return tuple(sorted(found - _UNNAMED))


class _Rest(str):
    """What bash sets behind the equals sign, though it says that the sign is the word it asks about.

    typer drops answers that do not begin with that word.
    """

    def startswith(self, *_: object) -> bool:
        """Whatever the word is."""
        return True


def _word_before(ctx: typer.Context) -> str | None:
    """The section's name, where the shell has cut ``section=`` off the word that is completed."""
    first = ctx.params.get("config")
    words = [*([first] if first else []), *(ctx.params.get("overrides") or ())]
    if words and words[-1] in _SECTIONS:
        return str(words[-1])
    return str(words[-2]) if words[-1:] == ["="] and len(words) > 1 else None


def _file(module: str) -> Path:
    return _HOME.joinpath(*module.split(".")).with_suffix(".py")


def _imported(path: Path) -> list[tuple[Path, str]]:
    """Every class that a file imports from this repository: the file it is in, and its name."""
    return [
        (_file(node.module), alias.name)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module and _file(node.module).is_file()
        for alias in node.names
    ]


def _named_classes(path: Path) -> dict[str, str]:
    """By class, the word of its field ``name: Literal[word]``."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            kind = field.annotation
            if field.target.id == "name" and isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Constant):
                found[str(getattr(node, "name", ""))] = str(kind.slice.value)
    return found
