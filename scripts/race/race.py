# ruff: noqa: E402
"""The same work in rayfl, Flower, pfl-research, fluke and a bare PyTorch loop, in turns: who is how fast.

    python scripts/race/race.py --folder FOLDER [--works W1,W3] [--contenders rayfl,pfl] [--repeats 5] [--out PAGE]

Each contender runs in a virtual environment of its own below ``--folder``, made on first use with the newest release on
the package index and the release of PyTorch that this script runs with; rayfl and the bare loop in the environment of
this script. All get the same data and initial weights, two processes with one thread each (fluke has one process), and
tell loss and accuracy beside their times. Results go to
``<folder>/results.json``, which later calls extend, and from there to a table and a picture.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "contenders"
sys.path.insert(0, str(HERE))

import data
import numpy as np
from memory import Peak
from race_report import write_report
from work import WORKS, Task, Work

from rayfl.examples import InputSpec
from rayfl.models.zoo import Architecture, CharLSTM, TwoCNN, TwoNN
from rayfl.randomness import RandomStreams

REQUIREMENTS = {"flower": ["flwr[simulation]"], "pfl": ["pfl[pytorch]"], "fluke": ["fluke-fl"]}
CONTENDERS = ("rayfl", "rayfl-commits", "bare", "pfl", "flower", "fluke")
VARIANTS = {"rayfl-commits": {"RAYFL_RACE_COMMITS": "1"}}
"""``rayfl-commits`` commits every round, the others at the end alone."""
ARCHITECTURES: dict[str, Architecture] = {"two_nn": TwoNN(), "two_cnn": TwoCNN(), "char_lstm": CharLSTM()}
TIMEOUT_S = 900


def interpreter(contender: str, folder: Path) -> str:
    """Python with the contender installed; makes the environment on first use."""
    if contender not in REQUIREMENTS:
        return sys.executable
    environment = folder / "environments" / contender
    if not (environment / "ready").exists():
        print(f"installing {contender}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        # Frameworks are compared, not releases of PyTorch. ("2.13.0+cpu" is a build of a release.)
        torch = "torch==" + importlib.metadata.version("torch").partition("+")[0]
        subprocess.run([environment / "bin/pip", "install", "--quiet", *REQUIREMENTS[contender], torch], check=True)
        (environment / "ready").touch()
    return str(environment / "bin/python")


def prepare(work: Work, folder: Path) -> Path:
    """The work's data and the initial weights that rayfl draws, as files."""
    files = folder / "data" / work.name
    if not (files / "initial.npz").exists():
        data.write(work, files)
        tokens = work.model == "char_lstm"
        spec = InputSpec("tokens" if tokens else "image", work.shape, work.classes, work.classes if tokens else 0)
        tree = ARCHITECTURES[work.model].network(spec).initialize(RandomStreams(0).integer("init.global"))
        np.savez(files / "initial.npz", **{f"{i:03d}": tensor.numpy() for i, tensor in enumerate(tree.values())})
    return files


def run(contender: str, work: Work, folder: Path) -> dict[str, Any]:
    """One process (with its children) of one contender: what it measured, and its peak memory."""
    python, files, scratch = interpreter(contender, folder), prepare(work, folder), folder / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    path = folder / "task.json"
    # Ray lowers the priority of its workers by default, which would let any other program of the machine slow them.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "PYTHONPATH": str(HERE),
    }
    environment["RAYFL_RACE"] = str(path)
    Task(work, str(files), time.time(), str(scratch)).write(path)
    environment |= VARIANTS.get(contender, {})
    command = [python, str(HERE / f"with_{contender.partition('-')[0]}.py"), str(path)]
    with Peak() as peak, (folder / "last.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=scratch, env={**environment, **peak.mark}, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            out, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
    line = next((line for line in reversed(out.splitlines()) if "RACE " in line), None)
    if process.returncode or line is None:
        tail = "\n".join((folder / "last.log").read_text().splitlines()[-15:])
        raise SystemExit(f"{contender} failed on {work.name} (exit code {process.returncode}):\n{tail}")
    result: dict[str, Any] = json.loads(line.partition("RACE ")[2])
    return {**result, "contender": contender, "work": work.name, "peak_mib": peak.mib}


def versions(folder: Path) -> dict[str, str]:
    """The release of each contender that was installed, and of its PyTorch."""
    names = {"rayfl": "rayfl", "flower": "flwr", "pfl": "pfl", "fluke": "fluke-fl", "bare": "torch"}
    found = {}
    for contender, package in names.items():
        code = f"import importlib.metadata as m; print(m.version({package!r}), m.version('torch'))"
        python = interpreter(contender, folder) if contender not in REQUIREMENTS else None
        python = python or str(folder / "environments" / contender / "bin/python")
        if Path(python).exists():
            release, torch = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
            found[contender] = f"{release} (torch {torch})"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="environments, data and results")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of every contender at every work")
    parser.add_argument("--out", type=Path, help="page to write the tables into, between its marks")
    arguments = parser.parse_args()
    folder, results = arguments.folder.resolve(), arguments.folder / "results.json"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = json.loads(results.read_text()) if results.exists() else []
    for name in filter(None, arguments.works.split(",")):
        contenders = arguments.contenders.split(",")
        before = 1 + max((row["turn"] for row in found if row["work"] == name), default=-1)
        for turn in range(arguments.repeats):
            # Everybody is first once: a machine's speed may change within a turn.
            for contender in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                result = run(contender, WORKS[name], folder)
                found.append({**result, "turn": before + turn})
                results.write_text(json.dumps(found))
                median = float(np.median(result["rounds"]))
                print(
                    f"{name} {turn + 1}/{arguments.repeats} {contender:7} {median:.4f} s a round, start "
                    f"{result['start']:.1f} s, {result['peak_mib']:.0f} MiB, loss {result['loss']:.4f}, accuracy "
                    f"{result['accuracy']:.3f}",
                    flush=True,
                )
    if arguments.out is not None:
        write_report(found, versions(folder), arguments.out)


if __name__ == "__main__":
    main()
