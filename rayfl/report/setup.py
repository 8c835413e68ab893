"""How a run was made, and how it is made again: its environment, configuration and commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rayfl.config.plain_yaml import write_yaml
from rayfl.config.redaction import redacted
from rayfl.report.blocks import Block, Cell, Code, Column, Paragraph, Table
from rayfl.runs.loading import Run


def setup(run: Run) -> list[Block]:
    """Returns the blocks on the environment, the configuration, and how to do the run again."""
    resolved = redacted(dict(run.content))
    blocks: list[Block] = []
    if run.environment:
        blocks.append(_environment(run.environment))
    else:
        blocks.append(Paragraph("The run did not record its environment."))
    blocks += [
        Code("Resolved configuration", write_yaml(resolved)),
        Paragraph(
            "To do it again: install the versions above, put the data where the configuration says, and start the "
            "configuration under a new name. On CPUs the results are the same then, to the bit with equal versions and "
            f"processors, if the partition is: its hash is {run.partition_hash or 'not known here'}. `rayfl verify` "
            "checks that the folder is whole."
        ),
        Code("Commands", commands(run)),
    ]
    return blocks


def commands(run: Run) -> str:
    """Returns shell commands that do a run again."""
    last = run.environment[-1].get("versions") if run.environment else None
    versions = last if isinstance(last, Mapping) else {}
    pins = [f"{name}=={version}" for name, version in versions.items() if name not in ("python", "cuda", "rayfl")]
    lines = [f"rayfl verify {shlex.quote(run.uri)}"]
    if pins:
        lines.append(f"pip install {' '.join(shlex.quote(pin) for pin in pins)}")
    config = run.uri if "://" not in run.uri else "."
    lines.append(f"rayfl run {shlex.quote(f'{config}/config.yaml')} name={shlex.quote(f'{run.name}-again')}")
    return "\n".join(lines)


def _environment(entries: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a column for each start of the run; equal starts in a row are one."""
    columns = [_environment_facts(entry) for entry in entries]
    kept = [
        (entry, facts)
        for n, (entry, facts) in enumerate(zip(entries, columns, strict=True))
        if n == 0 or facts != columns[n - 1]
    ]
    names = dict.fromkeys(name for _, facts in kept for name in facts)
    headings = [f"from round {entry.get('rounds_completed', '?')}, {entry.get('started', '?')}" for entry, _ in kept]
    rows = [[Cell(name), *(Cell(facts.get(name, "-")) for _, facts in kept)] for name in names]
    return Table(
        "environment-table",
        "With what the run was made.",
        [Column("what", numeric=False), *(Column(heading, numeric=False) for heading in headings)],
        rows,
        sortable=False,
    )


def _environment_facts(entry: Mapping[str, Any]) -> dict[str, str]:
    versions, machine, devices = (entry.get(part) or {} for part in ("versions", "machine", "devices"))
    facts = {str(name): str(version) for name, version in versions.items()}
    if machine:
        facts |= {
            "system": str(machine.get("system", "-")),
            "processor": f"{machine.get('processor', '-')}, {machine.get('cpus', '-')} CPUs",
            "GPUs of the driver": ", ".join(map(str, machine.get("gpus") or [])) or "none",
        }
        if isinstance(machine.get("memory"), int):
            facts["memory"] = f"{machine['memory'] / 2**30:.0f} GiB"
    facts["actors"] = ", ".join(f"{count} on {name}" for name, count in devices.items()) or "in the driver's process"
    return facts
