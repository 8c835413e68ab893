"""Which GPUs take one process alone, by what nvidia-smi says."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.processes.gpu_sharing import takes_one_process


@pytest.mark.parametrize(
    ("said", "mps", "expected"),
    [
        (None, False, False),
        ("GPU-a, Default\\nGPU-b, Exclusive_Process\\n", False, False),
        ("GPU-a, Exclusive_Process\\nGPU-b, Default\\n", False, True),
        ("GPU-a, Exclusive_Process\\n", True, False),
        ("GPU-b, Default\\n", False, False),
        ("GPU-b, Default\\nGPU-c, Exclusive_Process\\n", False, True),  # a part of one of these, with MIG
    ],
)
def test_a_gpu_in_an_exclusive_mode_takes_one_process(
    said: str | None, mps: bool, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if said is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho \"$1\" | grep -q 'uuid,compute_mode' && printf '{said}'\n")
        tool.chmod(0o700)
    if mps:
        (tmp_path / "control").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert takes_one_process("a") == expected
