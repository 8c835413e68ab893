"""When a plan recomputes activations: where stacks would be smaller than asked for, and more fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.probing.measure import Measured
from actors.processes.placement import Node
from algorithms.registry import Experiment
from cluster.planning import measuring
from cluster.planning.measuring import plan_run, with_room
from cluster.planning.plan import Plan
from cluster.planning.resources import plan_actors
from rayfl.config.loading import load_config
from rayfl.config.schema import ExperimentConfig
from rayfl.examples import InputSpec
from tests.support.experiments import small_experiment
from tests.support.plans import GIB, STACKED, plan


def transformer(rows: int | None = 512) -> ExperimentConfig:
    """Stacks of 128 clients of 4 samples would fill 512 rows, if a sample made one."""
    model = {"name": "pretrained", "folder": "nowhere", "checkpointing": "auto"}
    content = small_experiment(Path("nowhere"), "run", "fedavg") | {"model": model}
    engine = {"mode": "vectorized", "width": "auto", "rows_per_step": rows}
    return load_config(Experiment, content | {"engine": engine}, {})


def chosen(
    asked_for: int | None, *measured: Measured, saving: Measured | None = None, m: int = 40
) -> tuple[Plan, list[ExperimentConfig]]:
    """The plan, and the configurations that were measured because memory was short."""
    config, again = transformer(), list[ExperimentConfig]()

    def planned(other: ExperimentConfig) -> Plan:
        again.append(other)
        return plan(other, *([saving] if saving else []), gpus=1, m=m)

    other = config.model_copy(update={"model": config.model.saving_memory()})
    return with_room(plan(config, *measured, gpus=1, m=m), other, asked_for, planned), again


def test_blocks_are_computed_again_where_stacks_would_be_smaller_than_rows_ask_for() -> None:
    saving = replace(STACKED, client_bytes=GIB // 4)
    assert plan(transformer(), STACKED, gpus=1, m=40).fitting == 35  # (0.9 * 40 - 1) / 1
    found, again = chosen(36, STACKED, saving=saving)
    assert [config.model.checkpointing for config in again] == [True]
    assert (found.config.model.checkpointing, found.config.engine.width) == (True, 40)
    assert "35 of 36 clients, as engine.rows_per_step asks for, fit at a time without, 40 with it" in found.lines[-1]
    for asked_for in (35, 1, None):  # memory has room for these, or nobody asks for a number
        found, again = chosen(asked_for, STACKED, saving=saving)
        assert (found.config.model.checkpointing, found.config.engine.width, again) == ("auto", 35, [])
    found, again = chosen(36, STACKED, saving=saving, m=30)  # the round has no more
    assert (found.config.model.checkpointing, found.config.engine.width, again) == ("auto", 30, [])


def test_what_saves_nothing_is_left_and_what_was_needed_stays() -> None:
    for useless in (STACKED, None):  # nothing could be measured
        found, _ = chosen(36, STACKED, saving=useless)
        assert found.config.model.checkpointing == "auto" and "and no more with it" in found.lines[-1]
    found, again = chosen(36, replace(STACKED, saves_memory=True))
    assert found.config.model.checkpointing is True and not again
    assert found.config.engine.width == 35 and "memory does not suffice otherwise" in found.lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize("decided", [True, False])
def test_a_model_that_leaves_nothing_open_is_measured_once(decided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformer()
    config = config.model_copy(update={"model": config.model.model_copy(update={"checkpointing": decided})})
    measured = run_planned(config, monkeypatch)
    assert [one.model.checkpointing for one in measured] == [decided]
    assert [one.model.checkpointing for one in run_planned(transformer(), monkeypatch)] == ["auto", True]
    assert [one.model.checkpointing for one in run_planned(transformer(rows=None), monkeypatch)] == ["auto"]


def run_planned(config: ExperimentConfig, monkeypatch: pytest.MonkeyPatch) -> list[ExperimentConfig]:
    """The configurations that are measured for a run on a GPU on which one client fits."""
    asked, nodes = list[ExperimentConfig](), [Node("x", 16, 1)]

    def probe(content: dict[str, Any], *_: Any) -> list[Measured]:
        asked.append(Experiment.model_validate(content))
        return [replace(STACKED, client_bytes=(10 if asked[-1].model.checkpointing is True else 30) * GIB)]

    task = SimpleNamespace(network=SimpleNamespace(rows_per_sample=16, rows_per_model=0), inputs_per_sample=1)
    task.candidates = [task]
    parts: Any = SimpleNamespace(
        config=config,
        dataset=SimpleNamespace(num_clients=100, spec=InputSpec("image", (1, 8, 8), 10)),
        context=SimpleNamespace(cohort_size=20),
        task=task,
    )
    options = plan_actors(config.cluster, {"CPU": 16, "GPU": 1}, 100, nodes)
    replaced = {
        "check_version": lambda labels: None,
        "whole_nodes": lambda labels: nodes,
        "free_nodes": lambda labels: nodes,
        "wait_for_room": lambda *_, **__: options,
        "probe_calls": lambda parts, sizes: [],
        "get_current_placement_group": lambda: None,
        "probe": probe,
    }
    for name, by in replaced.items():
        monkeypatch.setattr(measuring, name, by)
    found = plan_run(parts, np.full((100, 3), 9))
    assert found.config.model.checkpointing == asked[-1].model.checkpointing
    assert found.config.engine.width == (3 if found.config.model.checkpointing is True else 1)
    return asked
