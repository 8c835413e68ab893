"""Part b: other simulators on the same GPU, where they are installed.

They take part with the programs of the race (scripts/race/contenders), on this device. With ``--peers FOLDER`` they are
those of the environments that ``scripts/race/race.py --folder FOLDER`` has made, else those of this interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import data
import numpy as np
from work import WORKS, Task, Work

from checks.bench import DEVICE, REHEARSAL
from checks.running import Check, Record, SkippedError
from rayfl.examples import InputSpec
from rayfl.models.zoo import TwoNN
from rayfl.randomness import RandomStreams

_PACKAGES = {"rayfl": "ray", "flower": "flwr", "pfl": "pfl", "fluke": "fluke"}
_CONTENDERS = Path(__file__).resolve().parents[2] / "race" / "contenders"


def _work() -> Work:
    """100 of 100 clients, TwoNN: enough work for a GPU; a round or two of it in a rehearsal."""
    work = replace(WORKS["W1"], cohort=100, rounds=6)
    return replace(work, clients=4, cohort=4, samples=20, rounds=3) if REHEARSAL else work


def interpreter(contender: str) -> str:
    """Python that has the contender's package.

    Raises:
        SkippedError: when there is none.
    """
    folder = os.environ.get("CAMPAIGN_PEERS")
    if folder and contender != "rayfl":
        own = Path(folder) / "environments" / contender / "bin" / "python"
        if own.exists():
            return str(own)
    if importlib.util.find_spec(_PACKAGES[contender]) is None:
        raise SkippedError(f"{_PACKAGES[contender]} is not installed")
    return sys.executable


def _prepared(work: Work, folder: Path) -> Path:
    """The samples, and the initial weights that rayfl draws, as files."""
    files = folder / "data"
    if not (files / "initial.npz").exists():
        data.write(work, files)
        tree = (
            TwoNN()
            .network(InputSpec("image", work.shape, work.classes))
            .initialize(RandomStreams(0).integer("init.global"))
        )
        np.savez(files / "initial.npz", **{f"{i:03d}": tensor.numpy() for i, tensor in enumerate(tree.values())})
    return files


def _raced(contender: str) -> dict[str, Any]:
    """What a contender says of its rounds."""
    python, work = interpreter(contender), _work()
    with tempfile.TemporaryDirectory(prefix="rayfl-campaign-") as scratch:
        path = Path(scratch) / "task.json"
        files = _prepared(work, Path(scratch))
        (Path(scratch) / "run").mkdir()
        Task(work, str(files), time.time(), str(Path(scratch) / "run"), DEVICE.type).write(path)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONPATH": f"{_CONTENDERS}:{Path(__file__).resolve().parents[3]}:{os.environ.get('PYTHONPATH', '')}",
            "RAYFL_RACE": str(path),
        }
        command = [python, str(_CONTENDERS / f"with_{contender}.py"), str(path)]
        ran = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    line = next((line for line in reversed(ran.stdout.splitlines()) if "RACE " in line), None)
    if ran.returncode or line is None:
        raise RuntimeError((ran.stdout + ran.stderr)[-2500:])
    found: dict[str, Any] = json.loads(line.partition("RACE ")[2])
    return found


def _of(contender: str) -> Callable[[Record], None]:
    def measure(record: Record) -> None:
        found = _raced(contender)
        taken = statistics.median(found["rounds"])
        record.note("work", "100 of 100 TwoNN clients of 400 samples, batches of 10")
        record.note("s a round", taken)
        record.note("loss and accuracy", [found["loss"], found["accuracy"]])
        own = record.path.parent / "peer-rayfl.json"
        if contender == "rayfl":
            own.write_text(json.dumps(taken))
        elif own.exists():
            ratio = taken / json.loads(own.read_text())
            record.note("times rayfl's", ratio)
            if contender == "flower":
                record.goal("Flower to rayfl, 100 TwoNN clients", "at least 10", ratio, ratio >= 10)

    return measure


CHECKS = tuple(
    Check(f"peer_{name}", limit, f"The race's work in {name}, on this device", _of(name))
    for name, limit in (("rayfl", 40), ("flower", 55), ("pfl", 30), ("fluke", 30))
)
