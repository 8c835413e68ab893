"""Series from files, long and wide, and made up: what is read, what is missing, and what is wrong in files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from rayfl.data.series import SeriesDataset
from rayfl.data.sources.series.source import SeriesSource, SyntheticSeriesSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

START = datetime.datetime(2016, 7, 1)
TIMES = 30
SMALL: dict[str, Any] = {"window": 4, "horizon": 2, "scaling": "none"}


def hour(place: int) -> str:
    return str(START + datetime.timedelta(hours=place))


def value(client: int, time: int, column: int = 0) -> float:
    return 100.0 * client + time + 1000 * column


def text(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    path.write_text("".join(",".join("" if one is None else str(one) for one in row) + "\n" for row in (header, *rows)))
    return path


def long_rows(clients: int = 3, times: int = TIMES) -> list[list[Any]]:
    return [
        [f"0{k}", hour(time), value(k, time), value(k, time, 1), value(k, time, 2)]
        for time in range(times)
        for k in range(clients)
    ]


HEADER = ["home", "time", "load", "gas", "warmth"]
LONG: dict[str, Any] = {"client": "home", "targets": ("load", "gas"), "covariates": ("warmth",), **SMALL}


def opened(path: Path, /, **options: Any) -> SeriesDataset:
    given = {"path": path, **LONG, **options}
    return SeriesSource(**{name: one for name, one in given.items() if one != "left out"}).open(RandomStreams(0))


def check(found: SeriesDataset, names: tuple[str, ...]) -> None:
    assert found.names == names and found.spec.shape == (3, 1, 4) and found.spec.forecast_series == 2
    for client in range(len(names)):
        split = found.load(client)["train"]
        for place in range(len(split)):
            seen = [[[value(client, place + t, c) for t in range(4)]] for c in range(3)]
            ahead = [value(client, place + t, c) for c in range(2) for t in (4, 5)]
            last = [value(client, place + 3, c) for c in range(2) for _ in range(2)]
            assert split.x[place].tolist() == seen and split.y[place].tolist() == [ahead, last, [1.0] * 4]


def test_long_files_are_sorted_by_client_and_time(tmp_path: Path) -> None:
    rows = long_rows()
    rows = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    check(opened(text(tmp_path / "all.csv", HEADER, rows)), ("00", "01", "02"))


def test_several_files_and_a_folder_are_one_table(tmp_path: Path) -> None:
    rows = long_rows()
    files = tuple(text(tmp_path / f"{k}.csv", HEADER, rows[k::2]) for k in range(2))
    check(opened(files[0], path=None, paths=files), ("00", "01", "02"))
    check(opened(tmp_path), ("00", "01", "02"))


def test_without_a_column_of_clients_each_file_is_one(tmp_path: Path) -> None:
    for k in range(2):
        rows = [row[1:] for row in long_rows() if row[0] == f"0{k}"]
        text(tmp_path / f"house-{k}.csv", HEADER[1:], rows)
    check(opened(tmp_path, client=None), ("house-0", "house-1"))


@pytest.mark.parametrize("kind", ["timestamp", "date", "whole", "decimal", "text"])
def test_parquet_files_may_have_other_times(tmp_path: Path, kind: str) -> None:
    rows = long_rows()
    times = {
        "timestamp": [datetime.datetime.fromisoformat(row[1]) for row in rows],
        "date": [(START + datetime.timedelta(days=place // 3)).date() for place in range(len(rows))],
        "whole": [place // 3 for place in range(len(rows))],
        "decimal": [0.1 * (place // 3) for place in range(len(rows))],
        "text": [row[1] for row in rows],
    }[kind]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(HEADER)}
    pq.write_table(pa.table({**columns, "time": times}), tmp_path / "all.parquet")
    check(opened(tmp_path / "all.parquet"), ("00", "01", "02"))


WIDE: dict[str, Any] = {"form": "wide", "time": "date", "client": None, "targets": (), "covariates": ()}


def wide(path: Path, changed: dict[tuple[int, int], Any] | None = None, times: list[Any] | None = None) -> Path:
    rows = [[(times or list(map(hour, range(TIMES))))[t], *(value(k, t) for k in range(3))] for t in range(TIMES)]
    for (row, column), one in (changed or {}).items():
        rows[row][column] = one
    return text(path, ["date", "client", "MT_1", "MT_2"], rows)


def test_wide_files_have_a_column_for_each_client(tmp_path: Path) -> None:
    path = wide(tmp_path / "electricity.csv")
    found = opened(path, **WIDE)
    assert found.names == ("client", "MT_1", "MT_2") and found.spec.shape == (1, 1, 4)
    assert found.load(1)["train"].x[0].tolist() == [[[100, 101, 102, 103]]]
    shared = opened(path, **{**WIDE, "covariates": ("client",)})
    assert shared.names == ("MT_1", "MT_2") and shared.spec.shape == (2, 1, 4)
    assert shared.load(1)["train"].x[0].tolist() == [[[200, 201, 202, 203]], [[0, 1, 2, 3]]]
    assert opened(path, **{**WIDE, "targets": ("MT_2",)}).names == ("MT_2",)


def test_missing_values_are_refused_filled_or_left_out(tmp_path: Path) -> None:
    path = wide(tmp_path / "a.csv", {(2, 2): None, (3, 2): None, (9, 1): "nan"})
    with pytest.raises(
        DataError, match=r"a.csv: client 'client', time 2016-07-01T09.* column 'client' has no value; .*f"
    ):
        opened(path, **WIDE)
    filled = opened(path, **WIDE, missing="forward")
    assert filled.load(1)["train"].x[0].tolist() == [[[100, 101, 101, 101]]]
    assert "missing values are filled in with those of the time before: 3" in filled.remarks()
    with pytest.raises(
        DataError, match=r"client 'client', time .*08:00:00: the next time is .*10:00:00, but most are 360"
    ):
        opened(path, **WIDE, missing="drop")
    dropped = opened(path, **WIDE, missing="drop", gaps="split")
    assert dropped.load(1)["train"].x[0].tolist() == [[[104, 105, 106, 107]]]
    remarks = list(dropped.remarks())
    assert "rows with a missing value are left out: 3" in remarks
    assert "gaps between times, which windows do not cross: 2" in remarks
    first = wide(tmp_path / "b.csv", {(0, 3): None})
    with pytest.raises(
        DataError, match=r"client 'MT_2', time .*00:00:00: column 'MT_2' has no value; there is none bef"
    ):
        opened(first, **WIDE, missing="forward")


def test_gaps_are_refused_split_or_ignored(tmp_path: Path) -> None:
    path = wide(tmp_path / "a.csv", times=[hour(t + 5 * (t >= 10)) for t in range(TIMES)])
    with pytest.raises(
        DataError, match=r"client 'client', time .*09:00:00: the next time is .*15:00:00, but .*gaps=split"
    ):
        opened(path, **WIDE)
    begins = opened(path, **WIDE, gaps="split").load(0)["train"].x[:, 0, 0, 0].tolist()
    assert begins == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15]
    whole = opened(path, **WIDE, gaps="ignore")
    assert whole.load(0)["train"].x[:, 0, 0, 0].tolist() == list(range(16))
    assert all("gaps" not in one for one in whole.remarks())


def changed(row: int, column: int, one: Any) -> list[list[Any]]:
    rows = long_rows()
    rows[row][column] = one
    return rows


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (
            long_rows(),
            {"client": "house"},
            r"dataset.client: .*all.csv has no column 'house' \(did you mean 'home'\?\), only home, time, load",
        ),
        (long_rows(), {"time": "tme"}, r"dataset.time: .*has no column 'tme' \(did you mean 'time'\?\), only home"),
        (long_rows(), {"targets": ("lod",)}, r"dataset.targets: .* has no column 'lod'"),
        (long_rows(), {"covariates": ("heat",)}, r"dataset.covariates: .* has no column 'heat'"),
        ([], {}, r"all.csv: no rows|is not a readable CSV|has no column"),
        (long_rows() + long_rows()[4:5], {}, r"client '01', time 2016-07-01T01:00:00: there are two rows of this time"),
        (changed(4, 1, None), {}, r"column 'time', line 6: no value"),
        (changed(4, 0, None), {}, r"column 'home', line 6: no value"),
        (changed(4, 1, "noon"), {}, r"column 'time', line 6: 'noon' is no time like 2016"),
        (changed(4, 2, "much"), {}, r"column 'load', line 6: 'much' is no number; mend"),
        (changed(4, 3, "inf"), {}, r"column 'gas', line 6: the value is not finite"),
        (long_rows(times=5), {}, r"no client has a window in each of train, validation, test: one needs 6 times in a"),
    ],
)
def test_what_is_wrong_in_files_is_named(
    tmp_path: Path, rows: list[list[Any]], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        opened(text(tmp_path / "all.csv", HEADER, rows), **options)


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder .* has no file that ends in .csv"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"missing.csv does not exist"):
        opened(tmp_path / "missing.csv")
    one = text(tmp_path / "a.csv", HEADER, long_rows())
    other = text(tmp_path / "b.csv", HEADER, [[row[0], 5 + place, *row[2:]] for place, row in enumerate(long_rows())])
    with pytest.raises(DataError, match=r"b.csv: times here are numbers, but those of .*a.csv are not"):
        opened(one, path=None, paths=(one, other))
    inner = tmp_path / "inner"
    inner.mkdir()
    again = text(inner / "a.csv", HEADER, long_rows())
    with pytest.raises(DataError, match=r"two files are called 'a' without their endings"):
        opened(one, path=None, paths=(one, again), client=None)
    tables = tuple(wide(folder / "wide.csv") for folder in (tmp_path, inner))
    with pytest.raises(DataError, match=r"client 'client' is a column of two files"):
        opened(one, path=None, paths=tables, **WIDE)
    with pytest.raises(DataError, match=r"has no column that is a client, only time"):
        opened(text(tmp_path / "t.csv", ["time"], [[1]]), **{**WIDE, "time": "time"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"paths": ("b.csv",)}, "give either path, a file or a folder, or paths"),
        ({"form": "wide"}, "client is for form=long"),
        ({"targets": ()}, "targets must name the columns that are forecast, or set form=wide"),
        ({"covariates": ("load",)}, "column 'load' is named twice"),
        ({"time": "home"}, "column 'home' is named twice"),
        ({"validation": 0.5, "test": 0.5}, "leave no times for training"),
        ({"season": 5}, "season=5 is longer than window=4"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SeriesSource(**{"path": Path("a.csv"), **LONG, **options})


def test_made_up_series_are_those_of_the_seed_and_of_their_client() -> None:
    source = SyntheticSeriesSource(num_clients=3, times=200, window=24, horizon=6)
    one, again, other = (source.open(RandomStreams(seed)) for seed in (1, 1, 2))
    assert one.names == ("0", "1", "2") and one.content_hash() == again.content_hash() != other.content_hash()
    fewer = SyntheticSeriesSource(num_clients=2, times=200, window=24, horizon=6).open(RandomStreams(1))
    assert fewer.load(1)["test"].x.equal(one.load(1)["test"].x)
    with pytest.raises(DataError, match=r"dataset.times is 20, but a window and what follows it take 30"):
        SyntheticSeriesSource(times=20, window=24, horizon=6).open(RandomStreams(0))


def test_made_up_days_repeat_without_noise_and_are_common_without_difference() -> None:
    plain: dict[str, Any] = {"times": 1000, "window": 168, "horizon": 24, "noise": 0.0, "season": 168}
    one = SyntheticSeriesSource(num_clients=2, **plain).open(RandomStreams(0)).load(0)["test"].y
    assert (one[:, 0] - one[:, 1]).std() < 0.05  # a week later there is but the trend
    days = []
    for difference in (0.0, 1.0):
        source = SyntheticSeriesSource(num_clients=2, difference=difference, **{**plain, "scaling": "none"})
        data = source.open(RandomStreams(0))
        own = [data.load(client)["train"].x[0, 0, 0, :24].numpy() for client in range(2)]
        days.append([day - day.mean() for day in own])
    assert np.abs(days[0][0] - days[0][1]).max() < 0.2 < np.abs(days[1][0] - days[1][1]).max()
