"""Breaks runs on purpose, runs the same command again, and compares with an undisturbed run, to the bit.

    python scripts/chaos/chaos.py --trials 200 --seed 0      # and writes the table of docs/reliability.md
    python scripts/chaos/chaos.py --short                    # a few trials of most kinds, no page
    python scripts/chaos/chaos.py --damage --trials 40       # damage, copies and links alone: the page's second table

A trial ends well if the server's model, the states of all clients and all tables are those of the undisturbed run, and
``rayfl verify`` finds nothing wrong. Where a fault costs rows or states for good, all else must be the undisturbed
run's, and on record what was lost. The seed chooses moments, methods and files. Exit status 1 if a trial failed; its
folder is kept.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reliability.md"
_SHORT = 15

# One thread, for the same bits everywhere; before PyTorch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("RAY_ADDRESS", None)
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

from chaos_damage import DAMAGE  # noqa: E402
from chaos_inline import (  # noqa: E402
    BOUNDARIES,
    Laboratory,
    boundary_names,
    failed_at_boundary,
    killed_at_boundary,
)
from chaos_random import RANDOM  # noqa: E402
from chaos_ray import FAULTS, ray_trial  # noqa: E402
from chaos_trials import Trial  # noqa: E402

Work = Callable[[], Trial | None]


def plan(
    laboratory: Laboratory, names: Sequence[str], last: range, trials: int, seed: int, short: bool
) -> Iterator[Work]:
    """The trials: every boundary of the last commit if there are enough, all kinds on Ray, and the others in turn."""
    rng = random.Random(seed)
    on_ray = ["actor"] if short else list(islice(cycle(FAULTS), max(len(FAULTS), trials // 12)))
    kills = list(last) if not short and trials >= len(last) + len(on_ray) else rng.sample(last, max(3, trials // 4))
    others = max(trials - len(kills) - len(on_ray), 0)
    for number in kills:
        yield lambda number=number: killed_at_boundary(laboratory, number, names[number])  # type: ignore[misc]
    failures = [(errno.ENOSPC, False), (errno.EROFS, False), (errno.EIO, True)]
    every = {**RANDOM, **DAMAGE}
    kinds = ["driver", "damage", "client-raise", *DAMAGE, *RANDOM, *failures, "driver", "driver", *failures]
    for kind in islice(cycle(kinds), others):
        private = random.Random(rng.randrange(1 << 60))
        if isinstance(kind, str):
            yield lambda kind=kind, private=private: every[kind](laboratory, private)  # type: ignore[misc]
        else:
            number, (code, once) = private.randrange(len(names)), kind
            yield lambda number=number, code=code, once=once: failed_at_boundary(  # type: ignore[misc]
                laboratory, number, names[number], code, once
            )
    for fault in on_ray:
        private = random.Random(rng.randrange(1 << 60))
        yield lambda fault=fault, private=private: ray_trial(laboratory, private, fault)  # type: ignore[misc]


def damage_alone(laboratory: Laboratory, trials: int, seed: int) -> Iterator[Work]:
    """The trials of damage, copies and links in turn."""
    rng = random.Random(seed)
    for kind in islice(cycle(DAMAGE), trials):
        private = random.Random(rng.randrange(1 << 60))
        yield lambda kind=kind, private=private: DAMAGE[kind](laboratory, private)  # type: ignore[misc]


def table(results: Sequence[Trial]) -> str:
    """A Markdown table: a row per fault."""
    rows = [
        "| fault | trials | struck | ended well | seconds to go on: median | max |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for fault in dict.fromkeys(trial.fault for trial in results):
        mine = [trial for trial in results if trial.fault == fault]
        seconds = [trial.recover_s for trial in mine if trial.recover_s is not None]
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "- | -"
        struck, well = sum(trial.struck for trial in mine), sum(not trial.problem for trial in mine)
        rows.append(f"| {fault} | {len(mine)} | {struck} | {well} | {times} |")
    well = sum(not trial.problem for trial in results)
    rows.append(f"| all | {len(results)} | {sum(trial.struck for trial in results)} | {well} | | |")
    return "\n".join(rows)


def write_page(text: str, place: str) -> None:
    """Puts a table between its markers in the page."""
    first, last = f"<!-- {place}: begin -->", f"<!-- {place}: end -->"
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise SystemExit(f"{PAGE} lacks the lines {first} and {last}, between which the table belongs")
    PAGE.write_text(f"{before}{first}\n{text}\n{last}{after}", encoding="utf-8")


def machine() -> str:
    """This machine in words."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python {platform.python_version()}"


def main() -> int:
    """Runs the trials; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=None, help="begin no further trial after so long")
    parser.add_argument("--short", action="store_true", help="a few trials, and no page")
    parser.add_argument("--damage", action="store_true", help="damage, copies and links alone")
    parser.add_argument("--json", type=Path, default=None, help="write all trials to this file, too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rayfl-chaos-"))
    laboratory = Laboratory(folder)
    laboratory.warm_up()
    begun, results = time.monotonic(), list[Trial]()
    names, first = boundary_names(laboratory)
    last, trials = range(first, len(names)), _SHORT if options.short else options.trials
    every = plan(laboratory, names, last, trials, options.seed, options.short)
    for work in damage_alone(laboratory, trials, options.seed) if options.damage else every:
        if options.minutes is not None and time.monotonic() - begun > 60 * options.minutes:
            break
        trial = work()
        if trial is None:
            continue  # needs a right that this process does not have
        results.append(trial)
        said = f"{len(results):4} {'FAILED' if trial.problem else 'ok':6} {trial.fault}: {trial.detail} {trial.problem}"
        print(said.rstrip(), flush=True)
        laboratory.tidy(keep=bool(trial.problem))
    minutes, load = (time.monotonic() - begun) / 60, os.getloadavg()[1]
    print(f"\n{table(results)}\n\n{minutes:.1f} minutes")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(trial) for trial in results], indent=1))
    if not options.short:
        killed = sum(trial.fault.startswith(BOUNDARIES) for trial in results)
        limit = f" --minutes {options.minutes:g}" if options.minutes is not None else ""
        tried = f"{killed} of the {len(last)} boundaries of one commit were tried. "
        write_page(
            f"{table(results)}\n\n{'' if options.damage else tried}"
            f"`python scripts/chaos/chaos.py{' --damage' if options.damage else ''} --trials {options.trials} --seed "
            f"{options.seed}{limit}`, {datetime.now(UTC):%Y-%m-%d}, {minutes:.0f} minutes at low priority on "
            f"{machine()}; load average {load:.1f}.",
            "chaos of damage" if options.damage else "chaos",
        )
    failed = any(trial.problem for trial in results)
    if failed:
        print(f"what failed is in {folder}")
    else:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
