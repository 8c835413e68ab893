"""FedAvg with fine-tuning as a further row of the papers' tables."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.registry import Experiment
from rayfl.errors import ConfigError
from rayfl.reproduction.baseline import FINETUNED, has_baseline
from rayfl.reproduction.comparison import compare
from rayfl.reproduction.output import as_markdown
from rayfl.reproduction.reference import reference_tables
from rayfl.reproduction.tables import Reproduction, plan_reproduction
from tests.reproduction.test_comparison import MODELS


def plan(name: str, **options: Any) -> Reproduction:
    return plan_reproduction(Experiment, name, "/runs", **{"scale": "paper", "seeds": [0], **options})


def test_fedavg_with_fine_tuning_is_a_row_of_tables_of_personalized_models_that_print_none() -> None:
    setting = "superfed-table1-mnist-k50"
    planned = plan(setting, methods=["fedavg", FINETUNED])
    (table,) = planned.tables
    plain, tuned = planned.runs
    assert (plain.method, tuned.method) == ("fedavg", FINETUNED)
    assert tuned.config.algorithm.finetune_epochs == tuned.config.train.local_epochs == 10
    assert tuned.config.train == plain.config.train and has_baseline(table, setting)
    fedavg, finetuned = compare(planned, dict.fromkeys(planned.runs, MODELS))
    assert fedavg.ours == pytest.approx(40)
    assert finetuned.ours == pytest.approx(70), "the row after fine-tuning"
    assert (finetuned.paper, finetuned.difference, finetuned.status) == (None, None, "no_target")
    assert f"| {FINETUNED} | 70.00 |" in (text := as_markdown(planned, [fedavg, finetuned]))
    assert f"{FINETUNED}: no row of the paper" in text
    assert [run.method for run in plan(setting, methods=[FINETUNED]).runs] == [FINETUNED], "also alone"
    assert [run.method for run in plan(setting, methods=["ditto", FINETUNED]).runs] == ["ditto", FINETUNED]
    quick = plan(setting, methods=[FINETUNED], scale="quick").runs[0].config
    assert quick.algorithm.finetune_epochs == quick.train.local_epochs == 1


def test_tables_that_have_it_or_are_of_global_models_do_not_get_it_again() -> None:
    named = {table.name: table for table in reference_tables()}
    with_own = next(one for one in named.values() if one.paper == "fedme" and one.settings and one.protocol)
    assert not any(has_baseline(with_own, setting) for setting in with_own.preset_names), "FedMe fine-tunes FedAvg"
    assert FINETUNED in {run.method for run in plan("floco-table1-local").runs}
    for name in ("floco-table1-global", "floco-fig2"):
        table = named[name]
        assert not any(has_baseline(table, setting) for setting in table.preset_names)
    with pytest.raises(ConfigError, match=f"has no row '{FINETUNED}'"):
        plan("floco-table1-global", methods=[FINETUNED])
