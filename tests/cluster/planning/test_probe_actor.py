"""A probe in a real process: what it measures decides, and changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ray

import rayfl
from actors.probing.actor import probe
from actors.probing.measure import Measured
from actors.probing.probe_calls import ProbeCall, probe_calls
from actors.processes.placement import ActorOptions
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from tests.support.experiments import assert_same, outcome, small_experiment

pytestmark = pytest.mark.usefixtures("local_ray")
OPTIONS = ActorOptions(2, 1.0, 0.0, "cpu", 120.0, 0, 1, 2)


def content(folder: Path, name: str, **cluster: Any) -> dict[str, Any]:
    engine = {"mode": "vectorized", "width": "auto"}
    return small_experiment(folder, name, "superfed-mm", num_actors=1, **cluster) | {"engine": engine}


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_the_width_that_was_measured_is_used_and_noted_and_measuring_changes_no_bit(tmp_path: Path) -> None:
    rayfl.run(content(tmp_path, "measured"))
    rayfl.run(content(tmp_path, "unmeasured", probe=False))
    widths, logs = {}, {}
    for name in ("measured", "unmeasured"):
        (entry,) = json.loads((tmp_path / name / "environment.json").read_text())
        widths[name], logs[name] = entry["width"], (tmp_path / name / "rayfl.log").read_text()
    # memory has room for the round's three clients, and three are what is stacked in both cases
    assert widths == {"measured": 3, "unmeasured": 32}
    assert_same(outcome(tmp_path / "measured"), outcome(tmp_path / "unmeasured"))
    for log in logs.values():
        assert "INFO plan: 1 node: 1 actor with 1 CPU each, 3 of a round's clients each" in log
    assert "INFO measured on node " in logs["measured"]
    assert "an actor with 3 clients at a time needs" in logs["measured"]
    assert "measured on" not in logs["unmeasured"]


def measured(config: Any, calls: list[ProbeCall]) -> list[Measured]:
    return probe(config.model_dump(mode="json"), OPTIONS, calls, 1000)


@pytest.mark.slow
def test_a_probe_ends_and_what_it_cannot_measure_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(load_config(Experiment, content(tmp_path, "run"), {}))
    (found,) = measured(parts.config, probe_calls(parts, parts.check()))
    assert found.vectorized
    assert 0 < found.step_s < found.first_step_s
    assert found.held_bytes == 1000
    assert 50 << 20 < found.base_bytes < found.device_free_bytes <= found.device_total_bytes
    assert not measured(parts.config, [])
    assert "the cost of a client could not be measured: no client that takes part has training samples" in caplog.text
    actors = ray.util.list_named_actors(all_namespaces=True)
    assert not [actor for actor in actors if "probe" in str(actor).lower()]
    assert not (tmp_path / "run").exists()
