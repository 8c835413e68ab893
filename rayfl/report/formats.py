"""Comparisons as text for other programs: CSV, JSON, Markdown, and LaTeX with booktabs."""

from __future__ import annotations

import io
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import pyarrow as pa

from rayfl.report.columns import NO_NUMBER, Metric
from rayfl.report.comparison import Comparison
from rayfl.report.lines import Line
from rayfl.report.paper import PaperCell, PaperTable, paper_table
from rayfl.report.protocol import protocol
from rayfl.report.significance import LEVEL, PairTest
from rayfl.results.plain_csv import write_csv
from rayfl.results.plain_json import json_text

Format = Literal["table", "csv", "markdown", "latex", "json"]

_MANY = 4
"""LaTeX sets tables with more columns of numbers smaller and closer, and spreads below their means."""

JSON_SCHEMA = "rayfl.compare/1"
"""What the JSON says of itself: a new number for another meaning of a field, not for a further one."""

NUMBERS_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("dataset", "method", "model")),
        ("personalized", pa.bool_()),
        ("finished", pa.bool_()),
        ("seen_test", pa.bool_()),
        *((name, pa.string()) for name in ("split", "cohort", "phase", "metric")),
        *((name, pa.float64()) for name in ("mean", "std_over_clients", "std_over_seeds")),
        *((name, pa.int64()) for name in ("seeds", "clients", "round")),
        ("rank", pa.int64()),
    ]
)
"""A row for each data set, method, row of its tables and metric.

``mean`` and the standard deviations are in the units of a run's tables: accuracies are shares, not percent.
``clients`` is the fewest that a seed's mean is over, those for which the metric is defined; null where that is not
known (each client has a model of its own choice, and the metric is undefined for some). ``rank`` is 1 for the best of
a metric, 2 for the second, else null.
"""


def formatted(comparisons: Mapping[str, Comparison], wanted: Format) -> str:
    """Returns comparisons by data set as text in one of the formats for programs and papers."""
    if wanted == "csv":
        buffer = io.BytesIO()
        write_csv(pa.Table.from_pylist(numbers(comparisons), schema=NUMBERS_SCHEMA), buffer)
        return buffer.getvalue().decode()
    if wanted == "json":
        return json_text(as_json(comparisons), indent=2) + "\n"
    table = paper_table(comparisons)
    return as_markdown(table) if wanted == "markdown" else as_latex(table)


def numbers(comparisons: Mapping[str, Comparison]) -> list[dict[str, Any]]:
    """Returns the rows of :data:`NUMBERS_SCHEMA`."""
    return [
        {
            "dataset": name,
            **_about(line),
            **asdict(one.measured),
            "seen_test": line.key.seen_test or (metric.chosen and one.measured.split != "validation"),
            "metric": metric.column,
            **_values(line, metric),
            "seeds": line.seeds,
            "clients": line.cells[metric.column].clients,
            "round": line.rounds,
        }
        for name, one in comparisons.items()
        for line in one.lines
        for metric in one.wanted.metrics
    ]


def as_json(comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Returns all that a comparison has as plain data."""
    return {
        "schema": JSON_SCHEMA,
        "protocol": protocol(comparisons),
        "numbers": numbers(comparisons),
        "tests": [
            {"dataset": name, "metric": one.tested.column, "pairs_are": kind, **_test(test), "level": LEVEL}
            for name, one in comparisons.items()
            for kind, tests in (("clients", one.clients), ("seeds", one.seeds))
            for test in tests
        ],
        "notes": list(dict.fromkeys(note for one in comparisons.values() for note in one.notes)),
    }


def _about(line: Line) -> dict[str, Any]:
    model = {"method": line.method, "model": line.model.removesuffix(" *")}
    return {**model, "personalized": line.own, "finished": line.finished}


def _values(line: Line, metric: Metric) -> dict[str, float | int | None]:
    cell = line.cells[metric.column]
    named = {"mean": cell.mean, "std_over_clients": cell.over_clients, "std_over_seeds": cell.over_seeds}
    values = {
        name: None if value is None or not math.isfinite(value) else value / metric.scale
        for name, value in named.items()
    }
    return {**values, "rank": 1 if cell.best else 2 if cell.second else None}


def _test(test: PairTest) -> dict[str, Any]:
    return {**asdict(test), "significant": test.significant}


def as_markdown(table: PaperTable) -> str:
    """Returns a table in GitHub's Markdown: the best bold, the second underlined."""
    headings = [
        " ".join(part for part in (name if len(table.datasets) > 1 else "", heading) if part)
        for name in table.datasets
        for heading in table.headings
    ]
    head, rule = [*table.heads, *map(_in_markdown, headings)], "|---" * len(table.heads) + "|---:" * len(headings)
    lines = [f"| {' | '.join(head)} |", f"{rule}|"]
    for names, cells in table.rows.items():
        lines.append(f"| {' | '.join([*map(_in_markdown, names), *map(_markdown_cell, cells)])} |")
    return (
        "\n".join([*lines, "", _in_markdown(table.caption), *(f"\n{_in_markdown(note)}" for note in table.notes)])
        + "\n"
    )


def _markdown_cell(cell: PaperCell | None) -> str:
    if cell is None:
        return "-"
    mean = {1: f"**{cell.mean}**", 2: f"<u>{cell.mean}</u>"}.get(cell.rank, cell.mean)
    marks = f" <sup>{','.join(cell.marks)}</sup>" if cell.marks else ""
    spread = f" ± {cell.spread}" if cell.spread else ""
    return f"{mean}{spread}{marks}"


def _in_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text)


def as_latex(table: PaperTable) -> str:
    """Returns a table environment for the package booktabs, with its caption."""
    columns, several = len(table.datasets) * len(table.headings), len(table.datasets) > 1
    headings = [_heading_in_latex(heading) for _ in table.datasets for heading in table.headings]
    head = [f"{' & '.join([*table.heads, *headings])} \\\\"]
    if several:
        width, names = len(table.headings), len(table.heads)
        over = [f"\\multicolumn{{{width}}}{{c}}{{{_in_latex(name)}}}" for name in table.datasets]
        rules = [
            f"\\cmidrule(lr){{{names + 1 + n * width}-{names + (n + 1) * width}}}" for n in range(len(table.datasets))
        ]
        head = [f"{' & ' * names}{' & '.join(over)} \\\\", "".join(rules), *head]
    rows = [
        f"{' & '.join([*map(_in_latex, label), *(_latex_cell(cell, columns > _MANY) for cell in cells)])} \\\\"
        for label, cells in zip(_once(table.rows), table.rows.values(), strict=True)
    ]
    texts = [table.caption, *table.notes, *table.datasets, *(name for names in table.rows for name in names)]
    unknown = "".join(sorted({character for text in texts for character in text if not _pdflatex_has(character)}))
    lines = [
        "% needs \\usepackage{booktabs}",
        *([f"% pdfLaTeX may lack {unknown}: use XeLaTeX or LuaLaTeX, with a font that has them"] if unknown else []),
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{' '.join([_in_latex(table.caption), *map(_in_latex, table.notes)])}}}",
        f"\\label{{tab:{table.label}}}",
        "\\smallskip",
        *(["\\footnotesize", "\\setlength{\\tabcolsep}{2pt}"] if columns > _MANY else []),
        f"\\begin{{tabular}}{{{'l' * len(table.heads)}{'c' * columns}}}",
        "\\toprule",
        *head,
        "\\midrule",
        *rows,
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _heading_in_latex(heading: str) -> str:
    """Returns the heading of a column, with what it is of or in on a second line, as columns are to be narrow."""
    parts = re.split(r", | (?=\()", heading, maxsplit=1)
    lines = r" \\ ".join(map(_in_latex, parts))
    return f"\\shortstack{{{lines}}}" if len(parts) > 1 else lines


def _once(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns what names each row, without the method where it is that of the row above."""
    named = list(rows)
    return [
        ("", *names[1:]) if above is not None and len(names) > 1 and names[0] == above[0] else names
        for above, names in zip([None, *named], named, strict=False)
    ]


def _latex_cell(cell: PaperCell | None, narrow: bool) -> str:
    if cell is None or cell.mean == NO_NUMBER:
        return "--"
    text = _number_in_latex(cell.mean)
    text = {1: f"\\mathbf{{{text}}}", 2: f"\\underline{{{text}}}"}.get(cell.rank, text)
    spread = rf" \pm {_number_in_latex(cell.spread)}" if cell.spread else ""
    marks = rf"^{{\mathrm{{{','.join(cell.marks)}}}}}" if cell.marks else ""
    if narrow and spread:
        return rf"\begin{{tabular}}[t]{{@{{}}c@{{}}}}${text}{marks}$ \\ ${spread.strip()}$\end{{tabular}}"
    return f"${text}{spread}{marks}$"


def _number_in_latex(text: str) -> str:
    return text.replace("inf", r"\infty").replace(",", "{,}")


_LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"{{{character}}}" for character in "[]"},  # at the beginning of a row, [ would be \\'s option
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "\N{MINUS SIGN}": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≠": r"$\neq$",
    "∞": r"$\infty$",
}
_GREEK = {"LAMDA": "LAMBDA", "FINAL SIGMA": "VARSIGMA"}
"""Letters whose names in Unicode are others than in LaTeX."""
_LIKE_LATIN = {
    "ALPHA": "A", "BETA": "B", "EPSILON": "E", "ZETA": "Z", "ETA": "H", "IOTA": "I", "KAPPA": "K", "MU": "M", "NU": "N",
    "OMICRON": "O", "RHO": "P", "TAU": "T", "CHI": "X",
}  # fmt: skip
"""Capital letters that LaTeX has no command for."""


def _in_latex(text: str) -> str:
    return "".join(map(_character, text))


def _character(character: str) -> str:
    """Returns what LaTeX sets as the character; what it needs no command for is unchanged."""
    case, _, name = unicodedata.name(character, "").removeprefix("GREEK ").partition(" LETTER ")
    if (
        re.fullmatch("[\N{GREEK CAPITAL LETTER ALPHA}-\N{GREEK SMALL LETTER OMEGA}]", character)
        and " WITH " not in name
    ):
        name = _GREEK.get(name, name)
        if case == "CAPITAL":
            return f"$\\mathrm{{{_LIKE_LATIN[name]}}}$" if name in _LIKE_LATIN else f"$\\{name.title()}$"
        return "o" if name == "OMICRON" else f"$\\{name.lower()}$"
    return _LATEX.get(character, character)


def _pdflatex_has(character: str) -> bool:
    """Returns whether pdfLaTeX sets the character in every font: ASCII, what has a command here, accented letters."""
    accented = "\N{LATIN CAPITAL LETTER A WITH GRAVE}" <= character <= "\N{LATIN SMALL LETTER Y WITH DIAERESIS}"
    return character.isascii() or _character(character) != character or (accented and character not in "ÐðÞþ")


def file_name(wanted: Format) -> str:
    """Returns the name of the file that a report has in a format."""
    ending = {"markdown": "md", "latex": "tex"}.get(wanted, wanted)
    return f"comparison.{ending}"
