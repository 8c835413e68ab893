"""Scaffnew: local steps with control variates, and after each of them a coin that says whether clients communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from algorithms.base import Clients, check_everyone, check_sgd, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.settings import limits_without_effect
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, inner_product, loss
from rayfl.params import Tree, add_scaled, copy, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


class ControlledSteps(FineTuned):
    """Rounds of as many local steps as a coin says, whose gradients lack a control variate of the client's own."""

    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there is no control variate of a parameter that is never sent; statistics is possible"
    }

    communication_probability: float = setting(
        0.1, "p", "probability that a local step is followed by a communication; 1/p is the mean of L", gt=0, le=1
    )

    def check_steps(self, title: str, context: RoundContext) -> None:
        """Refuses other steps than plain gradient steps; ConfigError names the option and the fix."""
        check_sgd(title, context.train, "its control variates suppose plain steps", heavy_ball=True)
        if context.train.momentum > 0:
            raise ConfigError(
                f"{title} takes plain gradient steps, but train.momentum is {context.train.momentum}: set it to 0"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        clipped = "train.max_grad_norm shortens gradients after h_k was taken away, so that no h_k makes up for it"
        limits = limits_without_effect("communication_probability", 1, context.train)
        return (*limits, *(() if context.train.max_grad_norm is None else (clipped,)))

    def steps(self, context: RoundContext, round: int) -> int:
        """L, the number of local steps in a round, the same for all clients."""
        return int(context.streams.generator("coin", round).geometric(self.communication_probability))

    async def controlled(self, client: Client, model: Tree, control: Tree) -> Tree:
        """The received model after L steps with a control variate."""
        steps = self.steps(client.context, client.round)
        known: dict[str, Any] = {"control": control}
        return await client.train(model, self.objective, frozen=known, steps=steps, keep_optimizer=False)

    @property
    def objective(self) -> Any:
        """f(x) - <x, h_k>, whose gradient is the controlled one."""
        return loss() - inner_product(TRAINED, "control")


class Scaffnew(ControlledSteps):
    """Scaffnew (ProxSkip for federated learning): communication is skipped, as a coin says after every local step.

    Client k has a control variate h_k, zero at first. All clients begin with the model x. They take local steps on
    mini-batches, and after each step a coin, the same for all, says with probability p that they communicate:

        x_k <- x_k - eta (grad f_B(x_k) - h_k)
        x = sum_k q_k x_k,    h_k <- h_k + p / eta (x - x_k),    x_k <- x        (if the coin says so)

    As nothing but x_k changes until then, a round of a run is all that happens up to a communication: L local steps,
    with L drawn from the geometric distribution of mean 1/p, the same for all clients, and then one mean. The training
    section's local epochs play no role. Where all q_k are alike the sum of the h_k stays zero, and each h_k comes to be
    the gradient of its own f_k at the optimum of all, where clients stay.

    A client learns x with its next round, and then renews its h_k. Weight decay is part of f. Control variates exist
    for parameters; buffers (running statistics) are averaged. With ``finetune_epochs`` each client fine-tunes the
    final model by plain steps, without h_k.

    Server: model x. Client: h_k, and x_k as it was sent. Down: x. Up: x_k. Evaluated: x (``global``).

    References:
        Mishchenko, Malinovsky, Stich, Richtarik: ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
        Acceleration! Finally!, ICML 2022 (arXiv:2202.09357), Algorithm 2 (Scaffnew).
    """

    name: Literal["scaffnew"] = "scaffnew"
    citation: ClassVar[str] = "Mishchenko et al., ICML 2022"
    no_privacy: ClassVar[str] = "its control variates follow from the exact mean of the models as clients trained them"
    needs_everyone: ClassVar[str] = "control variates follow from the mean of all clients"
    client_keeps: ClassVar[str] = "h_k, x_k"
    server_keeps: ClassVar[str] = "x"

    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_k", "weights of the mean: uniform 1/K (paper); samples n_k / sum over all clients"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_everyone("Scaffnew needs all clients in every round", context)
        self.check_steps("Scaffnew", context)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sent = {"model": server["model"]}
        return {"model": clients.mean(self.controlled_update, cohort, broadcast=sent, required=True)}

    async def controlled_update(self, client: Client, model: Tree) -> Weighted:
        """Renews the control variate by the received model, then trains that."""
        received = parameters(model, client.task)
        control = self.renewed(client, received)
        trained = await self.controlled(client, model, control)
        client.publish(local=Predictor.of(trained))
        client.state["control"] = control
        client.state["trained"] = copy(parameters(trained, client.task))
        # with a learning rate of 0 nothing has moved, and nothing was learned
        client.state["factor"] = self.communication_probability / client.lr if client.lr > 0 else 0.0
        return self.weighted(client, trained)

    @staticmethod
    def renewed(client: Client, received: Tree) -> Tree:
        """h_k, now that the mean of the last round is known.

        Args:
            client: k.
            received: x, without buffers.
        """
        if "control" not in client.state:
            return zeros_like(received)
        return add_scaled(client.state["control"], subtract(received, client.state["trained"]), client.state["factor"])
