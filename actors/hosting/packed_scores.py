"""The form in which scores travel: one array for those of all clients, in place of an object for each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from actors.hosting.scoring import SplitScores
from rayfl.metrics import Measures, Statistics

Scores = dict[int, SplitScores]
"""Statistics by client (or piece of the official test part), split and name of the predictor."""
_Form = tuple[tuple[str, tuple[str, ...]], ...]


class PackedScores(NamedTuple):
    """Scores in one array.

    Attributes:
        owners: the clients, or pieces.
        forms: splits, and names of the predictors of each, once for all owners that have the same.
        form_of: the number of each owner's form.
        vectors: statistics, one row for each owner, split and name; None if there are none.
        measures: of all statistics: a job has one task.
    """

    owners: list[int]
    forms: list[_Form]
    form_of: list[int]
    vectors: np.ndarray | None
    measures: Measures | None

    @classmethod
    def of(cls, scores: Scores) -> PackedScores:
        """Packs scores."""
        numbers: dict[_Form, int] = {}
        form_of, found = [], list[Statistics]()
        for own in scores.values():
            form = tuple((split, tuple(by_name)) for split, by_name in own.items())
            form_of.append(numbers.setdefault(form, len(numbers)))
            found += [statistics for by_name in own.values() for statistics in by_name.values()]
        vectors = np.stack([one.vector for one in found]) if found else None
        return cls([*scores], [*numbers], form_of, vectors, found[0].measures if found else None)

    def unpacked(self) -> Scores:
        """The scores, whose vectors are rows of the array."""
        scores: Scores = {}
        rows = iter(() if self.vectors is None or self.measures is None else self.vectors)
        for owner, number in zip(self.owners, self.form_of, strict=True):
            scores[owner] = {
                split: {name: Statistics(next(rows), self.measures) for name in names}  # type: ignore[arg-type]
                for split, names in self.forms[number]
            }
        return scores
