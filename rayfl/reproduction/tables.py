"""Which runs a paper's table needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.config.identity import FREE
from rayfl.config.loading import load_config
from rayfl.config.paper_presets import paper_preset, paper_presets
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError
from rayfl.naming.spelling import nearest
from rayfl.reproduction.baseline import FINETUNED, has_baseline, settings_of
from rayfl.reproduction.reference import ReferenceTable, reference_tables
from rayfl.reproduction.scaling import Scale, scaled

SEEDS = {"floco": 5, "fedme": 5, "pfllib": 3}
"""Runs of which a paper prints the mean, by its key; the others print one run."""

_FREE = ("dataset.root", "engine", *sorted(FREE - {"name", "storage_path"}))
"""What may be given in addition: where data are, and how a run is executed."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a table.

    Attributes:
        setting: the preset.
        method: as the table calls it.
        seed: of the run.
        config: the run; its folder lies in that of the reproduction.
        paper_rounds: T of the paper.
    """

    setting: str
    method: str
    seed: int
    config: ExperimentConfig
    paper_rounds: int


@dataclass(frozen=True)
class Reproduction:
    """What is run, and what it is compared with.

    Attributes:
        name: what the user asked for.
        scale: of the runs.
        tables: the tables, reduced to the settings and rows that are run.
        runs: setting by setting, method by method, seed by seed.
        finetuned: names of tables with their settings, where they get FedAvg with fine-tuning as a further row.
    """

    name: str
    scale: Scale
    tables: tuple[ReferenceTable, ...]
    runs: tuple[PlannedRun, ...]
    finetuned: frozenset[tuple[str, str]] = frozenset()


def obstacle(table: ReferenceTable) -> str:
    """Returns why a table cannot be reproduced by single runs; empty where it can."""
    if table.protocol is None:
        return f"its {table.metric} is no result of single runs"
    if table.rows == "statistics":
        return "its rows are statistics over several runs"
    return ""


def select_tables(name: str) -> tuple[ReferenceTable, ...]:
    """The tables that a name stands for.

    Args:
        name: of a table (``superfed-table1``), the beginning of several (``superfed-table4``), or a preset's
            (``superfed-table1-mnist-k50``) for that setting in all tables that have it.

    Raises:
        ConfigError: there are none, or none that single runs reproduce; names the nearest, or the reason.
    """
    known = reference_tables()
    found = [table for table in known if table.name == name]
    found = found or [table for table in known if table.name.startswith(f"{name}-")]
    if not found:
        found = [_only(table, name) for table in known if name in table.preset_names]
    if not found:
        names = {table.name for table in known} | {preset for table in known for preset in table.preset_names}
        raise ConfigError(f"no table of a paper is called {name!r}{nearest(name, names)}; `rayfl list tables` has all")
    possible = [table for table in found if not obstacle(table)]
    if not possible:
        reasons = "; ".join(f"{table.name}: {obstacle(table)}" for table in found)
        presets = ", ".join(dict.fromkeys(preset for table in found for preset in table.preset_names))
        raise ConfigError(f"{name} cannot be reproduced run by run ({reasons}). Its presets can be run: {presets}")
    return tuple(possible)


def plan_reproduction(
    schema: type[ExperimentConfig],
    name: str,
    folder: str,
    scale: Scale = "quick",
    rounds: int | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Reproduction:
    """Loads and validates every run of a table.

    Args:
        schema: the configuration class.
        name: see :func:`select_tables`.
        folder: where the runs' folders are to lie: a path or a URI.
        scale: see ``rayfl.reproduction.scaling``.
        rounds: T of all runs; None: as the scale has it.
        methods: rows of the tables; None: all.
        seeds: of the runs; None: 0, and at the paper's size as many as the paper averages over.
        overrides: dotted paths with values; only of what changes no result.

    Raises:
        ConfigError: the name, a method or an override is unknown, or a run is invalid.
    """
    tables = select_tables(name)
    _check_overrides(overrides or {})
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds is {rounds}, but must be at least 1")
    finetuned = frozenset((t.name, setting) for t in tables for setting in t.preset_names if has_baseline(t, setting))
    reduced = tuple(found for table in tables if (found := _with_methods(table, methods, finetuned)) is not None)
    offered = list(
        dict.fromkeys(
            row for table in tables for setting in table.preset_names for row in _rows(table, setting, finetuned)
        )
    )
    unknown = [method for method in methods or () if method not in offered]
    if unknown:
        raise ConfigError(
            f"{name} has no row {unknown[0]!r}{nearest(unknown[0], offered)}; it has {', '.join(offered)}"
        )
    if seeds is None:
        seeds = range(SEEDS.get(tables[0].paper, 1) if scale == "paper" else 1)
    runs = []
    for setting in dict.fromkeys(preset for table in reduced for preset in table.preset_names):
        wanted = dict.fromkeys(
            row for table in reduced if setting in table.preset_names for row in _rows(table, setting, finetuned)
        )
        for method in wanted if methods is None else [row for row in wanted if row in methods]:
            for seed in seeds:
                runs.append(_planned(schema, setting, method, seed, folder, scale, rounds, overrides or {}))
    return Reproduction(name, scale, reduced, tuple(runs), finetuned)


def _planned(
    schema: type[ExperimentConfig],
    setting: str,
    method: str,
    seed: int,
    folder: str,
    scale: Scale,
    rounds: int | None,
    overrides: Mapping[str, Any],
) -> PlannedRun:
    settings = {**settings_of(setting, method), "seed": seed, **overrides}
    preset = paper_preset(setting)
    paper = load_config(schema, preset.content, settings)
    # what the table's rows differ in stays as printed
    varied = {path if "." in path else f"algorithm.{path}" for variants in preset.variants for path in variants.over}
    changes = {path: value for path, value in scaled(paper, scale, rounds).items() if path not in varied}
    config = load_config(schema, preset.content, {**settings, **changes}) if changes else paper
    # the same settings under two names are one run: the folder's name has nothing of the row
    place = {
        "name": f"{config.algorithm.name}-seed{seed}-{config.fingerprint()[:8]}",
        "storage_path": _inside(folder, setting),
    }
    return PlannedRun(setting, method, seed, config.model_copy(update=place), paper.train.rounds)


def _inside(folder: str, setting: str) -> str:
    address, mark, options = folder.partition("?")
    return f"{address.rstrip('/')}/{setting}{mark}{options}"


def _rows(table: ReferenceTable, setting: str, finetuned: Collection[tuple[str, str]]) -> list[str]:
    """The methods of a setting: the printed ones, or where a figure prints none, all that the preset knows.

    A table of personalized models also has FedAvg with fine-tuning.
    """
    rows = list(table.settings[setting] if table.settings else paper_presets()[setting].methods)
    return [*rows, FINETUNED] if (table.name, setting) in finetuned else rows


def _only(table: ReferenceTable, setting: str) -> ReferenceTable:
    if not table.settings:
        return table.model_copy(update={"presets": (setting,)})
    return table.model_copy(update={"settings": {setting: table.settings[setting]}})


def _with_methods(
    table: ReferenceTable, methods: Sequence[str] | None, finetuned: Collection[tuple[str, str]]
) -> ReferenceTable | None:
    """The table with some of its rows; None where it has none of them."""
    if methods is None or not table.settings:
        return table
    settings = {
        setting: {row: cell for row, cell in cells.items() if row in methods}
        for setting, cells in table.settings.items()
    }
    baseline = [setting for setting in settings if FINETUNED in methods and (table.name, setting) in finetuned]
    settings = {setting: cells for setting, cells in settings.items() if cells or setting in baseline}
    return table.model_copy(update={"settings": settings}) if settings else None


def _check_overrides(overrides: Mapping[str, Any]) -> None:
    wrong = [path for path in overrides if not any(path == free or path.startswith(f"{free}.") for free in _FREE)]
    if wrong:
        raise ConfigError(
            f"override {wrong[0]}: the settings are the table's; only {', '.join(_FREE)} may be given here. "
            "Other experiments: rayfl run PRESET"
        )
