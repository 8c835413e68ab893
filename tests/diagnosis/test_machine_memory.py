"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayfl.diagnosis.machine_memory import group_limits, machine_memory


def test_a_process_has_some_memory() -> None:
    assert machine_memory() > 1 << 28


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"memory.max": "700\n"}, [700]),  # a container
        ("0::/slurm/job_7/step_0", {"memory.max": "max\n", "slurm/job_7/memory.max": "500"}, [500]),
        ("4:memory:/slurm/job_7\n1:cpu:/", {"memory/slurm/job_7/memory.limit_in_bytes": "300"}, [300]),
        ("1:cpu:/slurm/job_7", {"slurm/job_7/memory.max": "500"}, []),
    ],
)
def test_a_batch_job_has_the_memory_of_its_control_group(
    groups: str, files: dict[str, str], expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, content in files.items():
        (file := tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert list(group_limits(tmp_path / "cgroup", tmp_path / "mounted")) == expected
    assert list(group_limits(tmp_path / "none", tmp_path / "mounted")) == []
