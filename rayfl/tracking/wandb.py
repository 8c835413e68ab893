"""Curves of a run on Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.config.storage_section import WandbConfig
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.scalars import imported, scalars


class Wandb(Callback):
    """Sends the summaries of every evaluation; a run that is continued goes on in its place.

    The step is ``round``, so that rounds that are done again replace nothing but draw over what was there.

    Args:
        config: the section ``tracking.wandb``.
        folder: for wandb's own files; None: its default.

    Raises:
        ResourceError: when wandb is not installed.
    """

    def __init__(self, config: WandbConfig, folder: Path | None) -> None:
        self._config = config
        self._folder = folder
        self._wandb = imported("wandb", "tracking.wandb.enabled")
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        identity = f"{run.folder} {run.fingerprint or run.config.fingerprint()}"
        self._run = self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=self._config.mode,
            name=run.config.run_name,
            id=hashlib.sha256(identity.encode()).hexdigest()[:16],
            resume="allow",
            config=run.config.model_dump(mode="json"),
            dir=None if self._folder is None else str(self._folder),
        )
        self._run.define_metric("*", step_metric="round")

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._run.log({**scalars(rows), "round": rows[0]["round"]})

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._run.log({"time/seconds per round": seconds, "round": rounds_completed})

    def on_end(self, rounds_completed: int) -> None:
        if self._run is not None:
            self._run.finish()
