"""TensorBoard scalars: one curve per split, model and metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.tracking.callback import Callback, RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SCALARS = ("top1", "top1_std", "top1_worst5", "top1_jain", "loss", "ece", "mce")


class TensorBoard(Callback):
    """Writes event files into the run's folder.

    Args:
        folder: the run's folder on a disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def on_start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second that only runs pay

        # What an interrupted run wrote after its last commit is hidden, not shown twice.
        self._writer = SummaryWriter(str(self._folder), purge_step=run.rounds_completed + 1)

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._writer is not None
        for row in rows:
            selected = f" ({row['selected_on']})" if row["selected_on"] else ""
            place = f"{row['split']}, {row['cohort']} clients, {row['phase']}/{row['model']}{selected}"
            for metric in _SCALARS:
                self._writer.add_scalar(f"{metric}/{place}", row[metric], row["round"])

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        assert self._writer is not None
        for phase, value in seconds.items():
            self._writer.add_scalar(f"time/{phase}", value, rounds_completed)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        assert self._writer is not None
        self._writer.add_scalar("time/seconds per round", seconds, rounds_completed)
        self._writer.add_scalar("time/clients per second", len(cohort) / seconds, rounds_completed)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        assert self._writer is not None
        self._writer.add_text("failures", reason, rounds_completed)

    def on_end(self, rounds_completed: int) -> None:
        if self._writer is not None:
            self._writer.close()
