"""FedDPA: a global and a local adapter of each client, weighed for every input by how near it is to the client's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, setting
from algorithms.parts.adapters import check_adapters, check_no_magnitudes
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.pretrained.mixing import side_by_side
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class FedDPA(Averaging):
    """FedDPA (dual-personalizing adapter): a global adapter, and a local one that counts more for familiar inputs.

    Every layer with adapters has a global one (A_g, B_g), that of federated averaging, and a local one of the client,

        y = W x + (1 - w) s B_g A_g x + w s B_l A_l x

    In version T a client of the cohort first trains its local adapter from where it was, next to the received global
    one, which stays as it is, at w = ``training_weight``; then the global one alone. In version F the global adapter
    is trained in all rounds; after the last one every client trains a local adapter, which begins as the global one,
    next to it. To predict for an input x, with S of the client's training inputs x_j, drawn once,

        w(x) = c mean_j cos(e(x), e(x_j)),    e: what the last layer reads, with the local adapter alone

    Of a language model e is what it reads at the last token of the prompt, so that no response is seen.
    A head that is trained is a part of the adapters: there are two, whose outputs are weighed in the same way.

    Server: global adapter (A_g, B_g). Client: local adapter (A_l, B_l), at first the initial one; never sent. Down:
    (A_g, B_g). Up: (A_g, B_g) as trained, and n_k. Evaluated: w = 0 (``global``), w = 1 (``local``), the
    ``training_weight`` (``even``) and w(x) (``instance``); in version F all but ``global`` after the last round only.
    A client never sampled has the initial local adapter, in version F one that it trains.

    References:
        Yang, Long, Shen, Jiang, Blumenstein: Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024
        (FedDPA-F and FedDPA-T).
    """

    name: Literal["feddpa"] = "feddpa"
    personalized: ClassVar[str] = "instance"
    personalized_later: ClassVar[bool] = True
    citation: ClassVar[str] = "Yang et al., NeurIPS 2024"
    client_keeps: ClassVar[str] = "A_l, B_l"
    server_keeps: ClassVar[str] = "A_g, B_g"
    newcomer: ClassVar[str] = "the global adapter, and a local one that it trains next to it"

    version: Literal["T", "F"] = setting(
        "T", "", "T: the local adapter is trained in every round, next to the global one; F: once, after the last round"
    )
    training_weight: float = setting(
        0.5, "w", "share of the local adapter while one of the two is trained next to the other", ge=0, le=1
    )
    local_epochs: int | None = setting(
        None, "E_l", "epochs of the local adapter's training; null: train.local_epochs", ge=0
    )
    global_beside_local: bool = setting(
        False,
        "",
        "version T: train the global adapter next to the local one too, which stays as it is meanwhile",
        only={"version": ("T",)},
    )
    instances: int = setting(
        5,
        "S",
        "training inputs that an input is compared with; all, if there are fewer",
        ge=1,
        unless={"weight_scale": (0,)},
    )
    weight_scale: float = setting(0.5, "c", "share of the local adapter for an input like these", ge=0, le=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_adapters("FedDPA", task.network)
        check_no_magnitudes("FedDPA", task.network, "a layer has two adapters, whose sum has other row norms than each")
        if task.network.groups.get("context"):
            raise ConfigError(
                "FedDPA mixes two adapters and two heads, and a head that is made of texts with a context is no linear "
                "layer to be mixed: set model.prompt.context=none, or choose another method"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the local adapter, if it is its turn, and the received global one."""
        if self.version == "T":
            client.state["local"] = await self.train_local(client, self.started(client), model)
        if self.version == "T" and self.global_beside_local:
            trained = await client.train(model, self.global_objective, frozen={"other": client.state["local"]})
        else:
            trained = await client.train(model, self.objective)
        client.publish(trained=Predictor.of(trained))
        return self.weighted(client, trained)

    async def train_local(self, client: Client, start: Tree, received: Tree) -> Tree:
        """Returns the local adapter, trained next to the received global one."""
        return await client.train(
            start, self.local_objective, frozen={"other": received}, epochs=self.local_epochs, stream=".local"
        )

    def local_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of both adapters at ``training_weight``; the local one is trained."""
        return task.loss(self.weighed(frozen["other"], model), batch)

    def global_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE of both adapters at ``training_weight``; the global one is trained."""
        return task.loss(self.weighed(model, frozen["other"]), batch)

    def weighed(self, shared: Model, local: Model) -> Tree:
        """Both adapters at ``training_weight``."""
        weight = torch.full((1, 1), self.training_weight, device=next(iter(local.values())).device)
        return both(shared, local, weight)

    def started(self, client: Client) -> Tree:
        """The client's local adapter, the initial one until it has trained."""
        stored: Tree | None = client.state.get("local")
        return client.initial_model() if stored is None else stored

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        shared, rows = server["model"], {"global": Predictor.of(server["model"])}
        if self.version == "T":
            local = self.started(client)
        elif client.context.final:
            local = await self.train_local(client, shared, shared)
        else:
            return rows
        return rows | {
            "local": Predictor.of(local),
            "even": Predictor.of(self.weighed(shared, local)),
            "instance": await self.by_instance(client, shared, local),
        }

    async def by_instance(self, client: Client, shared: Model, local: Model) -> Predictor:
        """The prediction at w(x)."""
        own = client.examples()
        if not len(own):
            return Predictor.of(shared)
        generator = client.context.streams.generator("instances", client=client.id)
        chosen = torch.from_numpy(generator.permutation(len(own))[: self.instances]).sort().values.to(own.x.device)
        x, asked = own.x[chosen], client.task.asked(own.y[chosen])
        if asked is None:
            seen = await client.outputs(lambda x, task: embedded(task, local, x, None), x)
        else:  # what is read of a text, and where its response begins, side by side
            both = torch.stack([x, asked.to(x)], -1)
            seen = await client.outputs(lambda xy, task: embedded(task, local, xy[..., 0], xy[..., 1] > 0), both)
        return Predictor.of(
            shared, local, {"seen": seen}, combine=InstanceMixture(self.weight_scale), reads_asked=asked is not None
        )

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains a local adapter; in version F that is done by every client, when it is evaluated."""
        if self.version == "T":
            client.state["local"] = await self.train_local(client, self.started(client), server["model"])
        return {}

    @property
    def joins_for(self) -> str:
        if self.version == "F":
            return ""
        return "train.local_epochs" if self.local_epochs is None else "algorithm.local_epochs"


def both(shared: Model, local: Model, weight: Tensor) -> Tree:
    """Both adapters, of which the local one has the share ``weight``, shape (b, 1), or (1, 1) for all samples."""
    return side_by_side([shared, local], torch.cat([1 - weight, weight], 1))


def embedded(task: Task, model: Model, x: Tensor, asked: Tensor | None) -> Tensor:
    """What the last layer reads of samples, shape (b, f); of texts, at the last token of the prompt; of pairs of texts
    with one prompt, of the first.

    Args:
        task: of the model.
        model: the model.
        x: inputs, shape (b, *input shape).
        asked: of texts, the positions at which a token is predicted, shape (b, T). The first of them is where the last
            token of the prompt is read; it is position 0 where all of a text is learned.
    """
    if asked is not None and task.inputs_per_sample > 1:
        x, asked = x[:, 0], asked[:, 0]
    found = task.network.features(model, x)
    if asked is None:
        return found
    return found[torch.arange(len(x), device=x.device), asked.int().argmax(1)]


@dataclass(frozen=True)
class InstanceMixture:
    """Predicts each sample with the mixture of both models that its own features tell, at w(x).

    Attributes:
        scale: c.
    """

    scale: float

    def __call__(self, models: Sequence[Model], x: Tensor, task: Any, asked: Tensor | None = None) -> Tensor:
        shared, local, known = models
        found = F.normalize(embedded(task, local, x, asked), dim=1)
        weight = self.scale * (found @ F.normalize(known["seen"], dim=1).T).mean(1, keepdim=True)
        weight = weight.repeat_interleave(task.inputs_per_sample, 0)  # the network reads texts, which a pair has two of
        predicted: Tensor = task.predictions([both(shared, local, weight)], x)
        return predicted
