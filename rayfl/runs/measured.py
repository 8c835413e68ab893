"""Which evaluations of a run are looked at: on which split, of whom, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow.compute as pc

Split = Literal["test", "validation", "train", "official"]
Cohort = Literal["all", "selected", "unseen"]
Phase = Literal["received", "trained"]


@dataclass(frozen=True)
class Measured:
    """A choice among the rows of a run's tables.

    Attributes:
        split: the samples; ``official``, the data set's official test part, the same for all clients.
        cohort: all clients that may train, those sampled in the round, or those held out from training.
        phase: models as clients received them, or right after local training.
    """

    split: Split = "test"
    cohort: Cohort = "all"
    phase: Phase = "received"

    @property
    def rows(self) -> pc.Expression:
        """The condition on rows of ``rounds``, ``clients`` and ``calibration``."""
        field = pc.field
        return (field("split") == self.split) & (field("cohort") == self.cohort) & (field("phase") == self.phase)

    @property
    def whose(self) -> str:
        """The clients in words, for captions and axes."""
        return {"all": "clients", "selected": "the round's cohort", "unseen": "clients held out from training"}[
            self.cohort
        ]

    @property
    def when(self) -> str:
        """The moment in words, with a leading comma; empty for models as clients received them."""
        return ", right after local training" if self.phase == "trained" else ""

    @property
    def options(self) -> str:
        """The choice as options of a command."""
        return f"--split {self.split} --cohort {self.cohort} --phase {self.phase}"


EVERYBODY = Measured()
"""What most tables show: test data of all clients, with models as they received them."""
