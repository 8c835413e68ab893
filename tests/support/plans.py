"""Plans of a run from made-up measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from actors.probing.measure import Measured
from actors.processes.placement import Node
from algorithms.registry import Experiment
from cluster.planning.plan import Plan, final_plan
from cluster.planning.resources import plan_actors
from rayfl.config.loading import load_config
from rayfl.config.schema import ExperimentConfig
from tests.support.experiments import small_experiment

GIB = 1 << 30
LOOPED = Measured("GPU 0 of node x", False, 3.0, 0.002, 1 * GIB, 1 * GIB, 0, 40 * GIB, 48 * GIB)
STACKED = replace(LOOPED, vectorized=True)
ON_CPU = Measured("node x", True, 1.0, 0.01, 1 * GIB, 1 * GIB, 0, 16 * GIB, 20 * GIB)
MEASURED = st.builds(
    Measured,
    place=st.just("GPU 0 of node x"),
    vectorized=st.booleans(),
    first_step_s=st.just(1.0),
    step_s=st.just(0.1),
    client_bytes=st.integers(1, 4 * GIB),
    base_bytes=st.integers(0, 2 * GIB),
    held_bytes=st.integers(0, 40 * GIB),
    divides=st.booleans(),
    device_free_bytes=st.just(0) | st.integers(1 << 20, 80 * GIB),  # a single byte cannot be divided
    device_total_bytes=st.just(80 * GIB),
)


def experiment(width: Any = 32, mode: str = "auto", **cluster: Any) -> ExperimentConfig:
    content = small_experiment(Path("nowhere"), "run", "fedavg", **cluster)
    return load_config(Experiment, content | {"engine": {"width": width, "mode": mode}}, {})


def plan(
    config: ExperimentConfig, *measured: Measured, cpus: float = 16, gpus: float = 2, clients: int = 100, m: int = 20
) -> Plan:
    nodes = [Node("x", cpus, gpus)]
    options = plan_actors(config.cluster, {"CPU": cpus, "GPU": gpus}, clients, nodes)
    return final_plan(config, options, nodes, clients, m, measured)
