"""How processes may share the GPUs of this machine: their compute modes, and NVIDIA's multi-process service (MPS)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_PIPES = "/tmp/nvidia-mps"  # noqa: S108 -- where the service has them unless it is told otherwise
_PATIENCE_S = 20


def modes(by: str = "index") -> dict[str, str] | None:
    """The compute mode of each GPU, such as ``Default`` or ``Exclusive_Process``.

    None where there is no ``nvidia-smi`` that answers.

    Args:
        by: what GPUs are named by: ``index`` or ``uuid``.
    """
    query = ("nvidia-smi", f"--query-gpu={by},compute_mode", "--format=csv,noheader")
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split(",", 1) for line in ran.stdout.splitlines() if "," in line]
    return {number.strip(): mode.strip() for number, mode in rows} or None


def takes_one_process(uuid: str) -> bool:
    """Returns whether a second process on a GPU of this machine would fail.

    A part of a GPU (MIG) has a UUID of its own, which ``nvidia-smi`` does not list with modes: it counts as one of a
    GPU in an exclusive mode if the machine has any.

    Args:
        uuid: UUID of the GPU, without ``nvidia-smi``'s prefix.
    """
    known = modes("uuid") or {}
    found = [known[f"GPU-{uuid}"]] if f"GPU-{uuid}" in known else known.values()
    return any(mode.startswith("Exclusive") for mode in found) and not mps_runs()


def mps_runs() -> bool:
    """Returns whether the service has its pipes where processes of this environment look for them."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _PIPES) / "control").exists()
