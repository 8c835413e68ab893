"""Splits of series at counts of times or at times: those of the ETT papers, and of clients that begin apart."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.sources.series.source import SeriesSource, SyntheticSeriesSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

HOURS = 17_420
"""Of ETTh1.csv."""


def hourly(begin: datetime.datetime, count: int) -> list[str]:
    return [str(begin + datetime.timedelta(hours=hour)) for hour in range(count)]


@pytest.fixture(scope="module")
def ett(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hours as those of ETTh1.csv, and two series."""
    values = np.random.default_rng(0).normal(size=(HOURS, 2)).cumsum(0)
    rows = [
        f"{time},{a},{b}" for time, (a, b) in zip(hourly(datetime.datetime(2016, 7, 1), HOURS), values, strict=True)
    ]
    path = tmp_path_factory.mktemp("ett") / "ETTh1.csv"
    path.write_text("\n".join(["date,HUFL,OT", *rows]))
    return path


@pytest.mark.parametrize("borders", [(8640, 11520, 14400), ("2017-06-26", "2017-10-24 00:00", "2018-02-21T00:00")])
def test_ett_has_as_many_windows_as_in_the_papers(ett: Path, borders: tuple[int | str, ...]) -> None:
    """12, 4 and 4 months of 30 days: with windows of 96 hours 8449, 2785 and 2785 samples of 96 hours to forecast."""
    source = SeriesSource(path=ett, time="date", targets=("HUFL", "OT"), window=96, horizon=96, borders=borders)
    found = source.open(RandomStreams(0))
    assert found.sizes().tolist() == [[8449, 2785, 2785]]
    assert "times at or after the last of dataset.borders are left out: 3020" in found.remarks()
    first = found.load(0)["test"]
    values = np.loadtxt(ett, delimiter=",", skiprows=1, usecols=(1, 2))
    scaled = (values - values[:8640].mean(0)) / values[:8640].std(0)
    np.testing.assert_allclose(first.y[0, 0].reshape(2, 96).T, scaled[11520:11616], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(first.y[-1, 0].reshape(2, 96).T, scaled[14304:14400], rtol=1e-4, atol=1e-4)


def test_times_divide_clients_that_begin_apart_at_the_same_moment(tmp_path: Path) -> None:
    rows = ["home,time,load"]
    for name, day in (("early", 1), ("late", 4)):
        rows += [f"{name},{time},{place}" for place, time in enumerate(hourly(datetime.datetime(2016, 7, day), 24 * 8))]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows))
    options: dict[str, Any] = {"path": path, "client": "home", "targets": ("load",), "window": 4, "horizon": 1}
    source = SeriesSource(**options, scaling="none", borders=("2016-07-06", "2016-07-07", "2016-07-10"))
    found = source.open(RandomStreams(0))
    for client, hours in ((0, 24 * 5), (1, 24 * 2)):
        split = found.load(client)
        assert split["train"].y[-1, 0, 0] == hours - 1
        assert split["validation"].y[:, 0, 0].tolist() == list(range(hours, hours + 24))
        assert split["test"].y[0, 0, 0] == hours + 24
    assert found.load(0)["test"].y[-1, 0, 0] == 24 * 8 - 1 and found.load(1)["test"].y[-1, 0, 0] == 24 * 6 - 1


def test_clients_with_fewer_times_than_the_last_count_are_counted(ett: Path) -> None:
    source = SeriesSource(path=ett, time="date", targets=("OT",), borders=(10_000, 15_000, 20_000))
    found = source.open(RandomStreams(0))
    assert "clients that have fewer times than the last of dataset.borders: 1" in found.remarks()
    assert found.sizes()[0, 2] == HOURS - 15_000 - 24 + 1


def test_numbers_as_texts_are_times_that_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["time,load", *(f"{2 * place},{place}" for place in range(60))]))
    options: dict[str, Any] = {"path": path, "targets": ("load",), "window": 4, "horizon": 1, "scaling": "none"}
    found = SeriesSource(**options, borders=("60", "80.0")).open(RandomStreams(0))
    assert found.load(0)["validation"].y[:, 0, 0].tolist() == list(range(30, 40))
    with pytest.raises(
        DataError, match=r"dataset.borders: \['2016-07-01', .* are no numbers, but the times of client 'a' "
    ):
        SeriesSource(**options, borders=("2016-07-01", "2016-07-02")).open(RandomStreams(0))


def test_texts_are_times_where_these_are_dates(ett: Path) -> None:
    with pytest.raises(
        DataError, match=r"dataset.borders: '50' is no time like '2016-07-01 00:00', as the times of cl"
    ):
        SeriesSource(path=ett, time="date", targets=("OT",), borders=("50", "80")).open(RandomStreams(0))


def test_made_up_series_are_divided_at_counts() -> None:
    made: dict[str, Any] = {"num_clients": 2, "times": 100, "window": 8, "horizon": 2}
    source = SyntheticSeriesSource(**made, borders=(50, 50, 80))
    assert source.open(RandomStreams(0)).sizes().tolist() == [[41, 0, 29]] * 2


def test_yaml_may_have_dates_without_quotes(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("dataset: {name: series, path: a.csv, targets: [x], borders: [2016-07-01, 2016-08-01 12:00:00]}\n")
    config = load_config(Experiment, str(file), ["task=forecasting", "model=dlinear", "algorithm=fedavg"])
    assert config.dataset.borders == ("2016-07-01", "2016-08-01 12:00:00")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"borders": (5,)}, "borders has 1 entries: give where validation times begin"),
        ({"borders": (5, 6, 7, 8)}, "borders has 4 entries"),
        ({"borders": (5, "2016-07-01")}, "counts of times, or times as texts, and not some of both"),
        ({"borders": (0, 5)}, "borders: 0 times leave none for training"),
        ({"borders": (6, 5)}, r"borders \[6, 5\] do not ascend"),
        ({"borders": (5, 6, 6)}, r"borders \[5, 6, 6\] do not ascend"),
        ({"borders": ("2016-07-01", "2016-06-01")}, "do not ascend"),
        ({"borders": ("July", "August")}, "'July' is no time like '2016-07-01 00:00'"),
        ({"borders": (5, 6), "test": 0.3}, "leave validation and test out"),
        ({"borders": (5, 6), "validation": 0.0}, "leave validation and test out"),
    ],
)
def test_borders_that_divide_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SyntheticSeriesSource(**options)
