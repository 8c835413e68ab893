"""A run with adapters that ends in the midst of a round continues to the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayfl
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from tests.support.adapter_runs import ADAPTERS, experiment
from tests.support.commits_alike import assert_same_commits
from tests.support.experiments import assert_same, outcome

ROOT = Path(__file__).parents[3]
KEPT = {"rounds": 3, "persist_optimizer": True}
METHODS: dict[str, Any] = {
    "FedSA-LoRA": {"name": "fedper", "head_group": "lora_b_and_head"},
    "FedSA-LoRA with DoRA": {"name": "fedper", "head_group": "lora_b_and_head"},
    "FedDPA": {"name": "feddpa"},
    "FedALT": {"name": "fedalt"},
}
FORGETTING: dict[str, Any] = {
    "HetLoRA": {"name": "hetlora", "ranks": [1, 2], "kept_share": 0.5, "pruning_weight": 1.0},
    "FLoRA": {"name": "flora", "ranks": [1, 2]},
    "FlexLoRA": {"name": "flexlora", "ranks": [1, 2]},
    "FedEx-LoRA": {"name": "fedex_lora"},
    "RoLoRA": {"name": "rolora"},
    "LoRA-FAIR": {"name": "lora_fair", "correction_weight": 1e-4},
}
"""Methods that keep no moments, and nothing else of a client."""
MODELS: dict[str, Any] = {"FedSA-LoRA with DoRA": {"adapter": {**ADAPTERS, "use_dora": True}}}
"""Changes of the section ``model``."""
QUICK = ("FedSA-LoRA with DoRA",)


class _Stop(rayfl.Callback):
    """Ends the run between what a round's clients have trained and its commit."""

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows[0]["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*METHODS, *FORGETTING)],
)
def test_a_run_that_ends_inside_a_round_continues_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """Client by client, with AdamW's moments kept; the states and moments of the lost round are trained again."""
    train = KEPT if method in METHODS else {"rounds": 3}
    options = {"train": train, "evaluation": {"every": 1}, "engine": {"mode": "looped"}}
    options["model"] = MODELS.get(method, {})
    settings = {**METHODS, **FORGETTING}[method]
    rayfl.run(experiment(tmp_path, "whole", settings, **options))
    pieces = experiment(tmp_path, "pieces", settings, **options)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[_Stop()])
    rayfl.run(pieces)
    whole, found = outcome(tmp_path / "whole"), outcome(tmp_path / "pieces")
    assert_same(whole, found)
    assert_same_commits(tmp_path / "whole", tmp_path / "pieces")
    assert any("optimizer" in state for state in whole.states.values()) == (method in METHODS)
    assert verify(Storage(str(tmp_path / "pieces"))).problems == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_a_killed_process_continues_to_the_same_bits(backend: str, tmp_path: Path) -> None:
    """SIGKILL inside a round, in this process alone and with two actors."""
    cluster = {"backend": "inline"} if backend == "inline" else {"num_actors": 2}
    options = {"train": KEPT, "evaluation": {"every": 1}, "engine": {"mode": "looped"}, "cluster": cluster}
    rayfl.run(experiment(tmp_path, "whole", METHODS["FedDPA"], **options))
    pieces = experiment(tmp_path, "pieces", METHODS["FedDPA"], **options)
    config = tmp_path / "pieces.yaml"
    config.write_text(yaml.safe_dump(pieces))
    script = str(ROOT / "tests" / "support" / "killed_run.py")
    killed = subprocess.run(
        [sys.executable, script, str(config), "inside", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, timeout=300, check=False, capture_output=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    rayfl.run(pieces)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))
