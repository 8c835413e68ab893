"""What one client's local update costs on the CPU, as Markdown tables of ratios.

    python scripts/bench/bench_engine.py [--models NAME,...] [--methods NAME,...] [--momentum M] [--weight-decay W]
                                   [--repeats N] [--steps N] [--compile] [--stacks N,...]
                                   [--against CHECKOUT [--turns N]]

The first table sets a bare PyTorch loop with ``torch.optim.SGD`` against federated averaging (and, with ``--compile``,
against itself with ``torch.compile``), the second one methods against federated averaging. Everything runs in one
thread; the contenders of a row take turns, and the medians of their processor times are compared, so that other work on
the machine counts little.

With ``--stacks`` the table has clients of which that many are stacked: one by one, as steps are written, and compiled
(``engine.compile``), in milliseconds of processor time for a step of one client, the least of all turns.

With ``--against`` another checkout of rayfl and this one take turns, each in processes of its own; the table has the
least times of a step of each, and their ratios. A checkout with several kernels is measured with each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from engine_workloads import METHODS, MODELS, NO_WEIGHT_DECAY, Workload

from rayfl.engine.engine import EngineConfig

try:
    from actors.hosting.allocator import reuse_freed_memory
    from actors.hosting.building import pin_threads
except ModuleNotFoundError:  # another checkout, from before modules lay in folders
    from actors.allocator import reuse_freed_memory
    from actors.building import pin_threads

Contenders = dict[str, Callable[[], None]]


def times_of(
    contenders: Contenders, repeats: int, of: Callable[[list[float]], float] = statistics.median
) -> dict[str, float]:
    """Processor time in seconds of each contender; they take turns, after one turn each that is not counted."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            begun = time.process_time()
            run()
            times[name].append(time.process_time() - begun)
    return {name: of(taken) for name, taken in times.items()}


def kernels() -> tuple[str, ...]:
    """The ways of taking a step that this checkout offers; an empty name for the only one."""
    field = EngineConfig.model_fields.get("kernel")
    return ("",) if field is None else get_args(field.annotation)


def workload(model: str, method: str, chosen: argparse.Namespace) -> tuple[Workload, int]:
    """A client for a method, and how many steps it makes."""
    steps = chosen.steps or {"two_nn": 100, "char_lstm": 2}.get(model, 10)
    decay = 0.0 if method in NO_WEIGHT_DECAY else chosen.weight_decay
    return Workload(model, steps, chosen.momentum, decay), steps


def least(chosen: argparse.Namespace) -> dict[str, float]:
    """The least milliseconds of a step, by model, method and kernel."""
    found = {}
    for model in chosen.models.split(","):
        for method in chosen.methods.split(","):
            for kernel in kernels():
                work, steps = workload(model, method, chosen)
                run = work.method(METHODS[method], kernel)
                run()
                times = []
                for _ in range(chosen.repeats):
                    begun = time.process_time()
                    run()
                    times.append(time.process_time() - begun)
                found[f"{model} {method} {kernel}".strip()] = 1000 * min(times) / steps
    return found


def against(other: Path, chosen: argparse.Namespace) -> str:
    """The table of two checkouts that take turns."""
    best: dict[Path, dict[str, float]] = {other.resolve(): {}, Path(__file__).resolve().parents[2]: {}}
    given = [f"--{name}={getattr(chosen, name)}" for name in ("models", "methods", "momentum", "repeats", "steps")]
    for _ in range(chosen.turns):
        for root, known in best.items():
            command = [sys.executable, __file__, *given, f"--weight-decay={chosen.weight_decay}", "--times"]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
            for name, taken in json.loads(done.stdout.splitlines()[-1]).items():
                known[name] = min(taken, known.get(name, taken))
    before, now = best.values()
    lines = ["| model | method | before, ms a step | now | ratio to the best before |", "|---|---|---|---|---|"]
    for name, taken in now.items():
        old = {key: value for key, value in before.items() if f"{key} ".startswith(f"{name} ")}
        model, method = name.split()
        texts = ", ".join(f"{value:.2f} {key.removeprefix(name).strip()}".strip() for key, value in old.items())
        lines.append(f"| {model} | {method} | {texts} | {taken:.2f} | {taken / min(old.values()):.2f} |")
    return "\n".join(lines)


def tables(chosen: argparse.Namespace) -> str:
    """The tables of this checkout."""
    beside = ["fedavg", *(["compiled"] if chosen.compile else [])]
    others = [name for name in chosen.methods.split(",") if name != "fedavg"]
    columns = " | ".join(f"{name} / bare" for name in beside)
    first = [f"| model | bare PyTorch, ms a step | {columns} |", f"|---|---|{'---|' * len(beside)}"]
    second = [f"| model | {' | '.join(others)} |", f"|---|{'---|' * len(others)}"]
    for model in chosen.models.split(","):
        work, steps = workload(model, "fedavg", chosen)
        contenders: Contenders = {"bare": work.bare(), "fedavg": work.method(METHODS["fedavg"])}
        if chosen.compile:
            contenders["compiled"] = work.bare(compiled=True)
        contenders |= {name: workload(model, name, chosen)[0].method(METHODS[name]) for name in others}
        times = times_of(contenders, chosen.repeats)
        first.append(
            f"| {model} | {1000 * times['bare'] / steps:.2f} | {_ratios(times, beside, 'bare')} |",
        )
        second.append(f"| {model} | {_ratios(times, others, 'fedavg')} |")
    return "\n".join([*first, "", "Local updates of methods, federated averaging = 1:", "", *second])


def stacks(chosen: argparse.Namespace) -> str:
    """The table of stacks of clients; how long it took to compile is in the log."""
    lines = [
        "| model | method | clients | one by one, ms a client step | stacked | compiled | stacked / compiled "
        "| one by one / compiled |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for model in chosen.models.split(","):
        for method in chosen.methods.split(","):
            for clients in map(int, chosen.stacks.split(",")):
                work, steps = workload(model, method, chosen)
                ways: dict[str, dict[str, Any]] = {"one by one": {}, "stacked": {}, "compiled": {"compile": True}}
                contenders = {
                    name: work.method(METHODS[method], "", clients, **({"mode": "vectorized"} if n else {}), **options)
                    for n, (name, options) in enumerate(ways.items())
                }
                found = {k: 1000 * v / steps / clients for k, v in times_of(contenders, chosen.repeats, min).items()}
                alone, stacked, compiled = found.values()
                lines.append(
                    f"| {model} | {method} | {clients} | {alone:.2f} | {stacked:.2f} | {compiled:.2f} "
                    f"| {stacked / compiled:.2f} | {alone / compiled:.2f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _ratios(times: Mapping[str, float], names: list[str], to: str) -> str:
    return " | ".join(f"{times[name] / times[to]:.2f}" for name in names)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=0, help="local steps a turn; 0: as many as take a moment")
    parser.add_argument("--compile", action="store_true", help="also the bare loop with torch.compile")
    parser.add_argument("--stacks", default="", help="numbers of clients that are stacked, separated by commas")
    parser.add_argument("--against", type=Path, help="another checkout of rayfl")
    parser.add_argument("--turns", type=int, default=2, help="processes of each checkout")
    parser.add_argument("--times", action="store_true", help="print the least times as JSON")
    chosen = parser.parse_args()
    if chosen.against is not None:
        print(against(chosen.against, chosen))
        return
    pin_threads(1)
    reuse_freed_memory()
    if chosen.stacks:
        print(stacks(chosen))
        return
    print(json.dumps(least(chosen)) if chosen.times else tables(chosen))


if __name__ == "__main__":
    main()
