from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from algorithms.registry import Experiment
from rayfl.errors import ConfigError
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import Sweep, plan_sweep
from tests.support.experiments import small_experiment


def plan(folder: Path, *overrides: str, samples: int | None = None, **sections: Any) -> Sweep:
    content = {**small_experiment(folder, "sweep", "fedavg", backend="inline"), **sections}
    return plan_sweep(Experiment, content, parse_space(overrides), samples, 0)


def test_experiments_lie_in_one_folder_under_names_that_last(tmp_path: Path) -> None:
    small = plan(tmp_path, "algorithm=fedavg,floco", "seed=0:2")
    large = plan(tmp_path, "algorithm=fedavg,floco,ditto", "seed=0:3")
    assert small.folder.local_path == tmp_path / "sweep"
    names = [trial.name for trial in small.trials]
    assert len(set(names)) == 4
    assert {trial.storage.local_path for trial in small.trials} == {tmp_path / "sweep" / name for name in names}
    assert set(names) < {trial.name for trial in large.trials}
    assert small.described(small.trials[1]) == "algorithm=fedavg, seed=1"
    assert not list(tmp_path.iterdir())


def test_a_sweep_without_a_name_is_called_after_what_it_runs(tmp_path: Path) -> None:
    first, again, other = (plan(tmp_path, seeds, name=None) for seeds in ("seed=0:2", "seed=0:2", "seed=0:3"))
    assert first.folder.uri == again.folder.uri != other.folder.uri


def test_all_that_is_wrong_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        plan(tmp_path, "algorithm=fedavg,fedprx,flocco", "train.clients_per_round=2,50")
    text = str(error.value)
    assert "none was started" in text
    assert "did you mean 'fedprox'" in text and "did you mean 'floco'" in text
    assert "train.clients_per_round is 50, but there are only 5 clients" in text
    assert not list(tmp_path.iterdir())


def test_twins_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are one experiment"):
        plan(tmp_path, "max_failures=1,2")


def test_points_that_are_drawn_again_are_one_experiment(tmp_path: Path) -> None:
    found = plan(tmp_path, "train.lr=choice(0.01,0.1)", "seed=0:2", samples=8)
    points = [(trial.point["train.lr"], trial.point["seed"]) for trial in found.trials]
    assert sorted(points) == [(0.01, 0), (0.01, 1), (0.1, 0), (0.1, 1)]
    assert found.repeated == 12
    fewer = plan(tmp_path, "train.lr=choice(0.01,0.1)", "seed=0:2", samples=2)
    assert [trial.name for trial in fewer.trials] == [trial.name for trial in found.trials][: len(fewer.trials)]
    with pytest.raises(ConfigError, match="are one experiment"):
        plan(tmp_path, "max_failures=choice(1,2)", samples=8)


def test_standard_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="give a file"):
        plan_sweep(Experiment, "-", parse_space(["seed=0:2"]), None, 0)


def test_what_can_be_judged_is_known(tmp_path: Path) -> None:
    assert plan(tmp_path).trials[0].judged_on == {"validation", "test"}
    assert plan(tmp_path, "holdout.validation=0").trials[0].judged_on == {"test"}
    assert plan(tmp_path, "evaluation.splits=[validation]").trials[0].judged_on == {"validation"}
