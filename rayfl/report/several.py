"""The report on several runs: methods side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from rayfl.report import costs, harm
from rayfl.report.blocks import Block, Cell, Code, Column, Mark, Page, Paragraph, Section, Table, figures, number
from rayfl.report.cells import SEEN_TEST, unit_of_bytes
from rayfl.report.columns import NO_NUMBER, Metric
from rayfl.report.comparison import Comparison
from rayfl.report.curves import progress_of_groups
from rayfl.report.figures import client_distribution_of_groups, reliability_of_groups
from rayfl.report.grouping import config_table, shown_model
from rayfl.report.lines import Line
from rayfl.report.protocol import OVER_CLIENTS, OVER_SEEDS, caption
from rayfl.report.rows import RowKey, rounds_done
from rayfl.report.setup import commands
from rayfl.report.significance import LEVEL, PairTest
from rayfl.runs.loading import Run

_UNFINISHED = "† unfinished: after its last evaluation so far; never the best"
_ON_TERMINALS = {"top1": "acc.\n%", "top1_worst5": "worst\n5 %", "ece": "ECE\n"}
"""The columns of classification that have room in 80 characters where none are chosen."""
_ROOM = 3
"""How many columns of other tasks have."""
_BEST = (
    "Bold: the best of a column among finished runs and rows that were not chosen on test data. A best mean alone says "
    "nothing about chance: see the tests."
)


def page_of_runs(runs: Sequence[Run], comparison: Comparison) -> Page:
    """Returns the page on several runs."""
    groups = comparison.groups
    sections = [
        Section("comparison", "Comparison", [comparison_table(comparison)]),
        Section("harm", "Who is harmed", harm.section(groups, keys_of(comparison))),
        Section("significance", "Significance", _significance(comparison)),
        Section("progress", "Progress", figures(progress_of_groups(groups))),
        Section("clients", "Clients", figures([client_distribution_of_groups(groups)])),
        Section("calibration", "Calibration", figures([reliability_of_groups(groups)])),
        Section("costs", "Costs", costs.section(groups)),
        Section("configurations", "Configurations", _configurations(comparison)),
        Section("runs", "Runs", _runs(runs)),
    ]
    title = (
        f"{len(groups)} configurations on {runs[0].dataset}"
        if len(groups) > 1
        else f"{groups[0].label} on {runs[0].dataset}"
    )
    subtitle = f"{len(runs)} runs: {', '.join(group.label for group in groups)}"
    return Page(title, subtitle, [section for section in sections if section.blocks], comparison.notes)


def keys_of(comparison: Comparison) -> dict[str, list[RowKey]]:
    """Returns the rows that a comparison shows, by the label of their method."""
    found: dict[str, list[RowKey]] = {}
    for line in comparison.lines:
        found.setdefault(line.method, []).append(line.key)
    return found


def comparison_table(comparison: Comparison) -> Table:
    """Returns all lines as a table of a page, without columns in which no line has a number."""
    texts, metrics = ("method", "model", "clients"), comparison.wanted.metrics
    size, unit = unit_of_bytes(1e9 * max((line.gigabytes for line in comparison.lines), default=0.0))
    columns = [
        *(Column(text, numeric=text not in texts) for text in (*texts, "seeds")),
        *(column for metric in metrics for column in _columns(metric)),
        *map(Column, (f"{unit} sent", "wall time (s)")),
    ]
    rows = [_cells(line, metrics, size) for line in comparison.lines]
    shown = [place for place in range(len(columns)) if any(row[place].text != NO_NUMBER for row in rows)]
    return Table(
        "comparison-table",
        f"{caption(comparison)} {_BEST}",
        [columns[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        _footnotes(comparison),
        data="figures/comparison.csv",
    )


def _columns(metric: Metric) -> list[Column]:
    """Returns the columns of a metric: spreads over clients and over seeds have some of their own."""
    name, spreads = _plain(metric), (OVER_CLIENTS, OVER_SEEDS) if metric.by_client else (OVER_SEEDS,)
    return [
        Column(metric.heading, above=metric.heading, short="mean"),
        *(Column(f"{name} {spread}", above=metric.heading, short=spread) for spread in spreads),
    ]


def terminal_table(comparison: Comparison) -> RenderableType:
    """Returns the table and the tests for a terminal."""
    table = RichTable(
        title="Methods side by side", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    # The same for both: rich narrows the wider first, below what one alone would need, and then cuts the last numbers.
    for heading in ("method\n", "model\n"):
        table.add_column(heading, overflow="fold", min_width=8)
    for heading in ("clients\n", "seeds\n"):
        table.add_column(heading, justify="right", no_wrap=True)
    metrics = comparison.wanted.metrics
    shown = _on_terminal(comparison)
    spreads = (OVER_CLIENTS, OVER_SEEDS) if any(line.seeds > 1 for line in comparison.lines) else (OVER_CLIENTS,)
    spread_of = set(metrics if comparison.chosen else metrics[:1])
    for metric, heading in shown.items():
        table.add_column(heading, justify="right", no_wrap=True)
        for spread in spreads if metric in spread_of else ():
            table.add_column(spread.replace(" ", "\n"), justify="right", no_wrap=True)
    for line in comparison.lines:
        texts: list[str | Text] = [cell.text for cell in _cells(line, metrics)[:4]]
        for metric in shown:
            cell = line.cells[metric.column]
            mean = metric.text(cell.mean)
            texts.append(Text.assemble((mean, "bold"), "^") if cell.best else mean)
            if metric in spread_of:
                found = metric.text(cell.over_clients), metric.text(cell.over_seeds)
                texts += found[: len(spreads)]
        table.add_row(*texts)
    marked = ["^ best of the column among finished runs and rows not chosen on test data"]
    notes = [caption(comparison), *(marked if any(c.best for n in comparison.lines for c in n.cells.values()) else [])]
    parts: list[RenderableType] = [table, Text("\n".join([*notes, *_footnotes(comparison)]))]
    for tests, what in ((comparison.clients, "clients"), (comparison.seeds, "seeds")):
        if tests:
            parts += [Text(), _terminal_tests(tests, what, comparison.tested)]
    return Stack(*parts)


def _on_terminal(comparison: Comparison) -> dict[Metric, str]:
    """Returns the headings of the columns that were chosen, else of those that a terminal has room for."""
    metrics = comparison.wanted.metrics
    shown = {metric: _ON_TERMINALS.get(metric.column, f"{metric.heading}\n") for metric in metrics}
    if comparison.chosen:
        return shown
    known = [metric for metric in metrics if metric.column in _ON_TERMINALS]
    return {metric: shown[metric] for metric in (known if metrics[0] in known else metrics[:_ROOM])}


def _terminal_tests(tests: Sequence[PairTest], what: str, metric: Metric) -> RichTable:
    title = f"Paired over {what}, {_plain(metric)}: {_TEST}"
    table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in _test_headings(metric):
        if heading in _NAMES:
            table.add_column(heading, overflow="fold", min_width=8)
            continue
        for narrow in (", ", " better", "adjusted "):  # names may go on in the next line, numbers may not
            heading = heading.replace(narrow, "\n".join(narrow.split(" ")))
        table.add_column(heading, justify="right", no_wrap=True)
    for test in tests:
        table.add_row(*(cell.text for cell in _test_cells(test, metric)), style="bold" if test.significant else None)
    return table


def _plain(metric: Metric) -> str:
    return metric.heading.removesuffix(" %") if metric.by_client else metric.heading


def _cells(line: Line, metrics: Sequence[Metric], size: float = 1e9) -> list[Cell]:
    """Returns a line of the table; what was sent is in units of ``size`` bytes."""
    dagger = "" if line.finished else " †"
    return [
        Cell(f"{line.method}{dagger}"),
        Cell(f"{line.model} (own)" if line.own else line.model),
        Cell(line.clients, line.evaluated),
        number(line.seeds, 0),
        *(cell for metric in metrics for cell in _numbers(line, metric)),
        number(1e9 * line.gigabytes / size, 1 if size < 1e9 else 3),
        number(float("nan") if line.seconds is None else line.seconds, 1),
    ]


def _numbers(line: Line, metric: Metric) -> list[Cell]:
    """Returns a mean and its spreads, as :func:`_columns` has them."""
    cell = line.cells[metric.column]
    spreads = [*([cell.over_clients] if metric.by_client else []), cell.over_seeds]
    return [
        number(cell.mean, metric.digits, "best" if cell.best else ""),
        *(number(float("nan") if spread is None else spread, metric.digits) for spread in spreads),
    ]


def _footnotes(comparison: Comparison) -> list[str]:
    lines = comparison.lines
    return [
        *([SEEN_TEST] if any(line.key.seen_test for line in lines) else []),
        *([_UNFINISHED] if any(not line.finished for line in lines) else []),
    ]


_TEST = f"Wilcoxon's signed-rank test, two-sided; p adjusted by Holm; bold: adjusted p < {LEVEL}"
_NAMES = ("method A", "method B")


def _test_headings(metric: Metric) -> tuple[str, ...]:
    points = ", points" if metric.scale == 100 else ""
    return (*_NAMES, f"A - B{points}", "A better", "B better", "pairs", "p", "adjusted p")


def _test_cells(test: PairTest, metric: Metric) -> list[Cell]:
    mark: Mark = "own" if test.significant else ""
    difference = metric.scale * test.difference
    better = (test.wins, test.losses)[:: metric.sign]
    return [
        Cell(test.first),
        Cell(test.second),
        number(difference, 0) if math.isnan(difference) else Cell(f"{difference:+.{metric.digits}f}", difference),
        *(number(count, 0) for count in better),
        number(test.pairs, 0),
        Cell(_p(test.p), test.p),
        Cell(_p(test.adjusted), test.adjusted, mark),
    ]


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}"


def _significance(comparison: Comparison) -> list[Block]:
    blocks: list[Block] = []
    metric = comparison.tested
    columns = [Column(text, numeric=text not in _NAMES) for text in _test_headings(metric)]
    what = f"By {_plain(metric)} of {shown_model(comparison.groups)}. "
    if comparison.clients:
        text = (
            f"{what}A pair: two methods on the same client for the same seed. {_TEST}. Clients on which both are equal "
            "are left out of the test. The clients of a run share a model, so they are not independent: this says "
            "whether methods differ on these clients for these seeds, not whether they would for others."
        )
        blocks.append(Table("clients-test", text, columns, [_test_cells(test, metric) for test in comparison.clients]))
    if comparison.seeds:
        fewest = min(test.pairs for test in comparison.seeds)
        text = (
            f"{what}A pair: the means over clients of two methods for the same seed. {_TEST}. With n seeds no p "
            f"can be below 2 / 2^n, before correction: here {_p(2.0 ** (1 - fewest))} for {fewest}."
        )
        blocks.append(Table("seeds-test", text, columns, [_test_cells(test, metric) for test in comparison.seeds]))
    if not blocks:
        blocks.append(Paragraph("No tests: they need two finished methods with a seed and its clients in common."))
    return blocks


def _configurations(comparison: Comparison) -> list[Block]:
    rows = config_table(comparison.groups)
    if not rows:
        return []
    columns = [Column("option", numeric=False), *(Column(group.label, numeric=False) for group in comparison.groups)]
    cells = [[Cell(path), *map(Cell, values)] for path, values in rows.items()]
    text = "Options in which the configurations differ; - where a method has no such option. The seed is none of them."
    return [Table("configuration-table", text, columns, cells, sortable=False)]


def _runs(runs: Sequence[Run]) -> list[Block]:
    headings = ("run", "method", "seed", "rounds", "partition", "rayfl", "torch", "folder")
    rows = []
    for run in runs:
        found = run.environment[-1].get("versions") if run.environment else None
        versions = found if isinstance(found, dict) else {}
        rows.append(
            [
                Cell(run.name),
                Cell(run.method),
                number(run.seed, 0),
                Cell(rounds_done(run), run.rounds_completed),
                Cell(run.partition_hash[:12] or "-"),
                Cell(str(versions.get("rayfl", "-"))),
                Cell(str(versions.get("torch", "-"))),
                Cell(run.uri),
            ]
        )
    columns = [Column(text, numeric=text in ("seed", "rounds")) for text in headings]
    text = "The runs. Equal beginnings of a partition's hash: the same samples on the same clients."
    return [
        Table("runs-table", text, columns, rows),
        Paragraph("`rayfl report` with a single run has its whole configuration. To check and repeat these:"),
        Code("Commands", "\n\n".join(commands(run) for run in runs)),
    ]
