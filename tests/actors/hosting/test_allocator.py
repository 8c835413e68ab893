"""Freed memory is kept for the next step where the C library can be told to."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from actors.hosting import allocator

_STEPS = """
import resource, torch
from actors.hosting.allocator import reuse_freed_memory

assert not {tuned} or reuse_freed_memory()
for _ in range(20):
    torch.empty(5_000_000).fill_(1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.empty(5_000_000).fill_(1.0), torch.empty(2_000_000).fill_(1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_tensors_are_not_mapped_a_second_time() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", _STEPS.format(tuned=tuned)], capture_output=True, check=True).stdout)
        for tuned in (False, True)
    ]
    assert faults[1] < 10_000


@pytest.mark.parametrize("missing", ["gnu_get_libc_version", "mallopt", "linux"])
def test_other_systems_are_left_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: str | None) -> None:
            for function in {"gnu_get_libc_version", "mallopt"} - {missing}:
                setattr(self, function, lambda *_: 1)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    if missing == "linux":
        monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.reuse_freed_memory()
    assert not allocator.return_freed_memory()


_EVICTION = """
from pathlib import Path
import torch
from actors.hosting.allocator import reuse_freed_memory
from actors.hosting.memory import LeastRecentlyUsed

def resident():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) >> 10

reuse_freed_memory()
before = resident()
large, between = {}, []
recent = LeastRecentlyUsed(50 << 20, large.pop)
for i in range(400):
    large[i] = torch.ones(1 << 18)
    between.append(torch.ones(1 << 8))
    recent.touch(i, 1 << 20)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_is_evicted_from_between_other_things_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _EVICTION], capture_output=True, check=True)
    assert int(done.stdout) < 50 + 64 + 40
