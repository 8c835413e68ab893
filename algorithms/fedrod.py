"""Fed-RoD: a generic head under a balanced loss, and a personal head on top of its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import check_head, setting
from algorithms.parts.balanced import log_prior
from algorithms.parts.heads import head_logits
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.requirements import clipped_together
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, map_leaves
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedRoD(TrainedNewcomers):
    """Fed-RoD: one body with two heads, of which the server averages the generic one and clients keep the personal.

    With f(x) the input of the last linear layer, z its (generic) logits, n_y the client's samples of class y, and
    (V, c) its personal head, a step goes down

        CE(z + gamma log n, y) + CE([z] + V [f] + c, y)

    where brackets mark constants: the first term (balanced softmax) moves the model alone, the second the personal head
    alone. A class of which the client has no sample is left out of the first softmax.

    Server: model w. Client: personal head (V_k, c_k), at first a copy of the initial generic one; never sent. Down: w.
    Up: w_k and n_k. Evaluated: w (``global``), and w with the client's head, z + V_k f + c_k (``personalized``); after
    training both with w_k (``local``, ``personalized``).

    A client whose samples are all of one class has a first term that is 0: it sends back what it received, and counts
    in the mean like the others. The paper's other personal head, made by a hypernetwork, is not here.

    References:
        Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022, its
        Fed-RoD with the balanced softmax loss and the linear personal head.
    """

    name: Literal["fedrod"] = "fedrod"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Chen and Chao, ICLR 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "the loss is balanced by the numbers of samples by class"}
    client_keeps: ClassVar[str] = "V_k, c_k"
    newcomer: ClassVar[str] = "w, and a personal head after a local update"

    balance_exponent: float = setting(
        1.0, "gamma", "exponent of the class counts in the generic head's loss; 0: plain cross-entropy", ge=0, le=100
    )
    head_lr: float | None = setting(
        None, "eta_p", "learning rate of the personal head; null: that of the round, 0: the head stays as it is", ge=0
    )
    personal_init: Literal["copy", "zero"] = setting(
        "copy", "", "a client's first personal head: a copy of the initial generic head, or zeros", kept=True
    )
    unseen: Literal["init", "global"] = setting(
        "init",
        "",
        "what is evaluated for a client never sampled: its first personal head, or the generic head alone",
        unless={"personal_init": ("zero",)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("Fed-RoD", task.network)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "the model and of the personal head")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(
            {"model": model, "personal": self._own(client)},
            self.objective,
            frozen={"prior": self.prior(client, model[client.task.network.head_weight])},
            groups={"personal": ParameterGroup(lr=self.head_lr)},
        )
        client.state["personal"] = trained["personal"]
        client.publish(local=Predictor.of(trained["model"]), personalized=_both(trained["model"], trained["personal"]))
        return self.weighted(client, trained["model"])

    def prior(self, client: Client, like: Tensor) -> Tensor:
        """log n_y^gamma by class, shape (C,), of the type of ``like``; with gamma = 0 that is 0 for every class."""
        return log_prior(class_counts(client.examples().y, len(like)), self.balance_exponent).to(like)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Both losses, from one forward pass; each reaches its own tensors only."""
        features, generic = task.head_inputs_and_logits(model["model"], batch)
        own = head_logits(task.network, model["personal"], features.detach())
        balanced = task.loss_of(generic + frozen["prior"], batch)
        return balanced + task.loss_of(generic.detach() + own, batch)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        generic = Predictor.of(server["model"])
        plain = self.unseen == "global" and "personal" not in client.state
        return {"global": generic, "personalized": generic if plain else _both(server["model"], self._own(client))}

    def _own(self, client: Client) -> Tree:
        """The client's personal head, made when it is first needed."""
        stored: Tree | None = client.state.get("personal")
        if stored is not None:
            return stored
        initial = part(client.initial_model(), client.task.network.head_names)
        return initial if self.personal_init == "copy" else map_leaves(torch.zeros_like, initial)


def _both(model: Model, head: Model) -> Predictor:
    """The prediction of both heads together."""
    return Predictor.of(model, head, combine=_log_probabilities)


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, personal head)."""
    model, head = models
    features, generic = task.network.head_inputs_and_logits(model, x, training=False)
    found: Tensor = (generic + head_logits(task.network, head, features)).log_softmax(-1)
    return found
