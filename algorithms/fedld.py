"""FedLD: local losses that keep models unsure, and a server that moves along principal directions of the changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.masks import kept_count
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedLD(FineTuning):
    """FedLD (loss decomposition): each half of a round works against a part of what unlike data do to the loss.

    With p = softmax(z) of each of a mini-batch's n samples, a client minimises

        CE(z, y) + lambda log( 1 + sum_{j=1..n} ||p_j||^2 )

    whose second term is large where the model is sure. For each tensor of the model apart, the server has the m changes
    g_i = w_i - w of the cohort, and of C = 1/m (g_i . g_j)_ij the eigenvalues s_1 >= s_2 >= .. with eigenvectors v_j.
    From round R on it moves the tensor along the k = floor(kappa m) first principal directions u_j, one at least,

        w <- w + 1/m sum_i ||g_i|| sum_{j=1..k} s_j / (sum_l s_l) sign(g_i . u_j) u_j,    u_j ~ sum_i v_ji g_i

    with ||u_j|| = 1, so that directions in which few clients go count for little. Before round R, and for tensors of
    one number, it takes the mean. Clients count the same.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``). With ``finetune_epochs`` each
    client fine-tunes the final model on the cross-entropy.

    References:
        Zeng, Guo, Wang, Wang, Zhou, Qu: Tackling Data Heterogeneity in Federated Learning via Loss Decomposition,
        MICCAI 2024 (arXiv 2408.12300); formulas of the authors' code.
    """

    name: Literal["fedld"] = "fedld"
    citation: ClassVar[str] = "Zeng et al., MICCAI 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"distribution": "its clients bound probabilities of classes"}
    no_privacy: ClassVar[str] = "its server compares the changes of single clients"
    own_rule: ClassVar[str] = "it moves along principal directions of the clients' changes"

    aggregation: Literal["uniform", "samples"] = setting(
        "uniform",
        "q_k",
        "weights of the mean that is taken before round R, of buffers, and of tensors of one number: uniform (authors' "
        "code), or samples n_k / sum over the cohort",
    )
    margin_weight: float = setting(
        0.03, "lambda", "weight of the second term of local losses (authors' code: 0.03)", ge=0
    )
    direction_share: float = setting(0.8, "kappa", "share of the principal directions that are taken", gt=0, le=1)
    mean_rounds: int = setting(1, "R", "first rounds of the run, whose server takes the mean", ge=0)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.mean_rounds < context.rounds:
            return ()
        return (
            f"no step along principal directions: algorithm.mean_rounds is {self.mean_rounds}, but the run has "
            f"{context.rounds} rounds",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, network = server["model"], clients.task.network
        messages = clients.each(self.local_update, cohort, {"model": model})
        models = [message.tree for message in messages.values()]
        sizes = np.array([float(message.weight) for message in messages.values()])
        before = {name: model[name] for name in models[0]}
        moved = combined(models, before, torch.from_numpy(sizes / sizes.sum()))
        if clients.context.round >= self.mean_rounds:
            for name in network.parameter_names:
                if name in moved and moved[name].numel() > 1:
                    start = before[name].double()
                    changes = torch.stack([(one[name].double() - start).flatten() for one in models])
                    step = principal_step(changes, self.direction_share)
                    moved[name] = (start + step.view_as(start)).to(before[name])
        return {"model": {**model, **moved}}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)

    @property
    def objective(self) -> Sum:
        """The cross-entropy, and lambda times the term that is large where the model is sure."""
        return function(self._unsure) if self.margin_weight else loss()

    def _unsure(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.logits(model, batch)
        squares = logits.softmax(-1).square().sum(-1)
        total = squares.sum() if batch.mask is None else (squares * batch.mask).sum()
        found: Tensor = task.loss_of(logits, batch) + self.margin_weight * total.log1p()
        return found


def principal_step(changes: Tensor, share: float) -> Tensor:
    """The step of a tensor, shape (d,); the mean where there is no change.

    Args:
        changes: g_i, shape (m, d), float64.
        share: kappa.
    """
    count = len(changes)
    values, vectors = torch.linalg.eigh(changes @ changes.T / count)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    total = values.sum()
    if total == 0:
        return changes.mean(0)
    first = max(1, kept_count(share, count))
    # g_i . u_j has the sign of v_ji, and the length of sum_i v_ji g_i is the root of m s_j
    mean_lengths = changes.norm(dim=1) @ vectors[:, :first].sign() / count
    lengths = mean_lengths * (values[:first] / count).sqrt() / total
    step: Tensor = vectors[:, :first] @ lengths @ changes
    return step
