"""FedSMOO: FedDyn whose local steps look uphill, in directions that dual variables draw to one of all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding, averaging, check_unclipped
from algorithms.parts.displacements import anchor_of, corrected, keep_displacement
from algorithms.parts.mixture import parameters
from algorithms.parts.uphill import loss_uphill, scaled_to
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss, squared_distance
from rayfl.params import Tree, add_scaled, zeros_like
from rayfl.tasks.base import Batch, Predictor, Task


class FedSMOO(Algorithm):
    """FedSMOO: dynamic regularisation of the model (FedDyn), and of the point uphill at which gradients are taken.

    Client i of the cohort S starts at the received w_t, with the received s. A local step on a mini-batch, whose mean
    loss is f, is

        u = grad f(w) - mu_i - s,    s_i = rho u / ||u||,    mu_i <- mu_i + s_i - s
        w <- w - eta (grad f(w + s_i) - lambda_i + alpha (w - w_t))

    With w_i and s_i those after the last local step, client and server, which knows m clients in all, take

        lambda_i <- lambda_i - alpha (w_i - w_t),    z_i = mu_i + s_i
        lambda <- lambda - alpha/m sum_{i in S} (w_i - w_t),    w_{t+1} = mean_S w_i - lambda / alpha
        s <- rho v / ||v||,    v = mean_S z_i

    lambda_i and lambda are FedDyn's linear terms, kept as sums of displacements; alpha is 1/beta in the paper. mu_i is
    the dual variable of the constraint that all clients look uphill in one direction, s. Both means count all clients
    of the cohort the same. At first all lambda_i, mu_i and s are 0, so that a client's first step in round 0 is one of
    FedSAM with dynamic regularisation. rho = 0 is FedDyn.

    Norms are those of all parameters as one vector; where u or v is 0, so is what is made of it. s_i is a constant: no
    second derivative is taken. Both passes have the same samples, with the same augmentation and the same masks of
    dropout; running statistics are recorded by the first, at w. Neither the quadratic term nor weight decay enters u.
    Momentum and the other optimizers are applied to the gradient in the second line. Dual variables exist for
    parameters; buffers (running statistics) are averaged.

    Server: model w, lambda and s. Client: lambda_i and mu_i. Down: w and s. Up: w_i and z_i. Evaluated: w.

    References:
        Sun, Shen, Chen, Ding, Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching
        Global Consistency and Smooth Landscape, ICML 2023, Algorithm 1.
    """

    name: Literal["fedsmoo"] = "fedsmoo"
    citation: ClassVar[str] = "Sun et al., ICML 2023"
    no_privacy: ClassVar[str] = "its clients send dual variables, too, and its server counts the clients of a round"
    client_keeps: ClassVar[str] = "lambda_i, mu_i"
    server_keeps: ClassVar[str] = "w, lambda, s"
    newcomer: ClassVar[str] = "w"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the dual variables of a parameter need a server that has it; statistics is possible"
    }

    alpha: float = setting(0.1, "alpha", "weight of the dynamic regularisation, 1/beta in the paper", gt=0)
    radius: float = setting(0.1, "rho", "length of s_i and of s; 0 is FedDyn, with one pass a step", kept=True, ge=0)
    message: Literal["sum", "dual"] = setting(
        "sum",
        "z_i",
        "what the server makes s of: mu_i + s_i (paper), or mu_i alone (official code)",
        unless={"radius": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        if self.radius > 0:
            check_unclipped("FedSMOO", "algorithm.radius above 0", context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        zero = zeros_like(parameters(server["model"], task))
        return {**server, "displacement": zero, **({"perturbation": zero} if self.radius > 0 else {})}

    def sent(self, server: Tree) -> Tree:
        return {name: tree for name, tree in server.items() if name != "displacement"}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server))
        share = len(cohort) / clients.context.num_clients
        model, displacement = corrected(mean["model"], server["model"], server["displacement"], share)
        uphill = {"perturbation": scaled_to(self.radius, mean["perturbation"])} if self.radius > 0 else {}
        return {"model": model, "displacement": displacement, **uphill}

    async def local_update(self, client: Client, model: Tree, perturbation: Tree | None = None) -> Weighted:
        """Trains from the received model.

        Args:
            client: who trains.
            model: w_t.
            perturbation: s, of the parameters; None where rho is 0.
        """
        received = parameters(model, client.task)
        known, collected = {"anchor": anchor_of(client, received)}, {}
        if perturbation is not None:
            known["perturbation"] = perturbation
            collected["dual"] = client.state.get("dual") or zeros_like(received)
            if self.message == "sum":
                collected["last"] = zeros_like(received)
        trained = await client.train(
            {"model": model, **collected},
            self.objective,
            frozen=known,
            groups=dict.fromkeys(collected, ACCUMULATOR),
        )
        reply = {"model": trained["model"]}
        keep_displacement(client, received, parameters(trained["model"], client.task))
        if perturbation is not None:
            client.state["dual"] = dual = trained["dual"]
            reply["perturbation"] = dual if self.message == "dual" else add_scaled(dual, trained["last"], 1)
        client.publish(local=Predictor.of(trained["model"]))
        return Weighted(reply)

    @property
    def objective(self) -> Sum:
        """f(w + s_i) + alpha/2 ||w - (w_t + lambda_i / alpha)||^2."""
        own = function(self._uphill) if self.radius > 0 else loss(at="model")
        return own + self.alpha / 2 * squared_distance("model", "anchor")

    def _uphill(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """Returns f(w + s_i); a step on it also renews mu_i, and s_i where that is sent."""
        dual, shared = {name: leaf.detach() for name, leaf in trained["dual"].items()}, frozen["perturbation"]
        found = loss_uphill(
            trained["model"], batch, task, lambda weights, gradient: self.perturbation(gradient, dual, shared)
        )
        value = found.value
        for name, apart in found.apart.items():
            value = value + adding(trained["dual"][name], apart - shared[name])
            if self.message == "sum":
                value = value + averaging(trained["last"][name], apart, 1)
        return value

    def perturbation(self, gradient: Tree, dual: Tree, shared: Tree) -> Tree:
        """Returns s_i, of the shapes of the gradient.

        Args:
            gradient: grad f(w).
            dual: mu_i, before the step.
            shared: s.
        """
        apart = {name: leaf - dual[name] - shared[name] for name, leaf in gradient.items()}
        return scaled_to(self.radius, apart)
