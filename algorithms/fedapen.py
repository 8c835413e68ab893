"""FedAPEN: a private and a shared model teach each other, and predict together with a weight learned for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.mixed_outputs import mixed_logits, mixing
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.requirements import clipped_together
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_STREAM = ".weight"
"""Suffix of the streams of the pass that learns lambda_k."""


class FedAPEN(TrainedNewcomers):
    """FedAPEN: mutual learning of a private and the shared model, whose mixed logits have a learned weight.

    With z_v and z_w the logits of the client's private model v_k and of its version w_k of the shared model w, and
    lambda_k its weight, a client first learns the latter on samples of its own, going down

        CE(lambda_k z_v + (1 - lambda_k) z_w),    0 <= lambda_k <= 1

    with v_k and the received w in evaluation mode. Then it trains both models on the same batches:

        L_v = CE(z_v) + KL(p_w || p_v) + CE(lambda_k z_v + (1 - lambda_k) z_w)
        L_w = CE(z_w) + KL(p_v || p_w) + CE(lambda_k z_v + (1 - lambda_k) z_w)

    with p_v and p_w the probabilities; in L_v what comes from w_k is a constant, in L_w what comes from v_k. In a
    client's first participation lambda_k is 1/2, and nothing is learned before. The server takes the mean of the w_k.
    ``training_weight: equal`` has 1/2 in both losses (FedEN), and ``ensemble_weight: 0`` leaves the mixture out of them
    (FML-AE).

    Server: w. Client: v_k, at first an own draw, and lambda_k. Down: w. Up: w_k. Evaluated: w (``global``), v_k
    (``private``), and the mixed logits of v_k and w with the weight that the client then learns for them
    (``personalized``). Clients never sampled have w for all three.

    References:
        Qin, Deng, Zhao, Yan: FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to Statistical
        Heterogeneity, KDD 2023.
    """

    name: Literal["fedapen"] = "fedapen"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Qin et al., KDD 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "a client mixes the logits of two models for each sample"}
    client_keeps: ClassVar[str] = "v_k, lambda_k"
    newcomer: ClassVar[str] = "w, and an own model after a local update, mixed with a weight that it learns"

    aggregation: Literal["uniform", "samples", "population"] = setting(
        "uniform",
        "q_k",
        "weights of the mean: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; population n_k / sum "
        "over all clients, the rest staying on the old server model",
    )
    weight_lr: float = setting(1e-3, "", "learning rate of lambda_k; 0: it stays 1/2", ge=0)
    weight_epochs: int = setting(
        10, "", "passes that learn lambda_k, each time; 0: it stays 1/2", ge=0, unless={"weight_lr": (0,)}
    )
    tuning_data: Literal["validation", "train"] = setting(
        "validation",
        "",
        "samples that lambda_k is learned on (training samples where a client has none for validation)",
        unless={"weight_lr": (0,), "weight_epochs": (0,)},
    )
    ensemble_weight: float = setting(
        1.0, "", "weight of the mixture's cross-entropy in both losses; 0: mutual learning alone (FML-AE)", ge=0
    )
    training_weight: Literal["learned", "equal"] = setting(
        "learned",
        "",
        "the weight in both losses: lambda_k, or 1/2 (FedEN)",
        unless={"weight_lr": (0,), "weight_epochs": (0,), "ensemble_weight": (0,)},
    )

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        if self._learns and self.tuning_data == "validation" and not sizes[:, 1].any():
            raise ConfigError(
                "holdout.validation leaves no client validation samples, on which FedAPEN learns its weights: raise "
                "it, or set algorithm.tuning_data=train"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "the private model and of the shared model")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Learns the weight for what it received, then trains both models."""
        private, share = self._own(client, model)
        if "private" in client.state:
            share = await self.learned(client, private, model, share)
        mixed = share if self.training_weight == "learned" else torch.full_like(share, 0.5)
        start = {"private": private, "shared": model}
        trained = await client.train(start, self.mutual, frozen={"share": mixed})
        client.state.update(private=trained["private"], share=share)
        client.publish(
            local=Predictor.of(trained["shared"]), **self._rows(trained["private"], trained["shared"], share)
        )
        return self.weighted(client, trained["shared"])

    async def learned(self, client: Client, private: Model, shared: Model, share: Tensor) -> Tensor:
        """Returns lambda_k after its steps.

        Args:
            client: k.
            private: v_k.
            shared: w.
            share: lambda_k before.
        """
        held = client.examples("validation")
        samples = held if self.tuning_data == "validation" and len(held) else client.examples()
        if not self._learns or not len(samples):
            return share
        said = await client.outputs(
            lambda x, task: torch.stack([task.network.logits(one, x, training=False) for one in (shared, private)], 1),
            samples.x,
        )
        trained = await client.train(
            {"share": share.to(said)},
            self.mixed_loss,
            examples=Examples(said, samples.y),
            settings=TrainConfig(optimizer="sgd", lr=self.weight_lr, batch_size=client.context.train.batch_size),
            groups={"share": ParameterGroup(bounds=(0.0, 1.0))},
            epochs=self.weight_epochs,
            keep_optimizer=False,
            stream=_STREAM,
        )
        found: Tensor = trained["share"]
        return found

    @property
    def mutual(self) -> Sum:
        """L_v + L_w, whose gradients are apart: each takes the other's logits as constants."""
        return function(self._mutual)

    def _mutual(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        private, shared = (task.logits(model[name], batch) for name in ("private", "shared"))
        share, value = frozen["share"], private.new_zeros(())
        for own, other, mixed in (
            (private, shared.detach(), (shared.detach(), private)),
            (shared, private.detach(), (shared, private.detach())),
        ):
            value = value + task.loss_of(own, batch) + distillation(own, other, batch, temperature=1.0)
            if self.ensemble_weight:
                value = value + self.ensemble_weight * task.loss_of(mixed_logits(*mixed, share), batch)
        return value

    @property
    def mixed_loss(self) -> Sum:
        """The loss of the mixed logits, as a function of lambda_k; a sample is the logits of both models."""
        return function(self._mixed)

    def _mixed(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        shared, private = batch.x.unbind(1)
        found: Tensor = task.loss_of(mixed_logits(shared, private, trained["share"]), batch)
        return found

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        if "private" not in client.state:
            return dict.fromkeys(("global", "private", "personalized"), Predictor.of(model))
        private, share = self._own(client, model)
        share = await self.learned(client, private, model, share)
        return {"global": Predictor.of(model), **self._rows(private, model, share)}

    @property
    def _learns(self) -> bool:
        return self.weight_lr > 0 and self.weight_epochs > 0

    @staticmethod
    def _own(client: Client, like: Model) -> tuple[Tree, Tensor]:
        """v_k, an own draw until the client has trained, and lambda_k."""
        if "private" in client.state:
            return client.state["private"], client.state["share"]
        return client.fresh_model(), next(iter(like.values())).new_full((), 0.5)

    @staticmethod
    def _rows(private: Model, shared: Model, share: Tensor) -> dict[str, Predictor]:
        return {"private": Predictor.of(private), "personalized": mixing(shared, private, share)}
