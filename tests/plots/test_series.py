"""Runs become series with short labels; repetitions are one."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from pyarrow import csv
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.errors import ConfigError, RunError
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.plots.curves import _panel
from rayfl.plots.metrics import bounds_of
from rayfl.plots.output import write_plot
from rayfl.plots.phases import second_phase
from rayfl.plots.series import fields_that_differ, need_alike, need_same_but, seeds_together, series_of
from rayfl.plots.style import (
    COLOURS,
    SPLIT_COLOURS,
    TAU,
    band,
    colour,
    draw_curve,
    marker,
    new_figure,
    paper_style,
    size_of,
)
from rayfl.runs.folder import RunFolder
from tests.plots.conftest import Runs


def test_labels_say_what_differs_and_no_more(made: Runs) -> None:
    runs = [made("superfed-mm"), made("superfed-mm", seed=1), made("superfed-lm"), made("fedavg")]
    found = series_of(runs)
    assert [series.label for series in found] == ["SuPerFed, mode=mm", "SuPerFed, mode=lm", "FedAvg"]
    assert [len(series.runs) for series in found] == [2, 1, 1]


@pytest.mark.slow
def test_labels_say_which_data_methods_have_where_they_differ(made: Runs) -> None:
    few = {"partition.num_clients": 6}
    found = series_of([made("fedavg"), made("superfed-mm", **few), made("superfed-lm", **few)])
    assert [series.label for series in found] == [
        "FedAvg, num_clients=5",
        "SuPerFed, mode=mm, num_clients=6",
        "SuPerFed, mode=lm, num_clients=6",
    ]
    held = made("superfed-mm", **{"evaluation.unseen_clients": 0.2})
    staged = made("superfed-lm", stages={"name": "samples", "count": 2, "rounds": 2})
    assert [series.label for series in series_of([made("fedavg"), held])] == [
        "FedAvg, unseen_clients=0.0",
        "SuPerFed, unseen_clients=0.2",
    ]
    assert [series.label for series in series_of([made("fedavg"), staged])] == [
        "FedAvg, stages=none",
        "SuPerFed, stages=samples",
    ]


class Changed(RunFolder):
    """A run on other samples, or on unknown ones, of the same description."""

    checksum: str | None = None

    @property
    def content_hash(self) -> str | None:
        return self.checksum


def test_samples_that_have_changed_are_told_apart(made: Runs) -> None:
    found = []
    for method, seed, checksum in (("fedavg", 0, "a"), ("fedavg", 1, "b"), ("superfed-mm", 0, "b"), ("fedavg", 0, "b")):
        run = made(method, **({"seed": seed} if seed else {}))
        found.append(Changed(run.storage, run.config))
        found[-1].checksum = 64 * checksum
    series = series_of(found)
    assert [one.label for one in series] == [
        "FedAvg, samples=aaaaaaaa",
        "FedAvg, samples=bbbbbbbb",
        "SuPerFed, samples=bbbbbbbb",
    ]
    assert [len(one.runs) for one in series] == [1, 2, 1]
    with pytest.raises(ConfigError, match="these differ in samples as well"):
        need_same_but([found[0], found[3]], [], "x")
    found[0].checksum = None
    assert [one.label for one in series_of(found[1:])] == ["FedAvg", "SuPerFed"]
    assert [one.label for one in series_of(found[:3])] == ["FedAvg", "SuPerFed"]


class Behind(RunFolder):
    """A run that has one round to go."""

    @property
    def rounds_completed(self) -> int:
        return self.total_rounds - 1


def test_seeds_at_different_rounds_are_not_pooled(made: Runs) -> None:
    whole, other = made("superfed-mm"), made("superfed-mm", seed=1)
    behind = Behind(other.storage, other.config)
    with pytest.raises(RunError, match=r"seed_1 has done 2 of 3 rounds, and .*, with another seed, 3: .*rayfl run"):
        series_of([whole, behind])
    assert len(series_of([whole, behind], pooled=False)) == 1


def test_evaluations_of_other_clients_or_other_attacks_are_not_pooled(made: Runs) -> None:
    whole, few = made("superfed-mm"), made("superfed-mm", seed=1, **{"evaluation.clients": 3})
    with pytest.raises(
        ConfigError, match=r"seed_1.* cannot be pooled, as they differ in evaluation\.clients \(all, 3\)"
    ):
        need_alike(series_of([whole, few]), ["top1"])
    need_alike(series_of([whole]) + series_of([few]), ["top1"])
    attacked = [
        made("superfed-mm", seed=seed, **{"evaluation.adversarial": {"radius": radius}})
        for seed, radius in enumerate((0.05, 0.2))
    ]
    need_alike(series_of(attacked), ["top1"])
    with pytest.raises(ConfigError, match=r"differ in evaluation\.adversarial\.radius \(0\.05, 0\.2\)"):
        need_alike(series_of(attacked), ["top1", "robust_top1"])


def test_evaluation_makes_no_other_experiment(made: Runs) -> None:
    assert fields_that_differ([made("fedavg"), made("fedavg", **{"evaluation.every": 3})]) == []


def test_other_fields_are_named(made: Runs) -> None:
    runs = [made("superfed-mm"), made("superfed-lm")]
    need_same_but(runs, ["algorithm.mode"], "x")
    with pytest.raises(ConfigError, match=r"these differ in algorithm.mode as well"):
        need_same_but(runs, ["algorithm.start"], "x")


def test_second_phases(made: Runs) -> None:
    assert second_phase(made("floco").config) == (2, TAU)
    assert second_phase(made("superfed-mm", **{"algorithm.start": 0.5}).config) == (1, "L")
    assert second_phase(made("fedavg").config) is None


@given(st.lists(st.dictionaries(st.integers(0, 9), st.floats(-1, 1), min_size=1), min_size=1, max_size=4))
def test_only_rounds_that_all_seeds_have_count(curves: list[dict[int, float]]) -> None:
    found = seeds_together(curves)
    assert set(found) == set.intersection(*(set(curve) for curve in curves))
    for round, (mean, spread) in found.items():
        values = [curve[round] for curve in curves]
        assert min(values) - 1e-12 <= mean <= max(values) + 1e-12
        assert math.isnan(spread) if len(curves) == 1 else 0 <= spread <= 2**0.5 + 1e-12


def test_many_series_can_be_told_apart() -> None:
    looks = {(colour(i), marker(i)) for i in range(3 * len(COLOURS))}
    assert len(looks) == 3 * len(COLOURS)


def test_a_global_model_looks_like_no_other_curve() -> None:
    rounds = np.arange(1, 101)
    rows = [
        {"series": f"s{position}", "model": model, "round": round, "top1": 0.5, "top1_std_over_seeds": 0, "seeds": 1}
        for position in range(3 * len(COLOURS))
        for model in ("personalized", "global")
        for round in rounds.tolist()
    ]
    axes = Figure().subplots()
    _panel(axes, rows, CLASSIFICATION.first, "rounds")
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
    assert len(set(looks)) == len(looks) == 6 * len(COLOURS)
    assert {line.get_linestyle() for line in axes.lines[1 : 2 * len(COLOURS) : 2]} == {"--"}


def test_curves_look_alike_in_plots_and_reports() -> None:
    """One palette: the page's style sheet knows each colour, and one function draws a series' line and its band."""
    sheet = (Path(rayfl.__file__).parent / "report" / "templates" / "style.css").read_text()
    for number, drawn in enumerate([*COLOURS]):
        assert f"--series-{number}: {drawn}" in sheet
    for number, drawn in enumerate(SPLIT_COLOURS):
        assert f"--split-{number}: {drawn}" in sheet
    axes = Figure().subplots()
    x = np.arange(3.0)
    draw_curve(axes, 1, "plain", x, x)
    draw_curve(axes, 9, "band", x, x, np.array([0.5, np.nan, 0.5]))
    draw_curve(axes, 2, "long", np.arange(41.0), np.arange(41.0), np.full(41, np.nan), linestyle="--")
    plain, banded, long = axes.lines
    assert (plain.get_color(), plain.get_linestyle(), plain.get_marker()) == (COLOURS[1], "-", marker(1))
    assert (banded.get_color(), banded.get_linestyle()) == (COLOURS[1], "--")
    assert (long.get_color(), long.get_linestyle(), long.get_marker()) == (COLOURS[2], "--", "")
    assert len(axes.collections) == 1


def test_bands_stay_where_values_can_be() -> None:
    y, spread = np.array([0.1, 2.0, -0.5]), np.array([0.4, 0.5, 0.1])
    low, high = band(y, spread, bounds_of(CLASSIFICATION.metrics[2]))
    assert low.tolist() == [0, 1.5, -0.5]  # a loss of one's own that is below zero is drawn where it is
    assert high.tolist() == pytest.approx([0.5, 2.5, -0.4])
    assert [
        edge.tolist() for edge in band(np.array([97.0, 2.0]), np.array([5.0, 5.0]), bounds_of(CLASSIFICATION.first))
    ] == [
        [92, 0],
        [100, 7],
    ]
    assert bounds_of(Metric("r2", "R2", "higher")) == (-math.inf, math.inf)
    with paper_style():
        axes = new_figure(3, 2).subplots()
        draw_curve(axes, 0, "loss", np.arange(3), y, spread, bounds_of(Metric("loss", "loss", "lower")))
    (drawn,) = axes.collections
    assert drawn.get_paths()[0].vertices[:, 1].min() == -0.5


def test_figures_for_papers_have_the_venues_width_and_fonts(tmp_path: Path) -> None:
    import matplotlib

    with paper_style():
        screen = new_figure(5.0, 4.0)
        assert screen.get_size_inches().tolist() == [5.0, 4.0]
    with paper_style(size_of("icml-column")):
        figure = new_figure(5.0, 4.0)
        assert matplotlib.rcParams["font.family"][0] == "STIXGeneral"
        assert (matplotlib.rcParams["font.size"], matplotlib.rcParams["legend.fontsize"]) == (8, 7)
    width, height = figure.get_size_inches()
    assert width == 3.25
    assert 4.0 * 3.25 / 5.0 < height < 4.0  # labels keep their size, so it is not flattened as much as it is narrowed
    assert new_figure(5.0, 4.0).get_size_inches()[0] == 5.0
    with pytest.raises(ConfigError, match=r"--size: there is no 'icml-colum'.*icml-column.*jmlr"):
        size_of("icml-colum")


def test_dots_per_inch_are_those_that_are_asked_for(made: Runs, tmp_path: Path) -> None:
    run = made("fedavg")
    write_plot("clients", [run], tmp_path / "f.png", dpi=100, size="ieee-column")
    with Image.open(tmp_path / "f.png") as image:
        assert image.width == 350
    for name, dpi, message in (("f.pdf", 300, "made of lines"), ("f.png", 5000, "not within 30 and 1200")):
        with pytest.raises(ConfigError, match=message):
            write_plot("clients", [run], tmp_path / name, dpi=dpi)
    assert not (tmp_path / "f.pdf").exists()


def test_a_folder_of_runs_stands_for_all_of_them(made: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("fedavg").storage.local_path
    assert folder is not None
    for name in ("a", "b"):
        shutil.copytree(folder, tmp_path / "sweep" / name)
    config = tmp_path / "sweep" / "b" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plot", "clients", "sweep"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "clients of 2 runs -> clients.png, clients.csv" in done.output
    assert set(csv.read_csv(tmp_path / "clients.csv")["seed"].to_pylist()) == {0, 1}
