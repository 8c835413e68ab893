"""The commands and Python blocks of the documentation, as a shell understands them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from typer.main import get_command

from rayfl.cli.entry import app

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = {"presets.md"}
"""Pages that a script makes; those on methods lie in a folder of their own."""

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED)]

_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"Save this as `(\w+\.py)`:\s*\Z")
_NAMED = re.compile(r"# (\w+\.py)\b")
# Nothing is on the PATH: whatever is called is written down, with the folder, instead of being run.
_RECORDER = """
PATH=/nowhere
written() { printf '%s\\0' "$PWD" "$#" "$@" >> "$RECORD"; }
command_not_found_handle() { written "$@"; }
source() { written source "$@"; }
"""


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        language: ``bash`` or ``python``.
        text: the code.
        file: under which name the page, or the first line, asks to save it.
    """

    language: str
    text: str
    file: str | None = None


@dataclass(frozen=True)
class Command:
    """What a shell would run: the words, expanded, and the folder."""

    words: tuple[str, ...]
    folder: Path

    @property
    def text(self) -> str:
        """The words with blanks between them, for patterns and messages."""
        return " ".join(self.words)


def blocks(page: Path) -> list[Block]:
    """All blocks of a page that are bash or Python, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        named = _SAVED.search(text[: match.start()]) or _NAMED.match(match[2])
        found.append(Block(match[1], match[2], named[1] if named else None))
    return found


def commands(block: Block, folder: Path, home: Path) -> tuple[list[Command], Path]:
    """The commands of a block, in order, and the folder in which a shell would be after it.

    Loops, wildcards, quotes, comments, redirections and ``cd`` are bash's own doing.

    Args:
        block: in bash.
        folder: in which it begins.
        home: what ``~`` is.
    """
    record, after = home / ".record", home / ".after"
    record.write_bytes(b"")
    script = f'{_RECORDER}\n{block.text}\nprintf %s "$PWD" > "$AFTER"\n'
    environment = {"HOME": str(home), "RECORD": str(record), "AFTER": str(after), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert "syntax error" not in done.stderr, done.stderr
    words = record.read_bytes().decode().split("\0")[:-1]
    found = []
    while words:
        place, count = Path(words[0]), int(words[1])
        found.append(Command(tuple(words[2 : 2 + count]), place))
        del words[: 2 + count]
    return found, Path(after.read_text())


def parsed(words: tuple[str, ...]) -> tuple[str, dict[str, object]]:
    """A ``rayfl`` command line as its parser reads it: the command's name (``data show``), and all its parameters.

    Raises:
        click.UsageError: an option or argument that the command does not have.
    """
    command, names, rest = get_command(app), [], list(words[1:])
    context = command.make_context("rayfl", rest)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        names.append(str(name))
        context = command.make_context(str(name), list(rest), parent=context)
    return " ".join(names), dict(context.params)


def temporary_environment(home: Path, data: Path) -> dict[str, str]:
    """Environment variables under which nothing outside of a scratch folder is read or written."""
    return {"HOME": str(home), "RAYFL_DATA": str(data), "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(home))}
