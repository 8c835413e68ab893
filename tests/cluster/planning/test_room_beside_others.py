"""A run on a cluster that others use plans for what is free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.processes.placement import Node
from algorithms.registry import Experiment
from cluster.planning import measuring
from cluster.planning.measuring import plan_run
from cluster.planning.plan import Plan
from rayfl.config.loading import load_config
from rayfl.examples import InputSpec
from tests.support.experiments import small_experiment

WHOLE = [Node("x", 4, 0), Node("y", 4, 0)]


def planned(
    monkeypatch: pytest.MonkeyPatch,
    free: Sequence[Sequence[Node]],
    whole: Sequence[Node] = WHOLE,
    reserved: bool = False,
    **cluster: Any,
) -> Plan:
    """The plan of a run with 20 clients.

    Args:
        monkeypatch: replaces what asks Ray.
        free: what is free each time that somebody looks; from the last time on it stays.
        whole: the nodes.
        reserved: whether the run is in a placement group.
        cluster: section of the configuration.
    """
    config = load_config(Experiment, small_experiment(Path("nowhere"), "run", "fedavg", probe=False, **cluster), {})
    parts: Any = SimpleNamespace(
        config=config,
        dataset=SimpleNamespace(num_clients=20, spec=InputSpec("image", (1, 8, 8), 10)),
        context=SimpleNamespace(cohort_size=20),
    )
    left, now = list(free), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    replaced = {
        "whole_nodes": lambda labels: list(whole),
        "free_nodes": lambda labels: list(left.pop(0) if len(left) > 1 else left[0]),
        "get_current_placement_group": lambda: object() if reserved else None,
        # Ray's own would start Ray, with which later tests then cannot start theirs
        "ray": SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "the driver's")),
        "time": SimpleNamespace(monotonic=lambda: now[0], sleep=sleep),
    }
    for name, by in replaced.items():
        monkeypatch.setattr(measuring, name, by)
    return plan_run(parts, np.full((20, 3), 9))


BUSY = [Node("x", 1.5, 0), Node("y", 2, 0)]
FULL = [Node("x", 0, 0), Node("y", 0.5, 0)]


@pytest.mark.parametrize(
    ("num_actors", "free", "count", "begins_with"),
    [
        ("auto", WHOLE, 8, 1),
        ("auto", BUSY, 3, 1),
        ("auto", FULL, 8, 1),  # waits for others
        ("2:16", BUSY, 3, 2),
        ("2:2", BUSY, 2, 2),
        ("4:16", BUSY, 8, 4),
        (5, BUSY, 5, 5),  # insists
    ],
)
def test_as_many_actors_as_have_room(
    num_actors: Any, free: list[Node], count: int, begins_with: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(monkeypatch, [free], num_actors=num_actors)
    assert (found.options.count, found.options.begins_with) == (count, begins_with)
    assert found.options.at_most == {"auto": 20, "2:16": 16, "2:2": 2, "4:16": 16, 5: 5}[num_actors]


def test_what_is_given_back_after_a_moment_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, [FULL, BUSY, BUSY, WHOLE]).options.count == 8


def test_a_share_of_a_gpu_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, free = [Node("x", 8, 2), Node("y", 8, 2)], [Node("x", 8, 1.5), Node("y", 8, 0.5)]
    found = planned(monkeypatch, [free], whole, device="cuda", num_actors="2:8", actors_per_gpu="auto")
    assert (found.options.count, found.options.device) == (4, "cuda")  # one free GPU has no room for two
    found = planned(monkeypatch, [free], whole, device="auto", actors_per_gpu=3)
    assert (found.options.count, found.options.device) == (3, "cuda")
    found = planned(monkeypatch, [[Node("x", 8, 0.5)]], whole)
    assert (found.options.count, found.options.device) == (4, "cuda")  # waits, and does not go to CPUs


def test_what_is_reserved_for_a_run_is_not_taken_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, [FULL], reserved=True).options.count == 8
