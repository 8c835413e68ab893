"""APFL: the personalized model is a mixture of the federated and a local model."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, check_sgd, setting
from algorithms.parts.mixed_outputs import mixed_logits, mixing
from algorithms.parts.mixture import mixed_weights, parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import constant, line, loss
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class APFL(Averaging):
    """APFL: federated averaging, and next to it a local model trained through its mixture with the federated one.

    On every mini-batch, with w_k the client's version of w and all gradients taken before any update,

        w_k     <- w_k - eta grad CE(w_k)
        v_k     <- v_k - eta alpha_k g,        g = grad CE at vbar = alpha_k v_k + (1 - alpha_k) w_k
        alpha_k <- clip(alpha_k - eta <v_k - w_k, g>, 0, 1)        (only if ``adaptive``)

    so the server's model is that of federated averaging. The step of alpha_k has neither momentum nor decay.

    Server: model w. Client: v_k (at first the server's initial model) and, if it adapts, alpha_k. Down: w. Up: w_k
    and n_k. Evaluated: w (``global``) and the mixture of v_k with the latest w (``personalized``). Buffers (running
    statistics) of the mixture are those of v_k, which stay with the client.

    Public codes mix logits instead of weights (``mix``), mix with the received or the already updated w, or adapt
    alpha_k once a round: the paper's algorithm is followed.

    References:
        Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, arXiv:2003.13461, 2020, Algorithm 1 and the
        gradient of alpha in its section on adaptive mixing.
    """

    name: Literal["apfl"] = "apfl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Deng et al., arXiv 2020"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "v_k, alpha_k"
    newcomer: ClassVar[str] = "w, and v from w after a local update, alpha with it"

    alpha: float = setting(
        0.25, "alpha", "share of the local model in the mixture; the initial one if it adapts", ge=0, le=1
    )
    adaptive: bool = setting(False, "", "every client trains its own alpha_k with the round's learning rate")
    mix: Literal["weights", "logits"] = setting(
        "weights",
        "",
        "mix the weights (paper), or the logits of the two models (the authors' code)",
        unless={"adaptive and alpha": ((False, 0), (False, 1))},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.mix == "logits" and not task.mixes_outputs:
            raise ConfigError(
                f"algorithm.mix=logits: task={task.name} scores features, which a mixture of outputs has not: set "
                "algorithm.mix=weights"
            )
        if self.adaptive:
            reason = "alpha_k moves by train.lr times its gradient: set algorithm.adaptive=false for another optimizer"
            check_sgd("APFL", context.train, reason)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        local, alpha = self._own(client, model)
        start: Tree = {"federated": model, "local": local}
        if self.adaptive:
            like = next(iter(model.values()))
            start["alpha"] = torch.as_tensor(alpha, dtype=like.dtype, device=like.device)
        groups = {"alpha": ParameterGroup(momentum=0.0, weight_decay=0.0, bounds=(0.0, 1.0))} if self.adaptive else {}
        trained = await client.train(start, self.objective, groups=groups)
        client.state["local"] = trained["local"]
        if self.adaptive:
            client.state["alpha"] = alpha = trained["alpha"]
        client.publish(
            local=Predictor.of(trained["federated"]),
            personalized=self._mixture(trained["federated"], trained["local"], alpha, client.task),
        )
        return self.weighted(client, trained["federated"])

    def why_no_example_privacy(self) -> str:
        other = "with algorithm.adaptive or algorithm.mix=logits its loss is no sum of terms with gradients of samples"
        return super().why_no_example_privacy() or (other if self.adaptive or self.mix == "logits" else "")

    @property
    def objective(self) -> Any:
        """CE(w) + CE(alpha v + (1 - alpha) w), whose gradients are apart: the mixture takes w as a constant."""
        if self.adaptive or self.mix == "logits":
            return self._adaptive_objective
        return loss(at="federated") + loss(at=line(constant("federated"), "local", self.alpha, buffers_of="local"))

    def _adaptive_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Computes the objective where alpha is trained too, or logits are mixed."""
        federated, local = model["federated"], model["local"]
        alpha = model["alpha"] if self.adaptive else self.alpha
        if self.mix == "logits":
            logits = task.logits(federated, batch)
            mixed = mixed_logits(logits.detach(), task.logits(local, batch), alpha)
            return task.loss_of(logits, batch) + task.loss_of(mixed, batch)
        value: Tensor = task.loss(federated, batch)
        received = {name: leaf.detach() for name, leaf in federated.items()}
        return value + task.loss(mixed_weights(received, local, alpha, task, buffers=local), batch)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains a mixture as a client of a cohort does, its own model from the server's; sends nothing."""
        client.state["local"] = server["model"]
        await self.local_update(client, server["model"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        local, alpha = self._own(client, server["model"])
        return {
            "global": Predictor.of(server["model"]),
            "personalized": self._mixture(server["model"], local, alpha, client.task),
        }

    def _own(self, client: Client, received: Model) -> tuple[Tree, float | Tensor]:
        """v_k and alpha_k; of a client never sampled the initial weights, with the received running statistics."""
        local: Tree | None = client.state.get("local")
        if local is None:
            local = {**received, **parameters(client.initial_model(), client.task)}
        return local, client.state.get("alpha", self.alpha) if self.adaptive else self.alpha

    def _mixture(self, federated: Model, local: Model, alpha: float | Tensor, task: Task) -> Predictor:
        if self.mix == "logits":
            return mixing(federated, local, alpha)
        return Predictor.of(mixed_weights(federated, local, alpha, task, buffers=local))
