"""Ditto: a federated model, and personal models held near it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.personal_copy import PersonalCopy
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.updates.settings import TrainConfig
from rayfl.objectives import TRAINED, Sum
from rayfl.params import Tree
from rayfl.tasks.base import Predictor


class Ditto(PersonalCopy):
    """Ditto: federated averaging, and next to it a personal model of each client held near the federated one.

    A client first makes the update of federated averaging. Then, with an optimizer and batches of its own, it trains
    its personal model v for E_D epochs from where it was, on

        CE(v) + lambda/2 ||v - w||^2

    with w the model it received in this round, not the one it just trained. Buffers (running statistics) are no part
    of the norm.

    Server: model w. Client: v_k, at first the initial w; never sent. Down: w. Up: w_k and n_k. Evaluated: w
    (``global``) and v_k (``personalized``); a client never sampled has its initial v_k, with ``unseen`` ``global``
    it has w.

    The original takes both steps on each batch, weights clients equally and samples them in proportion to n_k; here
    the second pass follows the first with other batches, and the server is that of federated averaging. The official
    SuPerFed code penalises the sum of unsquared norms of the weight tensors: ``proximal_form``.

    References:
        Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021,
        Algorithm 1 and the objective h_k(v_k; w*).
    """

    name: Literal["ditto"] = "ditto"
    citation: ClassVar[str] = "Li et al., ICML 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "w"

    proximal_form: Literal["half_squared", "norm_per_layer"] = setting(
        "half_squared",
        "",
        "1/2 ||.||^2 (paper), or sum of unsquared norms per weight tensor (official SuPerFed code)",
        unless={"proximal_weight": (0,), "personal_epochs": (0,)},
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective)
        start = client.state["personal"] if "personal" in client.state else client.initial_model()
        personal = await self.personal_update(client, start, received=model)
        client.state["personal"] = personal
        client.publish(local=Predictor.of(trained), personalized=Predictor.of(personal))
        return self.weighted(client, trained)

    def noised_batches(self, train: TrainConfig, samples: int) -> Mapping[int, int]:
        return {1: train.steps_of(samples) + train.steps_of(samples, self.personal_epochs)}

    @property
    def proximal_term(self) -> Sum:
        return proximity(self.proximal_form, TRAINED, "received")

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        personal: Tree | None = client.state.get("personal")
        if personal is None:
            personal = client.initial_model() if self.unseen == "init" else server["model"]
        return {"global": Predictor.of(server["model"]), "personalized": Predictor.of(personal)}
