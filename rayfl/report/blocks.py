"""What a page is made of: sections with tables, figures and texts, apart from how they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from rayfl.report.drawing import Drawing

Mark = Literal["", "best", "own"]


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        key: what it is sorted by; None: the text.
        mark: ``best`` and ``own`` are shown bold; the first is also said to screen readers.
    """

    text: str
    key: float | None = None
    mark: Mark = ""


@dataclass(frozen=True)
class Column:
    """A column of a table; numbers are aligned to the right.

    Attributes:
        heading: its name, unique in the table.
        numeric: whether it has numbers.
        above: heading of this column and its neighbours together, in a line of its own; "" without one.
        short: the heading where ``above`` is shown.
    """

    heading: str
    numeric: bool = True
    above: str = ""
    short: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: unique on the page.
        caption: what it shows, and of what.
        columns: headings.
        rows: cells by row; the first of each row is its heading.
        footnotes: below it.
        sortable: whether a reader may sort it.
        data: file with the whole content, relative to the page; "" without one.
    """

    name: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    footnotes: Sequence[str] = ()
    sortable: bool = True
    data: str = ""
    kind: Literal["table"] = "table"

    @property
    def spans(self) -> list[tuple[str, int]]:
        """Headings over several columns, with how many these are; empty if no column is under one."""
        if not any(column.above for column in self.columns):
            return []
        return [(above, len(list(those))) for above, those in groupby(self.columns, lambda column: column.above)]


@dataclass(frozen=True)
class Figure:
    """A figure, and the files it is also saved as."""

    drawing: Drawing
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and a text."""

    pairs: Sequence[tuple[str, str]]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str
    kind: Literal["paragraph"] = "paragraph"


@dataclass(frozen=True)
class Code:
    """Lines to be copied, with a label for screen readers."""

    label: str
    text: str
    kind: Literal["code"] = "code"


Block = Table | Figure | Facts | Paragraph | Code


@dataclass(frozen=True)
class Section:
    """A section of a page; without blocks it is left out."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: its heading.
        subtitle: a line below it.
        sections: in order.
        notes: what a reader must know first, a sentence each.
        details: what the page says of a client that is chosen, as JSON (:mod:`rayfl.report.details`); empty: nothing.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=list)
    details: str = ""

    @property
    def figures(self) -> list[Drawing]:
        """Returns all figures in order."""
        return [block.drawing for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def figures(drawings: Sequence[Drawing | Table | None]) -> list[Block]:
    """Returns the blocks of those drawings that are there; tables stand in for charts of one point."""
    return [Figure(one) if isinstance(one, Drawing) else one for one in drawings if one is not None]


def number(value: float, digits: int, mark: Mark = "") -> Cell:
    """Returns a cell with a number; what is missing (nan) is a dash and sorts last."""
    if value != value:
        return Cell("-", float("inf"), mark)
    return Cell(f"{value:,.{digits}f}", float(value), mark)
