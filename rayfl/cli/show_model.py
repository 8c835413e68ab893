"""``rayfl show model=NAME dataset=NAME``: a model's parts, and what methods send and keep with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from rayfl.cli.outputs import write_json
from rayfl.tracking import terminal

if TYPE_CHECKING:
    from rayfl.config.schema import ExperimentConfig


def show_model(config: ExperimentConfig, methods: str | None, as_json: bool) -> None:
    """Prints the anatomy of a configuration's model, then a row for each method as soon as it is measured.

    Args:
        config: a configuration.
        methods: names with commas; None: all.
        as_json: whether one JSON object is printed in place of text.
    """
    from algorithms.registry import METHODS
    from rayfl.cli import anatomy

    wanted = [name.strip() for name in methods.split(",")] if methods is not None else list(METHODS)
    found = anatomy.anatomies(config)
    spec = anatomy.inputs_of(config)
    if not as_json:
        for one in found:
            for line in anatomy.as_lines(one):
                terminal.say(line)
    traffic = []
    with terminal.err().status("measuring"):
        for row in anatomy.measured(config, spec, wanted):
            traffic.append(row)
    if as_json:
        write_json("show-model", anatomy.as_json(found, traffic))
        return
    table = Table("method", title="Bytes for each client and round, counted in a second round", title_justify="left")
    for heading in ("down", "up", "state kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("refused", overflow="fold")
    for row in traffic:
        cells = (row.down, row.up, row.state)
        table.add_row(row.method, *("-" if value is None else f"{value:,}" for value in cells), row.refused)
    terminal.out().print(table)
