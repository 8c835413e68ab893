"""Mime and MimeLite: local steps are those of an optimizer whose statistics the server keeps and nobody else moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from algorithms.base import Clients, check_sgd, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import constant_slope
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, Sum, function, inner_product, loss
from rayfl.params import Tree, add_scaled, interpolate, map_leaves, zeros_like
from rayfl.params import inner_product as product_of
from rayfl.tasks.base import Batch, Predictor, Task

_OF_ADAM = {"base": ("adam",)}


class Mimicking(FineTuned):
    """Averaging whose local steps take an optimizer's statistics from the server and leave them as they are.

    What the server keeps as ``statistics`` are trees of the parameters: ``first``, and with Adam ``second``.
    """

    server_keeps: ClassVar[str] = "x, m; with Adam v"
    no_privacy: ClassVar[str] = "its clients send gradients of all their samples, too"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "there are no statistics of a parameter that is never sent; statistics is possible"
    }

    base: Literal["sgdm", "adam"] = setting(
        "sgdm", "B", "the optimizer: SGD with momentum, or Adam (with beta = 0: RMSProp)", kept=True
    )
    momentum: float = setting(0.9, "beta", "share of m in a step, and of the old m in the new one", ge=0, lt=1)
    second_decay: float = setting(0.99, "beta_2", "decay of v", ge=0, lt=1, only=_OF_ADAM)
    adaptivity: float = setting(
        1e-3, "tau", "added to the root of v; the larger, the less adaptive", gt=0, only=_OF_ADAM
    )
    initial_accumulator: float = setting(0.0, "v_0", "v before the first round", ge=0, only=_OF_ADAM, kept=True)
    server_lr: float = setting(1.0, "eta_g", "step of the server; 1 goes to the mean of the clients' models", gt=0)
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_i", "weights of the means: uniform 1/|S| (paper); samples n_i / sum over the cohort"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_sgd(type(self).__name__, context.train, "its steps are those of algorithm.base", heavy_ball=True)
        if context.train.momentum > 0:
            raise ConfigError(
                f"the momentum of {type(self).__name__} is algorithm.momentum, to which train.momentum="
                f"{context.train.momentum} would add a second one: set train.momentum=0"
            )
        if self.base == "adam" and context.train.max_grad_norm is not None:
            raise ConfigError(
                "train.max_grad_norm would limit steps that are divided by the root of v already, by other lengths "
                "than those of gradients: set train.max_grad_norm=null, or algorithm.base=sgdm"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if context.train.max_grad_norm is None:
            return ()
        return ("train.max_grad_norm shortens the sum of gradient and momentum, not the gradient alone",)

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        zeros = zeros_like(parameters(server["model"], task))
        second = map_leaves(lambda leaf: leaf + self.initial_accumulator, zeros)
        return {**server, "statistics": {"first": zeros, **({"second": second} if self.base == "adam" else {})}}

    def moved(self, server: Tree, mean: Tree, gradient: Tree, context: RoundContext) -> Tree:
        """Returns the server's new model and statistics.

        Args:
            server: x and s.
            mean: of the clients' models, with buffers.
            gradient: the mean of their gradients at x, without weight decay.
            context: has the training section.
        """
        start, end = ({name: tree[name] for name in gradient} for tree in (server["model"], mean))
        penalized = add_scaled(gradient, start, context.train.weight_decay)
        old, beta = server["statistics"], self.second_decay
        renewed = {"first": interpolate(penalized, old["first"], self.momentum)}
        if self.base == "adam":
            renewed["second"] = map_leaves(lambda v, g: beta * v + (1 - beta) * g.square(), old["second"], penalized)
        return {"model": {**mean, **interpolate(start, end, self.server_lr)}, "statistics": renewed}

    async def stepped(self, client: Client, model: Tree, statistics: Tree, control: Tree | None = None) -> Tree:
        """Returns y_i, with its buffers.

        Args:
            client: i.
            model: x.
            statistics: s.
            control: c; None where gradients are not corrected.
        """
        decay, known = client.context.train.weight_decay, {"first": statistics["first"]}
        if self.base == "adam":
            scale = map_leaves(lambda v: 1 / (v.sqrt() + self.adaptivity), statistics["second"])
            known |= {"scale": scale, "decay": decay}
        if control is not None:
            known |= {"control": control, "received": parameters(model, client.task)}
        added = 0.0 if self.base == "adam" else (1 - self.momentum) * decay  # Adam scales the gradient of decay, too
        trained = await client.train(model, self.objective, frozen=known, weight_decay=added)
        client.publish(local=Predictor.of(trained))
        return trained

    @property
    def objective(self) -> Sum:
        """What has the gradient U(g, s)."""
        return function(self._along)

    def _along(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """<y, U>, where U is a constant; running statistics are recorded at y alone."""
        drawn = task.network.draws
        gradient, recorded = constant_slope(model, batch, task)
        if "control" in frozen:
            task.network.draws = drawn  # both passes have the same masks of dropout
            there, _ = constant_slope({**model, **frozen["received"]}, batch, task)
            gradient = map_leaves(lambda g, h, c: g - h + c, gradient, there, frozen["control"])
        here = parameters(model, task)
        if "scale" in frozen:
            gradient = map_leaves(lambda g, w: g + frozen["decay"] * w.detach(), gradient, here)
        step = interpolate(gradient, {name: frozen["first"][name] for name in gradient}, self.momentum)
        if "scale" in frozen:
            step = map_leaves(lambda u, scale: u * scale, step, frozen["scale"])
        for name, leaf in recorded.items():
            model[name].copy_(leaf)
        return product_of(here, step)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}


class Mime(Mimicking):
    """Mime: local steps mimic an optimizer on everybody's data: its statistics stand still, gradients are corrected.

    An optimizer B is a step U along a gradient g, by statistics s that V renews (``base``):

        sgdm: U(g, s) = (1 - beta) g + beta m,    V: m <- (1 - beta) g + beta m
        adam: U(g, s) = ((1 - beta) g + beta m) / (sqrt(v) + tau),    V: m as above, v <- (1 - beta_2) g^2 + beta_2 v

    Client i of the cohort S sends the gradient of f_i, its mean loss over all its samples, at the received x, and the
    server returns the mean c of these gradients. Beginning with y_i = x, the client takes a local step on each
    mini-batch, whose mean loss is f_B,

        c = sum_i q_i grad f_i(x),    g = grad f_B(y_i) - grad f_B(x) + c,    y_i <- y_i - eta U(g, s)

    in which s stays what the server has sent. The server then takes

        x <- x + eta_g sum_i q_i (y_i - x),    s <- V(c, s)

    A first step, at y_i = x, is that of B on the data of the whole cohort. Both gradients of a step have the same
    samples, with the same augmentation and the same masks of dropout; a step costs two passes. Weight decay is part of
    f. Statistics exist for parameters; buffers (running statistics) are recorded at y_i and averaged. Fine-tuning
    (``finetune_epochs``) takes plain steps.

    Server: model x and s (m; with Adam v), zero at first. Client: nothing. Down: x, then c and s. Up: grad f_i(x), then
    y_i. Evaluated: x (``global``).

    References:
        Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Mime: Mimicking Centralized Stochastic Algorithms in
        Federated Learning, arXiv:2008.03606, 2020 (NeurIPS 2021: Breaking the Centralized Barrier for Cross-Device
        Federated Learning), Mime.
    """

    name: Literal["mime"] = "mime"
    citation: ClassVar[str] = "Karimireddy et al., arXiv 2020"

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        gradient = clients.mean(self.report, cohort, broadcast=self.sent(server))["gradient"]
        known = {"control": gradient, "statistics": server["statistics"]}
        mean = clients.mean(self.corrected_update, cohort, broadcast=known)
        return self.moved(server, mean, gradient, clients.context)

    async def report(self, client: Client, model: Tree) -> Weighted:
        """The gradient over all samples of the client; keeps the model until it trains."""
        client.state["received"] = model
        gradient = await client.gradient(model, loss())
        return self.weighted(client, {"gradient": parameters(gradient, client.task)})

    async def corrected_update(self, client: Client, control: Tree, statistics: Tree) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            control: c.
            statistics: s.
        """
        return self.weighted(client, await self.stepped(client, client.state.pop("received"), statistics, control))


class MimeLite(Mimicking):
    """MimeLite: local steps of an optimizer whose statistics stand still, without Mime's correction of gradients.

    An optimizer B is a step U along a gradient g, by statistics s that V renews (``base``):

        sgdm: U(g, s) = (1 - beta) g + beta m,    V: m <- (1 - beta) g + beta m
        adam: U(g, s) = ((1 - beta) g + beta m) / (sqrt(v) + tau),    V: m as above, v <- (1 - beta_2) g^2 + beta_2 v

    Client i of the cohort begins with y_i = x, the received model, and takes a local step on each mini-batch, whose
    mean loss is f_B. It sends y_i, and the gradient of f_i, its mean loss over all its samples, at x:

        y_i <- y_i - eta U(grad f_B(y_i), s)
        x <- x + eta_g sum_i q_i (y_i - x),    s <- V(sum_i q_i grad f_i(x), s)

    In the local steps s stays what the server has sent. Weight decay is part of f. Statistics exist for parameters;
    buffers (running statistics) are averaged. Fine-tuning (``finetune_epochs``) takes plain steps. ``sgdm`` with
    beta = 0 is federated averaging.

    Server: model x and s (m; with Adam v), zero at first. Client: nothing. Down: x and s. Up: y_i and grad f_i(x).
    Evaluated: x (``global``).

    References:
        Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh: Mime: Mimicking Centralized Stochastic Algorithms in
        Federated Learning, arXiv:2008.03606, 2020 (NeurIPS 2021: Breaking the Centralized Barrier for Cross-Device
        Federated Learning), MimeLite.
    """

    name: Literal["mimelite"] = "mimelite"
    citation: ClassVar[str] = "Karimireddy et al., arXiv 2020"

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        mean = clients.mean(self.reporting_update, cohort, broadcast=self.sent(server))
        return self.moved(server, mean["model"], mean["gradient"], clients.context)

    async def reporting_update(self, client: Client, model: Tree, statistics: Tree) -> Weighted:
        """Trains the received model; returns it with the gradient at the received one.

        Args:
            client: who trains.
            model: x.
            statistics: s.
        """
        trained = await self.stepped(client, model, statistics)
        gradient = await client.gradient(model, loss())
        return self.weighted(client, {"model": trained, "gradient": parameters(gradient, client.task)})

    @property
    def objective(self) -> Sum:
        """(1 - beta) f(y) + beta <y, m>, whose gradient is U; with Adam see the class above."""
        if self.base == "adam":
            return super().objective
        return (1 - self.momentum) * loss() + self.momentum * inner_product(TRAINED, "first")
