#!/usr/bin/env python3
# ruff: noqa: E402
"""Puts rayfl to the test on a GPU, in seven parts of less than nine minutes each: is it right, how fast, what if not.

    python scripts/gpu/campaign.py --part a --out FOLDER [--device cuda|cpu] [--only NAME,...] [--within SECONDS]

Part a compares results with those of the CPU. Part b measures seconds, bytes and launches, and sets them against the
goals. Part c lets things go wrong: memory that runs out, a lost context, an actor that is killed. Part d is about
adapters over a pretrained base. Part e measures what else could be done: options that are off by default, and other
ways to compute. Part f sets other simulators beside rayfl. Part g is about
the kinds of adapters. Every check runs in a process of its own and may take a
limited time, so that one that hangs or dies costs nothing but itself. After each check all answers are in
``FOLDER/campaign-a.json``, and in the end on a page, ``FOLDER/campaign-a.md``.

``--device cpu`` rehearses everything with less work, on a pretended device where something must fail: it shows that the
campaign runs, and says nothing about GPUs. ``--list`` prints the checks. docs/gpu.md says more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "race" / "contenders")]

import torch
from checks.page import write_page
from checks.running import Check, Record, SkippedError, run_checks

from actors.hosting.allocator import reuse_freed_memory
from rayfl.engine.precision import set_arithmetic

PARTS = {
    "a": ("correct", "messages", "stacks"),
    "b": ("fast", "workloads"),
    "c": ("wrong", "actors"),
    "d": ("adapters", "output_layer"),
    "e": ("choices",),
    "f": ("peers",),
    "g": ("kinds",),
}
"""The modules of each part, in this order."""
_WITHIN_S = 535
_PATIENCE = 12
"""How many times the time a rehearsal may take: machines without a GPU have few cores, often busy ones."""


def checks_of(part: str) -> list[Check]:
    """The checks of a part, in the order in which they run."""
    return [check for name in PARTS[part] for check in importlib.import_module(f"checks.{name}").CHECKS]


def run_one(part: str, name: str, record: Record) -> None:
    """Runs one check in this process; what it finds, and how it ends, is in the record.

    Args:
        part: of the check.
        name: of the check.
        record: is written whenever something is noted.
    """
    check = next(check for check in checks_of(part) if check.name == name)
    set_arithmetic("float32")
    reuse_freed_memory()  # as an actor does
    try:
        check.work(record)
        record.end("ok")
    except SkippedError as reason:
        record.end("skipped", str(reason))
    except BaseException:
        record.end("failed", traceback.format_exc()[-3000:])


def main() -> int:
    """Runs the checks of one part; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = "a: correct, b: fast, c: wrong, d: adapters, e: choices, f: peers, g: kinds of adapters"
    parser.add_argument("--part", choices=sorted(PARTS), help=what)
    parser.add_argument("--out", type=Path, help="folder of the answers, the logs and the page")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the rehearsal")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument(
        "--within", type=float, help=f"seconds for the part; default {_WITHIN_S}, of rehearsals {_WITHIN_S * _PATIENCE}"
    )
    parser.add_argument(
        "--together", type=int, default=1, help="checks that run at a time: saves time, and seconds mean nothing"
    )
    parser.add_argument("--peers", type=Path, help="the folder of scripts/race/race.py, whose peers then take part")
    parser.add_argument("--fl-bench", type=Path, help="a checkout of FL-bench, which then takes part")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--check", default="", help=argparse.SUPPRESS)  # one check, in this process
    chosen = parser.parse_args()
    if chosen.list:
        for part in sorted(PARTS):
            for check in checks_of(part):
                print(f"{part}  {check.name:24} {check.limit_s:4g} s  {check.what}")
        return 0
    if chosen.part is None or chosen.out is None:
        parser.error("--part and --out are needed")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no GPU (nvidia-smi says whether there is one, and for which CUDA): "
            "install a torch built for the driver's CUDA, or rehearse with --device cpu"
        )
    os.environ["CAMPAIGN_DEVICE"] = chosen.device
    if chosen.peers is not None:
        os.environ["CAMPAIGN_PEERS"] = str(chosen.peers.resolve())
    if chosen.fl_bench is not None:
        if not (chosen.fl_bench / "main.py").is_file():
            parser.error(f"--fl-bench: {chosen.fl_bench} is no checkout of FL-bench: it has no main.py")
        os.environ["FL_BENCH"] = str(chosen.fl_bench.resolve())
    if chosen.together < 1:
        parser.error("--together: at least 1 check has to run")
    if chosen.check:
        run_one(chosen.part, chosen.check, Record(chosen.out))
        return 0
    checks, names = checks_of(chosen.part), [name for name in chosen.only.split(",") if name]
    if unknown := set(names) - {check.name for check in checks}:
        parser.error(f"part {chosen.part} has no check {', '.join(sorted(unknown))}: see --list")
    command = [sys.executable, str(Path(__file__).resolve()), "--part", chosen.part, "--device", chosen.device]
    wanted = [check for check in checks if not names or check.name in names]
    patience = _PATIENCE if chosen.device == "cpu" else 1
    within = chosen.within or _WITHIN_S * patience
    wanted = [replace(check, limit_s=check.limit_s * patience) for check in wanted]
    answers = run_checks(wanted, command, chosen.out.resolve(), f"campaign-{chosen.part}", within, chosen.together)
    write_page(chosen.out / f"campaign-{chosen.part}.md", chosen.part, chosen.device, wanted, answers)
    return int(any(answer["status"] == "failed" for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
