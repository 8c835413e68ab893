"""Figures of clients: nobody is left out of them without a word."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from algorithms.registry import METHODS
from rayfl.report.drawing import Drawing, legend_above, styled
from rayfl.report.figures import client_distribution
from rayfl.report.rows import RowKey
from rayfl.results.schemas import METRICS_KEY, metrics_of
from rayfl.runs.finding import load_run
from tests.plots.test_text_fits import faults


def test_clients_whose_number_is_infinite_or_missing_are_counted(copied: Callable[..., Path]) -> None:
    run = copied("fedavg-0")
    for name in ("rounds", "clients"):
        table = pq.read_table(run / f"{name}.parquet")
        first, *others = metrics_of(table)
        error = replace(first, better="lower", unit="", scale=1.0)
        table = table.replace_schema_metadata({METRICS_KEY: json.dumps([asdict(m) for m in (error, *others)]).encode()})
        if name == "clients":
            values = np.array([client + 1.0 for client in table["client"].to_pylist()])
            values[np.array(table["client"].to_pylist()) == 1] = np.inf
            missing = [client == 2 for client in table["client"].to_pylist()]
            place = table.schema.get_field_index("top1")
            values = type(table["top1"].chunk(0)).from_pandas(values, mask=np.array(missing))
            table = table.set_column(place, table.schema.field("top1"), values)
        pq.write_table(table, run / f"{name}.parquet")
    with styled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = client_distribution(load_run(str(run), METHODS), [RowKey("global")])
        assert isinstance(drawn, Drawing)
        drawn.figure.draw_without_rendering()
    count = drawn.data.num_rows
    assert drawn.data["accuracy"].to_pylist()[:2] == [np.inf, count + 1]
    assert (
        f"global, {count} clients (1 infinite and not in the picture, 1 more without a number): highest inf"
        in drawn.caption
    )


def test_more_histograms_than_there_are_colours_are_not_drawn(copied: Callable[..., Path]) -> None:
    run = load_run(str(copied("fedavg-0")), METHODS)
    for lines, panels in ((8, 2), (9, 1)):
        with styled():
            drawn = client_distribution(run, [RowKey("global")] * lines)
        assert isinstance(drawn, Drawing)
        assert len(drawn.figure.axes) == panels
        assert ("on its right" in drawn.caption) == (panels == 2)


def test_long_legends_are_not_cut_off() -> None:
    for names in (
        ["fedavg", "ditto"],
        [f"superfed (orthogonality_weight={n}, proximal_weight=0.0)" for n in range(16)],
    ):
        with styled():
            figure = Figure(figsize=(9.6, 3.8), layout="constrained")
            axes = figure.subplots()
            for name in names:
                axes.plot([0, 1], label=name)
            legend_above(figure, *axes.get_legend_handles_labels())
            assert faults(figure) == []
            assert axes.get_window_extent().height > 250
