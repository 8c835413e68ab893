"""FedLAW: the server learns on a few labelled samples how much each client's model counts, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import buffers
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, stacks
from rayfl.tasks.base import Batch, Predictor, Task


class FedLAW(FineTuning):
    """FedLAW (learnable aggregation weights): the server learns the weights of the mean, and a factor that shrinks it.

    The server has labelled samples D_0 of its own (the proxy set: ``holdout.public``). From the models w_k of the
    cohort S it makes

        w = e^g sum_k p_k w_k,    p = softmax(x)

    where it goes E epochs of Adam over D_0 down the loss of w in the logits x and in g, from x_k = log q_k, the
    weights of federated averaging, and g = 0. The factor e^g is usually below 1: it decays weights (global weight
    shrinking). With E = 0 it is federated averaging. Mini-batches of the server have batch statistics of their own.
    Buffers (running statistics) are averaged with the weights p, without the factor.

    Server: model w, and D_0. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), and with
    ``finetune_epochs`` w fine-tuned by each client.

    References:
        Li, Lin, Shang, Wu: Revisiting Weighted Aggregation in Federated Learning with Neural Networks, ICML 2023
        (arXiv 2302.10911).
    """

    name: Literal["fedlaw"] = "fedlaw"
    citation: ClassVar[str] = "Li et al., ICML 2023"
    no_privacy: ClassVar[str] = "its server weighs single models, which noise on a sum does not hide"
    own_rule: ClassVar[str] = "it weighs each message by what it does on the server's own samples"
    server_keeps: ClassVar[str] = "w, D_0"
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server runs the model on its own samples, and needs all of its layers for that"
    )

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights that clients begin with: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    server_epochs: int = setting(20, "E", "epochs of the server over its samples in a round", ge=0)
    server_lr: float = setting(
        0.01, "eta_s", "learning rate of Adam for logits and factor", gt=0, unless={"server_epochs": (0,)}
    )
    server_batch_size: int = setting(
        128, "", "samples in a mini-batch of the server", ge=1, unless={"server_epochs": (0,)}
    )
    shrinking: bool = setting(
        True, "gamma", "learn the factor e^g; false: it stays 1, so that w is a mean", unless={"server_epochs": (0,)}
    )

    def check_data(self, task: Task, sizes: Any, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.server_epochs and not public:
            raise ConfigError(
                "holdout.public is 0, but in fedlaw the server learns weights on labelled samples of its own (proxy "
                "set): set holdout.public=200, or algorithm.server_epochs=0"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        messages = clients.each(self.local_update, cohort, {"model": server["model"]})
        sizes = torch.tensor([float(message.weight) for message in messages.values()], dtype=torch.float64)
        models = dict(stacks([message.tree for message in messages.values()]))
        like = next(iter(server["model"].values()))
        given = {"models": {name: leaf.to(server["model"][name]) for name, leaf in models.items()}}
        return clients.on_server(self.mix, {**given, "logits": (sizes / sizes.sum()).log().to(like)})

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)

    async def mix(self, server: Server, models: Tree, logits: Tensor) -> Tree:
        """Learns the weights; returns the model.

        Args:
            server: the server.
            models: w_k, stacked: tensors of shape (m, *).
            logits: x at first, shape (m,).
        """
        learned: Tree = {"logits": logits, "log_factor": torch.zeros_like(logits[0])}
        if self.server_epochs:
            found = await server.train(
                learned if self.shrinking else {"logits": logits},
                self.proxy_loss,
                frozen={"models": models},
                examples=server.labelled_public(),
                epochs=self.server_epochs,
                settings=TrainConfig(
                    optimizer="adam", lr=self.server_lr, betas=(0.5, 0.999), batch_size=self.server_batch_size
                ),
                stream=".weights",
            )
            learned = {**learned, **found}
        return {"model": mixed(models, learned, server.task)}

    def proxy_loss(self, learned: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The loss of the mixed model on a mini-batch of the server's samples."""
        return task.loss(mixed(frozen["models"], learned, task), batch)


def mixed(models: Tree, learned: Mapping[str, Tensor], task: Task) -> Tree:
    """e^g sum_k p_k w_k, whose buffers are sum_k p_k b_k.

    Args:
        models: stacked, tensors of shape (m, *).
        learned: ``logits`` x, shape (m,), and ``log_factor`` g; without it 0.
        task: tells parameters from buffers.
    """
    weights = learned["logits"].softmax(0)
    mean = {name: torch.tensordot(weights.to(leaf), leaf, dims=1) for name, leaf in models.items()}
    factor = learned["log_factor"].exp() if "log_factor" in learned else 1.0
    scaled = {name: factor * leaf for name, leaf in parameters(mean, task).items()}
    return {**copy(buffers(mean, task)), **scaled}
