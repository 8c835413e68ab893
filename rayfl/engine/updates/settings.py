"""The training section of a configuration: rounds, cohort and local training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rayfl.engine.updates.batches import epoch_samples, num_steps
from rayfl.engine.updates.cohorts import Sampling
from rayfl.errors import ConfigError
from rayfl.models.private_norm import PrivateNormPolicy
from rayfl.naming.objects import names_an_object
from rayfl.naming.spelling import nearest
from rayfl.optimization.elementwise import ELEMENTWISE, Chosen, made
from rayfl.optimization.optimizers import SLOTS, Rule
from rayfl.optimization.schedules import Cosine, Schedule


def _known(name: str) -> str:
    if name not in (known := (*SLOTS, *ELEMENTWISE)) and not names_an_object(name):
        raise ValueError(
            f"there is no optimizer {name!r}{nearest(name, known)}: choose {', '.join(known)}, or name one of your own "
            "as my_module:MyOptimizer"
        )
    return name


Optimizer = Annotated[str, AfterValidator(_known)]


class TrainConfig(BaseModel):
    """Rounds, cohort and local training; every method reads the same section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rounds: int = Field(100, ge=1, description="communication rounds (T or R)")
    clients_per_round: Annotated[int, Field(ge=1)] | Literal["all"] = Field(
        5, description="size of the cohort sampled each round, without replacement; all: every client"
    )
    min_clients_per_round: int | None = Field(
        None,
        ge=1,
        description="a round's cohort has from this number to clients_per_round clients, each size as likely; null: "
        "always clients_per_round",
    )
    sampling: Sampling = Field(
        "fixed",
        description="fixed: a round's cohort has clients_per_round clients; poisson: every client is in it with "
        "probability clients_per_round / K, by itself, so that clients_per_round is the mean; cyclic: the next "
        "clients_per_round clients in an order of all clients that is drawn once",
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
    optimizer: Optimizer = Field(
        "sgd",
        description="local optimizer: sgd, adam, adamw (decoupled weight decay), adagrad, lion, rmsprop, or one of "
        "your own, my_module:MyOptimizer",
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict, description="options of adagrad, lion, rmsprop, or of your own optimizer"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of SGD")
    dampening: float = Field(0.0, ge=0, lt=1, description="SGD: share of a gradient that is kept out of the momentum")
    nesterov: bool = Field(False, description="SGD: Nesterov's momentum")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.999), description="Adam: decay of the two moments"
    )
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="Adam: added to the root of the second moment")
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="multiple of the parameters that is added to the gradient (L2); adamw, lion: share of them, times "
        "the learning rate, by which every step shrinks them",
    )
    max_grad_norm: float | None = Field(
        None,
        gt=0,
        description="largest Euclidean norm of a step's gradient; longer ones are scaled down; null: no limit",
    )
    min_local_steps: int = Field(
        0, ge=0, description="least number of local steps; clients with few samples take part of a further epoch"
    )
    max_local_steps: int | None = Field(
        None,
        ge=1,
        description="most steps of a pass of local training; clients with many samples train on some of them in a "
        "round, drawn each time; null: no limit",
    )
    stragglers: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a client of a round does a part of its local work alone: as many epochs as are "
        "drawn, from straggler_epochs to local_epochs",
    )
    straggler_epochs: int = Field(1, ge=1, description="least number of epochs of a straggler")
    drop_last: bool = Field(
        False,
        description="leave out the last mini-batch of an epoch where it is smaller than batch_size, unless it is the "
        "epoch's only one",
    )
    shuffle: bool = Field(
        True,
        description="a new order of a client's samples in every epoch; false: one random order a client, the same in "
        "all epochs and rounds (data loaders without shuffling)",
    )
    persist_optimizer: bool = Field(
        False,
        description="keep each client's buffers of the optimizer (momentum; moments and number of steps) from one "
        "participation to the next; otherwise they begin at zero in every local update",
    )
    private_norm: PrivateNormPolicy = Field(
        "none",
        description="what of the model's normalization layers stays with the client and is never sent: none; "
        "statistics, their running statistics; all, also their scales and shifts (FedBN)",
    )

    @property
    def rule(self) -> Rule:
        """Returns the optimizer's update rule in round 0."""
        return Rule(
            self.lr,
            self.optimizer,
            self.momentum,
            self.dampening,
            self.nesterov,
            self.weight_decay,
            self.betas,
            self.eps,
            options=tuple(sorted((name, _hashable(value)) for name, value in self.optimizer_options.items())),
        )

    def lr_in(self, round: int) -> float:
        """Returns eta_t, the learning rate of round t (0-indexed)."""
        return self.lr * self.factor_in(round)

    def factor_in(self, round: int) -> float:
        """Returns eta_t / eta, to scale a method's own learning rates."""
        if self.schedule is None:
            return self.lr_decay**round
        return self.schedule.relative(round, self.rounds, self.lr)

    def steps_of(self, samples: int, epochs: int | None = None) -> int:
        """Returns the number of local SGD steps of a client.

        Args:
            samples: n_k.
            epochs: default the configured local epochs.
        """
        steps = num_steps(samples, self.batch_size, self.local_epochs if epochs is None else epochs, self.drop_last)
        if not steps:
            return 0
        steps = max(steps, self.min_local_steps)
        return steps if self.max_local_steps is None else min(steps, self.max_local_steps)

    def samples_in_steps(self, samples: int) -> int:
        """Returns the number of samples that a client's local steps process, with repetitions.

        Args:
            samples: n_k.
        """
        if not (steps := self.steps_of(samples)):
            return 0
        epochs, rest = divmod(steps, num_steps(samples, self.batch_size, 1, self.drop_last))
        return epochs * epoch_samples(samples, self.batch_size, self.drop_last) + rest * (self.batch_size or samples)

    @model_validator(mode="after")
    def _most_and_least(self) -> TrainConfig:
        if self.max_local_steps is not None and self.max_local_steps < self.min_local_steps:
            raise ValueError(
                f"max_local_steps={self.max_local_steps} is less than min_local_steps={self.min_local_steps}: raise "
                "it, or leave one of both out"
            )
        return self

    @model_validator(mode="after")
    def _work_of_stragglers(self) -> TrainConfig:
        if not self.stragglers and self.straggler_epochs != 1:
            raise ValueError("straggler_epochs without stragglers does nothing: set stragglers, or drop it")
        if self.stragglers and self.straggler_epochs >= self.local_epochs:
            raise ValueError(
                f"stragglers do from straggler_epochs={self.straggler_epochs} to local_epochs={self.local_epochs} "
                "epochs, so that none does less than others: raise local_epochs, or set stragglers=0"
            )
        return self

    @model_validator(mode="after")
    def _smallest_cohort(self) -> TrainConfig:
        least, most = self.min_clients_per_round, self.clients_per_round
        if least is not None and most != "all" and least > most:
            raise ValueError(
                f"min_clients_per_round={least} is more than clients_per_round={most}: raise that, or drop it"
            )
        return self

    @model_validator(mode="after")
    def _sizes_of_the_sampling(self) -> TrainConfig:
        if self.sampling == "poisson" and self.min_clients_per_round is not None:
            raise ValueError("sampling=poisson draws cohorts of any size: leave min_clients_per_round out")
        if self.sampling == "cyclic" and self.min_clients_per_round is not None:
            raise ValueError("sampling=cyclic has cohorts of one size: leave min_clients_per_round out")
        return self

    @model_validator(mode="after")
    def _one_schedule(self) -> TrainConfig:
        if self.schedule is None:
            return self
        if self.lr_decay != 1:
            raise ValueError("schedule and lr_decay both change the learning rate: set lr_decay=1, or schedule=null")
        if isinstance(self.schedule, Cosine) and self.schedule.minimum > self.lr:
            raise ValueError(
                f"schedule.minimum={self.schedule.minimum} is more than lr={self.lr}, from which the rate falls to it"
            )
        return self

    @model_validator(mode="after")
    def _options_of_the_optimizer(self) -> TrainConfig:
        """Refuses options of other optimizers, and options that need another one to have an effect."""
        own = _OPTIONS.get(self.optimizer, ())
        defaults = {name: type(self).model_fields[name].default for name in (*_OF_SGD, *_OF_ADAM) if name not in own}
        if given := [name for name, default in defaults.items() if getattr(self, name) != default]:
            means = "sgd" if given[0] in _OF_SGD else "adam or adamw"
            without = ", ".join(f"{name}={defaults[name]}" for name in given)
            instead = "" if own else ", give its own options as optimizer_options"
            raise ValueError(
                f"optimizer={self.optimizer} has no {', '.join(given)}: set {without}{instead}, or optimizer={means}"
            )
        if own and self.optimizer_options:
            raise ValueError(
                f"optimizer_options are for {', '.join(ELEMENTWISE)} and optimizers of your own: those of "
                f"{self.optimizer} are {', '.join(own)}"
            )
        if nested := [name for name, value in self.optimizer_options.items() if isinstance(value, dict)]:
            raise ValueError(f"optimizer_options.{nested[0]} must be a number, a text or a list of those")
        if self.optimizer in ELEMENTWISE:
            # Users' code is imported when the run is checked, not when its configuration is read.
            try:
                made(Chosen(self.optimizer, self.rule.options))
            except ConfigError as error:
                raise ValueError(str(error).removeprefix("train.")) from error
        if self.nesterov and self.dampening:
            raise ValueError("nesterov is defined without dampening: set dampening=0, or nesterov=false")
        if self.optimizer == "sgd" and not self.momentum:
            for name in ("nesterov", "dampening"):
                if getattr(self, name):
                    raise ValueError(f"{name} without momentum does nothing: set momentum, or drop {name}")
        return self


_OF_SGD = ("momentum", "dampening", "nesterov")
_OF_ADAM = ("betas", "eps")
_OPTIONS = {"sgd": _OF_SGD, "adam": _OF_ADAM, "adamw": _OF_ADAM}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
