"""FedMRL: a model of the client's own and a small shared one, whose features are fused and read in two lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import check_head, setting
from algorithms.parts.architectures import architecture
from algorithms.parts.heads import head_logits
from algorithms.parts.layers import draw_linear, linear
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.requirements import clipped_together
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedMRL(TrainedNewcomers):
    """FedMRL: every client fuses the features of its own model and of a small shared one (Matryoshka representations).

    Client k has a model v_k of its own, which may have an architecture of its own, with features f(x; v_k) in R^d2, and
    its version w_k of the small model, with features f(x; w_k) in R^d1, d1 <= d2. Features are what the last layers
    read. With the client's own projection P_k, a matrix and an offset, and h the last layer of a model, it trains all
    three on

        r = P_k [f(x; w_k), f(x; v_k)] in R^d2
        m_G CE(h(r_1..d1; w_k), y) + m_F CE(h(r; v_k), y)

    so that the shared last layer reads the first d1 entries of the fused features, and the client's own all of them.
    The server takes the mean of the w_k.

    With several ``model.candidates`` the first is the small model, and each client's own is a draw from the others.
    With one model both have its architecture.

    Server: small model w. Client: v_k and P_k, at first the initial model of its architecture and one draw for all;
    never sent. Down: w. Up: w_k and n_k. Evaluated: the client's own last layer on r, with the latest w
    (``personalized``), and the shared last layer on the first d1 entries of r (``coarse``); after training the former
    with w_k (``local``). A client never sampled has the initial v_k and P_k. There is no global model: no last layer
    reads the features of w alone.

    References:
        Yi, Yu, Ren, Wang, Liu, Li: Federated Model Heterogeneous Matryoshka Representation Learning, NeurIPS 2024.
    """

    name: Literal["fedmrl"] = "fedmrl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Yi et al., NeurIPS 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "it fuses the features of two models"}
    client_keeps: ClassVar[str] = "v_k, P_k"
    server_keeps: ClassVar[str] = "w (small model)"
    newcomer: ClassVar[str] = "w, and an own model and projection after a local update"
    mixes_architectures: ClassVar[bool] = True

    coarse_weight: float = setting(
        1.0, "m_G", "weight of the loss of the shared last layer, which reads d1 fused features", ge=0
    )
    fine_weight: float = setting(
        1.0, "m_F", "weight of the loss of the client's own last layer, which reads all fused features", gt=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        for candidate in task.candidates:
            check_head("FedMRL", candidate.network)
        small, *others = [candidate.network.head_shape[1] for candidate in task.candidates]
        if any(width < small for width in others):
            raise ConfigError(
                f"FedMRL's small model, the first of model.candidates, has {small} features, but the others have "
                f"{others}: put the one with the fewest first"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return clipped_together(context, "the client's own model, its projection and the small model")

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the small model with the client's own model and projection, which it keeps."""
        number = own_architecture(client)
        trained = await client.train(
            {"small": model, **self._own(client, number)}, self.objective, frozen={"architecture": number}
        )
        client.state.update(own=trained["own"], projection=trained["projection"])
        client.publish(local=self._predictor(number, trained["small"], trained))
        return self.weighted(client, trained["small"])

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """m_G CE(h(r_1..d1; w_k), y) + m_F CE(h(r; v_k), y)."""
        own = task.candidates[frozen["architecture"]]
        narrow, _ = task.head_inputs_and_logits(model["small"], batch)
        wide, _ = own.head_inputs_and_logits(model["own"], batch)
        fused = linear(model["projection"], torch.cat([narrow, wide], -1))
        fine = head_logits(own.network, model["own"], fused)
        coarse = head_logits(task.network, model["small"], fused[..., : narrow.shape[-1]])
        return self.coarse_weight * task.loss_of(coarse, batch) + self.fine_weight * task.loss_of(fine, batch)

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        number = own_architecture(client)
        own = self._own(client, number)
        return {
            "personalized": self._predictor(number, server["model"], own),
            "coarse": self._predictor(number, server["model"], own, coarse=True),
        }

    @staticmethod
    def _predictor(number: int, small: Tree, own: Tree, coarse: bool = False) -> Predictor:
        return Predictor.of(small, own["own"], own["projection"], combine=FusedPrediction(number, coarse))

    @staticmethod
    def _own(client: Client, number: int) -> Tree:
        """v_k (``own``) and P_k (``projection``), the initial ones until the client has trained."""
        if "own" in client.state:
            return {name: client.state[name] for name in ("own", "projection")}
        task = client.task.candidates[number]
        model = client.initial_model(task)
        narrow, wide = client.task.network.head_shape[1], task.network.head_shape[1]
        generator = client.context.streams.generator("init.projection")
        like = next(iter(model.values()))
        return {"own": model, "projection": draw_linear(narrow + wide, wide, like, generator)}


@dataclass(frozen=True)
class FusedPrediction:
    """What (small model, own model, projection) predict.

    Attributes:
        architecture: number of the own model's candidate.
        coarse: whether it is the small model's last layer that predicts.
    """

    architecture: int
    coarse: bool

    def __call__(self, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        """Returns the predictions of the task, a row a sample."""
        small, own, projection = models
        network = task.candidates[self.architecture].network
        narrow, _ = task.network.head_inputs_and_logits(small, x, training=False)
        wide, _ = network.head_inputs_and_logits(own, x, training=False)
        fused = linear(projection, torch.cat([narrow, wide], -1))
        if self.coarse:
            outputs = head_logits(task.network, small, fused[..., : narrow.shape[-1]])
        else:
            outputs = head_logits(network, own, fused)
        found: Tensor = task.predicted(outputs)
        return found


def own_architecture(client: Client) -> int:
    """The number of the candidate that a client's own model has: a draw from all but the first, if there are more."""
    others = len(client.task.candidates) - 1
    return 1 + architecture(client.id, others, client.context) if others else 0
