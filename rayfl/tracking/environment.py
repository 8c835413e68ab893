"""With what a run was made: versions of the software, and names of the hardware. Kept in the run's folder.

Nothing else of the environment: no variables, users, paths, addresses or names of machines.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rayfl.storage.files import Storage
from rayfl.tracking.callback import Callback, RunInfo

FILE = "environment.json"
_PACKAGES = ("rayfl", "torch", "torchvision", "ray", "numpy", "scipy", "scikit-learn", "pyarrow", "pydantic")


class Environment(Callback):
    """Keeps ``environment.json``: a list with an entry for each time that the run was started.

    An entry has ``rounds_completed`` (0, or where the run was continued), ``rounds`` (how many the run was to have
    then), ``started`` (UTC, ISO 8601), ``versions``, ``machine`` (the driver's) and ``devices`` (number of actors by
    the device that they compute on); where actors stack clients, ``width``, how many at a time: the last bits of such a
    run depend on it.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def on_start(self, run: RunInfo) -> None:
        entry: dict[str, Any] = {
            "rounds_completed": run.rounds_completed,
            "rounds": run.config.train.rounds,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "machine": machine(),
            "devices": devices(run.hosts),
        }
        widths = [host["width"] for host in run.hosts if host.get("vectorized")]
        if widths:
            entry["width"] = max(widths)
        entries = [*read_environment(self._storage), entry]
        self._storage.write(FILE, environment_file(entries))


def environment_file(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the content of ``environment.json`` with these entries."""
    return (json.dumps(list(entries), indent=1) + "\n").encode()


def starts_before(entries: Sequence[dict[str, Any]], round: int) -> list[dict[str, Any]]:
    """Returns the starts after which a round was still to come."""
    known = [entry for entry in entries if isinstance(entry.get("rounds_completed"), int)]
    return [entry for entry in known if entry["rounds_completed"] < round]


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on; those not installed are left out."""
    found = {"python": platform.python_version(), **_installed()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


@cache
def _installed() -> dict[str, str]:
    """Returns the packages' versions; a process cannot change those it has imported."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> dict[str, Any]:
    """This machine: operating system, processor, number of CPUs, memory in bytes, names of the GPUs."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def device_name(device: torch.device) -> str:
    """Returns what a device is called: ``cpu``, or the GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def devices(hosts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many actors compute on which device; empty where the clients run in the driver's process."""
    return dict(sorted(Counter(str(host.get("device_name", host["device"])) for host in hosts).items()))


def read_environment(storage: Storage) -> list[dict[str, Any]]:
    """The entries of ``environment.json``, the first start first; empty where there is none or it is damaged.

    What it says is no part of the results, so damage to it ends no run.
    """
    try:
        content = json.loads(storage.read(FILE))
    except (FileNotFoundError, ValueError, RecursionError):
        return []
    return [entry for entry in content if isinstance(entry, dict)] if isinstance(content, list) else []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
