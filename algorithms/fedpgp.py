"""FedPGP: a global context of CLIP's texts, and a low-rank addition that stays with each client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.moon import contrastive
from algorithms.parts.prompts import check_context, clip_of, with_context
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.pretrained.text_head import CONTEXT
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

SPREAD = 0.02
"""Standard deviation of the factors at first, that of a context."""


class FedPGP(Averaging):
    """FedPGP: a global prompt, kept near CLIP's own text, and a low-rank personalization of each client.

    A client's context is p_k = p + U_k V_k: the received context p, and a matrix of rank b that is its own. With z_c(p)
    the features of class c's text with a context p, and t_c those of the template's text, it trains p, U_k and V_k
    together on

        CE(p_k) + mu mean_c l_c,    l_c = log(1 + exp((cos(z_c(p), z_c(p_k)) - cos(z_c(p), t_c)) / tau))

    which is the contrastive loss of z_c(p) with t_c as the positive and z_c(p_k) as the negative: the global context is
    drawn to the template, and apart from the personal one. Adapters in the image tower, if there are any, are shared
    like p.

    Server: context p. Client: U_k (M, b) and V_k (b, d), at first a draw that all clients have in common; never sent.
    Down: p. Up: p as trained, and n_k. Evaluated: the latest p with the client's factors (``personalized``), and
    without (``global``).

    References:
        Cui, Li, Wang, Shi: Harmonizing Generalization and Personalization in Federated Prompt Learning, ICML 2024.
    """

    name: Literal["fedpgp"] = "fedpgp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Cui et al., ICML 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the texts of CLIP tell classes"}
    client_keeps: ClassVar[str] = "U_k, V_k"
    server_keeps: ClassVar[str] = "p"
    newcomer: ClassVar[str] = "p, and factors after a local update"

    rank: int = setting(4, "b", "rank of what a client adds to the context", ge=1, kept=True)
    contrast_weight: float = setting(1.0, "mu", "weight of the contrastive term", ge=0)
    temperature: float = setting(
        0.5, "tau", "temperature of the contrastive term", gt=0, unless={"contrast_weight": (0,)}
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_context("FedPGP", task.network)
        if self.contrast_weight > 0 and (reason := clip_of(task).why_no_template):
            raise ConfigError(f"FedPGP contrasts contexts with the template, but {reason}, or set contrast_weight=0")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the context and the client's factors together, and keeps the factors."""
        constants = {}
        if self.contrast_weight > 0:
            constants["template"] = clip_of(client.task).template_features.to(model[CONTEXT])
        trained = await client.train({"model": model, **self.factors(client)}, self.objective, frozen=constants)
        client.state.update(left=trained["left"], right=trained["right"])
        client.publish(personalized=Predictor.of(personal(trained)))
        return self.weighted(client, trained["model"])

    @property
    def objective(self) -> Sum:
        """CE(p_k) + mu mean_c l_c; each context passes once through the text tower."""
        return function(self._contrasted)

    def _contrasted(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        network, own = clip_of(task), personal(trained)
        texts = network.text_features(own, training=True)
        logits = F.linear(task.features(own, batch), network.text_scale * texts)
        if self.contrast_weight == 0:
            return task.loss_of(logits, batch)
        common = network.text_features(trained["model"], training=True)
        contrast = contrastive(common, frozen["template"], texts, self.temperature).mean()
        return task.loss_of(logits, batch) + self.contrast_weight * contrast

    def factors(self, client: Client) -> Tree:
        """U_k (``left``) and V_k (``right``), of each class where contexts are; normal until the client trains."""
        if "left" in client.state:
            return {name: client.state[name] for name in ("left", "right")}
        like = client.initial_model()[CONTEXT]
        *classes, length, width = like.shape
        generator = client.context.streams.generator("init.factors")
        shapes = {"left": (*classes, length, self.rank), "right": (*classes, self.rank, width)}
        return {
            name: torch.from_numpy(SPREAD * generator.standard_normal(shape)).to(like) for name, shape in shapes.items()
        }

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = personal({"model": server["model"], **self.factors(client)})
        return {"personalized": Predictor.of(own), **self.global_predictors(server, client.task)}


def personal(tree: Mapping[str, Any]) -> Tree:
    """The model with the context p + U V.

    Args:
        tree: ``model``, ``left`` and ``right``.
    """
    return with_context(tree["model"], tree["model"][CONTEXT] + tree["left"] @ tree["right"])
