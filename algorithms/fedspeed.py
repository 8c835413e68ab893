"""FedSpeed: a proximal term whose bias clients correct, and gradients that are mixed with those uphill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.displacements import corrected
from algorithms.parts.mixture import parameters
from algorithms.parts.uphill import loss_uphill, scaled_to
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, Sum, function, loss, squared_distance
from rayfl.params import Tree, add_scaled, inner_product, subtract, zeros_like
from rayfl.tasks.base import Batch, Predictor, Task


class FedSpeed(Algorithm):
    """FedSpeed: local steps with a proximal term, less what that term has pulled so far, and with a look uphill.

    Client i of the cohort S starts at the received x_t. A local step on a mini-batch, whose mean loss is f, takes two
    gradients and their mixture:

        g_1 = grad f(x),    g_2 = grad f(x + rho g_1),    g = (1 - alpha) g_1 + alpha g_2
        x <- x - eta_l (g - ghat_i + 1/lambda (x - x_t))

    With x_i the model where they end, client and server take

        ghat_i <- ghat_i - 1/lambda (x_i - x_t)
        x_{t+1} = 1/|S| sum_{i in S} (x_i - lambda ghat_i)

    Kept is h_i = - lambda ghat_i, the sum of the distances x_i - x_t of the client's rounds. So
    the client sends x_i + h_i, and the step goes down f + 1/(2 lambda) ||x - (x_t - h_i)||^2.

    With ``normalized`` rho is the length of the step uphill, rho g_1 / ||g_1|| in place of rho g_1, with the norm of
    all parameters as one vector; where g_1 is 0, the step is 0. It is a constant: no second derivative is taken. Both
    passes have the same samples, with the same augmentation and the same masks of dropout; running statistics are
    recorded by the first, at x. Neither the proximal term nor weight decay, which is added to g, enters g_1. Momentum,
    clipping and the other optimizers are applied to the whole gradient. h_i exists for parameters; buffers (running
    statistics) are averaged. Clients count the same, whatever their samples.

    The paper's mean over S has the h_i of the cohort alone, which do not cancel as those of all clients do, so that x
    jumps from cohort to cohort. With ``correction_mean=all`` the server adds the mean h_i of all clients to the mean of
    x_i over S (official code). Where all take part both are the same. Without the look uphill (rho = 0 or alpha = 0)
    the method then is FedDyn with its alpha = 1/lambda.

    Server: model x; with ``correction_mean=all`` also the mean of all h_i. Client: h_i, zero at first. Down: x. Up:
    x_i + h_i; with ``correction_mean=all`` x_i. Evaluated: x.

    References:
        Sun, Shen, Huang, Ding, Tao: FedSpeed: Larger Local Interval, Less Communication Round, and Higher
        Generalization Accuracy, ICLR 2023, Algorithm 1.
    """

    name: Literal["fedspeed"] = "fedspeed"
    citation: ClassVar[str] = "Sun et al., ICLR 2023"
    no_privacy: ClassVar[str] = "its clients send sums over their rounds, or its server counts the clients of a round"
    client_keeps: ClassVar[str] = "ghat_i"
    server_keeps: ClassVar[str] = "x"
    newcomer: ClassVar[str] = "x"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "the correction of a parameter needs a server that has it; statistics is possible"
    }

    proximal_scale: float = setting(
        10.0, "lambda", "the proximal term is 1/(2 lambda) ||x - x_t||^2: smaller holds clients more", gt=0
    )
    rho: float = setting(0.1, "rho", "step uphill to g_2; 0: no step, and one pass", ge=0, unless={"alpha": (0,)})
    normalized: bool = setting(
        True,
        "",
        "rho is the length of the step uphill (the paper's runs, official code), not a factor of g_1",
        unless={"rho": (0,), "alpha": (0,)},
    )
    alpha: float = setting(
        1.0, "alpha", "weight of g_2, the gradient uphill; 0: g_1 alone, and one pass", ge=0, le=1, unless={"rho": (0,)}
    )
    correction_mean: Literal["cohort", "all"] = setting(
        "cohort",
        "",
        "whose corrections the server adds: those of the cohort (paper), or of all clients (official code)",
        kept=True,
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.correction_mean == "all" or context.smallest_cohort == context.num_clients:
            return ()
        return (
            "the server adds the corrections of the cohort alone, which do not cancel as those of all clients do, so "
            "that x jumps from cohort to cohort: algorithm.correction_mean=all adds the mean of all",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        if self.correction_mean == "cohort":
            return server
        return {**server, "correction": zeros_like(parameters(server["model"], task))}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.local_update, cohort, broadcast=self.sent(server))
        if self.correction_mean == "cohort":
            return {"model": mean}
        share = len(cohort) / clients.context.num_clients
        model, correction = corrected(mean, server["model"], server["correction"], share)
        return {"model": model, "correction": correction}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model x_t."""
        received = parameters(model, client.task)
        before = client.state.get("correction") or zeros_like(received)
        trained = await client.train(model, self.objective, frozen={"anchor": subtract(received, before)})
        client.publish(local=Predictor.of(trained))
        end = parameters(trained, client.task)
        client.state["correction"] = after = add_scaled(before, subtract(end, received), 1)
        return Weighted(trained if self.correction_mean == "all" else {**trained, **add_scaled(end, after, 1)})

    @property
    def objective(self) -> Sum:
        """What has the gradient g + 1/lambda (x - (x_t - h_i)): that of f at x alone if there is no step uphill."""
        own = function(self._mixture) if self.rho > 0 and self.alpha > 0 else loss()
        return own + 1 / (2 * self.proximal_scale) * squared_distance(TRAINED, "anchor")

    def _mixture(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """What has the gradient g: alpha f(x + rho g_1) + (1 - alpha) <x, g_1>, where g_1 is a constant."""
        uphill = loss_uphill(model, batch, task, self.perturbation)
        if self.alpha == 1:
            return uphill.value
        return self.alpha * uphill.value + (1 - self.alpha) * inner_product(parameters(model, task), uphill.gradient)

    def perturbation(self, weights: Tree, gradient: Tree) -> Tree:
        """Returns the step uphill, of the shapes of the gradient.

        Args:
            weights: x, which it does not depend on.
            gradient: g_1.
        """
        if self.normalized:
            return scaled_to(self.rho, gradient)
        return {name: self.rho * leaf for name, leaf in gradient.items()}
