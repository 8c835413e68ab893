"""FedMD: clients with models of their own learn from the mean of what all of them say about public samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.architectures import task_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedMD(Algorithm):
    """FedMD: clients agree on the logits of public samples, and each moves its own model towards them.

    In a round the clients of the cohort run their models v_k, in evaluation mode, on public samples A and send the
    logits. The server sends back their mean z. Each client *digests* it, which is ``digest_epochs`` epochs down

        mean over a mini-batch of A and the classes of |v_k(x) - z(x)|    (or of its square),

    and *revisits* its own samples: local training with the cross-entropy. A are ``alignment_samples`` public samples,
    drawn in every round. Clients may have different architectures (``model.candidates``), each a draw of its own.

    Server: nothing. Client: v_k, at first the initial model of its architecture. Down: z, a number a sample and class.
    Up: its logits, as many. Evaluated: v_k (``personalized``); a client never sampled has its initial model.

    References:
        Li, Wang: FedMD: Heterogenous Federated Learning via Model Distillation, arXiv 1910.03581, 2019, Algorithm 1.
    """

    name: Literal["fedmd"] = "fedmd"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Li & Wang, arXiv 2019"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "clients exchange scores of classes"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "-"
    newcomer: ClassVar[str] = "a model that it trains alone, without a consensus"
    mixes_architectures: ClassVar[bool] = True
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "clients send no model, all of whose layers stay with them anyway"
    )

    alignment_samples: int = setting(
        5000, "|A|", "public samples of a round; all, if there are no more", ge=1, unless={"digest_epochs": (0,)}
    )
    digest_epochs: int = setting(1, "N_d", "epochs on the public samples; 0: local training alone", ge=0)
    digest_batch_size: int = setting(256, "", "public samples in a mini-batch", ge=1, unless={"digest_epochs": (0,)})
    digest_lr: float | None = setting(
        None, "", "learning rate on them; null: that of the round", ge=0, unless={"digest_epochs": (0,)}
    )
    digest_loss: Literal["mae", "mse"] = setting(
        "mae",
        "",
        "mean absolute or mean squared difference of the logits from their mean",
        unless={"digest_epochs": (0,)},
    )
    digest_deadband: float = setting(
        0.0,
        "",
        "differences up to so much have no gradient: of absolute ones none is small, however close the logits",
        ge=0,
        unless={"digest_epochs": (0,)},
    )
    initial_epochs: int = setting(
        0, "", "epochs of a client on its own samples before it first says anything", ge=0, kept=True
    )
    consensus: Literal["uniform", "samples"] = setting(
        "uniform",
        "",
        "weights of the mean of the logits: equal, or the clients' training samples",
        unless={"digest_epochs": (0,)},
    )

    def check_data(self, task: Task, sizes: Any, public: int) -> None:
        if self.digest_epochs and not public:
            raise ConfigError(
                "holdout.public is 0, but in fedmd clients exchange what they say of public samples: set "
                "holdout.public=1000, or algorithm.digest_epochs=0"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if self.digest_epochs:
            said = clients.mean(self.say, cohort, {})
            clients.map(self.local_update, cohort, {"consensus": said["logits"]})
        else:
            clients.map(self.revisit, cohort, {})
        return {}

    async def say(self, client: Client) -> Weighted:
        """The logits of the round's public samples, of shape (|A|, C)."""
        model, task = await self._begun(client), task_of(client)

        def logits(x: Tensor, task: Any) -> Tensor:
            found: Tensor = task.network.logits(model, x, training=False)
            return found

        said = await client.outputs(logits, self.alignment(client), task=task)
        return Weighted({"logits": said}, client.num_samples if self.consensus == "samples" else 1)

    async def local_update(self, client: Client, consensus: Tensor) -> Tree:
        """Digests the mean logits and revisits the client's own samples; uploads nothing."""
        settings = {"batch_size": self.digest_batch_size, "min_local_steps": 0, "max_local_steps": None}
        client.state["local"] = await client.train(
            self._own(client),
            self.digest,
            examples=Examples(self.alignment(client), consensus),
            epochs=self.digest_epochs,
            lr=self.digest_lr,
            settings=client.context.train.model_copy(update=settings),
            task=task_of(client),
            stream=".digest",
        )
        return await self.revisit(client)

    async def revisit(self, client: Client) -> Tree:
        """Trains on the client's own samples; uploads nothing."""
        task, model = task_of(client), await self._begun(client)
        client.state["local"] = trained = await client.train(model, self.objective, task=task)
        client.publish(personalized=Predictor.of(trained, task=task))
        return {}

    def alignment(self, client: Client) -> Tensor:
        """A, the same for all clients of a round."""
        public = client.public()
        if len(public) <= self.alignment_samples:
            return public
        generator = client.context.streams.generator("digest", client.round)
        chosen = generator.choice(len(public), size=self.alignment_samples, replace=False)
        return public[torch.from_numpy(chosen).to(public.device)]

    def digest(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Returns how far the logits are from the consensus, which is ``batch.y``; a scalar."""
        return self.distance(task.logits(model, batch), batch)

    def distance(self, logits: Tensor, batch: Batch) -> Tensor:
        """The mean over samples and classes; of logits of shape (b, C)."""
        differences = logits - batch.y
        if self.digest_deadband:
            differences = torch.where(differences.abs() > self.digest_deadband, differences, 0.0)
        return batch.mean((differences.abs() if self.digest_loss == "mae" else differences.square()).mean(-1))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains alone: there is a consensus among the clients of a cohort only."""
        await self.revisit(client)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(self._own(client), task=task_of(client))}

    @staticmethod
    def _own(client: Client) -> Tree:
        """v_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("local")
        return client.initial_model(task_of(client)) if stored is None else stored

    async def _begun(self, client: Client) -> Tree:
        """v_k, after the client's first training if there is to be one."""
        model = self._own(client)
        if self.initial_epochs and "local" not in client.state:
            task, epochs = task_of(client), self.initial_epochs
            model = await client.train(model, self.objective, epochs=epochs, task=task, stream=".initial")
            client.state["local"] = model
        return model
