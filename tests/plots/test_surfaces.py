"""Planes and triangles of models: the losses on them are those of the run's own evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.plots.landscape import WEIGHT_DECAY
from rayfl.plots.output import write_plot
from rayfl.plots.planes import plane_around, plane_through, vector_of
from rayfl.runs.committed import CommittedModels, single_model
from rayfl.runs.rows import last_round, model_rows, where
from rayfl.tasks.classification import Classification
from tests.plots.conftest import Runs
from tests.support.toy_networks import NormalizedLayers, TwoLayers

TASK = Classification(Network(TwoLayers))
NAMES = TASK.network.parameter_names


@settings(max_examples=25, deadline=None)
@given(seeds=st.lists(st.integers(0, 1000), min_size=3, max_size=3, unique=True), t=st.floats(-2, 2))
def test_a_plane_goes_through_its_models_and_is_affine(seeds: list[int], t: float) -> None:
    models = [TASK.network.initialize(seed) for seed in seeds]
    plane = plane_through(models, TASK)
    assert float(plane.u @ plane.v) == pytest.approx(0, abs=1e-9)
    assert float(plane.u.norm()) == pytest.approx(1) and float(plane.v.norm()) == pytest.approx(1)
    for model, anchor in zip(models, plane.anchors, strict=True):
        torch.testing.assert_close(vector_of(plane.at(anchor), NAMES), vector_of(model, NAMES), atol=1e-6, rtol=0)
    first, second = plane.anchors[1], plane.anchors[2]
    between = vector_of(plane.at(first + t * (second - first)), NAMES)
    ends = [vector_of(plane.at(end), NAMES) for end in (first, second)]
    torch.testing.assert_close(between, ends[0] + t * (ends[1] - ends[0]), atol=1e-5, rtol=0)


def test_the_origin_is_the_model_to_the_bit() -> None:
    model = TASK.network.initialize(0)
    plane = plane_around(model, TASK, np.random.default_rng(0))
    assert all(torch.equal(tensor, model[name]) for name, tensor in plane.at(np.zeros(2)).items())
    vector = vector_of(model, NAMES)
    assert plane.squared_norm(np.zeros(2)) == pytest.approx(float(vector @ vector))


def test_random_directions_have_the_norms_of_the_models_filters() -> None:
    task = Classification(Network(NormalizedLayers))
    model = {**task.network.initialize(0), "norm.running_mean": torch.full((7,), 3.0)}
    plane = plane_around(model, task, np.random.default_rng(1))
    moved = plane.at(np.array([1.0, 0.0]))
    for name in task.network.parameter_names:
        step = (moved[name] - model[name]).double()
        if step.dim() < 2:
            assert not step.any()
        else:
            torch.testing.assert_close(step.norm(dim=1), model[name].double().norm(dim=1), rtol=1e-5, atol=1e-6)
    assert torch.equal(moved["norm.running_mean"], model["norm.running_mean"])


def test_three_models_on_a_line_have_no_plane() -> None:
    model = TASK.network.initialize(0)
    with pytest.raises(ConfigError, match="on one line"):
        plane_through([model, model, TASK.network.initialize(1)], TASK)
    with pytest.raises(ConfigError, match="on one line"):
        plane_through([{n: k * t for n, t in model.items()} for k in (1, 2, 3)], TASK)


def test_models_of_other_architectures_have_no_plane() -> None:
    other = Classification(Network(lambda: TwoLayers(hidden=3))).network.initialize(0)
    with pytest.raises(ConfigError, match="different architectures"):
        plane_through([TASK.network.initialize(0), other, TASK.network.initialize(1)], TASK)


def test_the_middle_of_a_landscape_is_the_loss_in_the_tables(made: Runs, tmp_path: Path) -> None:
    runs = [made("fedavg"), made("superfed-mm")]
    table = pyarrow.csv.read_csv(write_plot("landscape", runs, tmp_path / "l.png", plane="random", points=5))
    for run, panel in zip(runs, ("FedAvg", "SuPerFed"), strict=True):
        middle = where(table, panel=panel, a=0.0, b=0.0)["loss"][0].as_py()
        rows = model_rows(run, "global")
        recorded = where(rows, round=last_round(rows))["pooled_loss"][0].as_py()
        model = single_model(CommittedModels(run).predictor(0, "global"), "global")
        vector = vector_of(model, tuple(model))
        assert middle == pytest.approx(recorded + WEIGHT_DECAY / 2 * float(vector @ vector), rel=1e-6)


def test_landscapes_through_models(made: Runs, tmp_path: Path) -> None:
    run = made("superfed-mm")
    own = pyarrow.csv.read_csv(write_plot("landscape", [run], tmp_path / "own.png", points=5, clients=[0, 3]))
    assert own.num_rows == 25
    runs = [run, made("superfed-lm"), made("fedavg")]
    three = pyarrow.csv.read_csv(write_plot("landscape", runs, tmp_path / "three.png", points=5, samples=30))
    assert three.num_rows == 25
    other = made("fedavg", **{"partition.num_clients": 6})
    with pytest.raises(ConfigError, match="other data"):
        write_plot("landscape", [*runs[:2], other], tmp_path / "n.png")


def test_the_centre_of_a_simplex_is_the_global_model(made: Runs, tmp_path: Path) -> None:
    run = made("floco", **{"algorithm.simplex_dimension": 2, "algorithm.assignment_round": 1})
    table = pyarrow.csv.read_csv(write_plot("simplex", [run], tmp_path / "s.png", points=6, clients=[2]))
    shares = np.stack([table[f"alpha_{m}"].to_numpy() for m in (1, 2, 3)], 1)
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-12)
    assert set(table["panel"].to_pylist()) == {"all clients", "client 2", "points"}
    losses = where(table, panel="all clients")
    middle = np.abs(np.stack([losses[f"alpha_{m}"].to_numpy() for m in (1, 2, 3)], 1) - 1 / 3).max(1).argmin()
    rows = model_rows(run, "global")
    recorded = where(rows, round=last_round(rows))["pooled_loss"][0].as_py()
    assert losses["loss"][int(middle)].as_py() == pytest.approx(recorded, rel=1e-5)
    assert where(table, panel="points").num_rows == 5
