"""Runs of methods of prompts over CLIP: in stacks, continued, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from tests.models.pretrained.test_clip_runs import CONTEXT, experiment
from tests.support.experiments import outcome
from tests.support.toys import assert_close, assert_equal

OF_PROMPTS: dict[str, dict[str, Any]] = {
    "fedpgp": {"name": "fedpgp", "rank": 2},
    "fedotp": {"name": "fedotp"},
    "pfedmoap": {"name": "pfedmoap", "peers": 2},
    "fedtpg": {"name": "fedtpg", "expansion": 1},
}
"""Methods of prompts."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PROMPTS)
def test_methods_of_prompts_run_in_stacks_go_on_and_leave_in_files(name: str, tmp_path: Path) -> None:
    train = {"optimizer": "sgd", "lr": 0.002}
    for run, mode in (("looped", "looped"), ("stacked", "vectorized")):
        content = experiment(tmp_path, run, OF_PROMPTS[name], {"length": 2}, engine={"mode": mode}, train=train)
        rayfl.run({**content, "train": {**content["train"], "rounds": 1}})
        rayfl.run(str(tmp_path / run), train__rounds=2)
    rayfl.run(experiment(tmp_path, "whole", OF_PROMPTS[name], {"length": 2}, engine={"mode": "looped"}, train=train))
    one, other, whole = (outcome(tmp_path / run) for run in ("looped", "stacked", "whole"))
    assert_equal(one.server, whole.server)
    assert_equal(one.states, whole.states)
    assert_close(one.server, other.server, 2e-5)
    assert one.states.keys() == other.states.keys()
    for client in one.states:
        assert_close(one.states[client], other.states[client], 2e-5)
    out = tmp_path / "out.safetensors"
    client = max(whole.states, key=lambda name: len(whole.states[name]), default="0")  # it was in both rounds
    found = CliRunner().invoke(app, ["export", str(tmp_path / "whole"), "--client", str(client), "--out", str(out)])
    if name in ("fedotp", "pfedmoap"):  # what they predict is made of patches, or of others' contexts, too
        assert found.exit_code and "personalized" in str(found.exception)
        return
    assert found.exit_code == 0, found.output
    models = CommittedModels(open_run(str(tmp_path / "whole"), Experiment))
    (model,) = models.predictor(int(client), "personalized").built()
    assert_equal(safetensors.torch.load_file(out)[CONTEXT], model[CONTEXT])
