"""With what a run was made is kept beside it, and nothing else of the environment."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.storage.files import Storage
from rayfl.tracking.callback import RunInfo
from rayfl.tracking.environment import FILE, Environment, device_name, read_environment, versions


def started(folder: Path, rounds_completed: int, *devices: str) -> None:
    stacking = {"vectorized": True, "width": 7}
    hosts = [{"node": "secret-node", "pid": 1, "device": "cuda:0", "device_name": name, **stacking} for name in devices]
    info = RunInfo(load_config(Experiment, "quickstart", []), str(folder), 20, rounds_completed, hosts)
    Environment(Storage(str(folder))).on_start(info)


def test_an_entry_for_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    started(tmp_path, 0, "NVIDIA X", "NVIDIA X", "NVIDIA Y")
    started(tmp_path, 7)
    first, second = read_environment(Storage(str(tmp_path)))
    assert (first["rounds_completed"], second["rounds_completed"]) == (0, 7)
    assert first["devices"] == {"NVIDIA X": 2, "NVIDIA Y": 1}
    assert second["devices"] == {}
    assert first["width"] == 7
    assert "width" not in second
    assert first["versions"]["python"] == platform.python_version()
    assert first["machine"]["cpus"] >= 1
    text = (tmp_path / FILE).read_text()
    for secret in ("hunter2", "secret-node", platform.node(), str(Path.home())):
        assert secret not in text


@pytest.mark.parametrize("content", ["", "{", "{}", "3", '["x"]', "\udcff"])
def test_what_is_damaged_is_not_known_and_written_again(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, errors="surrogateescape")
    assert read_environment(Storage(str(tmp_path))) == []
    started(tmp_path, 0)
    assert len(json.loads((tmp_path / FILE).read_text())) == 1


def test_versions_and_names() -> None:
    import torch

    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert device_name(torch.device("cpu")) == "cpu"
