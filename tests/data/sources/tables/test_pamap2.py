"""PAMAP2 from small files of its layout: people, windows of one activity, gaps and pauses, what is wrong in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.federated import FederatedDataset
from rayfl.data.opening import open_dataset
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.tables.pamap2 import Pamap2Source
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.pamap2_files import PEOPLE, SIGNALS, pamap2_files, pamap2_zip, recording, write

WINDOW = 16


def opened(*options: str, step: int = 8) -> FederatedDataset:
    dataset = f"dataset={{name: pamap2, window: {WINDOW}, step: {step}}}"
    config = [dataset, "partition=natural", "holdout={test: 0, validation: 0}", "model=har_cnn", "model.kernel=3"]
    return open_dataset(load_config(Experiment, "quickstart", [*config, *options]), RandomStreams(0))


def train(data: FederatedDataset, client: int) -> tuple[np.ndarray, list[int]]:
    examples = data.load(client)["train"]
    return examples.x.numpy(), examples.y.tolist()


def changed(folder: Path, person: int, rows: np.ndarray) -> None:
    write(folder / "Protocol" / f"subject{person}.dat", rows)


@pytest.mark.parametrize("step", [8, 16])
def test_people_are_clients_and_windows_are_of_one_activity(tmp_path: Path, root: Path, step: int) -> None:
    found = pamap2_files(tmp_path / "PAMAP2_Dataset")
    with pytest.raises(DataError, match=r"PAMAP2_Dataset.zip exists, nor all .* `rayfl data prepare pamap2` \(add"):
        Pamap2Source().open()
    source = Pamap2Source(window=WINDOW, step=step)
    source.prepare(Order(place=str(tmp_path), offline=True))
    assert source.class_names()[11] == "rope jumping"
    data = opened(step=step)
    assert data.names == tuple(f"subject_{person}" for person in PEOPLE)
    assert data.spec == source.known_spec and not data.remarks()
    for client, person in enumerate(PEOPLE):
        x, y = train(data, client)
        begins = [first + shift for first in (7, 56) for shift in range(0, 40 - WINDOW + 1, step)]
        classes = (0, 11) if person % 2 else (1, 7)
        assert y == [code for code in classes for _ in range(len(begins) // 2)]
        for window, begin in zip(x, begins, strict=True):
            expected = found[person][begin : begin + WINDOW, SIGNALS].T[:, np.newaxis]
            np.testing.assert_allclose(window, expected, rtol=2e-5)


def test_short_gaps_are_bridged_and_windows_with_longer_ones_left_out(tmp_path: Path, root: Path) -> None:
    folder = root / "PAMAP2_Dataset"
    pamap2_files(folder)
    rows = recording([(4, 400)], seed=0)
    rows[10:14, 4] = np.nan  # inside of a window
    rows[:3, 21] = np.nan  # before the first number: nothing to bridge from
    rows[150:251, 49] = np.nan  # one time longer than a second
    changed(folder, 103, rows)
    data = opened(step=WINDOW)
    x, _ = train(data, 2)
    kept = [begin for begin in range(0, 400, WINDOW) if begin and (begin + WINDOW <= 150 or begin > 250)]
    assert len(x) == len(kept)
    assert data.remarks()[0].startswith(f"{400 // WINDOW - len(kept)} windows of pamap2 are left out")
    assert np.isfinite(x).all()
    second = recording([(4, 400)], seed=0)
    second[10:14, 4] = np.nan
    changed(folder, 103, second)
    x, _ = train(opened(step=WINDOW), 2)
    line = np.interp(np.arange(10, 14), [9, 14], second[[9, 14], 4])
    np.testing.assert_allclose(x[0, 0, 0, 10:14], line, rtol=1e-5)


def test_no_window_goes_over_a_pause_of_the_recording(tmp_path: Path, root: Path) -> None:
    folder = root / "PAMAP2_Dataset"
    pamap2_files(folder)
    rows = recording([(4, 40)], seed=0)
    rows[20:, 0] += 1.5
    changed(folder, 101, rows)
    x, _ = train(opened(step=2), 0)
    assert len(x) == 2 * len(range(0, 20 - WINDOW + 1, 2))


def test_from_the_zip_file_of_uci(tmp_path: Path, root: Path) -> None:
    pamap2_files(tmp_path / "PAMAP2_Dataset")
    archive = pamap2_zip(tmp_path / "PAMAP2_Dataset", tmp_path / "mine.zip")
    Pamap2Source(window=WINDOW).prepare(Order(place=str(archive), offline=True))
    assert [file.name for file in root.glob("*.zip")] == ["PAMAP2_Dataset.zip"]
    assert opened(step=128).num_clients == 9
    with pytest.raises(
        DataError, match=r"nothing is downloaded offline; get https://archive.ics.uci.edu/static/public"
    ):
        Pamap2Source(root=tmp_path / "other").prepare(Order(offline=True))


def test_there_is_no_official_test_part(tmp_path: Path, root: Path) -> None:
    pamap2_files(root / "PAMAP2_Dataset")
    with pytest.raises(ConfigError, match=r"dataset\.part"):
        load_config(Experiment, "quickstart", ["dataset={name: pamap2, part: train}", "partition=natural"])


@pytest.mark.parametrize(
    ("row", "column", "value", "words"),
    [
        (3, 1, 8.0, r"subject105.dat, row 3: time 5.03 and activity 8 must be .* one of 0, 1, 2, .*, 24; get the file"),
        (3, 0, np.nan, r"subject105.dat, row 3: time nan and activity 0 must be a number of seconds"),
        (3, 0, 5.0, r"subject105.dat, row 3: the time 5 is not after the one before it"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, root: Path, row: int, column: int, value: float, words: str
) -> None:
    found = pamap2_files(root / "PAMAP2_Dataset")
    found[105][row, column] = value
    changed(root / "PAMAP2_Dataset", 105, found[105])
    with pytest.raises(DataError, match=words):
        opened()


def test_rows_that_are_too_short_and_people_without_windows_are_named(tmp_path: Path, root: Path) -> None:
    found = pamap2_files(root / "PAMAP2_Dataset")
    changed(root / "PAMAP2_Dataset", 105, found[105][:, :53])
    with pytest.raises(DataError, match=r"subject105.dat: .*Expected 54 columns, got 53.*; it must have 54 numbers"):
        opened()
    changed(root / "PAMAP2_Dataset", 105, found[105][:20])
    with pytest.raises(DataError, match=r"subject105.dat has no window of 16 times of one activity"):
        opened()
