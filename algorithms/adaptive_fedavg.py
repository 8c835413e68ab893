"""Adaptive-FedAvg: the clients' learning rate falls, and rises when the mean model begins to move faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, interpolate, map_leaves, tensors, zeros_like
from rayfl.tasks.base import Predictor, Task


def corrected(average: float, decay: float, steps: int) -> float:
    """An exponential moving average without the bias of its beginning with 0.

    Args:
        average: after ``steps`` steps.
        decay: beta.
        steps: n, from 1.
    """
    return average / (1 - decay**steps)


class AdaptiveFedAvg(FineTuned):
    """Adaptive-FedAvg: federated averaging with a local learning rate that the server lowers, and raises at a drift.

    After round n, from 1, the server has the mean w_n of the cohort's models, and takes moving averages of it, of the
    square of its distance to the average before, and of the ratio of that from round to round:

        m_n = beta_1 m_{n-1} + (1 - beta_1) w_n
        s_n = beta_2 s_{n-1} + (1 - beta_2) mean (w_n - mhat_{n-1})^2
        r_n = beta_3 r_{n-1} + (1 - beta_3) shat_n / shat_{n-1}

    Each begins with 0, and with a hat it is without that bias, as m_n / (1 - beta_1^n). The square is the mean over all
    parameters. The ratio is 1 in the first two rounds, where it would compare with the average's beginning, and where
    it would divide by 0. In round n + 1 clients train as in federated averaging, with the learning rate

        eta_{n+1} = eta min(1, rhat_n)

    where ``decay: time`` divides the ratio's average by n. eta is that of the training section in that round; the first
    round has eta itself. Buffers (running statistics) are averaged, and are no part of the moving averages. With
    ``finetune_epochs`` each client fine-tunes the final model, at eta.

    Server: model w, m, s, r, and the factor of eta. Client: nothing. Down: w and the factor. Up: w_k and n_k.
    Evaluated: w (``global``).

    References:
        Canonaco, Bergamasco, Mongelluzzo, Roveri: Adaptive Federated Learning in Presence of Concept Drift, IJCNN 2021.
    """

    name: Literal["adaptive_fedavg"] = "adaptive_fedavg"
    citation: ClassVar[str] = "Canonaco et al., IJCNN 2021"
    no_example_privacy: ClassVar[str] = ""
    no_gradient: ClassVar[str] = "the learning rate of their steps is another one in each round"
    server_keeps: ClassVar[str] = "w, m, s, r"

    mean_decay: float = setting(0.7, "beta_1", "decay of the average of models", ge=0, lt=1)
    variance_decay: float = setting(0.3, "beta_2", "decay of the average of squared distances to it", ge=0, lt=1)
    ratio_decay: float = setting(0.7, "beta_3", "decay of the average of their ratios", ge=0, lt=1)
    decay: Literal["none", "time"] = setting(
        "none", "", "none: the rate falls as the model moves less; time: as 1 / n as well"
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        zeros = zeros_like(parameters(server["model"], task))
        return {**server, "moments": {"mean": zeros, "variance": 0.0, "ratio": 0.0, "steps": 0}, "factor": 1.0}

    def summed(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, factor = server["model"], server["factor"]
        rest = self.remainder(model, cohort, clients)
        broadcast = {"model": model, "factor": factor}
        mean = clients.mean(self.paced_update, cohort, broadcast=broadcast, also=rest)
        moments = self.followed(parameters(mean, clients.task), server["moments"])
        return {"model": mean, "moments": moments, "factor": self.factor(moments)}

    async def paced_update(self, client: Client, model: Tree, factor: float) -> Weighted:
        """Trains the received model at a part of the learning rate."""
        trained = await client.train(model, self.objective, lr=client.lr * factor)
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def followed(self, model: Tree, moments: Tree) -> Tree:
        """Returns the moving averages of a further round.

        Args:
            model: the parameters of w_n.
            moments: those of round n - 1.
        """
        before, steps = int(moments["steps"]), int(moments["steps"]) + 1
        bias = 1 - self.mean_decay**before if before else 1.0
        squares = tensors(map_leaves(lambda w, m: (w.double() - m.double() / bias).square(), model, moments["mean"]))
        square = sum(float(one.sum()) for one in squares) / sum(map(Tensor.numel, squares))
        variance = self.variance_decay * moments["variance"] + (1 - self.variance_decay) * square
        ratio = 1.0
        if before > 1 and moments["variance"] > 0:
            last = corrected(moments["variance"], self.variance_decay, before)
            ratio = corrected(variance, self.variance_decay, steps) / last
        return {
            "mean": interpolate(model, moments["mean"], self.mean_decay),
            "variance": variance,
            "ratio": self.ratio_decay * moments["ratio"] + (1 - self.ratio_decay) * ratio,
            "steps": steps,
        }

    def factor(self, moments: Tree) -> float:
        """Returns what the learning rate of the next round is multiplied by."""
        steps = int(moments["steps"])
        ratio = corrected(moments["ratio"], self.ratio_decay, steps)
        return min(1.0, ratio / steps if self.decay == "time" else ratio)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
