"""A page as a parser sees it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from algorithms.registry import METHODS
from rayfl.cli.report import dataset_of
from rayfl.report.drawing import styled
from rayfl.report.page import render
from rayfl.report.single import page_of_run
from rayfl.runs.finding import load_run

VOID = {"meta", "br", "img", "hr", "input", "link", "path", "use", "rect"}


class Document(HTMLParser):
    """Collects tags with their attributes, texts, ids, references and the cells of tables."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.open: list[str] = []
        self.wrongly_closed: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self.ids += [str(found["id"])] if "id" in found else []
        self.references += [str(found[name]) for name in ("href", "src", "xlink:href", "data") if name in found]
        if tag == "table":
            self._table = str(found["id"])
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrongly_closed.append(tag)

    def handle_data(self, data: str) -> None:
        data = data.replace("\u2060", "").replace("\u00a0", " ")  # where a line must not break
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[self._table][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def rendered(run: Path) -> str:
    """The page of a run, without its files."""
    with styled():
        page, _ = page_of_run(load_run(str(run), METHODS), dataset_of)
        return render(page)
