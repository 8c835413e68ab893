"""FLDA: each client's gate mixes the shared model with a private one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.newcomers import TrainedNewcomers
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FLDA(TrainedNewcomers):
    """FLDA (private federated learning with domain adaptation): a gate mixes the shared model with a private one.

    Client k predicts with the mixture of experts

        p(y | x) = s p_w(y | x) + (1 - s) p_v(y | x),    s = sigmoid(<a_k, phi(x)> + b_k)

    and trains its version w_k of the shared model, its private model v_k and its gate (a_k, b_k) jointly on the mean
    of -log p(y | x). The gate sees phi(x), the shared model's features as constants.

    Server: model w. Client: v_k, at first an own draw, and (a_k, b_k), at first 0 so that s = 1/2; never sent. Down:
    w. Up: w_k and n_k. Evaluated: w (``global``) and the mixture with w (``personalized``); after training the
    mixture with w_k, and w_k (``local``).

    In the original, on tables and texts, the gate sees the input (``gate_input``) and noise makes the shared model's
    training differentially private; there is no noise here. ``mix`` mixes logits in place of probabilities.

    References:
        Peterson, Kanani, Marathe: Private Federated Learning with Domain Adaptation, arXiv:1912.06733, 2019, its
        mixture of experts.
    """

    name: Literal["flda"] = "flda"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Peterson et al., arXiv 2019"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "it mixes probabilities of classes"}
    client_keeps: ClassVar[str] = "v_k, a_k, b_k"
    newcomer: ClassVar[str] = "w, and an own model and gate after a local update"

    gate_input: Literal["features", "raw"] = setting(
        "features",
        "phi",
        "what the gate sees: the shared model's features, or the flattened input itself (original)",
        kept=True,
    )
    mix: Literal["probabilities", "logits"] = setting("probabilities", "", "what the gate mixes")
    gate_bias: float = setting(
        0.0, "b_k", "initial bias of the gate; large: the shared model, very negative: the private", kept=True
    )
    gate_lr: float | None = setting(
        None, "eta_g", "learning rate of the gate; null: that of the models, 0: the gate stays as it is", ge=0
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        private, gate = self._own(client, model)
        start = {"shared": model, "private": private, "gate": gate}
        trained = await client.train(start, self.objective, groups={"gate": ParameterGroup(lr=self.gate_lr)})
        client.state.update(private=trained["private"], gate=trained["gate"])
        client.publish(personalized=self._mixture(**trained), local=Predictor.of(trained["shared"]))
        return self.weighted(client, trained["shared"])

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The mean of -log p(y | x)."""
        features, shared = task.features_and_logits(model["shared"], batch)
        private = task.logits(model["private"], batch)
        mixed = self.mixed(shared, private, self._gate(features.detach(), batch.x, model["gate"]))
        return batch.mean(-mixed.gather(1, batch.y[:, None])[:, 0])

    def mixed(self, shared: Tensor, private: Tensor, gate: Tensor) -> Tensor:
        """Log-probabilities of the mixture, shape (b, C).

        Args:
            shared: logits of the shared model, shape (b, C).
            private: logits of the private model, shape (b, C).
            gate: the logit of s, shape (b,).
        """
        gate = gate[:, None]
        if self.mix == "logits":
            return torch.lerp(private, shared, gate.sigmoid()).log_softmax(-1)
        return torch.logaddexp(
            F.logsigmoid(gate) + shared.log_softmax(-1), F.logsigmoid(-gate) + private.log_softmax(-1)
        )

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        private, gate = self._own(client, server["model"])
        return {
            "global": Predictor.of(server["model"]),
            "personalized": self._mixture(server["model"], private, gate),
        }

    def _own(self, client: Client, received: Model) -> tuple[Tree, Tree]:
        """v_k and the gate, made when they are first needed."""
        if "private" in client.state:
            return client.state["private"], client.state["gate"]
        private = client.fresh_model()
        x = client.examples().x
        sample = x.new_zeros(1, *x.shape[1:])
        like = next(iter(private.values()))
        with torch.no_grad():
            width = self._seen(client.task.network.features(received, sample), sample).shape[1]
        return private, {"weight": like.new_zeros(width), "bias": like.new_tensor(self.gate_bias)}

    def _gate(self, features: Tensor, x: Tensor, gate: Mapping[str, Tensor]) -> Tensor:
        """The logit of s, shape (b,)."""
        return self._seen(features, x).to(features.dtype) @ gate["weight"] + gate["bias"]

    def _seen(self, features: Tensor, x: Tensor) -> Tensor:
        """phi(x), shape (b, d)."""
        return features if self.gate_input == "features" else x.flatten(1)

    def _mixture(self, shared: Model, private: Model, gate: Model) -> Predictor:
        return Predictor.of(shared, private, gate, combine=self._log_probabilities)

    def _log_probabilities(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        """Returns what (shared model, private model, gate) predict; log-probabilities of shape (b, C)."""
        shared, private, gate = models
        features, logits = task.network.features_and_logits(shared, x, training=False)
        return self.mixed(logits, task.network.logits(private, x, training=False), self._gate(features, x, gate))
