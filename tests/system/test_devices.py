"""Devices from lists, distributions and traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from rayfl.system.config import System
from rayfl.system.devices import DEVICES_SCHEMA, Device, devices_table, make_devices
from rayfl.system.traces import NEVER_US, Hours, read_hours

# FedScale's own form: a mapping from ids to records.
SPEEDS = {"1": {"computation": 162.0, "communication": 5648.1}, "2": {"computation": 40, "communication": 900.0}}
TIMES = {"1": {"duration": 30, "inactive": [20, 50], "finish_time": 60, "active": [10, 40], "model": "CPH1801"}}


def make(clients: int, seed: int = 0, **section: Any) -> list[Device]:
    config: Any = TypeAdapter(System).validate_python(section)
    return make_devices(config, clients, RandomStreams(seed))


def trace(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


def test_given_devices_are_one_for_each_client() -> None:
    devices = make(2, name="given", computation=[1, 2], communication=[3, 4], availability=[1, 0.5])
    assert devices == [Device(1, 3), Device(2, 4, 0.5)]
    with pytest.raises(ConfigError, match=r"system.communication has 1 values, but there are 2 clients"):
        make(2, name="given", computation=[1, 2], communication=[3])


def test_sampled_devices_follow_their_distributions_client_by_client() -> None:
    computation = {"name": "lognormal", "median": 40, "sigma": 0.5}
    devices = make(400, name="sampled", computation=computation, communication={"name": "uniform", "low": 1, "high": 3})
    speeds = np.array([device.computation for device in devices])
    assert 36 < np.median(speeds) < 44
    assert 0.4 < np.log(speeds).std() < 0.6
    assert all(1 <= device.communication <= 3 and device.availability == 1 for device in devices)
    assert make(10, name="sampled", computation=computation)[:5] == make(5, name="sampled", computation=computation)
    assert make(5, name="sampled") != make(5, seed=1, name="sampled")
    with pytest.raises(ConfigError, match="is a probability, but client 0 has drawn 2"):
        make(1, name="sampled", availability={"name": "constant", "value": 2})
    with pytest.raises(ConfigError, match=r"system.communication must be above 0"):
        make(1, name="sampled", communication={"name": "constant", "value": 0})


def test_traces_in_fedscales_columns(tmp_path: Path) -> None:
    speeds, times = trace(tmp_path, "speeds.json", SPEEDS), trace(tmp_path, "times.json", TIMES)
    devices = make(3, name="trace", devices=speeds, availability=times)
    hours = Hours((10, 40), (20, 50), 60)
    assert devices == [Device(162, 5648.1, hours=hours), Device(40, 900, hours=hours), Device(162, 5648.1, hours=hours)]
    records = pa.Table.from_pylist(list(SPEEDS.values()))
    pq.write_table(records, tmp_path / "speeds.parquet")
    pc.write_csv(records, tmp_path / "speeds.csv")
    pq.write_table(pa.Table.from_pylist(list(TIMES.values())), tmp_path / "times.parquet")
    for kind in ("parquet", "csv"):
        other = make(
            3, name="trace", devices=str(tmp_path / f"speeds.{kind}"), availability=str(tmp_path / "times.parquet")
        )
        assert other == devices
    drawn = make(50, name="trace", devices=speeds, order="random")
    assert {device.computation for device in drawn} == {162, 40}
    assert drawn == make(50, name="trace", devices=speeds, order="random")


def test_a_device_that_is_there_all_the_time_never_leaves() -> None:
    assert Hours((0,), (60,), 60).ends_us(59_000_000) == NEVER_US
    assert Hours((0, 30), (20, 60), 60).ends_us(59_000_000) == 80_000_000  # until 20 s of the next period


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "at least one record"),
        ([{"computation": 1}], "no column communication"),
        ([{"computation": "fast", "communication": 1}], "device 0: computation must be a number, not 'fast'"),
        ([{"computation": 1, "communication": 0}], "must be above 0"),
    ],
)
def test_speeds_that_cannot_be_used_are_named(content: Any, message: str, tmp_path: Path) -> None:
    path = trace(tmp_path, "speeds.json", content)
    with pytest.raises(DataError, match=message) as error:
        make(1, name="trace", devices=path)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"active": [1, 5], "inactive": [2], "finish_time": 9}, "same length"),
        ({"active": [], "inactive": [], "finish_time": 9}, "same length"),
        ({"active": [3], "inactive": [2], "finish_time": 9}, "alternate"),
        ({"active": [3], "inactive": [12], "finish_time": 9}, "between 0 and finish_time"),
        ({"active": [1], "inactive": [1.0000001], "finish_time": 9}, "a microsecond apart"),
        ({"active": [0], "inactive": [1e-7], "finish_time": 1e-7}, "a microsecond apart"),
        ({"active": [0], "inactive": [1], "finish_time": 1e305}, "between 0 and finish_time"),
        ({"active": 3, "inactive": [12], "finish_time": 9}, "must be a list of seconds"),
    ],
)
def test_hours_that_cannot_be_used_are_named(record: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_hours(trace(tmp_path, "times.json", [record]))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "trace.pkl").write_bytes(b"")
    for name, message in (
        ("broken.json", "cannot be read"),
        ("no.parquet", "cannot be read"),
        ("trace.pkl", "converts FedScale's"),
    ):
        with pytest.raises(DataError, match=message):
            make(1, name="trace", devices=str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("twice.json", '[{"computation": 1, "communication": 2, "computation": 3}]'),
        ("ids.json", '{"7": {"computation": 1, "communication": 2}, "7": {"computation": 3, "communication": 2}}'),
        ("twice.csv", "computation,communication,computation\n1,2,3\n"),
    ],
)
def test_what_stands_twice_in_a_trace_is_refused(name: str, content: str, tmp_path: Path) -> None:
    """The last alone would count."""
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name} cannot be read: .*'(7|computation)'"):
        make(1, name="trace", devices=str(tmp_path / name))


def test_the_table_has_all_that_was_simulated(tmp_path: Path) -> None:
    table = devices_table([Device(1, 2, 0.5), Device(3, 4, hours=Hours((1,), (2,), 3))])
    assert table.schema == DEVICES_SCHEMA
    assert table.column("active").to_pylist() == [None, [1.0]]
    assert table.column("availability").to_pylist() == [0.5, 1.0]


def test_a_deadline_fits_the_clock() -> None:
    with pytest.raises(ValidationError, match=r"(?s)deadline_s.*less than or equal to 1000000000000"):
        make(1, name="sampled", deadline_s=1e305)


def test_distributions_are_checked() -> None:
    with pytest.raises(ValidationError, match="above high"):
        make(1, name="sampled", computation={"name": "uniform", "low": 2, "high": 1})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"computation": {"name": "lognormal", "median": 40, "sigma": 1e4}}, r"client \d has a computation of inf ms"),
        ({"communication": {"name": "constant", "value": 1e-320}}, "a communication of .* kbit/s, whose times are too"),
        ({"forward_passes": 1e300}, "forward_passes"),
        ({"availability": {"name": "constant", "value": 0}}, "nobody would ever train"),
    ],
)
def test_devices_that_would_never_be_done_or_there_are_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(9, name="sampled", **section)
