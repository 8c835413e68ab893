"""Every table of the papers resolves to valid runs, and what the quick form keeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.config.paper_presets import method_settings, paper_preset
from rayfl.errors import ConfigError
from rayfl.reproduction.baseline import FINETUNED, has_baseline, settings_of
from rayfl.reproduction.reference import reference_tables
from rayfl.reproduction.scaling import scaled, scaled_rounds, scaled_window
from rayfl.reproduction.tables import obstacle, plan_reproduction, select_tables

POSSIBLE = [table.name for table in reference_tables() if not obstacle(table)]
OTHERS = [table.name for table in reference_tables() if obstacle(table)]


def test_every_table_of_methods_with_results_can_be_reproduced() -> None:
    assert len(POSSIBLE) > 30
    for table in reference_tables():
        if table.settings and table.rows == "methods" and table.protocol is not None:
            assert table.name in POSSIBLE


@pytest.mark.two_cases
@pytest.mark.parametrize("scale", ["quick", pytest.param("paper", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", POSSIBLE)
def test_every_table_resolves_to_valid_runs(name: str, scale: Any) -> None:
    (table,) = select_tables(name)
    planned = plan_reproduction(Experiment, name, "/runs", scale, seeds=[0])
    cells = {(setting, row) for setting, row, _ in table.cells()}
    cells |= {(setting, FINETUNED) for setting in table.preset_names if has_baseline(table, setting)}
    runs = {(run.setting, run.method) for run in planned.runs}
    assert runs == cells if cells else {setting for setting, _ in runs} == set(table.preset_names)
    for run in planned.runs:
        own = load_config(Experiment, paper_preset(run.setting).content, settings_of(run.setting, run.method))
        if scale == "paper":
            assert run.config.fingerprint() == own.fingerprint()
            continue
        assert run.config.train.rounds == scaled_rounds(run.paper_rounds, "quick") <= 100
        varied = {path for variants in paper_preset(run.setting).variants for path in variants.over}
        assert run.config.train.local_epochs == (own.train.local_epochs if "train.local_epochs" in varied else 1)
        if "start" in varied:
            assert run.config.algorithm == own.algorithm
        assert (run.config.model, run.config.dataset, run.config.train.lr) == (own.model, own.dataset, own.train.lr)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tables_say_why_not(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be reproduced run by run .* can be run: "):
        select_tables(name)


def quick(preset: str, method: str, **changes: Any) -> tuple[Any, Any]:
    settings = {**method_settings(preset, method), **changes}
    config = load_config(Experiment, preset, settings)
    return config, load_config(Experiment, preset, {**settings, **scaled(config, "quick")})


def test_the_quick_form_of_a_divided_data_set_keeps_its_clients() -> None:
    config, small = quick("superfed-table1-mnist-k500", "ditto")
    assert small.train.rounds == 100
    assert small.train.clients_per_round == 50
    assert small.partition == config.partition
    assert small.algorithm.personal_epochs == 1
    assert small.train.lr_decay**100 == pytest.approx(config.train.lr_decay**500, rel=1e-4)
    assert (small.evaluation.every, small.evaluation.cohort_every) == (20, 20)


def test_a_schedule_is_stretched_with_the_rounds() -> None:
    steps = {"name": "multistep", "milestones": [250, 375], "warmup": 50}
    _, small = quick("superfed-table1-mnist-k500", "ditto", **{"train.lr_decay": 1.0, "train.schedule": steps})
    assert small.train.rounds == 100
    assert (small.train.schedule.milestones, small.train.schedule.warmup) == ((50, 75), 10)


def test_rounds_inside_a_method_keep_their_share_and_writers_become_fewer() -> None:
    config, small = quick("floco-table1-femnist", "floco")
    assert small.algorithm.assignment_round / 100 == config.algorithm.assignment_round / 500
    assert (small.partition.num_clients, small.train.clients_per_round) == (50, 5)
    clusters = {"name": "fedme", "cluster_rounds": [150, 225, 275]}
    _, fedme = quick("fedme-table4-cifar10", "fedme", algorithm=clusters)
    assert fedme.algorithm.cluster_rounds == (30, 45, 55)
    assert fedme.train.clients_per_round == "all"


def test_the_second_phase_begins_early_enough_for_few_rounds() -> None:
    assert quick("superfed-table1-mnist-k50", "superfed_lm")[1].algorithm.start == 0.4
    assert quick("superfed-table1-mnist-k500", "superfed_mm")[1].algorithm.start == 0.2


def test_the_papers_size_changes_only_with_rounds() -> None:
    config = load_config(Experiment, "superfed-table1-mnist-k50", [])
    assert scaled(config, "paper") == {}
    assert set(scaled(config, "paper", 100)) == {
        "train.rounds",
        "train.lr_decay",
        "evaluation.every",
        "evaluation.cohort_every",
    }


@given(st.integers(1, 3000))
def test_scaled_rounds_never_exceed_the_papers(rounds: int) -> None:
    assert 1 <= scaled_rounds(rounds, "quick") <= min(rounds, 100)
    assert scaled_rounds(rounds, "paper") == rounds


@given(st.integers(1, 1000), st.integers(0, 50), st.integers(1, 1000))
def test_a_window_of_rounds_lies_inside_the_shorter_run(first: int, more: int, rounds: int) -> None:
    last = min(1000, first + more)
    start, end = scaled_window((first, last), 1000, rounds)
    assert 1 <= start <= end <= rounds
    assert scaled_window((first, last), 1000, 1000) == (first, last)
