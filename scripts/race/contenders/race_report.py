"""The results of the race as Markdown tables and a picture."""

from __future__ import annotations

import datetime
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from work import WORKS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BEGIN, END = "<!-- race: begin -->", "<!-- race: end -->"
TITLES = {
    "rayfl": "rayfl",
    "rayfl-commits": "rayfl, commits every round",
    "bare": "bare PyTorch, 2 processes",
    "pfl": "pfl-research, 2 processes",
    "flower": "Flower",
    "fluke": "fluke, 1 process",
}
COLOURS = {
    "rayfl": "#0072B2",
    "rayfl-commits": "#56B4E9",
    "bare": "#999999",
    "pfl": "#E69F00",
    "flower": "#009E73",
    "fluke": "#CC79A7",
}
Results = Sequence[Mapping[str, Any]]
Measure = Callable[[Mapping[str, Any]], float]


def write_report(found: Results, versions: Mapping[str, str], page: Path) -> None:
    """Replaces what lies between the marks of ``page`` and draws ``images/race.png`` beside it."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in text:
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END}")
    shown = [contender for contender in TITLES if any(row["contender"] == contender for row in found)]
    parts = [
        _conditions(found, versions),
        _times(found, shown),
        _starts(found, shown),
        _memory(found, shown),
        _checks(found, shown),
    ]
    page.write_text(before + BEGIN + "\n" + "\n\n".join(parts) + "\n" + END + after)
    (page.parent / "images").mkdir(exist_ok=True)
    draw(relative(found, _time), page.parent / "images" / "race.png")


def medians(found: Results, measure: Measure) -> dict[str, dict[str, float]]:
    """By work and contender: the median over turns of what was measured."""
    return {
        work: {contender: float(np.median(list(own.values()))) for contender, own in turns.items()}
        for work, turns in _turns(found, measure).items()
    }


def relative(found: Results, measure: Measure) -> dict[str, dict[str, float]]:
    """The same, relative to rayfl in the same turn: a machine's speed may change from one to the next."""
    table: dict[str, dict[str, float]] = {}
    for work, turns in _turns(found, measure).items():
        for contender, own in turns.items():
            both = own.keys() & turns["rayfl"].keys()  # not all need have been in all turns
            table.setdefault(work, {})[contender] = float(np.median([own[t] / turns["rayfl"][t] for t in both]))
    return table


def _turns(found: Results, measure: Measure) -> dict[str, dict[str, dict[int, float]]]:
    """What was measured of each work and contender, by turn."""
    table: dict[str, dict[str, dict[int, float]]] = {}
    for work in WORKS:
        for contender in TITLES:
            rows = [row for row in found if (row["work"], row["contender"]) == (work, contender)]
            own = {row["turn"]: measure(row) for row in rows}
            if own:
                table.setdefault(work, {})[contender] = own
    return table


def _time(row: Mapping[str, Any]) -> float:
    """A process's median, in seconds a round (or evaluation)."""
    return float(np.median(row["evaluation"] if WORKS[row["work"]].evaluate else row["rounds"]))


def _conditions(found: Results, versions: Mapping[str, str]) -> str:
    counts = Counter((row["work"], row["contender"]) for row in found)
    fewest, most = min(counts.values()), max(counts.values())
    turns = f"{most}" if fewest == most else f"{fewest} to {most}"
    lines = [
        f"{datetime.date.today()}, {_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, "
        f"Python {platform.python_version()}; {turns} turns.",
        "",
        ", ".join(f"{TITLES[contender].split(',')[0]} {version}" for contender, version in versions.items()) + ".",
    ]
    return "\n".join(lines)


def _processor() -> str:
    rows = Path("/proc/cpuinfo").read_text().splitlines()
    return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _works(found: Results) -> list[str]:
    return [work for work in WORKS if any(row["work"] == work for row in found)]


def _header(shown: Sequence[str]) -> list[str]:
    return ["work", *(TITLES[contender] for contender in shown)]


def _times(found: Results, shown: Sequence[str]) -> str:
    rows = _with_ratios(found, shown, _time, "{:.3f}")
    titled = [[f"**{work}** {WORKS[work].title}", *cells] for work, *cells in rows]
    title = "Seconds a round, and in brackets how many times rayfl's in the same turn (medians of both):"
    return f"{title}\n\n{_markdown(_header(shown), titled)}"


def _starts(found: Results, shown: Sequence[str]) -> str:
    rows = _with_ratios(found, shown, lambda row: row["start"], "{:.1f}")
    title = "**W6**: seconds from the start of the process to the end of the first round, and likewise in brackets:"
    return f"{title}\n\n{_markdown(_header(shown), rows)}"


def _with_ratios(found: Results, shown: Sequence[str], measure: Measure, form: str) -> list[list[str]]:
    ratios = relative(found, measure)
    return [
        [work, *(f"{form.format(own[c])} ({ratios[work][c]:.2f})" if c in own else "-" for c in shown)]
        for work, own in medians(found, measure).items()
    ]


def _memory(found: Results, shown: Sequence[str]) -> str:
    rows = [
        _cells(found, shown, work, "peak_mib", "{:.0f}") for work in WORKS if any(row["work"] == work for row in found)
    ]
    return "Peak memory of all processes together, in MiB (PSS):\n\n" + _markdown(_header(shown), rows)


def _cells(found: Results, shown: Sequence[str], work: str, key: str, form: str) -> list[str]:
    cells = [work]
    for contender in shown:
        own = [row[key] for row in found if (row["work"], row["contender"]) == (work, contender)]
        cells.append(form.format(np.median(own)) if own else "-")
    return cells


def _checks(found: Results, shown: Sequence[str]) -> str:
    rows = []
    for work in _works(found):
        cells = [work]
        for contender in shown:
            own = [row for row in found if (row["work"], row["contender"]) == (work, contender)]
            pair = (
                (np.median([row["loss"] for row in own]), np.median([row["accuracy"] for row in own])) if own else None
            )
            cells.append("-" if pair is None else f"{pair[0]:.3f}, {100 * pair[1]:.1f} %")
        rows.append(cells)
    return "What they learned, test loss and accuracy at the end:\n\n" + _markdown(_header(shown), rows)


def draw(table: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars of times relative to rayfl's, by work and contender, on a logarithmic axis."""
    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    shown = [contender for contender in TITLES if any(contender in times for times in table.values())]
    width = 0.8 / len(shown)
    for place, contender in enumerate(shown):
        at = [i + (place - (len(shown) - 1) / 2) * width for i, w in enumerate(table) if contender in table[w]]
        ratios = [table[w][contender] for w in table if contender in table[w]]
        bars = axis.bar(at, ratios, width * 0.92, color=COLOURS[contender], label=TITLES[contender], bottom=0)
        if not contender.startswith("rayfl"):
            axis.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios], fontsize=7, padding=1)
    axis.set_yscale("log")
    axis.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"], minor=False)
    axis.minorticks_off()
    axis.set_ylim(0.5)
    axis.axhline(1, color=COLOURS["rayfl"], linewidth=0.8)
    axis.set_xticks(range(len(table)), list(table))
    axis.set_ylabel("time of a round, rayfl = 1")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=8, ncols=4, loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
