"""Checks whether a machine or a cluster is ready for runs; each problem comes with its fix."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from actors.processes.gpu_sharing import modes, mps_runs
from cluster.rounds.privacy import open_to_others, token_file
from rayfl.data.sources.root import data_root
from rayfl.errors import RayflError
from rayfl.storage.files import Storage, absolute

Verdict = Literal["ok", "warning", "wrong"]

_MINIMUM_PYTHON = (3, 11)
_SHARED_MEMORY_SHARE = 0.3
"""Ray's object store takes this share of the memory, in /dev/shm."""
_OPEN_FILES = 4096
_PROCESSES = 4096
_DASHBOARD_PORT = 8265
_SOCKET_PATH = 60
"""Longer folders leave too little for the names of Ray's sockets (107 bytes together)."""
_GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: a line of the table.

    Attributes:
        what: what was checked.
        verdict: ``ok``, ``warning`` (runs work, but not well) or ``wrong``.
        found: what was found.
        fix: what to do; empty for ``ok``.
    """

    what: str
    verdict: Verdict
    found: str
    fix: str = ""


def examine(address: str | None, storage: str) -> list[Finding]:
    """Examines this machine and, if an address is given, the cluster.

    Args:
        address: address of a Ray cluster (``host:port``, ``auto``); None for this machine only.
        storage: folder of all runs, a path or URI.
    """
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_torch,
        check_gpus,
        check_gpu_sharing,
        check_shared_memory,
        lambda: check_limit("open files", resource.RLIMIT_NOFILE, _OPEN_FILES, "ulimit -n 65536"),
        lambda: check_limit("processes", resource.RLIMIT_NPROC, _PROCESSES, "ulimit -u 65536"),
        check_temporary_folder,
        lambda: check_storage(storage),
        check_data,
        check_ports,
        check_token,
    ]
    findings = [Finding(f"version of {name}", *check_version(name)) for name in ("rayfl", "ray")]
    findings += [check() for check in checks]
    if address is not None:
        findings.append(check_cluster(address, storage))
    return findings


def check_version(name: str) -> tuple[Verdict, str, str]:
    """Returns the verdict on an installed package, its version, and what to do if there is none."""
    try:
        return "ok", version(name), ""
    except PackageNotFoundError:
        return "wrong", "not installed", f"pip install {name}"


def check_python() -> Finding:
    """Checks Python's version."""
    old = sys.version_info < _MINIMUM_PYTHON
    return Finding(
        "version of Python", "wrong" if old else "ok", platform.python_version(), "install 3.11 or newer" if old else ""
    )


def check_torch() -> Finding:
    """Checks by torchvision's operators whether torch and torchvision were built for each other."""
    what = "torch and torchvision"
    try:
        found = f"{version('torch')}, {version('torchvision')}"
        import torch
        import torchvision

        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (ImportError, PackageNotFoundError, RuntimeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Finding(what, "wrong", f"do not work together: {reason}", "install both from one index, in one command")
    return Finding(what, "ok", found)


def check_gpus() -> Finding:
    """Checks which GPUs torch can use, and whether it sees those of the driver."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        return Finding("GPUs", "ok", f"{count} x {', '.join(names)} (CUDA {torch.version.cuda})")
    if Path("/proc/driver/nvidia/gpus").is_dir() and os.environ.get("CUDA_VISIBLE_DEVICES", "all"):
        return Finding("GPUs", "wrong", "the driver has some, torch sees none", "install a torch built for CUDA")
    return Finding("GPUs", "ok", "none; runs on the CPU")


def check_gpu_sharing() -> Finding:
    """Checks how many processes may use a GPU at a time, and whether NVIDIA's service for sharing one (MPS) runs."""
    what, found, mps = "GPU sharing", modes(), mps_runs()
    if found is None:
        return Finding(what, "ok", "no nvidia-smi")
    said = ", ".join(f"GPU {gpu}: {mode}" for gpu, mode in found.items())
    said += "; MPS runs: a GPU's processes compute side by side, and one that fails takes the others along" * mps
    closed = [gpu for gpu, mode in found.items() if mode == "Prohibited"]
    alone = [gpu for gpu, mode in found.items() if mode.startswith("Exclusive")]
    if closed:
        return Finding(
            what, "wrong", said, f"nvidia-smi -i {','.join(closed)} -c DEFAULT (as root): no process may use it"
        )
    if alone and not mps:
        fix = f"set cluster.actors_per_gpu=1, or nvidia-smi -i {','.join(alone)} -c DEFAULT, or start MPS"
        return Finding(what, "warning", f"{said}; MPS does not run: a second process on a GPU fails", fix)
    return Finding(what, "ok", said)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 -- it is this folder that counts
    """Checks the room for Ray's object store, without which Ray falls back to the disk."""
    from rayfl.diagnosis.machine_memory import machine_memory

    if not folder.is_dir():
        return Finding("shared memory", "ok", "this system has no /dev/shm")
    size = shutil.disk_usage(folder).total
    memory = machine_memory()
    found = f"{size / _GIB:.1f} GiB of {memory / _GIB:.0f} GiB memory"
    if size >= _SHARED_MEMORY_SHARE * memory:
        return Finding("shared memory", "ok", found)
    wanted = f"{_SHARED_MEMORY_SHARE * memory / _GIB:.0f}g"
    return Finding("shared memory", "warning", found, f"docker run --shm-size={wanted}; in Kubernetes an emptyDir")


def check_limit(what: str, kind: int, wanted: int, fix: str) -> Finding:
    """Checks a limit of the shell."""
    soft, _ = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Finding(f"limit of {what}", "ok", "none" if soft == resource.RLIM_INFINITY else str(soft))
    return Finding(f"limit of {what}", "warning", str(soft), fix)


def check_temporary_folder() -> Finding:
    """Checks the folder where Ray puts sockets, logs and spilled objects."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    what = "temporary files"
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(what, "wrong", f"{folder}: {error.strerror}", "create it, or set RAY_TMPDIR to another folder")
    if not os.access(folder, os.W_OK):
        return Finding(what, "wrong", f"{folder} cannot be written", "set RAY_TMPDIR to another folder")
    if len(folder) > _SOCKET_PATH:
        return Finding(what, "wrong", f"{folder} is too long for Ray's sockets", "set RAY_TMPDIR to a shorter one")
    if free < 5 * _GIB:
        return Finding(what, "warning", f"{free / _GIB:.1f} GiB free in {folder}", "set RAY_TMPDIR to a larger disk")
    return Finding(what, "ok", f"{free / _GIB:.0f} GiB free in {folder}")


def check_token() -> Finding:
    """Checks whether other users can read Ray's token: who has it can run code as this user."""
    try:
        file = token_file()
        about = file.stat()
    except (OSError, RuntimeError):
        return Finding("token", "ok", "none yet; rayfl makes one for its own Ray")
    if open_to_others(about):
        return Finding("token", "warning", f"other users can read {file}", f"chmod 600 {file}; a new one after leaks")
    return Finding("token", "ok", f"{file} is for this user only")


def check_storage(uri: str) -> Finding:
    """Checks whether runs can be written here: writes, reads and deletes a file."""
    storage, name = Storage(absolute(uri)), f".probe-{uuid.uuid4().hex}"
    try:
        storage.write(name, name.encode())
        readable = storage.read(name) == name.encode()
        storage.delete(name)
    except (RayflError, OSError) as error:
        return Finding("storage", "wrong", str(error), "set storage_path to a folder you may write, or its credentials")
    if not readable:
        return Finding("storage", "wrong", f"{uri} gives back something else than was written", "use another folder")
    return Finding("storage", "ok", f"{uri} can be written")


def check_data() -> Finding:
    """Checks the folder of data sets."""
    folder, what = data_root(), "data sets (RAYFL_DATA)"
    if not folder.is_dir():
        return Finding(what, "warning", f"no folder {folder}", "`rayfl data prepare`, or set RAYFL_DATA")
    return Finding(what, "ok", f"{sum(1 for entry in folder.iterdir())} entries in {folder}")


def check_ports() -> Finding:
    """Checks the loopback interface, and whether the dashboard's port is free."""
    what = "ports"
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        fix = "let processes of this machine talk on 127.0.0.1 (firewall, sandbox)"
        return Finding(what, "wrong", f"no connection on the loopback interface: {error}", fix)
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", _DASHBOARD_PORT)) == 0
    found = f"{_DASHBOARD_PORT} is {'in use (a Ray dashboard?)' if taken else 'free'}"
    return Finding(what, "ok", f"loopback works, {found}")


def check_cluster(address: str, storage: str) -> Finding:
    """Connects to a cluster, and has every node try the storage."""
    import ray

    from cluster.planning.shared_storage import check_shared_storage
    from cluster.rounds.session import ray_session

    what = f"cluster {address}"
    try:
        with ray_session(address):
            nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            check_shared_storage(Storage(absolute(storage)), 60)
    except RayflError as error:
        return Finding(what, "wrong", _short(str(error)), "correct the address, token or folder that is named")
    found = f"{len(nodes)} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs; all see {storage}"
    if not total.get("CPU"):
        return Finding(what, "wrong", found, "add a node with CPUs: the head has none by intention")
    return Finding(what, "ok", found)


def _short(text: str) -> str:
    return re.sub(r"\s+", " ", text)
