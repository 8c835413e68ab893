"""What shells complete on the command line: presets, methods, and the names of data sets, partitions and models.

A shell waits for every answer, so nothing here imports PyTorch.
"""

from __future__ import annotations

import typer

from rayfl.cli.source_files import SECTIONS, named_classes
from rayfl.config.paper_presets import preset_names

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
    known = (f"{section}={name}" for section in SECTIONS for name in names(section))
    return [text for text in known if text.startswith(incomplete)]


def names(section: str) -> tuple[str, ...]:
    """The names that a section of a configuration may have, sorted; none for an unknown section.

    Args:
        section: a key of :data:`rayfl.cli.source_files.SECTIONS`.
    """
    return tuple(found.name for found in named_classes(section) if found.name not in _UNNAMED)


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
    if words and words[-1] in SECTIONS:
        return str(words[-1])
    return str(words[-2]) if words[-1:] == ["="] and len(words) > 1 else None
