"""Functions of an own method that look like hooks but are none are named before the run."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.experiment.own_methods import misspelt_hooks
from rayfl.experiment.parts import Parts
from tests.support.experiments import small_experiment

OWN_MODULE = """
from typing import ClassVar

from algorithms.base import Averaging

class Misspelt(Averaging):
    name: str = "misspelt"
    personalised: ClassVar[str] = "memory"
    async def local_updates(self, client, model):
        return self.weighted(client, model)

class Fine(Averaging):
    name: str = "fine"
    personalized: ClassVar[str] = "memory"
    summands: ClassVar[int] = 3
    def round(self, server, cohort, clients):
        return {"model": clients.mean(self.local_updates_, cohort, {"model": server["model"]})}
    async def local_updates_(self, client, model):
        return self.weighted(client, model)
    def helper(self):
        return None

class Derived(Fine):
    name: str = "derived"
    async def predictor(self, client, server):
        return {}
"""


def test_hooks_that_are_misspelt_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "misspelt_hooks_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("misspelt_hooks_module")
    assert misspelt_hooks(module.Misspelt) == [
        "nothing uses Misspelt.personalised: did you mean 'personalized'?",
        "nothing uses Misspelt.local_updates: did you mean 'local_update'?",
    ]
    assert not misspelt_hooks(module.Fine)
    assert misspelt_hooks(module.Derived) == ["nothing uses Derived.predictor: did you mean 'predictors'?"]
    with caplog.at_level(logging.WARNING):
        Parts(
            load_config(
                Experiment, small_experiment(tmp_path, "run", "fedavg"), {"algorithm": "misspelt_hooks_module:Derived"}
            )
        ).check()
    assert "algorithm: nothing uses Derived.predictor: did you mean 'predictors'?" in caplog.text
