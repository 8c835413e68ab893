"""Covariates that are made of times, against the standard library's dates; which models read them."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.series.calendar import calendar_of
from rayfl.data.sources.series.source import SeriesSource
from rayfl.errors import DataError, ModelError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from rayfl.runs.rows import where

CYCLES = ("hour", "weekday", "month")


def expected(time: datetime.datetime) -> list[float]:
    seconds = time.hour * 3600 + time.minute * 60 + time.second
    shares = (seconds / 86_400, time.weekday() / 7, (time.month - 1) / 12)
    return [wave(2 * math.pi * share) for share in shares for wave in (math.sin, math.cos)]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "D"])
def test_cycles_are_those_of_the_standard_library(unit: str) -> None:
    generator = np.random.default_rng(0)
    begin = datetime.datetime(1965, 3, 1)
    times = [begin + datetime.timedelta(seconds=int(one)) for one in generator.integers(0, 3_000_000_000, 300)]
    if unit == "D":
        times = [time.replace(hour=0, minute=0, second=0) for time in times]
    found = calendar_of(np.array(times, dtype=f"datetime64[{unit}]"), CYCLES, "a client")
    np.testing.assert_allclose(found, [expected(time) for time in times], atol=1e-12)


def hourly(folder: Path, numbers: bool = False) -> Path:
    begin = datetime.datetime(2016, 7, 1)
    rows = ["home,time,load,warmth"]
    for client in range(3):
        times = [begin + datetime.timedelta(hours=5 * client + hour) for hour in range(120)]
        rows += [f"h{client},{hour if numbers else time},{hour % 24},{client}" for hour, time in enumerate(times)]
    path = folder / "loads.csv"
    path.write_text("\n".join(rows))
    return path


OPTIONS: dict[str, Any] = {"client": "home", "targets": ("load",), "window": 8, "horizon": 3}


def test_calendar_series_come_last_and_are_not_scaled(tmp_path: Path) -> None:
    path, cycles = hourly(tmp_path), ("weekday", "hour")
    source = SeriesSource(path=path, **OPTIONS, covariates=("warmth",), calendar=cycles, scaling="global")
    found = source.open(RandomStreams(0))
    plain = SeriesSource(path=path, **OPTIONS, covariates=("warmth",), scaling="global").open(RandomStreams(0))
    assert found.spec.shape == (6, 1, 8) and found.spec.forecast_series == 1
    for client in range(3):
        split, other = found.load(client)["test"], plain.load(client)["test"]
        assert split.x[:, :2].equal(other.x) and split.y.equal(other.y)
    begin = datetime.datetime(2016, 7, 1, 10)
    wanted = [expected(begin + datetime.timedelta(hours=hour)) for hour in range(8)]
    np.testing.assert_allclose(
        found.load(2)["train"].x[0, 2:, 0], np.array(wanted).T[[2, 3, 0, 1]], rtol=1e-6, atol=1e-6
    )


def test_times_that_are_numbers_have_no_calendar(tmp_path: Path) -> None:
    source = SeriesSource(path=hourly(tmp_path, numbers=True), **OPTIONS, calendar=("month",))
    with pytest.raises(DataError, match=r"dataset.calendar: the times of client 'h0' are numbers, which have no month"):
        source.open(RandomStreams(0))


def test_models_that_read_no_covariates_refuse_a_calendar_and_others_learn_from_it(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "dataset": {"name": "series", "path": str(hourly(tmp_path)), **OPTIONS, "calendar": ["hour"]},
        "task": "forecasting",
        "model": {"name": "lstm_forecaster", "hidden": 4},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 2, "batch_size": 8, "lr": 0.05},
        "evaluation": {"every": 2},
        "cluster": {"backend": "inline", "device": "cpu"},
    }
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    row = where(result.rounds, round=2, cohort="all", split="test").to_pylist()[0]
    assert np.isfinite(row["mse"])
    with pytest.raises(ModelError, match=r"leave out dataset.covariates and calendar, or choose lstm_forecaster"):
        Parts(load_config(Experiment, {**content, "model": "dlinear"}, {})).check()
