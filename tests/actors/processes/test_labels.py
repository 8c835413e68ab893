"""Nodes are chosen by labels as Ray chooses them."""

from __future__ import annotations

import pytest
import ray

from actors.processes import placement
from actors.processes.labels import check_version, matches
from actors.processes.placement import Node, free_nodes, resources_of, whole_nodes
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ConfigError

KIND = "ray.io/accelerator-type"


@pytest.mark.parametrize(
    ("wanted", "among"),
    [
        ("H100", {"H100"}),
        ("!H100", {"A100", None}),
        ("in(H100,A100)", {"H100", "A100"}),
        ("in(H100,L4)", {"H100"}),
        ("!in(H100,L4)", {"A100", None}),
    ],
)
def test_values_of_a_selector(wanted: str, among: set[str | None]) -> None:
    for value in ("H100", "A100", None):
        labels = {} if value is None else {KIND: value}
        assert matches(labels, {KIND: wanted}) == (value in among), value


def test_all_labels_must_hold() -> None:
    selector = {KIND: "H100", "zone": "!far"}
    assert matches({KIND: "H100", "zone": "near"}, selector)
    assert not matches({KIND: "H100", "zone": "far"}, selector)
    assert matches({"zone": "far"}, {})


@pytest.mark.parametrize(
    "wanted", ["H100", "!H100", "in(H100, A100)", "!in(H100,A100)", "a b", "in()", "-a", "in(a", "!!a"]
)
def test_a_selector_is_valid_where_ray_takes_it(wanted: str) -> None:
    from ray._private.label_utils import validate_label_selector

    try:
        config = ClusterConfig.model_validate({"label_selector": {KIND: wanted}})
    except ValueError:
        assert validate_label_selector({KIND: wanted}) is not None
        return
    assert validate_label_selector(config.label_selector) is None
    assert config.label_selector == {KIND: wanted.replace(" ", "")}  # Ray would look for the value with its space


def test_only_nodes_that_are_meant_are_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(id: str, alive: bool, gpus: float, **labels: str) -> dict[str, object]:
        return {"NodeID": id, "Alive": alive, "Resources": {"CPU": 8.0, "GPU": gpus}, "Labels": labels}

    nodes = [node("a", True, 2.0, kind="H100"), node("b", True, 1.0, kind="L4"), node("c", False, 4.0, kind="H100")]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    left = {"a": {"CPU": 3.0, "GPU": 1.0}, "b": {"CPU": 8.0, "GPU": 1.0}}
    monkeypatch.setattr(placement.state, "available_resources_per_node", lambda: left)
    assert [one.id for one in whole_nodes({})] == ["a", "b"]
    assert whole_nodes({"kind": "H100"}) == [Node("a", 8.0, 2.0)]
    assert free_nodes({"kind": "!H100"}) == [Node("b", 8.0, 1.0)]
    assert resources_of(whole_nodes({})) == {"CPU": 16.0, "GPU": 3.0}


def test_a_ray_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.48.1")
    check_version({})
    with pytest.raises(ConfigError, match=r"cluster\.label_selector needs Ray 2\.49 or newer, this is 2\.48\.1"):
        check_version({KIND: "H100"})
    monkeypatch.setattr(ray, "__version__", "3.0.0.dev0")
    check_version({KIND: "H100"})
