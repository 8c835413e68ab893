"""A reproduced table as Markdown, as Arrow table and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.reproduction.comparison import Comparison, rank_agreement
from rayfl.reproduction.reference import ReferenceTable
from rayfl.reproduction.tables import Reproduction
from rayfl.results.personalized import of_clients

COMPARISON_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("table", "setting", "method", "metric", "unit")),
        ("rounds", pa.int32()),
        ("paper_rounds", pa.int32()),
        ("seeds", pa.int32()),
        *((name, pa.float64()) for name in ("ours", "ours_std_over_clients", "ours_std_over_seeds", "best_round")),
        ("clients", pa.int32()),
        ("everybody", pa.int32()),
        *((name, pa.float64()) for name in ("paper", "paper_std", "difference")),
        ("paper_std_over", pa.string()),
        ("within", pa.bool_()),
        *((name, pa.string()) for name in ("status", "selected_on", "choice")),
        ("remarks", pa.list_(pa.string())),
    ]
)
"""One row per cell; see ``rayfl.reproduction.comparison.Comparison``. ``rounds`` is T of the run."""

_HEADINGS = (
    *("method", "ours", "+- clients", "+- seeds", "clients"),
    *("paper", "paper's std", "difference", "within 1 std", "target"),
)
_BEST_ROUND = "best round *"
_SHORT = {
    _BEST_ROUND: "best\nround *",
    "+- clients": "+-\nclients",
    "+- seeds": "+-\nseeds",
    "paper's std": "its\nstd",
    "difference": "diff.",
    "within 1 std": "within\n1 std",
}
_TARGETS = {"target": "yes", "caution": "with caution", "no_target": "no"}


def as_arrow(planned: Reproduction, rows: Sequence[Comparison]) -> pa.Table:
    """The cells as a table, schema :data:`COMPARISON_SCHEMA`."""
    tables = {table.name: table for table in planned.tables}
    rounds = {(run.setting, run.method): (run.config.train.rounds, run.paper_rounds) for run in planned.runs}
    content = []
    for row in rows:
        ours, paper = rounds[row.setting, row.method]
        about = {"metric": tables[row.table].metric, "unit": tables[row.table].unit}
        derived = {"difference": row.difference, "within": row.within, "rounds": ours, "paper_rounds": paper}
        content.append({**asdict(row), **about, **derived})
    return pa.Table.from_pylist(content, schema=COMPARISON_SCHEMA)


def as_markdown(planned: Reproduction, rows: Sequence[Comparison]) -> str:
    """The tables with notes, one section per table and setting."""
    lines = [f"# {planned.name}, {planned.scale} scale", ""]
    for table, setting, mine in _groups(planned, rows):
        lines += [f"## {_title(table)}: `{setting}`", "", table.caption, ""]
        headings = _headings(table)
        lines += [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
        lines += [f"| {' | '.join(_cells(row, table))} |" for row in mine]
        lines += ["", *(line for note in _notes(planned, table, setting, mine) for line in (note, ""))]
    return "\n".join(lines).rstrip() + "\n"


def as_text(planned: Reproduction, rows: Sequence[Comparison]) -> list[Table | str]:
    """Returns the tables and their notes for a terminal, to be printed one after the other."""
    shown: list[Table | str] = []
    for table, setting, mine in _groups(planned, rows):
        title = f"{_title(table)}: {setting}"
        printed = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
        shown_headings = [heading for heading in _headings(table) if heading != "clients"]  # a note says it
        for heading in shown_headings:
            # folded where the terminal is narrow, never cut: a number without its end is another one
            left = heading in ("method", "target")
            printed.add_column(_SHORT.get(heading, heading), justify="left" if left else "right", overflow="fold")
        for row in mine:
            cells = dict(zip(_headings(table), _cells(row, table), strict=True))
            printed.add_row(*(cells[heading] for heading in shown_headings))
        shown += [printed, *_notes(planned, table, setting, mine)]
    return shown


def _groups(
    planned: Reproduction, rows: Sequence[Comparison]
) -> Iterator[tuple[ReferenceTable, str, list[Comparison]]]:
    for table in planned.tables:
        for setting in table.preset_names:
            mine = [row for row in rows if (row.table, row.setting) == (table.name, setting)]
            if mine:
                yield table, setting, mine


def _title(table: ReferenceTable) -> str:
    return f"{table.name} ({table.table}), {table.metric}, {table.unit}"


def _headings(table: ReferenceTable) -> tuple[str, ...]:
    """The columns: with that of the best round where the paper prints this."""
    return _with_best_round(table, _HEADINGS, _BEST_ROUND)


def _with_best_round(table: ReferenceTable, columns: tuple[str, ...], best: str) -> tuple[str, ...]:
    place = 1 + _HEADINGS.index("clients")
    shown = table.protocol is not None and table.protocol.best_round
    return (*columns[:place], best, *columns[place:]) if shown else columns


def _cells(row: Comparison, table: ReferenceTable) -> tuple[str, ...]:
    digits = {"percent": 2, "share": 3}.get(table.unit, 3)
    star = " *" if row.seen_test else ""
    difference = "" if row.difference is None else f"{row.difference:+.{digits}f}"
    within = {None: "", True: "yes", False: "no"}[row.within]
    target = _TARGETS[row.status] if row.paper is not None else ""
    spreads = (_number(std, digits) for std in (row.ours_std_over_clients, row.ours_std_over_seeds))
    clients = "" if row.clients is None else of_clients(row.clients, row.everybody)
    ours = (_number(row.ours, digits) or "not run", *spreads, clients)
    paper = (_number(row.paper, digits), _number(row.paper_std, digits))
    cells = (f"{row.method}{star}", *ours, *paper, difference, within, target)
    return _with_best_round(table, cells, _number(row.best_round, digits))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _notes(planned: Reproduction, table: ReferenceTable, setting: str, rows: Sequence[Comparison]) -> list[str]:
    runs = [run for run in planned.runs if run.setting == setting]
    ours = sorted({run.config.train.rounds for run in runs})
    paper = sorted({run.paper_rounds for run in runs})
    seeds = sorted({run.seed for run in runs})
    notes = [f"Rounds: ours {_listed(ours)}, the paper's {_listed(paper)}; seeds: {_listed(seeds)}."]
    scored = dict.fromkeys(of_clients(row.clients, row.everybody) for row in rows if row.clients is not None)
    if scored:
        notes.append(f"Clients that were scored: {', '.join(scored)}.")
    over = {row.paper_std_over for row in rows} - {""}
    notes.append(
        "+- clients: population standard deviation over clients, mean over seeds; +- seeds: sample standard deviation "
        f"over seeds.{''.join(f' The standard deviation of the paper is over {what}.' for what in over)}"
    )
    if any(row.seen_test for row in rows):
        chosen = ", ".join(f"{row.method} {row.choice}" for row in rows if row.seen_test)
        notes.append(f"* chosen on test data ({chosen}), as in the paper: not a fair estimate.")
    if table.protocol is not None and table.protocol.best_round:
        notes.append(
            "* best round: the best of all evaluations, chosen by the test data themselves, as the paper prints it: "
            "not a fair estimate. The difference is of it; ours is that of the last round."
        )
    agreement = rank_agreement(rows)
    if agreement is not None:
        notes.append(f"Order of the methods, Kendall's tau with the paper's (targets only): {agreement:.2f}.")
    if table.finding:
        notes.append(f"The paper prints no numbers; it finds: {table.finding}")
    assert table.protocol is not None
    notes.append(f"How the paper differs: {table.protocol.differs}")
    by_remark: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            by_remark.setdefault(remark, []).append(row.method)
    return notes + [f"{', '.join(methods)}: {remark}" for remark, methods in by_remark.items()]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
