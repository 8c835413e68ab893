"""What the author of a method is told: which line of the author's own file, and what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

METHOD = """
from algorithms.base import Averaging

class Mine(Averaging):
    name: str = "mine"
    broken: str = ""

    async def local_update(self, client, model):
        print("lr is", client.lr)
        if self.broken == "client":
            helper(client)
        return await super().local_update(client, model)

    def objective(self, model, batch, task, frozen, draw):
        if self.broken == "objective":
            return task.loss(model, batch) + frozen["nothing"]
        return task.loss(model, batch)

    def round(self, server, cohort, clients):
        if self.broken == "server":
            return {"model": server["modle"]}
        if self.broken == "exit":
            raise SystemExit(3)
        if self.broken == "set":
            self.count = 1
        return super().round(server, cohort, clients)


def helper(client):
    raise ValueError(f"bad luck of {client.id}")
"""
TINY = [
    *("dataset=digits", "model={name: two_nn, hidden: [4]}", "partition={name: iid, num_clients: 4}"),
    *("train={rounds: 1, clients_per_round: 2, local_epochs: 1}", "tracking.tensorboard=false", "name=run"),
]


def rayfl(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, where the author's module lies."""
    (tmp_path / "mine.py").write_text(METHOD)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rayfl", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


def run(tmp_path: Path, broken: str, backend: str, *options: str) -> subprocess.CompletedProcess[str]:
    method = f"algorithm={{name: 'mine:Mine', broken: '{broken}'}}"
    cluster = f"cluster={{backend: {backend}}}" if backend == "inline" else "cluster={num_actors: 1}"
    return rayfl(tmp_path, *options, "run", *TINY, method, cluster, f"storage_path={tmp_path}")


def line_of(text: str) -> int:
    return METHOD.splitlines().index(text) + 1


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.slow), "inline"])
@pytest.mark.slow
def test_an_error_ends_with_the_lines_of_the_authors_file_and_the_log_has_all(backend: str, tmp_path: Path) -> None:
    done = run(tmp_path, "client", backend)
    assert done.returncode == 2
    source = str(tmp_path / "mine.py")
    expected = [
        f'  File "{source}", line {line_of("            helper(client)")}, in local_update',
        "    helper(client)",
        f'  File "{source}", line {line_of(METHOD.splitlines()[-1])}, in helper',
        '    raise ValueError(f"bad luck of {client.id}")',
    ]
    first, *rest = done.stderr.strip().splitlines()
    client = first.split()[2].rstrip(",")
    assert first == f"error: client {client}, round 1, local_update: ValueError: bad luck of {client}"
    assert rest == expected
    log = (tmp_path / "run" / "rayfl.log").read_text()
    assert "trampoline.py" in log  # frames of rayfl's too
    assert log.count("in helper") >= 1
    assert f"client {client}, round 1, local_update: lr is 0.01" in log
    assert f"client {client}, round 1, local_update: lr is 0.01" in done.stdout.splitlines()


@pytest.mark.slow
def test_debug_shows_what_happened_in_the_actor(tmp_path: Path) -> None:
    done = run(tmp_path, "objective", "ray", "--debug")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "In rayfl-host-00:" in done.stderr
    assert "looped.py" in done.stderr
    source = '            return task.loss(model, batch) + frozen["nothing"]'
    assert f'mine.py", line {line_of(source)}, in objective' in done.stderr


@pytest.mark.slow
def test_an_error_on_the_server_names_the_line_too(tmp_path: Path) -> None:
    done = run(tmp_path, "server", "inline")
    assert done.returncode == 1
    assert done.stderr.startswith("error: KeyError: 'modle'; `rayfl --debug run")
    assert done.stderr.strip().endswith('return {"model": server["modle"]}')
    assert "this should not happen" not in done.stderr
    (elsewhere := tmp_path / "elsewhere").mkdir()
    done = run(elsewhere, "exit", "inline")
    assert "ExitError: SystemExit(3) would end the whole process" in done.stderr
    assert "raise SystemExit(3)" in done.stderr


@pytest.mark.slow
def test_a_method_that_sets_an_attribute_is_told_where_to_keep_it(tmp_path: Path) -> None:
    done = run(tmp_path, "set", "inline")
    assert done.returncode == 2
    assert "error: Mine.count cannot be set" in done.stderr
    assert "client.state" in done.stderr
    assert done.stderr.strip().endswith("self.count = 1")
