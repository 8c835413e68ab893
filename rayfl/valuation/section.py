"""The section ``contribution`` of a configuration: how the clients of a round are valued."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rayfl.valuation.game import UndefinedUtilityError, Utility, Valued
from rayfl.valuation.shapley import drawn_values, exact_values, without_one

_MOST_EXACT = 16


class NoContribution(BaseModel):
    """Clients are not valued."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["none"] = "none"


class Cosine(BaseModel):
    """The cosine of a client's update with the round's mean update (CGSV: Xu et al., NeurIPS 2021, eq. 3).

    No model is evaluated. The mean here is the one that the server takes, of updates as they are: in the paper it is of
    updates that are scaled to one length, with weights that follow the values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["cosine"] = "cosine"


class Measured(BaseModel):
    """Values by what models of some of the clients would be worth.

    The model of a coalition is the mean of its clients' models, weighted as the server's mean is; that of nobody is the
    model before the round.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str | None = Field(
        None,
        description="what a model is worth: the metric, or minus it where less is better, as of loss; null: the task's "
        "first metric",
    )
    samples: Literal["validation", "public"] = Field(
        "validation",
        description="what models are evaluated on: validation: the validation parts of all honest clients together; "
        "public: the server's own samples (holdout.public)",
    )

    def valued(self, utility: Utility, generator: np.random.Generator) -> Valued:
        """Returns the values of a round's clients.

        Args:
            utility: of coalitions of them.
            generator: for what is drawn.
        """
        try:
            return self._valued(utility, generator)
        except UndefinedUtilityError:
            nothing = np.full(utility.players, np.nan)
            return Valued(nothing, "undefined", evaluations=utility.evaluations)

    @abstractmethod
    def _valued(self, utility: Utility, generator: np.random.Generator) -> Valued:
        """Returns the values; may raise UndefinedUtilityError."""

    @abstractmethod
    def most_evaluations(self, players: int) -> int:
        """Returns how many models are evaluated at most in a round of that many clients."""


class LeaveOneOut(Measured):
    """How much less the model after the round would be worth without a client."""

    name: Literal["leave_one_out"] = "leave_one_out"

    def _valued(self, utility: Utility, generator: np.random.Generator) -> Valued:
        before, values = utility.of(0), without_one(utility)
        after = utility.of(utility.everybody)
        return Valued(values, before=before, after=after, evaluations=utility.evaluations)

    def most_evaluations(self, players: int) -> int:
        return players + 2 if players > 1 else players + 1


class Shapley(Measured):
    """Federated Shapley values (FedSV: Wang et al., 2020), by drawn permutations in large cohorts (GTG-Shapley).

    What a client adds to a coalition, on average over all orders in which the clients of the round may join. The drawn
    permutations and both truncations are those of Liu et al., GTG-Shapley, ACM TIST 2022.
    """

    name: Literal["shapley"] = "shapley"
    exact_up_to: int = Field(
        6,
        ge=0,
        le=_MOST_EXACT,
        description="the largest cohort m whose values are exact, by 2^m evaluations; of larger ones permutations are "
        "drawn",
    )
    passes: int = Field(
        20,
        ge=1,
        description="the most passes of a round; each draws m permutations, every client being the first of one",
    )
    tolerance: float | None = Field(
        0.05,
        gt=0,
        allow_inf_nan=False,
        description="passes end once values have changed by less than this share, on average over clients, during the "
        "last 10 of more than 30 permutations; null: all passes are made",
    )
    within: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="epsilon_i: a permutation ends once its clients are worth what all are, up to this: the others add "
        "nothing; null: none ends",
    )
    between: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="epsilon_b: a round that has changed the utility by no more than this gives everybody 0; null: "
        "none does",
    )

    def _valued(self, utility: Utility, generator: np.random.Generator) -> Valued:
        before, after = utility.of(0), utility.of(utility.everybody)
        if self.between is not None and abs(after - before) <= self.between:
            return Valued(np.zeros(utility.players), "skipped", before, after, utility.evaluations)
        if utility.players <= self.exact_up_to:
            return Valued(exact_values(utility), "exact", before, after, utility.evaluations)
        values, count, truncated = drawn_values(utility, generator, self.passes, self.tolerance, self.within)
        return Valued(values, "drawn", before, after, utility.evaluations, count, truncated)

    def most_evaluations(self, players: int) -> int:
        everything = 1 << players
        if players <= self.exact_up_to:
            return everything
        return min(everything, 2 + self.passes * players * (players - 1))


Contribution = Annotated[NoContribution | Shapley | LeaveOneOut | Cosine, Field(discriminator="name")]
