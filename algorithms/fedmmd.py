"""FedMMD: local training whose features stay distributed like the received model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.parts.transfer import ONE_SAMPLE, OneSample, maximum_mean_discrepancy
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedMMD(FineTuned):
    """FedMMD: federated averaging whose local features stay distributed like those of the received model.

    Clients minimise

        CE(theta) + lambda MMD^2(h_theta, h_w)

    with h the features that enter the classifier and w the model they received, a constant in evaluation mode. The
    squared maximum mean discrepancy is that of FedPHP: the biased estimate under five Gaussian kernels, and 0 on
    mini-batches of one sample (``one_sample``).

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), after training w_k
    (``local``).

    The original also predicts with both streams, the local and the received model; as in FedPHP's comparison the
    discrepancy is a constraint on one model here. That comparison's code has the same form of loss.

    References:
        Yao, Huang, Sun: Two-Stream Federated Learning: Reduce the Communication Costs, VCIP 2018, the loss of its
        two-stream model.
        Li, Zhan, Shao, Li, Song: FedPHP: Federated Personalization with Inherited Private Models, ECML PKDD 2021,
        eq. 8 (MMD).
    """

    name: Literal["fedmmd"] = "fedmmd"
    citation: ClassVar[str] = "Yao et al., VCIP 2018"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "it compares distributions of features"}

    transfer_weight: float = setting(
        0.1, "lambda", "weight of the squared maximum mean discrepancy; 0 is federated averaging", ge=0
    )

    one_sample: OneSample = setting("skip", "", ONE_SAMPLE, unless={"transfer_weight": (0,)})

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if self.transfer_weight:
            trained = await client.train(model, self.objective, frozen={"received": model})
        else:
            trained = await client.train(model, super().objective)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.features_and_logits(model, batch)
        received = task.features(frozen["received"], batch, training=False)
        discrepancy = maximum_mean_discrepancy(features, received, batch, self.one_sample)
        return task.loss_of(logits, batch) + self.transfer_weight * discrepancy
