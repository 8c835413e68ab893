"""Speaking roles of Shakespeare's plays, from Project Gutenberg's Complete Works (no. 100, edition of 1994).

The rules are those of LEAF, which has them from McMahan et al. (2017): a play begins with the line "by William
Shakespeare" below its title; a speech begins with a line of two blanks, the role's name, a full stop and a blank, and
goes on in lines indented by four. The Comedy of Errors is not indented at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rayfl.errors import DataError

_AUTHOR = "by William Shakespeare"
_FLAT_PLAY = "THE COMEDY OF ERRORS"
# The poems after the plays of the edition of 1994; line numbers count from the file's second line.
_LAST_LINE = 124_195
_TITLE_DISTANCES = range(2, 8)
_LARGEST_FILE = 64 << 20
_SPEECH = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
_FLAT_SPEECH = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
_MORE = re.compile(r"    (.*)")
_FLAT_MORE = re.compile(r"(.*)")
# A role with fewer lines is no client.
_FEWEST_LINES = 3

_Play = tuple[str, dict[str, list[str]]]


def read_text(path: Path) -> str:
    """The file as text, with line feeds at the ends of lines.

    Raises:
        DataError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise DataError(f"{path} is larger than {_LARGEST_FILE >> 20} MiB; give the Complete Works as plain text")
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}; give the Complete Works as plain text") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def speaking_roles(text: str) -> dict[str, str]:
    """Returns what each role says, all its speeches one after the other.

    Names are in capitals, ``<PLAY>_<ROLE>``, with an underscore for every blank, and one for every run of marks.
    Line breaks become blanks, and runs of blanks one blank; every text ends with a blank. Roles with fewer than three
    lines, and plays with a single role, are left out.

    Args:
        text: the file.
    """
    lines: dict[str, list[str]] = {}
    for title, roles in _plays(text):
        if len(roles) < 2:
            continue
        for role, said in roles.items():
            if len(said) >= _FEWEST_LINES:
                lines.setdefault(_client(title, role), []).extend(said)
    return {role: re.sub(r" {2,}", " ", "".join(f"{line} " for line in said)) for role, said in lines.items()}


def _client(title: str, role: str) -> str:
    return re.sub(r"\W+", "_", f"{title}_{role}".replace(" ", "_"))


def _plays(text: str) -> Iterator[_Play]:
    """Titles, and each role's lines, of everything that looks like a play; the sonnets are passed over."""
    lines = text.splitlines()[1 : _LAST_LINE + 2]
    # The first work is the sonnets.
    starts = [number for number, line in enumerate(lines) if _AUTHOR in line][1:]
    for start, stop in pairwise([*starts, len(lines)]):
        title = _title(lines, start)
        yield title, _speeches(lines[start + 1 : stop], flat=title == _FLAT_PLAY)


def _title(lines: list[str], author: int) -> str:
    """The nearest line with text, two to seven lines above the author's."""
    above = (lines[author - distance].strip() for distance in _TITLE_DISTANCES if distance <= author)
    title = next((line for line in above if line), "")
    if not title:
        raise DataError(
            f"line {author + 2} has {_AUTHOR!r}, but no title two to seven lines above it; give Project Gutenberg's "
            "Complete Works in the edition of 1994"
        )
    return title


def _speeches(lines: list[str], flat: bool) -> dict[str, list[str]]:
    """Each role's lines in one play."""
    begins, goes_on = (_FLAT_SPEECH, _FLAT_MORE) if flat else (_SPEECH, _MORE)
    roles: dict[str, list[str]] = {}
    speaker: str | None = None
    for line in lines:
        if found := begins.match(line):
            name = found.group(1).upper()
            # Headings and the publisher's notice look like speech where nothing is indented.
            speaker = None if flat and name.startswith("ACT ") else name
            if speaker is not None:
                roles.setdefault(speaker, []).append(found.group(2))
        elif speaker is not None and (found := goes_on.match(line)):
            if flat and found.group(1).startswith("<"):
                speaker = None
            else:
                roles[speaker].append(found.group(1))
    return roles
