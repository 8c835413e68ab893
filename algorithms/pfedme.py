"""pFedMe: personalized models through Moreau envelopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from algorithms.base import Aggregation, check_sgd, setting
from algorithms.parts.mixture import parameters
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.settings import limits_without_effect
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.objectives import drawn, envelope, frozen, loss
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Predictor, Task


class PFedMe(TrainedNewcomers):
    """pFedMe: the server minimises the mean of the clients' Moreau envelopes, whose minimisers are personal models.

    A client starts with w_k = theta_k = w. For each mini-batch it takes K steps on that same batch,

        theta_k <- theta_k - eta_p (grad CE(theta_k) + lambda (theta_k - w_k) + mu_2 theta_k),

    and then one step w_k <- w_k - eta lambda (w_k - theta_k), with eta the learning rate of the training section.
    theta_k goes on from batch to batch. The server takes (1 - beta) w + beta mean(w_k). There is no momentum.

    Server: model w. Client: theta_k, kept for evaluation only (at first the server's initial model). Down: w.
    Up: (1 - beta) w + beta w_k and n_k. Evaluated: w (``global``) and theta_k as the client's last local update left
    it (``personalized``). Only theta_k is ever run on data: running statistics are recorded there and sent with w_k.

    The official code lets every client train in every round and samples only whom it averages; here the sampled
    clients train. It weights them equally, as is done here (``aggregation``).

    References:
        Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020, Algorithm 1.
    """

    name: Literal["pfedme"] = "pfedme"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "theta_k"
    newcomer: ClassVar[str] = "w, and theta after a local update from it"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (paper); samples n_k / sum over the cohort; population n_k / sum over all "
        "clients, the rest staying on the old server model; tokens those that a language model learns, in "
        "place of samples",
    )
    proximal_weight: float = setting(
        15.0, "lambda", "pull between theta_k and w_k; train.lr times it is how far w_k moves towards theta_k", ge=0
    )
    inner_steps: int = setting(5, "K", "steps of theta_k on each mini-batch", ge=1)
    personal_lr: float = setting(0.09, "eta_p", "learning rate of theta_k; follows the rounds as train.lr does", ge=0)
    personal_decay: float = setting(0.001, "mu_2", "weight decay of theta_k (official code); w_k has none", ge=0)
    local_iterations: int | None = setting(
        None, "R", "mini-batches of a local update (paper: 20); null: train.local_epochs passes over the data", ge=0
    )
    server_mix: float = setting(1.0, "beta", "step of the server towards the mean of the w_k", ge=0)
    momentum_on_personal: bool = setting(
        False, "", "allow train.momentum > 0 and apply it to theta_k; the original has no momentum"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        train = context.train
        check_sgd("pFedMe", train, "w_k follows theta_k by train.lr lambda (w_k - theta_k), which is a step of SGD")
        if train.momentum > 0 and not self.momentum_on_personal:
            raise ConfigError(
                f"pFedMe has no momentum, but train.momentum is {train.momentum}: set train.momentum=0, or "
                "algorithm.momentum_on_personal=true to apply it to the personal model"
            )
        if train.weight_decay > 0:
            raise ConfigError(
                f"pFedMe decays its personal model by algorithm.personal_decay and w not at all, but "
                f"train.weight_decay is {train.weight_decay}: set train.weight_decay=0"
            )
        if train.max_grad_norm is not None:
            raise ConfigError(
                "pFedMe moves w_k by lr lambda (w_k - theta_k), which train.max_grad_norm would shorten: set it to null"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return limits_without_effect("local_iterations", self.local_iterations, context.train)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        pull = client.lr * self.proximal_weight
        personal_lr = self.personal_lr * client.context.train.factor_in(client.round)
        trained = await client.train(
            {"personal": model, "local": parameters(model, client.task)},
            self.objective,
            frozen={"pull": pull},
            draw=self.renewals,
            steps=self.local_iterations,
            repeats=self.inner_steps,
            groups={
                "personal": ParameterGroup(lr=personal_lr, weight_decay=self.personal_decay),
                "local": ParameterGroup(momentum=0.0, weight_decay=0.0),
            },
        )
        personal = trained["personal"]
        # The last mini-batch has no successor at whose first step w_k would follow.
        local = interpolate(trained["local"], parameters(personal, client.task), pull)
        client.state["personal"] = personal
        client.publish(local=Predictor.of({**personal, **local}), personalized=Predictor.of(personal))
        # The server's step is linear: taken here, on parameters alone, its mean is the server's new model.
        stepped = interpolate(parameters(model, client.task), local, self.server_mix)
        return self.weighted(client, {**personal, **stepped})

    def noised_batches(self, train: TrainConfig, samples: int) -> Mapping[int, int]:
        drawn = train.steps_of(samples) if self.local_iterations is None else self.local_iterations
        return {self.inner_steps: drawn}

    def renewals(self, generator: np.random.Generator, steps: int) -> Tree:
        """1 at the first step of a mini-batch, where w_k moves on account of the one before; else 0."""
        first = np.arange(steps) % self.inner_steps == 0
        return {"renew": (first & (np.arange(steps) > 0)).astype(np.float64)}

    @property
    def objective(self) -> Any:
        """CE(theta) + lambda/2 ||theta - w||^2, whose w moves once a mini-batch."""
        return loss(at="personal") + self.proximal_weight * envelope(
            "personal", "local", due=drawn("renew"), pull=frozen("pull")
        )

    @property
    def joins_for(self) -> str:
        return "train.local_epochs" if self.local_iterations is None else "algorithm.local_iterations"

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        personal: Tree | None = client.state.get("personal")
        return {
            "global": Predictor.of(server["model"]),
            "personalized": Predictor.of(client.initial_model() if personal is None else personal),
        }
