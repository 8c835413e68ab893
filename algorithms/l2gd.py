"""L2GD: loopless local gradient descent for a mixture of global and local models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Algorithm, Clients, check_everyone, check_sgd, setting
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Predictor, Task


class L2GD(Algorithm):
    """L2GD: stochastic gradient descent on local losses and a pull to the mean, one of the two at a time.

    It minimises, over one model x_k for each of the K clients and with xbar their uniform mean,

        1/K sum_k F_k(x_k) + lambda/(2K) sum_k ||x_k - xbar||^2.

    Every round is one iteration of all clients. It flips a coin, the same for all: with probability p

        x_k <- x_k - alpha lambda / (K p) (x_k - xbar)          (aggregation)

    and otherwise, on one mini-batch,

        x_k <- x_k - alpha / (K (1 - p)) grad F_k(x_k)          (local step)

    with alpha the learning rate of the training section, so that the expected step is -alpha times the gradient of
    the objective. The training section's local epochs play no role.

    Server: xbar as of the last communication. Client: x_k, at first the common initial model; while aggregations
    follow each other also xbar, which they do not change. Only the first of them communicates. Down: xbar. Up: x_k.
    Evaluated: xbar (``global``) and x_k (``personalized``). Running statistics are mixed as the weights are.

    One public version divides by 1 - p in the aggregation too and counts the first client twice in the mean, another
    is a local SGD with a proximal term: the paper is followed.

    References:
        Hanzely, Richtarik: Federated Learning of a Mixture of Global and Local Models, arXiv:2002.05516, 2020,
        the objective (2) and Algorithm 1 (L2GD).
    """

    name: Literal["l2gd"] = "l2gd"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Hanzely & Richtarik, arXiv 2020"
    client_keeps: ClassVar[str] = "x_k"
    server_keeps: ClassVar[str] = "xbar"
    newcomer: ClassVar[str] = "w for x_k"
    needs_everyone: ClassVar[str] = "an iteration moves the models of all clients"

    aggregation_probability: float = setting(0.5, "p", "probability that a round aggregates", gt=0, lt=1, kept=True)
    penalty_weight: float = setting(1.0, "lambda", "pull of each model to the mean of all", ge=0)

    def check(self, task: Task, context: RoundContext) -> None:
        train = context.train
        check_everyone("L2GD needs all clients in every round", context)
        check_sgd("L2GD", train, "aggregations and local steps are the parts of one gradient step")
        if train.stragglers:
            raise ConfigError("L2GD has one local step a round, of which nobody can do a part: set train.stragglers=0")
        for field in ("momentum", "weight_decay"):
            value = getattr(train, field)
            if value > 0:
                raise ConfigError(f"L2GD takes plain gradient steps, but train.{field} is {value}: set it to 0")
        if (pull := max(self.pull(context, round) for round in range(context.rounds))) > 1:
            raise ConfigError(
                f"L2GD moves every model {pull:.3g} times the way to the mean (train.lr "
                "algorithm.penalty_weight / (K algorithm.aggregation_probability)), which must not exceed 1 (1/2 is "
                "recommended): lower train.lr"
            )

    def pull(self, context: RoundContext, round: int) -> float:
        """alpha lambda / (K p), how far an aggregation moves the models to their mean."""
        return context.train.lr_in(round) * self.penalty_weight / (context.num_clients * self.aggregation_probability)

    def aggregates(self, context: RoundContext, round: int) -> bool:
        """The coin of a round: whether it aggregates."""
        return round >= 0 and context.streams.generator("coin", round).random() < self.aggregation_probability

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context = clients.context
        if not self.aggregates(context, context.round):
            clients.map(self.local_step, cohort, broadcast={}, required=True)
            return {}
        if self.aggregates(context, context.round - 1):
            clients.map(self.approach, cohort, broadcast={}, required=True)
            return {}
        mean = clients.mean(self.report, cohort, broadcast={}, required=True)
        clients.map(self.approach, cohort, broadcast={"mean": mean}, required=True)
        return {"model": mean}

    async def local_step(self, client: Client) -> Tree:
        """One mini-batch; uploads nothing."""
        scale = client.context.num_clients * (1 - self.aggregation_probability)
        trained = await client.train(
            self._own(client),
            self.objective,
            lr=client.lr / scale,
            momentum=0.0,
            weight_decay=0.0,
            steps=1,
            keep_optimizer=False,
        )
        client.state.pop("mean", None)
        return self._kept(client, trained)

    async def report(self, client: Client) -> Weighted:
        """x_k, of which the server takes the uniform mean."""
        return Weighted(self._own(client))

    async def approach(self, client: Client, mean: Tree | None = None) -> Tree:
        """Moves x_k towards xbar; uploads nothing.

        Args:
            client: whose model moves.
            mean: xbar; None if the client has it from the round before.
        """
        mean = client.state["mean"] if mean is None else mean
        client.state["mean"] = mean
        return self._kept(client, interpolate(self._own(client), mean, self.pull(client.context, client.round)))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Takes the mean model for its own; trains nothing."""
        client.state["personal"] = server["model"]
        return {}

    @property
    def joins_for(self) -> str:
        return ""

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"global": Predictor.of(server["model"]), "personalized": Predictor.of(self._own(client))}

    @staticmethod
    def _own(client: Client) -> Tree:
        """x_k."""
        stored: Tree | None = client.state.get("personal")
        return client.initial_model() if stored is None else stored

    @staticmethod
    def _kept(client: Client, model: Tree) -> Tree:
        """Makes ``model`` x_k; nothing to upload."""
        client.state["personal"] = model
        client.publish(personalized=Predictor.of(model))
        return {}
