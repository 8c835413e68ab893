"""FedU: clients take the global encoder, and the global predictor as long as their training does not diverge."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.partial import part
from algorithms.parts.targets import KeepsTarget, predictor_names
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.params import Tree, copy
from rayfl.tasks.base import Predictor, Task
from rayfl.tasks.self_supervised import SelfSupervised


class FedU(KeepsTarget):
    """FedU: encoders are averaged and shared; a client whose encoder has moved far keeps its own predictor.

    A client trains from the global encoder f, and from the global predictor p or its own one p_k:

        p <- p    if d_k < mu,    else p_k

    d_k is how far the client's encoder moved in its last training, the mean over its weight tensors of ||f_k - f||,
    with f as it was received then (divergence-aware predictor update). A client that has not trained before takes the
    global predictor. With ``task.objective=byol`` it keeps its target network, which is never sent.

    Server: w = (f, p). Client: p_k, d_k and with BYOL the target network xi_k; never sent. Down: w. Up: w_k and n_k.
    Evaluated: w (``global``).

    References:
        Zhuang, Gan, Wen, Zhang, Yi: Collaborative Unsupervised Visual Representation Learning from Decentralized
        Data, ICCV 2021, section 4 and Algorithm 1.
    """

    name: Literal["fedu"] = "fedu"
    citation: ClassVar[str] = "Zhuang et al., ICCV 2021"
    client_keeps: ClassVar[str] = "p_k, d_k, xi_k"

    threshold: float = setting(0.4, "mu", "divergence from which on a client keeps its own predictor", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if isinstance(task, SelfSupervised) and not task.objective.predicts:
            raise ConfigError(
                "algorithm: fedu decides about predictors, and task.objective=simclr has none: set "
                "task.objective=byol or simsiam, or choose another method"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received encoder with the predictor that the last divergence chooses."""
        network = client.task.network
        trained = await self.train_online(client, self.chosen(client, model), model)
        client.state["predictor"] = copy(part(trained, predictor_names(network)))
        client.state["divergence"] = divergence(trained, model, network)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def chosen(self, client: Client, model: Tree) -> Tree:
        """The network that a client begins with."""
        own: Tree | None = client.state.get("predictor")
        if own is None:
            return model
        keeps = client.state["divergence"] >= self.threshold
        return {**model, **{name: torch.where(keeps, leaf, model[name]) for name, leaf in own.items()}}


def divergence(trained: Tree, received: Tree, network: Network) -> Tensor:
    """Returns how far an encoder has moved: the mean over weight tensors of the norms of their changes.

    Args:
        trained: the network after training.
        received: before it.
        network: tells weights of the encoder, which have two dimensions or more, from biases and the predictor.
    """
    others = set(predictor_names(network))
    names = [name for name in network.parameter_names if name not in others and trained[name].dim() > 1]
    if not names:
        nothing: Tensor = trained[network.parameter_names[0]].new_zeros((), dtype=torch.float64)
        return nothing
    return torch.stack([(trained[name].double() - received[name].double()).norm() for name in names]).mean()
