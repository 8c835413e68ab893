"""FedOTP: a global and a local context of CLIP's texts, matched with the patches of images by optimal transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.parts.prompts import check_context, clip_of, with_context
from algorithms.parts.transport import transport_plan
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.pretrained.text_head import CONTEXT
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedOTP(Averaging):
    """FedOTP: prompts cooperate by optimal transport between an image's patches and two texts of each class.

    With S_c (P, 2) the cosines of the features of an image's P patches with those of class c's texts, one with the
    global context p_g and one with the client's own p_k, and s the scale of CLIP, the logits are

        z_c = s <T_c, S_c>,    T_c = argmin_T <T, 1 - S_c> + lambda sum T (log T - 1),    T 1 <= 1/P,    T^T 1 = gamma/2

    so that each prompt looks at the patches that are most like it; a share 1 - gamma of the patches may be left out.
    A client trains p_g and p_k together on the cross-entropy of these logits, with T as a constant. Adapters in the
    image tower, if there are any, are shared like p_g.

    Server: context p_g. Client: context p_k, at first a draw that all clients have in common; never sent. Down: p_g.
    Up: p_g as trained, and n_k. Evaluated: the latest p_g with the client's p_k (``personalized``), and p_g alone,
    which then has all of the mass gamma (``global``).

    References:
        Li, Huang, Wang, Shi: Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, CVPR
        2024.
    """

    name: Literal["fedotp"] = "fedotp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Li et al., CVPR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the texts of CLIP tell classes"}
    client_keeps: ClassVar[str] = "p_k"
    server_keeps: ClassVar[str] = "p_g"
    newcomer: ClassVar[str] = "p_g, and a context of its own after a local update"

    mass: float = setting(0.8, "gamma", "share of the patches' mass that is moved to the texts", gt=0, le=1)
    regularization: float = setting(0.1, "lambda", "weight of the entropy of the transport plan", gt=0)
    iterations: int = setting(100, "", "steps of the algorithm that finds the transport plan", ge=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_context("FedOTP", task.network)
        if not clip_of(task).reads_images:
            raise ConfigError(
                "FedOTP matches texts with the patches of images, and the data are features of whole images: train on "
                "the images"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains both contexts together, and keeps the local one."""
        trained = await client.train({"model": model, "local": self.local(client)}, self.objective)
        client.state["local"] = trained["local"]
        client.publish(personalized=self._both(trained["model"], trained["local"]))
        return self.weighted(client, trained["model"])

    @property
    def objective(self) -> Sum:
        """The cross-entropy of the logits that both contexts make; each passes once through the text tower."""
        return function(self._transported)

    def _transported(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        model = trained["model"]
        logits = self._transport.logits([model, with_context(model, trained["local"])], batch.x, task, training=True)
        return task.loss_of(logits, batch)

    def local(self, client: Client) -> Tensor:
        """p_k; before the client has trained one, a context that begins as models do, with another draw."""
        if "local" in client.state:
            found: Tensor = client.state["local"]
            return found
        like = client.initial_model()[CONTEXT]
        return client.task.network.initialize(client.context.streams.integer("init.local"))[CONTEXT].to(like)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["model"])
        return {}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of(server["model"], combine=self._transport)}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = self._both(server["model"], self.local(client))
        return {"personalized": own, **self.global_predictors(server, client.task)}

    def _both(self, model: Model, local: Tensor) -> Predictor:
        return Predictor.of(model, with_context(model, local), combine=self._transport)

    @property
    def _transport(self) -> Transport:
        return Transport(self.mass, self.regularization, self.iterations)


@dataclass(frozen=True)
class Transport:
    """Predicts with the similarity of patches and texts under a transport plan.

    Attributes:
        mass: gamma.
        regularization: lambda.
        iterations: of the algorithm that finds the plan.
    """

    mass: float
    regularization: float
    iterations: int

    def __call__(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        predicted: Tensor = task.predicted(self.logits(models, x, task, training=False))
        return predicted

    def logits(self, models: Sequence[Model], x: Tensor, task: Task, training: bool) -> Tensor:
        """Logits of shape (b, C) of models that differ in their contexts alone.

        Args:
            models: N of them.
            x: images, shape (b, *input shape).
            task: of the models.
            training: as for a network's logits.
        """
        network = clip_of(task)
        patches = network.patch_features(models[0], x, training=training)
        texts = torch.stack([network.text_features(model, training=training) for model in models])
        similarity = torch.einsum("bpd,ncd->bcpn", patches, texts)
        plan = transport_plan(similarity, self.mass, self.regularization, self.iterations)
        return network.text_scale * (plan * similarity).sum((-2, -1))
