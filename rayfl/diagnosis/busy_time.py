"""The time that a process or its GPU has been at work."""

from __future__ import annotations

import time

import torch


def busy_seconds(device: torch.device) -> float:
    """Returns the CPU seconds of this process, of all threads; on a GPU the clock, once the GPU is idle."""
    if device.type == "cpu":
        return time.process_time()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
