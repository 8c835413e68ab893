"""Writes ``docs/presets.md``: the presets of the papers' tables, their methods' settings, and the printed numbers.

    python scripts/docs/preset_pages.py            writes the page
    python scripts/docs/preset_pages.py --check    says whether it is out of date, exit status 1 if so

All of it comes from ``rayfl/presets/papers.yaml`` and ``rayfl/presets/reference.yaml``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from algorithms.registry import Experiment
from rayfl.cli.catalog import catalog
from rayfl.config.loading import load_config
from rayfl.config.paper_presets import PaperPreset, method_settings, paper_presets
from rayfl.config.paper_settings import Paper, Variants
from rayfl.reproduction.reference import Protocol, ReferenceTable, reference_tables

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "presets.md"

_FAMILY = re.compile(r".*?-(?:table|fig)\w+-")

_INTRODUCTION = """<!-- made by scripts/docs/preset_pages.py, from papers.yaml and reference.yaml in rayfl/presets -->

# Presets

`rayfl run PRESET` runs one, `rayfl show PRESET` shows every value of it and `rayfl list presets` lists them. Overrides
change single values or the method:

```bash
rayfl run superfed-table1-mnist-k50
rayfl run superfed-table1-mnist-k50 algorithm=fedavg train.rounds=100
```

A preset of a paper's table runs the paper's own method. What the paper's other methods need in its place is what
`rayfl.config.paper_presets.method_settings` gives:

```python
import rayfl
from rayfl.config.paper_presets import method_settings

rayfl.run("floco-table1-femnist", **method_settings("floco-table1-femnist", "fedprox"))
```

Where a paper and its published code disagree, or the paper leaves something open, the notes say what the preset has;
they are also the comments that its YAML begins with.

The numbers are those that the papers print. (Parentheses): no target, for the reason given below the table. A star:
compare with caution. They are read by `rayfl.reproduction.reference.reference_tables()`."""


def page() -> str:
    """The page's text."""
    presets, tables = list(paper_presets().values()), reference_tables()
    parts = [_INTRODUCTION, _other_presets()]
    for paper in dict.fromkeys(preset.paper for preset in presets):
        own = [preset for preset in presets if preset.paper is paper]
        names = {preset.name for preset in own}
        parts += _section(paper, own, [table for table in tables if names.issuperset(table.preset_names)])
    return "\n\n".join(parts) + "\n"


def _other_presets() -> str:
    rows = [[f"`{name}`", f"{line}."] for name, line, *rest in catalog("presets") if not rest]
    return "## Of rayfl's own\n\n" + _table(["preset", "what"], rows)


def _section(paper: Paper, presets: Sequence[PaperPreset], tables: Sequence[ReferenceTable]) -> list[str]:
    return [
        f"## {paper.short}",
        f"{paper.authors}: {paper.title}.",
        _settings(presets),
        "### Notes",
        _notes(presets),
        "### Methods",
        _methods(presets),
        *(part for table in tables for part in _numbers(table)),
    ]


def _settings(presets: Sequence[PaperPreset]) -> str:
    heads = ["preset", "of", "what", "model", "T", "per round", "E", "B", "lr", "decay", "momentum", "weight decay"]
    rows = []
    for preset in presets:
        config = load_config(Experiment, preset.name, [])
        train = config.train
        numbers = [train.rounds, train.clients_per_round, train.local_epochs, train.batch_size, train.lr]
        numbers += [train.lr_decay, train.momentum, train.weight_decay]
        model = _flow(preset.content["model"], drop="candidates")
        rows.append([f"`{preset.name}`", preset.table, preset.about, f"`{model}`", *map(_number, numbers)])
    return _table(heads, rows)


def _notes(presets: Sequence[PaperPreset]) -> str:
    notes: dict[str, list[str]] = {}
    for preset in presets:
        for note in preset.notes:
            notes.setdefault(note, []).append(preset.name)
    everywhere = [preset.name for preset in presets]
    lines = [
        f"* {note}" if names == everywhere else f"* {_scope(names, everywhere)}: {note}"
        for note, names in notes.items()
    ]
    return "\n".join(lines)


def _methods(presets: Sequence[PaperPreset]) -> str:
    everywhere = [preset.name for preset in presets]
    found: dict[str, dict[str, list[str]]] = {}
    copied: dict[str, list[str]] = {}
    for preset in presets:
        copies = {name for variants in preset.variants for name in variants.copies(preset.methods)}
        for method in preset.methods:
            if method not in copies:
                settings = _flow(method_settings(preset.name, method))
                found.setdefault(method, {}).setdefault(settings, []).append(preset.name)
        for variants in preset.variants:
            copied.setdefault(_described(variants), []).append(preset.name)
    rows = []
    for method, by_settings in found.items():
        most = max(by_settings.values(), key=len)
        for settings, names in by_settings.items():
            others = "all that have it" if len(by_settings) == 1 else "all others"
            rows.append([f"`{method}`", f"`{settings}`", others if names is most else _scope(names, everywhere)])
    text = _table(["method", "settings", "presets"], rows)
    lines = [f"* {_scope(names, everywhere)}: {description}" for description, names in copied.items()]
    return "\n\n".join([text, *(["Copies of methods:", "\n".join(lines)] if lines else [])])


def _described(variants: Variants) -> str:
    values = "; ".join(f"{path} {', '.join(map(str, options))}" for path, options in variants.over.items())
    return f"`{variants.named}` of {', '.join(f'`{method}`' for method in variants.of)}: {values}."


def _numbers(table: ReferenceTable) -> list[str]:
    parts = [f"### {table.table}: `{table.name}`", table.caption]
    if table.finding is not None:
        parts.append(table.finding)
        parts.append("Preset: " + ", ".join(f"`{name}`" for name in table.presets) + ".")
        return parts
    unit = {"percent": "In percent.", "share": "", "nats": "", "ratio": "", "number": "", "seconds": ""}[table.unit]
    protocol = _protocol(table.protocol, table.metric) if table.protocol else ""
    text = " ".join(part for part in (unit, protocol) if part)
    return [*parts, *([text] if text else []), _cells(table), *_remarks(table)]


def _protocol(protocol: Protocol, metric: Any) -> str:
    chosen = f", of sweeps the one selected on {protocol.selected_on}" if protocol.selected_on else ""
    when = "last round" if protocol.rounds == "last" else f"rounds {protocol.rounds[0]} to {protocol.rounds[1]}"
    row = f"row {protocol.row}{chosen}, cohort {protocol.cohort}, phase {protocol.phase}, {when}"
    return f"Compares with column `{protocol.column(metric)}`, {row}. {protocol.differs}"


def _cells(table: ReferenceTable) -> str:
    methods = list(dict.fromkeys(row for _, row, _ in table.cells()))
    return _table(
        [{"methods": "method", "statistics": ""}[table.rows], *(f"`{name}`" for name in table.settings)],
        [[f"`{method}`", *(_cell(table, setting, method) for setting in table.settings)] for method in methods],
    )


def _cell(table: ReferenceTable, setting: str, method: str) -> str:
    cell = table.settings[setting].get(method)
    if cell is None:
        return "-"
    numbers = [f"{n:.2f}" if table.unit == "percent" else _number(n) for n in (cell.mean, cell.std) if n is not None]
    text = " +- ".join(numbers)
    return {"target": text, "caution": f"{text} *", "no_target": f"({text})"}[table.status(setting, method)]


def _remarks(table: ReferenceTable) -> list[str]:
    lines = []
    for remark in table.remarks:
        scope = [", ".join(f"`{name}`" for name in names) for names in (remark.methods, remark.settings) if names]
        mark = {"caution": "Caution", "no_target": "No target"}[remark.status]
        lines.append(f"* {mark}{': ' + ' in '.join(scope) if scope else ''}. {remark.reason}")
    return ["\n".join(lines)] if lines else []


def _scope(names: Sequence[str], everywhere: Sequence[str]) -> str:
    """Names of presets, those of a whole table as one."""
    families: dict[str, list[str]] = {}
    for name in names:
        found = _FAMILY.match(name)
        families.setdefault(found.group() if found else name, []).append(name)
    short = []
    for family, members in families.items():
        whole = len(members) > 1 and members == [name for name in everywhere if name.startswith(family)]
        short += [f"{family}*"] if whole else members
    return ", ".join(f"`{name}`" for name in short)


def _number(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _flow(value: Any, drop: str = "") -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping) and len(value) == 1 and "name" in value:
        return str(value["name"])
    if isinstance(value, Mapping) and value.get("name") == drop:
        value = value[drop]
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=10_000).strip()


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: list[str]) -> int:
    """Writes or checks the page; returns the exit status."""
    text = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in arguments:
        print(f"out of date: {PAGE.relative_to(ROOT)}")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
