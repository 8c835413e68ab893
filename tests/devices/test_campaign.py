"""The campaign for GPUs: what one check does costs no other, and all of it can be rehearsed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.gpu.checks import running
from scripts.gpu.checks.bench import counted, shares

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "gpu" / "campaign.py")]
FAKE = """
import os, sys, time
name, out = sys.argv[sys.argv.index("--check") + 1], sys.argv[sys.argv.index("--out") + 1]
sys.path.insert(0, {scripts!r})
from pathlib import Path
from checks.running import Record
record = Record(Path(out))
record.note("begun", name)
if name == "hangs":
    os.fork() or time.sleep(600)
    time.sleep(600)
if name == "dies":
    os.kill(os.getpid(), 9)
if name == "mute":
    Path(out).unlink()
    sys.exit(3)
record.goal("speed", "at most 1 s", 0.5, True)
record.end("ok")
"""
RUNNER = """
import json, sys
sys.path.insert(0, {scripts!r})
from pathlib import Path
from checks.page import write_page
from checks.running import Check, run_checks
out = Path({out!r})
checks = [Check(name, 8.0, name, print) for name in {names!r}]
answers = run_checks(checks, [sys.executable, {fake!r}], out, "campaign", {within}, {together})
write_page(out / "page.md", "b", "cuda", checks, answers)
"""


def ran(
    folder: Path,
    within: float,
    names: tuple[str, ...] = ("good", "hangs", "dies", "mute", "last"),
    together: int = 1,
) -> tuple[dict[str, dict[str, object]], str]:
    """The answers of made-up checks, and their page."""
    scripts, fake = str(ROOT / "scripts" / "gpu"), folder / "fake.py"
    fake.write_text(FAKE.format(scripts=scripts))
    given = {"out": str(folder), "fake": str(fake), "within": within, "names": names, "together": together}
    code = RUNNER.format(scripts=scripts, **given)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    return json.loads((folder / "campaign.json").read_text()), (folder / "page.md").read_text()


@pytest.mark.slow
def test_a_check_that_hangs_or_dies_costs_nothing_but_itself(tmp_path: Path) -> None:
    answers, page = ran(tmp_path, 100)
    assert {name: answer["status"] for name, answer in answers.items()} == {
        "good": "ok",
        "hangs": "failed",
        "dies": "failed",
        "mute": "failed",
        "last": "ok",
    }
    assert answers["hangs"]["found"] == answers["dies"]["found"] | {"begun": "hangs"}  # noted before it ended
    assert "no end within 8 s" in str(answers["hangs"]["reason"])
    assert "fake.py" in (tmp_path / "hangs.log").read_text()  # where it was
    assert "exit code -9" in str(answers["dies"]["reason"])
    assert answers["mute"]["reason"] == "no answer: exit code 3"
    assert "| speed | at most 1 s | 0.5 | met |" in page
    assert "| dies | dies | **failed** |" in page


@pytest.mark.slow
def test_checks_that_run_together_each_have_their_answer(tmp_path: Path) -> None:
    answers, page = ran(tmp_path, 60, ("good", "dies", "mute", "last"), together=4)
    assert {name: answer["status"] for name, answer in answers.items()} == {
        "good": "ok", "dies": "failed", "mute": "failed", "last": "ok",
    }  # fmt: skip
    rows = [page.index(f"| {name} |") for name in ("good", "dies", "mute", "last")]
    assert rows == sorted(rows)


@pytest.mark.slow
def test_a_part_ends_in_time(tmp_path: Path) -> None:
    answers, _ = ran(tmp_path, 4)
    assert {answer["reason"] for answer in answers.values()} == {"no time was left"}


@pytest.mark.slow
def test_a_process_that_cannot_be_ended_does_not_hold_up_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a driver which does not answer."""
    left: list[int] = []
    monkeypatch.setattr(running, "_GRACE_S", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, signal: left.append(group))
    stubborn = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(600)"
    check = running.Check("stubborn", 5.0, "", print)
    try:
        answers = running.run_checks([check], [sys.executable, "-c", stubborn], tmp_path, "campaign", 60.0)
    finally:
        for process in left:
            os.kill(process, signal.SIGKILL)
    assert answers["stubborn"]["status"] == "failed"
    assert float(answers["stubborn"]["seconds"]) < 60


def test_without_a_gpu_nothing_is_started(tmp_path: Path) -> None:
    command, environment = [*SCRIPT, "--part", "a", "--out", str(tmp_path)], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == 2 and "sees no GPU" in ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("other", "apart"), [([1.0, 2.0], 0.0), ([1.5, 2.0], 0.5), ([1.0, float("nan")], float("nan"))]
)
def test_a_number_that_is_nan_is_no_agreement(
    other: list[float], apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    difference = importlib.import_module("checks.correct").difference
    left, right = ({"a": {"b": torch.tensor(values)}, "c": 3, "d": torch.ones(2)} for values in ([1.0, 2.0], other))
    assert difference(left, right) == pytest.approx(apart, nan_ok=True)


@pytest.mark.slow
def test_checks_are_listed_and_their_limits_leave_each_part_below_nine_minutes() -> None:
    listed = subprocess.run([*SCRIPT, "--list"], check=True, capture_output=True, text=True).stdout
    limits: dict[str, float] = {}
    for line in listed.splitlines():
        part, _, limit, *_ = line.split()
        limits[part] = limits.get(part, 0.0) + float(limit)
    assert sorted(limits) == ["a", "b", "c", "d", "e", "f", "g"]
    assert max(limits.values()) <= 540, limits


@pytest.mark.slow
@pytest.mark.timeout(7000)
@pytest.mark.parametrize("part", ["a", "b", "c", "d", "e", "f", "g"])
def test_every_check_can_be_rehearsed_on_a_cpu(part: str, tmp_path: Path) -> None:
    command = [*SCRIPT, "--part", part, "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=False, timeout=6900)
    answers = json.loads((tmp_path / f"campaign-{part}.json").read_text())
    failed = {name: answer["reason"] for name, answer in answers.items() if answer["status"] == "failed"}
    assert not failed
    fewest = 1 if part == "f" else 4  # of the other simulators, those that are installed
    assert sum(answer["status"] == "ok" for answer in answers.values()) >= fewest
    assert "A rehearsal on a CPU" in (tmp_path / f"campaign-{part}.md").read_text()


def row(key: str, device: DeviceType, micros: float, count: int = 1, annotation: bool = False) -> SimpleNamespace:
    """A row of a profile."""
    return SimpleNamespace(
        key=key,
        device_type=device,
        self_device_time_total=micros,
        self_cpu_time_total=10.0,
        count=count,
        is_user_annotation=annotation,
    )


def test_a_kernel_s_time_is_counted_once() -> None:
    found = counted(
        [
            row("aten::bmm", DeviceType.CPU, 3000.0, count=2),
            row("cudaLaunchKernel", DeviceType.CPU, 0.0, count=2),
            row("gemm", DeviceType.CUDA, 3000.0, count=2),
            row("Step#1", DeviceType.CUDA, 3500.0, annotation=True),
        ]
    )
    assert found["ms on the GPU"] == 3.0 and found["launches"] == 2
    assert found["longest"] == ["gemm x 2: 3.00 ms"]


def test_shares_of_operators_are_of_the_time_on_the_gpu_where_there_is_one() -> None:
    parts = {"products": ("aten::bmm", "aten::baddbmm"), "copies": ("aten::copy_",)}
    rows = [
        row("aten::bmm", DeviceType.CPU, 2000.0),
        row("aten::copy_", DeviceType.CPU, 1000.0),
        row("aten::addmm", DeviceType.CPU, 5000.0),
        row("gemm", DeviceType.CUDA, 8000.0),
    ]
    assert shares(rows, parts) == {"products": 0.25, "copies": 0.125}
    on_cpu = [row("aten::bmm", DeviceType.CPU, 0.0), row("aten::addmm", DeviceType.CPU, 0.0)]
    assert shares(on_cpu, parts) == {"products": 0.5, "copies": 0.0}


def test_what_ran_on_the_cpu_is_no_kernel() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(20, 20) @ torch.ones(20, 20)
    rows = list(profiled.key_averages())
    found = counted(rows)
    assert not found["longest"] and not found["launches"]
    assert 0 < shares(rows, {"products": ("aten::mm",)})["products"] < 1
