"""A preset of each task runs as it is, with the methods that people begin with, looped, stacked and through a stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import rayfl
from rayfl.results.schemas import METRICS, metrics_of
from rayfl.tracking.callback import Callback
from tests.support.experiments import assert_same, outcome

PRESETS = {
    "quickstart-regression": "mse",
    "quickstart-multilabel": "f1_micro",
    "quickstart-text": "perplexity",
    "quickstart-tabular": "top1",
    "quickstart-segmentation": "dice",
    "quickstart-survival": "c_index",
    "quickstart-recommendation": "hit_rate",
    "quickstart-forecasting": "mse",
    "quickstart-graphs": "top1",
    "quickstart-nodes": "node_accuracy",
    "quickstart-self-supervised": "knn_top1",
    "quickstart-anomaly": "auroc",
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedper": {"name": "fedper"},
    "ditto": {"name": "ditto"},
    "superfed": {"name": "superfed", "mode": "mm", "start": 0.5},
    "floco": {"name": "floco", "simplex_dimension": 3, "assignment_round": 2},
}
SMALL = {
    "quickstart-segmentation": {"dataset.num_clients": 6, "train.clients_per_round": 3, "dataset.side": 12},
    "quickstart-forecasting": {"dataset.num_clients": 6, "train.clients_per_round": 3, "dataset.times": 90},
}
"""By preset, what makes it small enough for a test."""
SHORT = {
    "train.rounds": 4,
    "train.local_epochs": 1,
    "evaluation.every": 2,
    "cluster.backend": "inline",
    "tracking.tensorboard": False,
}


QUICK = {
    ("quickstart-regression", "fedavg"),
    ("quickstart-survival", "fedavg"),
    ("quickstart-nodes", "floco"),
}
QUICK_STACKED = {
    ("quickstart-tabular", "floco"),
    ("quickstart-forecasting", "ditto"),
    ("quickstart-multilabel", "ditto"),
}
"""Of the quick suite. Other tasks have files of their own, with both engines and stops."""


class Interrupted(Exception):
    """What ends a run in its midst."""


class Stop(Callback):
    """Ends the run after some rounds, as a crash of the driver would."""

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == 3:
            raise Interrupted


def run(preset: str, folder: Path, name: str, callbacks: Sequence[Callback] = (), **settings: Any) -> Any:
    settings = {**SHORT, **SMALL.get(preset, {}), **settings}
    return rayfl.run(preset, callbacks=callbacks, storage_path=str(folder), name=name, **settings)


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        pytest.param(preset, method, marks=() if (preset, method) in QUICK else pytest.mark.slow)
        for preset in PRESETS
        for method in METHODS
    ],
)
@pytest.mark.first_case
def test_every_method_looped_stacked_and_through_a_stop(preset: str, method: str, tmp_path: Path) -> None:
    chosen = {"algorithm": METHODS[method]}
    run(preset, tmp_path, "whole", **chosen)
    with pytest.raises(Interrupted):
        run(preset, tmp_path, "stopped", [Stop()], **chosen)
    result = run(preset, tmp_path, "stopped", **chosen)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))
    stacked = run(preset, tmp_path, "stacked", **chosen, **{"engine.mode": "vectorized"})
    first = metrics_of(result.rounds)[0]
    assert first.name == PRESETS[preset]
    values, others = (np.array(found.clients[first.name]) for found in (result, stacked))
    np.testing.assert_allclose(values.astype(float), others.astype(float), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("preset", "method"),
    [
        pytest.param(preset, method, marks=() if (preset, method) in QUICK_STACKED else pytest.mark.slow)
        for method in METHODS
        for preset in PRESETS
    ],
)
@pytest.mark.first_case
def test_stacked_too_a_stop_changes_no_bit(preset: str, method: str, tmp_path: Path) -> None:
    chosen = {"algorithm": METHODS[method], "engine.mode": "vectorized"}
    run(preset, tmp_path, "whole", **chosen)
    with pytest.raises(Interrupted):
        run(preset, tmp_path, "stopped", [Stop()], **chosen)
    run(preset, tmp_path, "stopped", **chosen)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))


@pytest.mark.parametrize(
    "preset",
    [pytest.param(preset, marks=() if preset.endswith("regression") else pytest.mark.slow) for preset in PRESETS],
)
def test_what_is_learned_gets_better_and_tables_have_the_tasks_own_columns(preset: str, tmp_path: Path) -> None:
    options = {"train.rounds": 8, "train.local_epochs": 3, "evaluation.every": 2}
    if preset == "quickstart-forecasting":  # from half of a week nobody learns much
        options["dataset.times"] = 168
    rounds = run(preset, tmp_path, "run", **options).rounds
    metrics = metrics_of(rounds)
    first, names = metrics[0], [metric.name for metric in metrics]
    for name in (*METRICS, *names):
        assert {name, f"{name}_std", f"pooled_{name}"} <= set(rounds.schema.names)
        assert (rounds[name].null_count == len(rounds)) == (name not in names)
    assert {f"{first.name}_worst5", f"{first.name}_jain"} <= set(rounds.schema.names)
    shown = rounds.filter(
        (pc.field("cohort") == "all") & (pc.field("split") == "test") & (pc.field("selected_on") == "")
    ).sort_by("round")
    models = set(shown["model"].to_pylist())
    gains = []
    for model in models:
        values = shown.filter(pc.field("model") == model)[first.name].to_pylist()
        gains.append(first.sign * (values[-1] - values[0]))
    assert max(gains) > 0
    worst, mean = (np.array(shown[f"{first.name}{suffix}"]).astype(float) for suffix in ("_worst5", ""))
    assert (first.sign * (mean - worst) >= -1e-9).all()
