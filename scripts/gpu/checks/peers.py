"""Part f: other simulators on the same GPU, where they are installed.

They take part with the programs of the race (scripts/race/contenders), on this device. With ``--peers FOLDER`` they are
those of the environments that ``scripts/race/race.py --folder FOLDER`` has made, else those of this interpreter.
FL-bench takes part with ``--fl-bench FOLDER``, a checkout.
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
import torch
from work import WORKS, Task, Work

from algorithms.fedavg import FedAvg
from checks.bases import folder_of, section_of, spec_of
from checks.bench import DEVICE, REHEARSAL, federation, play, scaled, seconds
from checks.running import Check, Record, SkippedError
from rayfl.examples import InputSpec
from rayfl.models.zoo import TwoNN
from rayfl.randomness import RandomStreams

_PACKAGES = {"rayfl": "ray", "flower": "flwr", "pfl": "pfl", "fluke": "fluke"}
_HERE = Path(__file__).resolve().parents[1]
_CONTENDERS = _HERE.parent / "race" / "contenders"


def _work(contender: str) -> Work:
    """100 of 100 clients, TwoNN: enough work for a GPU; a round or two of it in a rehearsal."""
    work = replace(WORKS["W1"], cohort=100, rounds=3 if contender == "fluke" else 6)  # it had not ended after 60 s
    return replace(work, clients=4, cohort=4, samples=20, rounds=3) if REHEARSAL else work


def interpreter(contender: str) -> str:
    """Python that has the contender's package.

    Raises:
        SkippedError: when there is none.
    """
    if contender == "flbench":
        if "FL_BENCH" not in os.environ:
            raise SkippedError("it has no package: --fl-bench names a checkout")
        return sys.executable
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
    python, work = interpreter(contender), _work(contender)
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
        found: dict[str, Any] = _printed(command, scratch, environment, "RACE ")
    return found


def _of(contender: str) -> Callable[[Record], None]:
    def measure(record: Record) -> None:
        found = _raced(contender)
        taken = statistics.median(found["rounds"])
        work = _work(contender)
        what = f"{work.cohort} of {work.clients} TwoNN clients of {work.samples} samples, batches of {work.batch}"
        record.note("work", what)
        if contender == "flbench":
            record.note("other than in the rest", "initial weights are its own, and pixels are rounded to bytes")
        record.note("s a round", taken)
        record.note("loss and accuracy", [found["loss"], found["accuracy"]])
        own = record.path.parent / "peer-rayfl.json"
        if contender == "rayfl":
            own.write_text(json.dumps(taken))
        elif own.exists():
            ratio = taken / json.loads(own.read_text())
            record.note("times rayfl's", ratio)
            if contender == "flower":
                record.goal(f"Flower to rayfl, {work.clients} TwoNN clients", "at least 10", ratio, ratio >= 10)

    return measure


def adapters_in_flower(record: Record) -> None:
    """Rounds of 16 ViT-B clients in Flower, whose workers train adapters of peft, and in rayfl."""
    name, clients, steps, batch = "ViT-B/16", scaled(16, 2), scaled(4, 2), scaled(10, 2)
    folder, spec = folder_of(name), spec_of(name)
    python = interpreter("flower")
    # Found, not imported: these imports take seconds, and Flower's processes make them again.
    missing = "from importlib.util import find_spec as f; exit(f('peft') is None or f('transformers') is None)"
    if subprocess.run([python, "-c", missing]).returncode:
        raise SkippedError("peft and transformers are not installed beside flwr")
    settings = {
        "folder": folder, "device": DEVICE.type, "clients": clients, "steps": steps, "batch": batch, "rounds": 4,
        "shape": spec.shape, "classes": spec.num_classes, "gpu_share": 0.0 if REHEARSAL else 0.25,
        "workers": scaled(4, 1),
    }  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONPATH": f"{_HERE}:{os.environ.get('PYTHONPATH', '')}",
        "CAMPAIGN_FLOWER": json.dumps(settings),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        command = [python, "-c", "from flower_adapters import main; main()"]
        seconds_of = _printed(command, scratch, environment, "FLOWER ")
    flower = min(seconds_of)
    toy = federation(FedAvg(), [steps * batch] * clients, section_of(name), spec, batch_size=batch)
    if not REHEARSAL:
        toy.task.network.compute_in(torch.bfloat16)
    own = seconds(lambda: play(toy), 2)
    record.note("s a round", {"flower": flower, "rayfl": own})
    record.note("in Flower", "four workers share the GPU; each keeps its base; a client repeats one mini-batch")
    record.goal(f"{name}, {clients} clients: Flower to rayfl", "at least 1", flower / own, flower >= own)


def _printed(command: list[str], folder: str, environment: dict[str, str], mark: str) -> Any:
    """What a program prints as JSON after a mark.

    All that it prints goes on to this check's log as it comes, so that one that is ended shows how far it came.

    Raises:
        RuntimeError: when it fails, or prints no such line.
    """
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    line = next((line for line in reversed(lines) if mark in line), None)
    if process.returncode or line is None:
        raise RuntimeError("".join(lines)[-2500:])
    return json.loads(line.partition(mark)[2])


CHECKS = (
    *(
        Check(f"peer_{name}", limit, f"The race's work in {name}, on this device", _of(name))
        for name, limit in (("rayfl", 60), ("flower", 110), ("pfl", 60), ("fluke", 60), ("flbench", 110))
    ),
    Check("peer_flower_adapters", 130, "Adapters of a ViT-B/16 in Flower and in rayfl", adapters_in_flower),
)
