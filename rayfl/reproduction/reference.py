"""The numbers that the papers print, for comparison with runs of their presets (``presets/reference.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.config.paper_presets import REFERENCE_FILE
from rayfl.config.plain_yaml import read_yaml

Metric = Literal[
    "top1",
    "top5",
    "loss",
    "ece",
    "mce",
    "choice",
    "time_ratio",
    "seconds",
    "clients",
    "train_samples",
    "configuration",
]
Unit = Literal["percent", "share", "nats", "ratio", "seconds", "number"]
Status = Literal["target", "caution", "no_target"]

_METRICS = ("top1", "top5", "loss", "ece", "mce")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Protocol(_Record):
    """Which row and column of a run's ``rounds.parquet`` stands for a printed number (test split)."""

    row: Literal["global", "personalized"] = Field(
        description="the row: global, or personalized for the one that rayfl.config.paper_presets.method_row names, "
        "else the algorithm's own personalized one"
    )
    selected_on: Literal["", "test", "test per client"] = Field(
        "", description="of methods that sweep (lambda): what the row chosen among the sweep was chosen on"
    )
    cohort: Literal["all", "selected"] = Field("all", description="all clients, or those of the round")
    phase: Literal["received", "trained"] = Field("received", description="before or right after local training")
    over: Literal["mean", "pooled", "worst5"] = Field(
        "mean", description="over clients: mean, all samples together, or mean of the lowest 5 %"
    )
    rounds: Literal["last"] | tuple[int, int] = Field(
        "last", description="the last evaluation, or the mean over the evaluations of these completed rounds"
    )
    best_round: bool = Field(
        False,
        description="whether the paper prints the best of all rounds on test data; ours is then shown beside the last "
        "round's, marked, and is what the printed number is compared with",
    )
    differs: str = Field(description="where the paper's own evaluation differs from that row")

    def column(self, metric: Metric) -> str:
        """The column of ``rounds.parquet`` (``rayfl.results.schemas.ROUNDS_SCHEMA``) that has a metric."""
        if metric == "choice":
            return "choice"
        return {"mean": metric, "pooled": f"pooled_{metric}", "worst5": f"{metric}_worst5"}[self.over]


class Cell(_Record):
    """A printed number, in the table's unit."""

    mean: float
    std: float | None = Field(None, ge=0)


class Remark(_Record):
    """Why some cells are no targets, or to be compared with caution.

    Attributes:
        status: which of the two.
        methods: rows it is about; None: all.
        settings: presets it is about; None: all.
        reason: in words.
    """

    status: Literal["caution", "no_target"]
    methods: tuple[str, ...] | None = None
    settings: tuple[str, ...] | None = None
    reason: str

    def covers(self, setting: str, method: str) -> bool:
        """Returns whether a cell is meant."""
        return (self.methods is None or method in self.methods) and (self.settings is None or setting in self.settings)


class ReferenceTable(_Record):
    """One metric of a printed table or figure.

    Attributes:
        name: unique; begins with the paper's key.
        paper: key of the paper.
        table: its number in the paper.
        caption: what it shows.
        metric: of the cells. A column of the results; ``choice``, the chosen lambda; ``time_ratio``, the first
            evaluated round in which the baseline is as accurate as at its end, over the first in which the method is
            (Grinwald et al., NeurIPS 2024, table 4); or what is no result: data and configuration.
        unit: of the cells; percent is 100 times what the results have.
        std_over: what a cell's ``std`` is taken over.
        protocol: how a result that compares is found; None where the numbers are no results of one run.
        rows: whether the rows are methods of the presets or other statistics.
        settings: cells by preset and row.
        finding: what a figure without numbers shows.
        presets: of a figure without numbers, its settings.
        remarks: on cells.
    """

    name: str
    paper: str
    table: str
    caption: str
    metric: Metric
    unit: Unit
    std_over: Literal["clients", "runs"] | None = None
    protocol: Protocol | None = None
    rows: Literal["methods", "statistics"] = "methods"
    settings: dict[str, dict[str, Cell]] = {}
    finding: str | None = None
    presets: tuple[str, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> ReferenceTable:
        if bool(self.settings) == bool(self.finding and self.presets):
            raise ValueError(f"{self.name} needs either settings with cells, or finding and presets")
        if self.settings and self.metric in _METRICS and self.protocol is None:
            raise ValueError(f"{self.name} has results without a protocol")
        bound = {"percent": 100.0, "share": 1.0}.get(self.unit, float("inf"))
        for setting, row, cell in self.cells():
            if not 0 <= cell.mean <= bound:
                raise ValueError(f"{self.name}: {setting}, {row}: {cell.mean} is no {self.unit}")
            if cell.std is not None and self.std_over is None:
                raise ValueError(f"{self.name}: {setting}, {row} has a std, but std_over does not say over what")
        rows = {row for _, row, _ in self.cells()}
        for remark in self.remarks:
            unknown = {*(remark.methods or ())} - rows | {*(remark.settings or ())} - {*self.settings}
            if unknown:
                raise ValueError(f"{self.name}: a remark is about {', '.join(sorted(unknown))}, which it has not")
        return self

    def cells(self) -> list[tuple[str, str, Cell]]:
        """Preset, row and number of every cell."""
        return [(setting, row, cell) for setting, rows in self.settings.items() for row, cell in rows.items()]

    def remarks_on(self, setting: str, method: str) -> tuple[Remark, ...]:
        """Returns what is to be known of a cell."""
        return tuple(remark for remark in self.remarks if remark.covers(setting, method))

    def status(self, setting: str, method: str) -> Status:
        """Returns whether a cell is something to reach: a target, one with caution, or none."""
        found = {remark.status for remark in self.remarks_on(setting, method)}
        return "no_target" if "no_target" in found else "caution" if found else "target"

    @property
    def preset_names(self) -> tuple[str, ...]:
        """The presets that are its settings."""
        return tuple(self.settings) or self.presets


@lru_cache
def reference_tables() -> tuple[ReferenceTable, ...]:
    """All printed tables and figures, in the order of the papers."""
    text = (resources.files("rayfl") / "presets" / REFERENCE_FILE).read_text(encoding="utf-8")
    return parsed_reference(read_yaml(text))


def parsed_reference(content: Mapping[str, Any]) -> tuple[ReferenceTable, ...]:
    """The tables in a reference file's content, whose protocols are named.

    Raises:
        ValueError: a table is malformed, names an unknown protocol, or has another's name.
    """
    protocols = {name: Protocol.model_validate(fields) for name, fields in content["protocols"].items()}
    tables: dict[str, ReferenceTable] = {}
    for fields in content["tables"]:
        name = fields.get("protocol")
        if name is not None and name not in protocols:
            raise ValueError(f"{fields['name']}: there is no protocol {name!r}")
        table = ReferenceTable.model_validate({**fields, "protocol": protocols.get(name)})
        if table.name in tables:
            raise ValueError(f"two tables are called {table.name}")
        tables[table.name] = table
    return tuple(tables.values())
