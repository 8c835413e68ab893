"""FedBABU: the body alone is trained, under a head that stays as it was drawn."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.base import setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.partial import PartialModel, part, shared_part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class FedBABU(PartialModel, FineTuning):
    """FedBABU: federated averaging of the body alone, under a random head that nobody trains before the end.

    A client joins the received body G with the initial head P_0, the same everywhere, and minimises CE(G, P_0) over
    the body; the head is no part of the optimizer. The server takes the mean of the G_k. After the last round each
    client fine-tunes (G, P_0), all of it by default. Buffers (running statistics) are part of the body.

    Server: body G, fixed head P_0. Client: nothing. Down: G. Up: G_k and n_k. Evaluated: (G, P_0) (``global``), and
    after the last round the fine-tuned model (``finetuned``), also of clients never sampled.

    The original weights clients equally (``aggregation`` ``uniform``) and gives the head the learning rate 0, which
    is the same. FL-bench leaves it in the optimizer with zero gradients, so that weight decay shrinks it.

    References:
        Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022,
        Algorithm 1 and the fine-tuning of its section on personalization.
    """

    name: Literal["fedbabu"] = "fedbabu"
    personalized: ClassVar[str] = "finetuned"
    personalized_later: ClassVar[bool] = True
    citation: ClassVar[str] = "Oh et al., ICLR 2022"
    no_example_privacy: ClassVar[str] = ""
    server_keeps: ClassVar[str] = "G, P_0"
    newcomer: ClassVar[str] = "w; fine-tuned after the last round"

    finetune_epochs: int = setting(5, "E_ft", "epochs of fine-tuning after the last round", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.head_group == "all":
            raise ConfigError("algorithm.head_group is all, which leaves FedBABU no body to train: set last_layer")

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        return {"shared": part(model, self.body(task.network)), "head": part(model, self.head(task.network))}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        """Trains the body; the head is part of no message, for everybody knows it from the start."""
        trained = await self.train_model(client, self.assembled(client, shared))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, part(trained, shared))

    async def train_model(self, client: Client, model: Tree) -> Tree:
        return {**model, **await self.train_part(client, model, self.body(client.task.network))}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Nothing: heads are not trained before fine-tuning."""
        return {}

    @property
    def joins_for(self) -> str:
        return ""

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of(_whole(server))}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return await FineTuning.predictors(self, client, {"model": _whole(server)})


def _whole(server: Tree) -> Tree:
    """Body and head."""
    return {**shared_part(server), **server.get("head", {})}
