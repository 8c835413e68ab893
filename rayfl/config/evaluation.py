"""The section ``evaluation``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rayfl.config.adversarial import AdversarialConfig
from rayfl.naming.lists import EACH_ONCE


class EvaluationConfig(BaseModel):
    """What is measured, and how often."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(
        10,
        ge=1,
        description="rounds between evaluations of all clients; there is one after the last round, too",
    )
    clients: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        "all",
        description="clients that are scored in evaluations before the last, drawn by the seed for each of them; "
        "all: every client. After the last round every client is scored in any case",
    )
    cohort_every: int = Field(
        1,
        ge=0,
        description="score the cohort's models right after local training, and the variance of its updates, every so "
        "many rounds; 0: never",
    )
    cohort_received: bool = Field(
        False,
        description="after those rounds, also score the cohort on what it receives next (before aggregation is over "
        "it was scored on what it trained): their difference is what a new download costs a client",
    )
    splits: Annotated[tuple[Literal["train", "validation", "test"], ...], EACH_ONCE] = Field(
        ("validation", "test"),
        min_length=1,
        description="the splits that are scored; train: what clients train on, as it is (without augment)",
    )
    unseen_clients: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the clients, rounded down, that take no part in training: they are drawn by the seed, "
        "have the last numbers, and are scored as newcomers when all others are (rows with the cohort unseen)",
    )
    unseen_epochs: int | None = Field(
        None,
        ge=0,
        description="epochs that a newcomer trains what the method says is its own, before each evaluation; 0: it has "
        "what a client never sampled has; null: train.local_epochs",
    )
    batch_size: int = Field(512, ge=1, description="samples per forward pass")
    official_test: bool = Field(
        False,
        description="when all clients are evaluated, also score the server's model on the data set's official test "
        "part, as one set that belongs to no client (rows with the cohort server and the split official)",
    )
    official_personalized: bool = Field(
        False,
        description="when all clients are evaluated, also score each client's personalized model on that part, "
        "the same for all (rows with the split official): what personalization forgets",
    )

    adversarial: AdversarialConfig | None = Field(
        None,
        description="score validation and test samples once more after each was changed by little so that the model "
        "gets it wrong (the metric robust_top1); {}: with the defaults; null: no",
    )

    @field_validator("splits")
    @classmethod
    def _judging(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        if splits == ("train",):
            raise ValueError("nothing is judged by training samples: add test or validation")
        return splits

    @property
    def scores_official(self) -> bool:
        """Returns whether any model is scored on the official test part."""
        return self.official_test or self.official_personalized

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> EvaluationConfig:
        if self.unseen_epochs is not None and not self.unseen_clients:
            raise ValueError("unseen_epochs needs unseen_clients: it is about clients that are held out from training")
        return self
