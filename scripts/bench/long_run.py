"""Does a long run leak? Memory, open files, time per round and size on storage, over thousands of rounds.

    python scripts/bench/long_run.py --rounds 2000 --minutes 5

Runs a tiny experiment on a local Ray with one actor, looks at driver and actor in /proc after every round (Linux with
glibc), and writes a table of slopes into docs/reliability.md and a picture to docs/long-run.png.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, PICTURE = ROOT / "docs" / "reliability.md", ROOT / "docs" / "long-run.png"
BEGIN, END = "<!-- long run: begin -->", "<!-- long run: end -->"
_SETTLED = 0.25
"""Share of the rounds, at the beginning, in which caches may still fill: slopes are those of the rest."""
_MIB = 1 << 20
_OBJECTS = "object_store_memory"

os.environ.pop("RAY_ADDRESS", None)

import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import ray  # noqa: E402

import rayfl  # noqa: E402
from rayfl.tracking.callback import RunInfo  # noqa: E402

mpl.use("Agg")
from matplotlib import pyplot  # noqa: E402

QUANTITIES = {
    "driver_mib": ("memory of the driver", "MiB"),
    "heap_mib": ("of it in use on the heap", "MiB"),
    "actor_mib": ("memory of the actor", "MiB"),
    "driver_files": ("open files of the driver", ""),
    "actor_files": ("open files of the actor", ""),
    "objects_kib": ("Ray's object store in use", "KiB"),
    "round_ms": ("time per round", "ms"),
    "commits_kib": ("size of commits/", "KiB"),
    "folder_kib": ("size of the run's folder", "KiB"),
}


@dataclass
class Meter(rayfl.Callback):
    """Looks at everything after every round.

    Args:
        folder: the run's folder.
        minutes: ends the run after so long.
    """

    folder: Path
    minutes: float
    rows: list[dict[str, float]] = field(default_factory=list)
    _pids: dict[str, int] = field(default_factory=dict)
    _begun: float = 0.0

    def on_start(self, run: RunInfo) -> None:
        self._pids = {"driver": os.getpid(), "actor": int(run.hosts[0]["pid"])}
        self._begun = time.monotonic()

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        row = {"round": float(rounds_completed), "round_ms": seconds * 1000, "heap_mib": _heap() / _MIB}
        for name, pid in self._pids.items():
            row[f"{name}_mib"] = _resident(pid) / _MIB
            row[f"{name}_files"] = len(os.listdir(f"/proc/{pid}/fd"))
        total, free = ray.cluster_resources(), ray.available_resources()
        row["objects_kib"] = (total[_OBJECTS] - free.get(_OBJECTS, 0.0)) / 1024
        row["commits_kib"] = _size(self.folder / "commits") / 1024
        row["folder_kib"] = _size(self.folder) / 1024
        self.rows.append(row)
        if time.monotonic() - self._begun > 60 * self.minutes:
            raise KeyboardInterrupt


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _heap() -> int:
    """Bytes that this process has allocated and not freed: what allocators keep for later is left out."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd) + pa.total_allocated_bytes()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # a commit is being written, and others deleted
    return total


def experiment(folder: Path, rounds: int) -> dict[str, Any]:
    """Five clients with states, three of them in a round."""
    return {
        "name": "run",
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
        "model": {"name": "two_nn", "hidden": [12]},
        "algorithm": {"name": "scaffold"},
        "train": {"rounds": rounds, "clients_per_round": 3, "local_epochs": 1, "batch_size": 128, "lr": 0.05},
        "cluster": {"num_actors": 1},
    }


def slopes(rows: Sequence[dict[str, float]]) -> str:
    """A Markdown table: at the beginning, at the end, and the slope of a least-squares line, per 1,000 rounds."""
    lines = [
        "| | after the first tenth | at the end | slope per 1,000 rounds |",
        "|---|--:|--:|--:|",
    ]
    settled = rows[int(len(rows) * _SETTLED) :]
    window = max(len(rows) // 50, 1)
    early = rows[len(rows) // 10 : len(rows) // 10 + window]
    for name, (label, unit) in QUANTITIES.items():
        x, y = (np.array([row[key] for row in settled]) for key in ("round", name))
        slope = np.polyfit(x, y, 1)[0] * 1000
        before, after = (float(np.median([row[name] for row in part])) for part in (early, rows[-window:]))
        lines.append(f"| {label}{f', {unit}' if unit else ''} | {before:.1f} | {after:.1f} | {slope:+.2f} |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, float]]) -> None:
    """One small picture a quantity."""
    figure, axes = pyplot.subplots(3, 3, figsize=(11, 7), layout="constrained")
    rounds = [row["round"] for row in rows]
    for axis, (name, (label, unit)) in zip(axes.flat, QUANTITIES.items(), strict=False):
        axis.plot(rounds, [row[name] for row in rows], linewidth=0.8)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("round")
        axis.set_ylabel(unit)
        axis.set_ylim(0, 1.1 * max(row[name] for row in rows))
    for axis in list(axes.flat)[len(QUANTITIES) :]:
        axis.set_axis_off()
    figure.savefig(PICTURE, dpi=90)


def main() -> None:
    """Runs and reports; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0, help="end the run after so long")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rayfl-long-run-"))
    meter = Meter(folder / "run", options.minutes)
    try:
        rayfl.run(experiment(folder, options.rounds), callbacks=[meter])
    except KeyboardInterrupt:
        print(f"ended after {len(meter.rows)} rounds")
    finally:
        shutil.rmtree(folder)
    if len(meter.rows) < 20:
        sys.exit("too few rounds for slopes")
    text = slopes(meter.rows)
    print(text)
    draw(meter.rows)
    command = f"python scripts/bench/long_run.py {shlex.join(sys.argv[1:])}"
    note = (
        f"{len(meter.rows)} rounds, slopes over the last {1 - _SETTLED:.0%} of them. `{command}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, at low priority on {os.cpu_count()} cores; "
        f"load average {os.getloadavg()[1]:.1f}."
    )
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} lacks the lines {BEGIN} and {END}, between which the table belongs")
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{note}\n\n![]({PICTURE.name})\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
