"""FedNTD: local training that keeps what the received model knows about the classes a sample is not of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits of the classes that a sample is not of, shape (b, C - 1) of (b, C)."""
    others = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, others + (others >= labels[:, None]))


class FedNTD(FineTuned):
    """FedNTD (not-true distillation): federated averaging that distils the received model's not-true classes.

    Clients minimise

        CE(z, y) + beta tau^2 mean KL(q_g || q)

    where q and q_g are the softmax of z / tau and of z_g / tau over the C - 1 classes that are not the sample's, z_g
    being the logits of the received model in evaluation mode. What a client's samples teach of their own classes is
    left to the cross-entropy; what the received model knows of the others is not forgotten. With ``finetune_epochs``
    each client fine-tunes the final model on the cross-entropy alone.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k.

    References:
        Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in Federated Learning,
        NeurIPS 2022, Algorithm 1.
    """

    name: Literal["fedntd"] = "fedntd"
    citation: ClassVar[str] = "Lee et al., NeurIPS 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it distills the classes that a sample is not of"}

    distillation_weight: float = setting(1.0, "beta", "weight of the distillation; 0 is federated averaging", ge=0)
    temperature: float = setting(
        1.0, "tau", "temperature of the distillation", gt=0, unless={"distillation_weight": (0,)}
    )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + beta tau^2 mean KL(q_g || q)."""
        logits = task.logits(model, batch)
        entropy = task.loss_of(logits, batch)
        # of two classes there is but one other, and nothing to know about it
        if self.distillation_weight == 0 or logits.shape[1] <= 2:
            return entropy
        received = task.logits(frozen["received"], batch, training=False)
        student, teacher = (not_true(found, batch.y) for found in (logits, received))
        return entropy + self.distillation_weight * distillation(student, teacher, batch, self.temperature)
