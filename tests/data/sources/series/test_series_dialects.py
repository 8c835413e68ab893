"""Series in CSV files as other programs write them: separators, decimal commas, forms of times, and where they err."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.data.sources.series.source import SeriesSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

START = datetime.datetime(2016, 12, 30, 22)
TIMES = 24
WIDE: dict[str, Any] = {"form": "wide", "window": 4, "horizon": 2, "scaling": "none"}


def written(path: Path, form: str, separator: str = ";", decimal: str = ",", step: int = 60) -> Path:
    """A time, and two clients whose values are t + 0.25 and 100 + t: the second has no decimals."""
    times = [START + datetime.timedelta(minutes=step * t) for t in range(TIMES)]
    numbers = [f"{t}.25".replace(".", decimal) for t in range(TIMES)]
    if decimal == separator:
        numbers = [f'"{one}"' for one in numbers]
    rows = [separator.join(("when", "a", "b"))]
    rows += [separator.join((times[t].strftime(form), numbers[t], str(100 + t))) for t in range(TIMES)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def check(path: Path, **options: Any) -> None:
    found = SeriesSource(path=path, time="when", **WIDE, **options).open(RandomStreams(0))
    assert found.names == ("a", "b")
    assert found.load(0)["train"].x[1].tolist() == [[[1.25, 2.25, 3.25, 4.25]]]
    assert found.load(1)["train"].x[1].tolist() == [[[101, 102, 103, 104]]]


@pytest.mark.parametrize(
    ("name", "separator", "decimal", "options"),
    [
        ("a.csv", ";", ",", {"decimal": ","}),
        ("a.csv", ";", ".", {}),
        ("a.csv", "\t", ".", {}),
        ("a.tsv", "\t", ",", {"decimal": ","}),
        ("a.csv", ",", ",", {"decimal": ","}),
        ("a.csv", "|", ",", {"separator": "|", "decimal": ","}),
    ],
)
def test_separators_are_found_and_decimal_commas_are_named(
    tmp_path: Path, name: str, separator: str, decimal: str, options: dict[str, Any]
) -> None:
    check(written(tmp_path / name, "%Y-%m-%d %H:%M", separator, decimal), **options)


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y %H:%M", "%m/%d/%Y %I:%M %p", "%Y%m%d%H%M", "%Y-%d-%m %H:%M", "%d %b %Y %H.%M.%S.%f"]
)
def test_times_are_read_as_they_are_written(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / "a.csv", form)
    check(path, time_format=form, decimal=",")


def test_a_day_before_its_month_is_no_month(tmp_path: Path) -> None:
    """Days 1 to 12 read as ISO 8601 are months: the times would be a month apart."""
    path = tmp_path / "a.csv"
    rows = [f"2016-{1 + t % 12:02}-{1 + t // 12:02};{t}.25;{100 + t}" for t in range(TIMES)]
    path.write_text("\n".join(["when;a;b", *rows]), encoding="utf-8")
    with pytest.raises(DataError, match="the next time is"):
        check(path)
    with pytest.raises(DataError, match=r"time 2016-01-12.* the next time is 2016-02-01"):
        check(path, time_format="%Y-%d-%m")


def test_times_with_a_zone_are_those_of_utc(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for form, options in (
        ("%Y-%m-%dT%H:%M:%S+01:00", {}),
        ("%d.%m.%Y %H:%M +0100", {"time_format": "%d.%m.%Y %H:%M %z"}),
    ):
        check(written(path, form), decimal=",", **options)
    lines = path.read_text().splitlines()  # the clocks are set back: an hour is there twice, and yet no time
    changed = [line.replace("+0100", "+0200") if place < 5 else line for place, line in enumerate(lines)]
    path.write_text("\n".join(changed))
    with pytest.raises(DataError, match="the next time is"):
        check(path, decimal=",", time_format="%d.%m.%Y %H:%M %z")


def test_the_file_of_electricity_loads_is_read(tmp_path: Path) -> None:
    """Like UCI's LD2011_2014.txt: semicolons, decimal commas, a column of times without a name."""
    path = tmp_path / "LD2011_2014.txt"
    rows = ['"";"MT_001";"MT_002"']
    for t in range(TIMES):
        time = datetime.datetime(2011, 1, 1) + datetime.timedelta(minutes=15 * (t + 1))
        rows.append(f'"{time}";{"0" if t < 8 else f"2,5{t}8071065"};{t},125')
    path.write_text("\n".join(rows), encoding="utf-8")
    options: dict[str, Any] = {"path": path, "time": "", "decimal": ",", **WIDE}
    found = SeriesSource(**options).open(RandomStreams(0))
    assert found.names == ("MT_001", "MT_002")
    assert found.load(1)["train"].x[0].tolist() == [[[0.125, 1.125, 2.125, 3.125]]]
    wanted = [2.588071065, 2.598071065, 2.5108071065, 2.5118071065]
    np.testing.assert_allclose(found.load(0)["train"].x[8, 0, 0].numpy(), wanted, rtol=1e-6)


def opened(path: Path, **options: Any) -> None:
    SeriesSource(path=path, time="when", **WIDE, **options).open(RandomStreams(0))


def lines_of(path: Path, **changed: str) -> Path:
    """A file whose line of a number is another."""
    lines = written(path, "%Y-%m-%d %H:%M", decimal=".").read_text().splitlines()
    for number, line in changed.items():
        lines[int(number.removeprefix("line")) - 1] = line
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        (
            {"line5": "2016-12-31 01:00;3,25;103"},
            {},
            r"a.csv, column 'a', line 5: '3,25' is no number; set dataset.dec",
        ),
        ({"line5": "2016-12-31 01:00;much;103"}, {}, r"a.csv, column 'a', line 5: 'much' is no number; mend it"),
        ({"line5": "2016-12-31 01:00;3.2.5;103"}, {}, r"a.csv, column 'a', line 5: '3.2.5' is no number; mend it"),
        ({}, {"decimal": ","}, r"a.csv, column 'a', line 2: '0.25' is no number; set dataset.decimal='.' if"),
        ({"line4": "\n\n2016-12-31 00:00;inf;1"}, {}, r"a.csv, column 'a', line 6: the value is not finite"),
        ({"line4": '2016-12-31 00:00;2.25;"1\n2"\nno;3;4'}, {}, r"a.csv, column 'when', line 6: 'no' is no time like"),
        ({"line7": ";5.25;105"}, {}, r"a.csv, column 'when', line 7: no value"),
        (
            {"line7": "31.12.2016 03:00;5.25;105"},
            {},
            r"column 'when', line 7: '31.12.2016 03:00' is no time like",
        ),
        (
            {"line7": "noon;5.25;105"},
            {"time_format": "%Y-%m-%d %H:%M"},
            r"line 7: 'noon' is no time of the form",
        ),
        (
            {"line7": "2016-12-31 03:00;5.25"},
            {},
            r"a.csv is not a readable CSV file: .*Row #7: Expected 3",
        ),
        ({"line1": "when;a,1;b"}, {}, r"not a readable CSV .*dataset.separator, .*',', if it is ';'"),
        (
            {"line1": "when;on,a;b", "line2": "1,2", **{f"line{k}": f"{k},2" for k in range(3, 26)}},
            {},
            r"dataset.time: .* has no column 'when'.* or set dataset.separator, which is taken to be ',', if it is ';'",
        ),
        ({}, {"separator": ","}, r"dataset.time: .* has no column 'when'.* only when;a;b; name one of them$"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, changed: dict[str, str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        opened(lines_of(tmp_path / "a.csv", **changed), **options)


def test_other_files_have_no_separator(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    times = [START + datetime.timedelta(hours=t) for t in range(TIMES)]
    pq.write_table(pa.table({"when": times, "a": np.arange(TIMES) + 0.25, "b": np.arange(TIMES) + 100}), path)
    check(path)
    for options in ({"separator": ";"}, {"decimal": ","}):
        with pytest.raises(DataError, match=r"are for CSV, and .*a.parquet is read as Parquet: leave them out"):
            opened(path, **options)
    with pytest.raises(DataError, match=r"time_format is for times that are texts, and column 'when' has"):
        opened(path, time_format="%Y")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"separator": "::"}, "at most 1 character"),
        ({"time_format": "%Q"}, "time_format='%Q' reads no times: 'Q' is a bad directive"),
        ({"time_format": "%d.%m. %H:%M"}, "time_format=.* has no year: add it"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SeriesSource(path=Path("a.csv"), **WIDE, **options)


def test_files_of_rows_may_have_semicolons_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("client;label;one\n" + "".join(f"0{k % 2};{k % 3};{k}.5\n" for k in range(12)))
    table = ParquetSource(path=path).tables()[0].read(["client", "label", "one"])
    assert table.column("client").to_pylist()[:2] == ["00", "01"] and table.column("one").to_pylist()[1] == 1.5
