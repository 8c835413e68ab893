"""FedFB: federated averaging whose server learns how much samples of each group and label weigh in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.people import check_people, groups_of, train_weighted
from algorithms.parts.simplex import project_onto_simplex
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait

Criterion = Literal["statistical_parity", "equal_opportunity", "equalized_odds"]


def directions(losses: np.ndarray, counts: np.ndarray, criterion: Criterion) -> tuple[np.ndarray, float]:
    """mu: where the shares lambda move, and its length.

    Args:
        losses: sums of the cross-entropy by group and label, shape (A, 2).
        counts: numbers of samples, the same.
        criterion: what is to be fair.

    Returns:
        mu of shape (A, 2), whose columns are of labels, 0 where a share does not move by itself; of statistical parity
        the second column is minus the first. And the norm of what the paper updates: of statistical parity the first
        column, else all but the group with which others are compared.
    """
    mu, free = np.zeros_like(losses), np.ones(losses.shape, dtype=bool)
    if criterion == "statistical_parity":
        people = counts.sum(1)
        found = (losses[:, 0] - losses[:, 1] - counts[:, 0]) / np.maximum(people, 1)
        _compare(found, people, mu[:, 0])
        mu[:, 1], free[:, 1] = -mu[:, 0], False
    else:
        for label in (0, 1) if criterion == "equalized_odds" else (1,):
            found = losses[:, label] / np.maximum(counts[:, label], 1)
            first = _compare(found, counts[:, label], mu[:, label])
            free[first, label] = False
    return mu, float(np.linalg.norm(mu[free]))


def _compare(found: np.ndarray, counts: np.ndarray, mu: np.ndarray) -> int:
    """Writes by how much each group that has samples exceeds the first one that has; the first gets minus the sum."""
    there = np.flatnonzero(counts)
    if len(there) < 2:
        return 0
    mu[there] = found[there] - found[there[0]]
    mu[there[0]] = -mu[there].sum()
    return int(there[0])


def moved(weights: np.ndarray, counts: np.ndarray, mu: np.ndarray, criterion: Criterion) -> np.ndarray:
    """Weights of samples after a step of the shares lambda, which are projected.

    Args:
        weights: v, of a sample by group and label, shape (A, 2).
        counts: numbers of samples, the same.
        mu: the step of lambda, the same.
        criterion: what is to be fair.

    Returns:
        The next v; of groups and labels that have no samples the same as before.
    """
    after, count = weights.copy(), counts.sum()
    if criterion == "statistical_parity":
        there = np.flatnonzero(counts.sum(1))
        share = counts.sum(1)[there] / count
        low = np.clip(weights[there, 0] * share + mu[there, 0], 0, 2 * share) / share
        after[there] = np.stack([low, 2 - low], 1)
        return after
    for label in (0, 1) if criterion == "equalized_odds" else (1,):
        there = np.flatnonzero(counts[:, label])
        if len(there) > 1:
            share = counts[there, label] / count
            shifted = weights[there, label] * share + mu[there, label]
            after[there, label] = project_onto_simplex(shifted[None], float(share.sum()))[0] / share
    return after


class FedFB(FineTuned):
    """FedFB: the server learns how much samples of each group and label weigh, so that the model treats groups alike.

    A sample of group a and label y weighs v_ya, at first 1. Client k of the cohort S trains the model w to w_k on the
    mean of

        v_ya CE(x, y)

    over its samples, and w becomes the mean of the w_k. The clients of S then send, for this w, sums L_ya of the
    cross-entropy over their samples of each group and label, and the numbers n_ya of these, which the server adds up.
    With n_a samples of group a and n of all, it compares each group with the first one, 0, and moves shares lambda of
    the loss within their limits. Statistical parity has a share for each group, and F_a stands for how much more often
    1 is predicted for group a than for group 0:

        F_a = (L_0a - L_1a - n_0a) / n_a - (L_00 - L_10 - n_00) / n_0
        lambda_a <- min(max(lambda_a + alpha_t mu_a, 0), 2 n_a / n),    mu_a = F_a,    mu_0 = -sum_{a > 0} F_a
        v_0a = lambda_a n / n_a,    v_1a = 2 - v_0a

    Equal opportunity has for the label y = 1, and equalized odds for both labels,

        F_ya = L_ya / n_ya - L_y0 / n_y0
        lambda_y <- P(lambda_y + alpha_t mu_y),    mu_ya = F_ya,    mu_y0 = -sum_{a > 0} F_ya
        v_ya = lambda_ya n / n_ya

    where P projects onto the simplex of the sum n_y / n, the label's share of the samples: of two groups it limits
    both shares to 0 and n_y / n. With ``normalized`` mu is divided by its length; for the latter two criteria by that
    of the F_ya. alpha_t is alpha / t^p after the rounds t = 1, 2, ... A group of which a cohort has nobody (of a label,
    for the latter two) keeps its v, and the first is the first that the cohort has. With alpha = 0 this is federated
    averaging. With ``finetune_epochs`` each client fine-tunes the final model on the cross-entropy.

    Server: model w, v. Client: nothing. Down: w and v, and the next w. Up: w_k and n_k, and L_ya and n_ya.
    Evaluated: w.

    References:
        Zeng, Chen, Lee: Improving Fairness via Federated Learning, arXiv 2110.15545.
        Roh, Lee, Whang, Suh: FairBatch: Batch Selection for Model Fairness, ICLR 2021.
    """

    name: Literal["fedfb"] = "fedfb"
    citation: ClassVar[str] = "Zeng et al., 2021"
    server_keeps: ClassVar[str] = "w, v"
    no_privacy: ClassVar[str] = "its clients say how large their losses are for each group and label"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "it compares losses of groups of people by class",
        "distribution": "it weighs the cross-entropy of samples",
    }

    criterion: Criterion = setting(
        "statistical_parity", "F", "in what the groups are to be alike", unless={"alpha": (0,)}
    )
    alpha: float = setting(0.05, "alpha", "step of lambda after the first round; 0: all samples weigh 1", ge=0)
    alpha_decay: float = setting(
        0.0, "p", "power of the round by which alpha is divided (authors' code: 0.5)", ge=0, unless={"alpha": (0,)}
    )
    normalized: bool = setting(
        True,
        "",
        "whether lambda moves by alpha_t whatever the size of F (paper), or by alpha_t times it (authors' code)",
        unless={"alpha": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_people(task, "FedFB", two_groups=False)

    def init(self, task: Task, context: RoundContext) -> Tree:
        weights = torch.ones(_number_of_groups(task), 2, dtype=torch.float64)
        return {**super().init(task, context), "weights": weights}

    def sent(self, server: Tree) -> Tree:
        return server if self.alpha else {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, dict[int, Tree]]:
        return {"model": server["model"]}, {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.alpha:
            return super().round(server, cohort, clients)
        rest = self.remainder(server["model"], cohort, clients)
        mean = clients.mean(self.weighed_update, cohort, broadcast=self.sent(server), also=rest)
        found = clients.map(self.told, cohort, broadcast={"model": mean})
        losses, counts = (
            np.sum([found[client][name].double().numpy() for client in cohort], 0).reshape(-1, 2)
            for name in ("losses", "counts")
        )
        mu, length = directions(losses, counts, self.criterion)
        step = self.alpha / (clients.context.round + 1) ** self.alpha_decay
        if self.normalized:
            step = step / length if length else 0.0
        after = moved(server["weights"].numpy(), counts, step * mu, self.criterion)
        return {"model": mean, "weights": torch.from_numpy(after)}

    async def weighed_update(self, client: Client, model: Tree, weights: Tensor) -> Weighted:
        """Trains the received model on samples that weigh what their group and label do."""
        each = np.append(weights.cpu().double().numpy().ravel(), 1.0)  # the last is of samples without a group
        trained = await train_weighted(client, model, each[_places(client).cpu().numpy()])
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    async def told(self, client: Client, model: Tree) -> Tree:
        """Returns the sums of a model's losses, and the numbers of samples, by group and label, each (2 A,)."""
        predictor = Predictor.of(model)
        built = predictor.built()
        rows = await client.outputs(lambda x, task: predictor.predictions(built, x, task))
        losses = -rows.gather(1, client.examples().y[:, None])[:, 0]
        places = torch.arange(2 * _number_of_groups(client.task), device=rows.device)
        entered = _places(client)[:, None] == places
        sums = (entered * losses.double()[:, None]).sum(0)
        return {"losses": sums.to(rows.dtype).cpu(), "counts": entered.sum(0).to(rows.dtype).cpu()}


def _number_of_groups(task: Task) -> int:
    spec = getattr(task, "spec", None)
    return 2 if spec is None else len(spec.groups)  # a task of one's own may not say what its data are


def _places(client: Client) -> Tensor:
    """Where each training sample's group and label stand among all, -1 for a sample without a group; (n,)."""
    samples = client.examples()
    group = groups_of(samples, "FedFB")
    return torch.where(group < 0, -1, 2 * group + (samples.y == 1).long())
