"""A driver that shares its Ray node with actors which do not know its processes by their numbers, as in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

import rayfl
from tests.support.experiments import assert_same, outcome, small_experiment

ROOT = Path(__file__).parents[3]
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child"]
"""Process 1 of its own namespace. With a ``/proc`` of its own too, Ray itself does not find its node."""
PATIENCE_S = 200
WIDE = {"name": "two_nn", "hidden": [256, 128]}
"""200 kB: a broadcast does not travel within a call."""

DRIVER = """
import json, os, sys
import ray, yaml
import rayfl
stored, put = [], ray.put
ray.put = lambda tree: stored.append(tree) or put(tree)
with open(sys.argv[1]) as file:
    rayfl.run(yaml.safe_load(file))
print("DRIVER", json.dumps({"pid": os.getpid(), "stored": len(stored)}))
"""


def drive(folder: Path, config: dict[str, Any], *within: str) -> dict[str, int]:
    """Runs the experiment on the tests' Ray from a process of its own, started by ``within``."""
    file = folder / f"{config['name']}.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        [*within, sys.executable, "-c", DRIVER, str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("DRIVER "))
    found: dict[str, int] = json.loads(said.removeprefix("DRIVER "))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("method", ["fedavg", "superfed-mm"])
def test_a_driver_in_another_container_than_its_actors(method: str, tmp_path: Path) -> None:
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")

    def experiment(name: str, **cluster: Any) -> dict[str, Any]:
        return small_experiment(tmp_path, name, method, **cluster) | {"model": WIDE}

    rayfl.run(experiment("inline", backend="inline"))
    beside = drive(tmp_path, experiment("beside", num_actors=2))
    within = drive(tmp_path, experiment("within", num_actors=2), *UNSHARE)
    assert within["pid"] == 1, "it should have a namespace of its own"
    assert beside["stored"] == 0 < within["stored"]
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "beside"))
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "within"))
