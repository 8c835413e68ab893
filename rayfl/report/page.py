"""Writes a report: one self-contained HTML file, its figures, and their data."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import pyarrow as pa
from markupsafe import Markup

from rayfl.data.files.whole import new_file
from rayfl.errors import ConfigError
from rayfl.report.blocks import Page, Table
from rayfl.report.drawing import Drawing, inline_svg, save, save_table

FILE = "report.html"
FIGURES = "figures"
_LICENCE = "uPlot.LICENSE"
_SCRIPTS = (_LICENCE, "uPlot.iife.min.js", "sort.js", "charts.js")
"""What a page runs, in this order: uPlot 1.6.32 (https://github.com/leeoniya/uPlot, MIT), and our own."""
_STYLES = ("uPlot.min.css", "style.css")


def check_folder(folder: Path) -> None:
    """Raises ConfigError where a report cannot be written."""
    for place in (folder, folder / FIGURES):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"--out: {place} is a file; name a folder")


def render(page: Page) -> str:
    """Returns the page as HTML: styles, script and figures are in it, and it is allowed to load nothing."""
    templates = resources.files("rayfl.report") / "templates"
    text = {name: (templates / name).read_text(encoding="utf-8") for name in (*_SCRIPTS, *_STYLES)}
    script = "\n".join(f"/*!\n{text[name]}*/" if name == _LICENCE else text[name] for name in _SCRIPTS)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (templates / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        page=page,
        version=version("rayfl"),
        style=_ours("\n".join(text[name] for name in _STYLES)),
        script=_ours(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        svg=_svg,
        data=_ours,
    )


def write(page: Page, folder: Path, tables: dict[str, pa.Table]) -> Path:
    """Writes everything of a report; the page last.

    Args:
        page: the report.
        folder: where to; made if missing, older files of the same names are replaced.
        tables: by path relative to the folder, what else is written as CSV.

    Returns:
        The HTML file.

    Raises:
        ConfigError: the folder is a file.
        DataError: a file cannot be written.
    """
    check_folder(folder)
    content = render(page)
    for drawing in page.figures:
        save(drawing, folder / FIGURES)
    for name, table in tables.items():
        save_table(table, folder / name)
    destination = folder / FILE
    with new_file(destination) as file:
        file.write(content.encode())
    return destination


def as_table(table: Table) -> pa.Table:
    """Returns the texts of a table of a page by heading."""
    return pa.table(
        {column.heading: [row[place].text for row in table.rows] for place, column in enumerate(table.columns)}
    )


def _svg(drawing: Drawing) -> Any:
    # matplotlib escapes the texts in its pictures.
    return _ours(inline_svg(drawing))


def _ours(text: str) -> Markup:
    """Returns text that rayfl itself wrote, or escaped, and that goes into a page as it is."""
    return Markup(text)  # noqa: S704
