"""RoLoRA: in one round clients train B over a common A, in the next one A over a common B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.parts.adapters import check_both_factors
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class RoLoRA(Averaging):
    """RoLoRA: in one round clients train B over a common A, in the next one A over a common B.

    Clients of a round have one factor in common, which stays as it is. The mean of the other one is then that of the
    products, without the error of averaged factors:

        odd rounds:   B <- sum_k p_k B_k,    sum_k p_k B_k A = B A,    p_k = n_k / sum_j n_j
        even rounds:  A <- sum_k p_k A_k,    sum_k p_k B A_k = B A

    Rounds are counted from 1: B is zero at first, and as long as it is, A has no gradient. A head that is trained is
    trained in every round, and averaged. With ``a_rounds=0`` A stays as it was drawn (FFA-LoRA).

    Server: A, B and the head. Client: nothing. Down: A, B and the head. Up: the factor that was trained, and the head.
    Evaluated: the model.

    References:
        Chen, Guo, Ju, Dalal, Zhu, Khisti: Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA,
        NeurIPS 2025 (arXiv:2502.01755).
    """

    name: Literal["rolora"] = "rolora"
    citation: ClassVar[str] = "Chen et al., NeurIPS 2025"
    server_keeps: ClassVar[str] = "A, B, head"

    b_rounds: int = setting(1, "", "how many rounds in a row B is trained, before A is", ge=1)
    a_rounds: int = setting(
        1, "", "how many rounds in a row A is trained, before B is again; 0: never (FFA-LoRA)", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_both_factors(
            self.name,
            task.network,
            "it trains them in turn; with one of them alone set algorithm=fedavg, or train both",
            "models with magnitudes have no common factor, by which their mean would be that of the products",
        )
        if context.train.persist_optimizer:
            raise ConfigError(
                f"{self.name} needs train.persist_optimizer=false: the next round trains another factor, for which the "
                "optimizer's buffers have no meaning"
            )

    def moving(self, network: Network, round: int) -> tuple[str, ...]:
        """Names of what is trained in a round: one factor, and the head.

        Args:
            network: knows both.
            round: t, 0-indexed.
        """
        of_b = round % (self.b_rounds + self.a_rounds) < self.b_rounds
        still = set(network.groups["lora_a" if of_b else "lora_b"])
        return tuple(name for name in network.parameter_names if name not in still)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, names = server["model"], self.moving(clients.task.network, clients.context.round)
        moving = part(model, names)
        still = part(model, [name for name in model if name not in moving])
        rest = self.remainder(moving, cohort, clients)
        mean = clients.mean(self.train_factor, cohort, broadcast={"moving": moving, "still": still}, also=rest)
        return {"model": {**model, **mean}}

    async def train_factor(self, client: Client, moving: Tree, still: Tree) -> Weighted:
        """Trains the round's factor and the head, and sends them.

        Args:
            client: who trains.
            moving: what is trained.
            still: the other factor.
        """
        trained = await client.train(moving, self.objective, frozen={"still": still})
        client.publish(local=Predictor.of({**still, **trained}))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """CE of both factors and the head; one factor is not trained."""
        return loss(TRAINED, completed_by="still")

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained, {"model": received.get("moving", {})}, task)
