"""FedAWA: the server moves weight to clients whose updates are near to the mean of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined, inner_products
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.optimization.optimizers import Rule
from rayfl.params import Tree, leaves
from rayfl.tasks.base import Predictor, Task


class FedAWA(FineTuning):
    """FedAWA (adaptive weight aggregation): weights of the mean are learned from the clients' updates alone.

    With u_k = w_k - w, the update (client vector) of client k of the cohort S, the server goes E steps of Adam in the
    logits x_k down

        sum_k p_k ||u_k - sum_j p_j u_j|| + sum_k p_k (1 - cos(w, w_k)),    p = softmax(x)

    from x_k = log q_k + o_k, where q_k are the weights of federated averaging, and o_k is what the client's logit has
    moved in earlier rounds; at first 0. It keeps what o_k is then, and takes the mean of the models with the weights p.
    With E = 0 it is federated averaging. Lengths and angles are over all parameters that are sent, as one vector, in
    float64; buffers (running statistics) are averaged with the same weights. With ``finetune_epochs`` each client
    fine-tunes the final model.

    Server: model w, and o_k of all clients. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``).

    References:
        Shi, Zhao, Zhang, Zhou, Guo, Chang: FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning
        Using Client Vectors, CVPR 2025 (arXiv 2503.15842); formulas of public code.
    """

    name: Literal["fedawa"] = "fedawa"
    citation: ClassVar[str] = "Shi et al., CVPR 2025"
    no_privacy: ClassVar[str] = "its server compares each message with the others, which noise on a sum does not hide"
    own_rule: ClassVar[str] = "it weighs each message by how near it is to the mean of all"
    server_keeps: ClassVar[str] = "w, o_k"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights that clients begin with: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    server_steps: int = setting(1, "E", "steps of the weights in a round; 0: federated averaging", ge=0)
    server_lr: float = setting(
        0.001, "eta_s", "learning rate of the weights' logits", gt=0, unless={"server_steps": (0,)}
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), "offsets": torch.zeros(context.num_clients, dtype=torch.float64)}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, names = server["model"], clients.task.network.parameter_names
        messages = clients.each(self.local_update, cohort, {"model": model})
        models = [message.tree for message in messages.values()]
        start = {name: model[name] for name in names if name in models[0]}
        sizes = torch.tensor([float(message.weight) for message in messages.values()], dtype=torch.float64)
        places = torch.tensor(list(messages))
        before = (sizes / sizes.sum()).log()
        logits = self.learned(before + server["offsets"][places], [{n: one[n] for n in start} for one in models], start)
        offsets = server["offsets"].index_copy(0, places, logits - before)
        kept = {name: model[name] for name in models[0]}
        return {"model": {**model, **combined(models, kept, logits.softmax(0))}, "offsets": offsets}

    def learned(self, logits: Tensor, models: Sequence[Tree], start: Tree) -> Tensor:
        """x after the steps of a round, float64, shape (m,).

        Args:
            logits: x before, float64, shape (m,).
            models: w_k, m trees of parameters.
            start: w.
        """
        products, apart = inner_products(models, dict(leaves(start))), turned(models, start)
        moving, adam = logits.clone(), Rule(lr=self.server_lr, optimizer="adam", betas=(0.5, 0.999))
        slots = [[torch.zeros_like(moving)] for _ in adam.slots]
        for step in range(self.server_steps):
            with torch.enable_grad():
                at = moving.clone().requires_grad_()
                weights = at.softmax(0)
                value = weights @ (distances(products, weights) + apart)
            adam.step([moving], list(torch.autograd.grad(value, [at])), slots, torch.tensor(step + 1.0))
        return moving

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)


def distances(products: Tensor, weights: Tensor) -> Tensor:
    """||u_k - sum_j p_j u_j||, shape (m,); where it is 0 its gradient is, too.

    Args:
        products: inner products of the u_k, shape (m, m).
        weights: p, shape (m,).
    """
    mixed = products @ weights
    squares = products.diagonal() - 2 * mixed + weights @ mixed
    positive = squares > _ROUNDING * products.diagonal().max()
    return torch.where(positive, squares, 1).sqrt() * positive


_ROUNDING = 1e-14
"""Of a square that is the difference of larger ones, in units of these."""


def turned(models: Sequence[Tree], start: Tree) -> Tensor:
    """1 - cos(w, w_k), float64, shape (m,); 1 where either is zero.

    Args:
        models: w_k, m trees of parameters.
        start: w.
    """
    along, squares = torch.zeros(2, len(models), dtype=torch.float64)
    length = torch.zeros((), dtype=torch.float64)
    for name, leaf in leaves(start):
        here = leaf.double().cpu()
        length += here.square().sum()
        for place, model in enumerate(models):
            there = model[name].double().cpu()
            along[place] += (here * there).sum()
            squares[place] += there.square().sum()
    norms = (squares * length).sqrt()
    return 1 - torch.where(norms > 0, along / torch.where(norms > 0, norms, 1), 0)
