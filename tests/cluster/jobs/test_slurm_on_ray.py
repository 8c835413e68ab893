"""Two jobs of the file for SLURM at once on this machine: real Rays and real runs, stand-ins for SLURM's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.jobs.templating import render, template_options

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
RUN = ["quickstart", "algorithm=fedavg", "train.rounds=2", "evaluation.every=2"]


def start(folder: Path, number: int, nodes: int) -> subprocess.Popen[str]:
    """Begins a job; its second node is another raylet of this machine."""
    script = folder / f"{number}.sh"
    chosen = template_options({"name": f"job-{number}", "nodes": nodes, "shared_volume": str(folder)})
    script.write_text(render("slurm", chosen, RUN))
    given = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": "here",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "0",
        "SLURM_MEM_PER_NODE": "1000",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return subprocess.Popen(
        ["bash", str(script)], env=kept | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_two_jobs_on_one_node_run_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    for name, content in {"srun": SRUN, "scontrol": "#!/bin/sh\nhostname\n"}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    base = os.getpid() % 1000 * 10_000  # numbers that nobody else's job has
    jobs = {base + 1: start(tmp_path, base + 1, nodes=2), base + 4001: start(tmp_path, base + 4001, nodes=1)}
    try:
        for number, job in jobs.items():
            output, errors = job.communicate(timeout=240)
            assert job.returncode == 0, f"{output}{errors}"
            assert (tmp_path / "runs" / f"job-{number}" / "rounds.parquet").exists()
    finally:
        for job in jobs.values():
            job.terminate()
            job.communicate(timeout=60)
    assert list((tmp_path / ".ray-tokens").iterdir()) == []
    for number in jobs:
        folder = f"/tmp/rayfl-{number}"
        assert not Path(folder).exists()
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert [command for command in running.splitlines() if f"{folder}/" in command] == []
