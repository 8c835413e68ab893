"""The training section of a configuration: rounds, cohort and local SGD."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.engine.batches import num_steps
from rayfl.engine.optimizers import OptimizerName, Rule
from rayfl.engine.schedules import Schedule
from rayfl.models.private_norm import PrivateNormPolicy


class TrainConfig(BaseModel):
    """Rounds, cohort and local SGD; every method reads the same section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(100, ge=1, description="communication rounds (T or R)")
    clients_per_round: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        5, description="size of the cohort sampled each round, without replacement; all: every client"
    )
    local_epochs: int = Field(5, ge=0, description="passes over a client's training data in a round (E)")
    batch_size: int | None = Field(10, ge=1, description="local mini-batch size (B); null: all of a client's samples")
    lr: float = Field(0.01, ge=0, description="local learning rate in round 0 (eta)")
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="factor on the learning rate per round: eta_t = lr * lr_decay^t"
    )
    schedule: Schedule | None = Field(
        None,
        description="learning rate by round: constant, exponential, cosine, linear, step or multistep, each with "
        "warm-up rounds; null: exponential with lr_decay",
    )
    optimizer: OptimizerName = Field("sgd", description="local optimizer: sgd, adam, or adamw (decoupled weight decay)")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD momentum; buffers start empty in every local update")
    dampening: float = Field(0.0, ge=0, lt=1, description="dampening of SGD's momentum")
    nesterov: bool = Field(False, description="Nesterov's momentum")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="decay of Adam's two moments"
    )
    eps: float = Field(1e-8, gt=0, description="Adam: added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="L2 coefficient added to the gradient")
    max_grad_norm: float | None = Field(
        None,
        gt=0,
        description="largest Euclidean norm of a step's gradient; longer ones are scaled down; null: no limit",
    )
    min_local_steps: int = Field(
        0, ge=0, description="least number of local steps; clients with few samples take part of a further epoch"
    )
    persist_optimizer: bool = Field(
        False, description="keep each client's momentum buffers from one participation to the next"
    )
    private_norm: PrivateNormPolicy = Field(
        "none",
        description="what of the model's normalization layers stays with the client and is never sent: none; "
        "statistics, their running statistics; all, also their scales and shifts (FedBN)",
    )

    @property
    def rule(self) -> Rule:
        """The optimizer's rule in round 0."""
        return Rule(
            self.lr,
            self.optimizer,
            self.momentum,
            self.dampening,
            self.nesterov,
            self.weight_decay,
            self.betas,
            self.eps,
        )

    def lr_in(self, round: int) -> float:
        """eta_t, the learning rate of round t (0-indexed)."""
        if self.schedule is None:
            return self.lr * self.lr_decay**round
        return self.schedule.rate(self.lr, round, self.rounds)

    def factor_in(self, round: int) -> float:
        """eta_t / eta, for rates of a method's own."""
        return self.lr_in(round) / self.lr if self.lr else 1.0

    def steps_of(self, samples: int, epochs: int | None = None) -> int:
        """Local SGD steps of a client with so many training samples.

        Args:
            samples: n_k.
            epochs: default the configured local epochs.
        """
        steps = num_steps(samples, self.batch_size, self.local_epochs if epochs is None else epochs)
        return max(steps, self.min_local_steps) if steps else 0

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainConfig:
        if self.schedule is not None and self.lr_decay != 1:
            raise ValueError("train.schedule and train.lr_decay both change the learning rate: give one of them")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov or self.dampening):
            raise ValueError(f"momentum, nesterov and dampening are SGD's: with optimizer={self.optimizer} set betas")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError("nesterov needs momentum, and no dampening")
        return self
