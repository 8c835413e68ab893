"""FedGKD: local training that is taught by the mean of the last global models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.means import mean_of
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_UNTAUGHT = {"distillation_weight": (0,)}


class FedGKD(FineTuned):
    """FedGKD (global knowledge distillation): federated averaging taught by the mean of the last global models.

    With w^t the server's model in round t, of which w^1 is the first mean of clients' models, the teacher is

        w_bar = 1/M sum_{m=1..M} w^{t-m+1}

    or the mean of as many as there are. Clients train the received model on

        CE(z, y) + gamma/2 tau^2 mean KL(softmax(z_bar / tau) || softmax(z / tau))

    with z_bar the teacher's logits, constants of its evaluation mode. With ``divergence: mse`` the second term is
    gamma/2 times the mean of (z - z_bar)^2 over samples and classes. In the first round there is no teacher. With
    M = 1 the teacher is the received model. With ``finetune_epochs`` each client fine-tunes the final model on the
    cross-entropy alone.

    Server: model w, and the last M of them. Client: nothing. Down: w, and w_bar once it is another model. Up: w_k and
    n_k. Evaluated: w (``global``).

    References:
        Yao, Pan, Dai, Wan, Ding, Yu, Jin, Xu, Sun: FedGKD: Toward Heterogeneous Federated Learning via Global Knowledge
        Distillation, IEEE Transactions on Computers 2023 (arXiv 2107.00051), FedGKD.
    """

    name: Literal["fedgkd"] = "fedgkd"
    citation: ClassVar[str] = "Yao et al., TC 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "it distills probabilities of classes"}
    server_keeps: ClassVar[str] = "w, past w"

    distillation_weight: float = setting(0.2, "gamma", "twice the weight of the term; 0 is federated averaging", ge=0)
    models: int = setting(5, "M", "global models whose mean is the teacher; 1: the received one", ge=1, kept=True)
    divergence: Literal["kl", "mse"] = setting(
        "kl", "", "distance from the teacher: KL of probabilities, or mean squared of logits", unless=_UNTAUGHT
    )
    temperature: float = setting(
        1.0, "tau", "temperature of the distillation", gt=0, only={"divergence": ("kl",)}, unless=_UNTAUGHT
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, past = server["model"], list(server.get("past", {}).values())
        rest = self.remainder(model, cohort, clients)
        procedure = self.taught_update if past and self.distillation_weight else self.local_update
        mean = clients.mean(procedure, cohort, broadcast=self.sent(server), also=rest)
        last = [*past, mean][-self.models :]
        return {"model": mean, "past": {str(place): one for place, one in enumerate(last)}}

    async def taught_update(self, client: Client, model: Tree, teacher: Tree | None = None) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            model: w^t.
            teacher: w_bar; None where it is w^t.
        """
        trained = await client.train(model, self.taught, frozen={"teacher": model if teacher is None else teacher})
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def taught(self) -> Sum:
        """The cross-entropy, and the distance from the teacher."""
        return function(self._taught)

    def _taught(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits, teacher = task.logits(model, batch), task.logits(frozen["teacher"], batch, training=False)
        apart = (
            distillation(logits, teacher, batch, self.temperature)
            if self.divergence == "kl"
            else batch.mean((logits - teacher).square().mean(-1))
        )
        return task.loss_of(logits, batch) + self.distillation_weight / 2 * apart

    def sent(self, server: Tree) -> Tree:
        past = server.get("past", {}).values()
        if len(past) < 2 or not self.distillation_weight:
            return {"model": server["model"]}
        return {"model": server["model"], "teacher": mean_of(Weighted(one, 1) for one in past)}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
