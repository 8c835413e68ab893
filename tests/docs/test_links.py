"""Links of Markdown pages lead to files that are there, and to headings that these have; numbers stay numbers.

``test_site.py`` follows the links of the site, which takes long to build.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NOTES = DOCS / "methods" / "notes"
"""Parts of the pages on methods. Their links are seen from the folder above."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted(path for path in DOCS.rglob("*.md") if NOTES not in path.parents),
]
_FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2[^\n]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: +\{[^}]*#([\w-]+)[^}]*\})? *#*$", re.MULTILINE)
_LINKS = (
    re.compile(r"\]\(\s*<?([^)\s>]+)"),
    re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", re.MULTILINE),
    re.compile(r"<(?:a|img|link|source)\b[^>]*?\b(?:href|src)=\"([^\"]*)\""),
)


def links(text: str) -> list[str]:
    """Where a page's links and pictures lead to; what is code has none."""
    prose = _CODE.sub("", _FENCED.sub("", text))
    return [link for pattern in _LINKS for link in pattern.findall(prose)]


def places(text: str) -> set[str]:
    """What links can name behind ``#``: headings, as Python-Markdown names them, and written ids."""
    prose, found, taken = _FENCED.sub("", text), set[str](), dict[str, int]()
    for heading, written in _HEADING.findall(prose):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\s-]", "", normalize("NFKD", shown).encode("ascii", "ignore").decode()).strip().lower()
        name = written or re.sub(r"[-\s]+", "-", name)
        number = taken[name] = taken.get(name, -1) + 1
        found.add(f"{name}_{number}" if number else name)
    return found | set(re.findall(r"\b(?:id|name)=\"([^\"]+)\"", prose))


@cache
def places_of(page: Path) -> set[str]:
    return places(page.read_text(encoding="utf-8"))


def broken(page: Path, text: str) -> list[str]:
    """The links of a page's text that lead nowhere."""
    wrong = []
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        # The site has what is in docs/, and pages of methods' sources (scripts/docs/site_hooks.py).
        on_site = target.is_relative_to(DOCS) or link.startswith("../../algorithms/")
        if not target.exists() or not (on_site if page.is_relative_to(DOCS) else target.is_relative_to(ROOT)):
            wrong.append(link)
        elif parts.fragment and target.suffix == ".md":
            known = places(text) if target == page else places_of(target)
            if unquote(parts.fragment) not in known:
                wrong.append(link)
    return wrong


def test_every_link_leads_somewhere() -> None:
    wrong, followed = {}, 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        followed += len(links(text))
        if found := broken(page, text):
            wrong[str(page.relative_to(ROOT))] = found
    assert wrong == {}
    assert followed > 1000


def test_links_of_notes_are_on_the_pages_that_are_made_of_them() -> None:
    """So that they are followed from there."""
    for note in sorted(NOTES.glob("*.md")):
        page = NOTES.parent / note.name
        assert set(links(note.read_text(encoding="utf-8"))) <= set(links(page.read_text(encoding="utf-8"))), note.name


@pytest.mark.parametrize(
    "link",
    [
        "[labelled](../../semi-supervised.md)",  # right in notes/, wrong on the page
        "[privacy](../privacy.md#no-such-heading)",
        "[below](#no-such-heading)",
        "![a curve](curves/none.svg)",
        "[by name][name]\n\n[name]: ../none.md",
        '<a href="none.html">a page</a>',
        "[a file that the site does not have](../../README.md)",
    ],
)
def test_a_broken_link_is_found(link: str) -> None:
    page = DOCS / "methods" / "fixmatch.md"
    text = page.read_text(encoding="utf-8")
    assert broken(page, text) == []
    assert len(broken(page, f"{text}\n{link}\n")) == 1


def test_code_has_no_links_and_headings_are_named_as_on_the_site() -> None:
    text = "# A `b` of [c](d.md): e's\n\n## Twice\n\n## Twice\n\n## Named {#own}\n"
    text += "\n```\n# no heading [x](y)\n```\n`[x](y)`\n"
    assert links(text) == ["d.md"]
    assert places(text) == {"a-b-of-c-es", "twice", "twice_1", "own"}


def test_no_number_at_the_beginning_of_a_line_is_taken_for_that_of_a_list() -> None:
    """A sentence's last number is lost where it is the first word of a line of a list, as in "and not / 0. Means"."""
    numbered = re.compile(r" *\d+[.)] ")
    wrong = []
    for page in PAGES:
        for before, line in pairwise(_FENCED.sub("", page.read_text(encoding="utf-8")).split("\n")):
            within = before.strip() and not numbered.match(before) and not before.startswith(("#", " " * 3))
            if numbered.match(line) and within:
                wrong.append(f"{page.name}: {before[-40:]} / {line[:40]}")
    assert wrong == []
