"""FedDyn: local losses regularised so that their minimisers agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.displacements import anchor_of, corrected, keep_displacement
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, frozen, loss, squared_distance
from rayfl.params import Tree, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


class FedDyn(Algorithm):
    """FedDyn: dynamic regularisation lets all clients' minimisers agree with that of their mean loss.

    Client k minimises, by its local epochs of SGD from the received w,

        F_k(theta) - <g_k, theta> + alpha/2 ||theta - w||^2

    and then takes g_k - alpha (theta_k - w) for g_k, which is the gradient of F_k at theta_k if the minimum was
    reached. The server takes h - alpha |S|/K mean(theta_k - w) for h and mean(theta_k) - h/alpha for w, the means
    uniform over the cohort S; h is the mean of all K clients' g_k.

    Both are kept divided by -alpha, which makes them sums of displacements: d_k of the theta_k - w of client k's
    rounds, d their mean over all K clients. So g_k = -alpha d_k, h = -alpha d, the server's model is
    mean(theta_k) + d, and the local loss is, up to a constant, F_k + alpha/2 ||theta - (w - d_k)||^2. This also
    defines the server where clients have an alpha of their own (``alpha_adaptive``). Displacements exist for
    parameters; buffers (running statistics) are averaged.

    Server: model w and d. Client: d_k, zero at first. Down: w (``alpha_adaptive``: and alpha_k). Up: theta_k.
    Evaluated: w (``global``), and w - d, which is the mean of the cohort's theta_k (``mean``).

    The official code also limits gradients to length 10: ``train.max_grad_norm``. Several public versions lack the
    quadratic term, or h: the paper is followed.

    References:
        Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic
        Regularization, ICLR 2021, Algorithm 1.
    """

    name: Literal["feddyn"] = "feddyn"
    citation: ClassVar[str] = "Acar et al., ICLR 2021"
    no_example_privacy: ClassVar[str] = ""
    no_privacy: ClassVar[str] = "its server counts the clients of a round"
    client_keeps: ClassVar[str] = "g_k"
    server_keeps: ClassVar[str] = "w, h"
    newcomer: ClassVar[str] = "w"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the displacement of a parameter needs a server that has it; statistics is possible"
    }

    alpha: float = setting(0.01, "alpha", "weight of the dynamic regularisation, above 0", ge=0)
    alpha_adaptive: bool = setting(
        False, "alpha_k", "divide alpha by the client's samples relative to the average client's (official code)"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.alpha == 0:
            raise ConfigError(
                "algorithm.alpha is 0, for which FedDyn's server step h/alpha is undefined: set it above 0, or use "
                "algorithm=fedavg with algorithm.aggregation=uniform"
            )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        return {**server, "displacement": zeros_like(_parameters(server["model"], task.network.parameter_names))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, displacement = server["model"], server["displacement"]
        payloads = self.own_alphas(cohort, clients) if self.alpha_adaptive else None
        mean = clients.mean(self.local_update, cohort, broadcast={"model": model}, payloads=payloads)
        share = len(cohort) / clients.context.num_clients
        model, displacement = corrected(mean, model, displacement, share)
        return {"model": model, "displacement": displacement}

    def own_alphas(self, cohort: Sequence[int], clients: Clients) -> dict[int, Tree]:
        """alpha_k = alpha (N/K) / n_k, by client."""
        average = clients.num_samples(range(clients.context.num_clients)).mean()
        own = clients.num_samples(cohort)
        return {k: {"alpha": float(self.alpha * average / n)} for k, n in zip(cohort, own, strict=True)}

    async def local_update(self, client: Client, model: Tree, alpha: float | None = None) -> Weighted:
        """Trains from the received model.

        Args:
            client: who trains.
            model: w.
            alpha: the client's own alpha_k; None for everybody's.
        """
        received = _parameters(model, client.task.network.parameter_names)
        # a tensor, so that clients with unequal alpha_k can be trained together
        weight = next(iter(received.values())).new_tensor(self.alpha if alpha is None else alpha)
        known = {"anchor": anchor_of(client, received), "alpha": weight}
        trained = await client.train(model, self.objective, frozen=known)
        keep_displacement(client, received, _parameters(trained, received))
        client.publish(local=Predictor.of(trained))
        return Weighted(trained)

    @property
    def objective(self) -> Any:
        """F_k + alpha/2 ||theta - (w - d_k)||^2."""
        return loss() + frozen("alpha") * squared_distance(TRAINED, "anchor") / 2

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        model, displacement = server["model"], server["displacement"]
        mean = {**model, **subtract(_parameters(model, displacement), displacement)}
        return {"global": Predictor.of(model), "mean": Predictor.of(mean)}


def _parameters(model: Tree, names: Any) -> Tree:
    """The named tensors of a model: all but its buffers."""
    return {name: model[name] for name in names}
