"""FLOCO: clients train, and are placed in, a simplex of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.partial import part
from algorithms.parts.products import check_products
from algorithms.parts.simplex import principal_coordinates, scale_candidates, spread_on_simplex
from algorithms.parts.simplex_models import barycenter as barycenter
from algorithms.parts.simplex_models import model_at as model_at
from algorithms.parts.simplex_models import simplex_of as simplex_of
from algorithms.parts.simplex_sampling import sample_ball, sample_ball_legacy, sample_simplex
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client, Draw
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import drawn, function, loss
from rayfl.objectives.numbers import Number
from rayfl.objectives.points import Point, Scope, Share
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task


@dataclass(frozen=True)
class InSimplex(Point):
    """The model w_alpha of a trained simplex; see :func:`model_at`.

    Attributes:
        vertices: d, the number of endpoints.
        point: alpha, a vector of d numbers.
    """

    vertices: int
    point: Number

    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """Of the head's weight one of each endpoint; the body as it is."""
        head = scope.task.network.head_weight
        endpoints = [Share("endpoints", "", self.point, row=m, group=m) for m in range(self.vertices)]
        names = scope.task.network.parameter_names
        return {name: endpoints if name == head else [Share("body", name)] for name in names}

    def base(self, scope: Scope) -> Tree:
        """The body."""
        return dict(scope.trained["body"])

    def model(self, scope: Scope) -> Tree:
        """See :func:`model_at`."""
        return model_at(dict(scope.trained), scope.number(self.point), scope.task)


class Floco(Averaging):
    """FLOCO: federated learning over connected modes.

    The weight of the last linear layer is a point of a simplex with d = M + 1 endpoints theta_m; everything else
    (the body, and the last layer's bias) is one set of parameters. Every mini-batch draws a point alpha and
    trains body and endpoints through the model w_alpha, whose head weight is sum_m alpha_m theta_m. Before round
    tau (0-indexed) alpha is uniform on the whole simplex. At the start of round tau every client, sampled or not,
    trains once from the current simplex; the updates of its endpoints (its signal), reduced to d principal
    coordinates and projected onto the simplex at the scale that spreads the clients best, become its point
    alpha_k. Nothing else of that pass is kept. From then on alpha is uniform in the client's subregion
    {||alpha - alpha_k||_1 <= rho} of the simplex. On a face of the simplex the mean of that law is not alpha_k,
    so training is centred inward of the point that is evaluated.

    Server: body, endpoints, and from round tau on all points (K, d). Client: nothing. Down: body, endpoints, and
    the client's point. Up: body, endpoints and n_k; in round tau the signal of every client as well. Evaluated:
    the barycentre (``global``), and the client's own point, before round tau the barycentre (``personalized``).

    The paper is inconsistent in its dimensions (M coordinates for points with M + 1); like both public codes we
    take M + 1. Like them we measure the energy on the points (``energy_on``) and normalize the mean over the
    cohort (``aggregation``). Their sampler leaves the simplex and is not uniform: ours is exact, and
    ``legacy_sampler`` reproduces that defect. They keep the arbitrary signs of the components: ours make the
    largest loading positive. One public code evaluates ``global`` at a client's point after round tau and
    persists optimizer states: we follow the paper.

    References:
        Grinwald, Wiesner, Nakajima: Federated Learning over Connected Modes, NeurIPS 2024, Algorithm 1 and
        eqs. 8-11.
    """

    name: Literal["floco"] = "floco"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send gradients one by one, by which their subregions are assigned"
    citation: ClassVar[str] = "Grinwald et al., NeurIPS 2024"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "-"
    server_keeps: ClassVar[str] = "body, theta_m, alpha_k"
    newcomer: ClassVar[str] = "the barycentre of the simplex"

    simplex_dimension: int = setting(6, "M", "dimension of the simplex, which has M + 1 endpoints", ge=0)
    assignment_round: int = setting(
        100,
        "tau",
        "round (0-indexed) at whose start clients get their points; never, if there are fewer rounds",
        ge=0,
        kept="assignment_round",
    )
    radius: float = setting(
        0.1,
        "rho",
        "L1 radius of a subregion; from 2 on it is the whole simplex",
        ge=0,
        unless={"simplex_dimension": (0,)},
    )
    energy_on: Literal["alpha", "beta"] = setting(
        "alpha",
        "",
        "choose the scale by the energy of the points (public codes) or of z times the points (paper)",
        unless={"simplex_dimension": (0,)},
        kept="assignment_round",
    )
    scale_grid: Literal["linear", "log"] = setting(
        "linear",
        "z",
        "spacing of the 1000 scales tried between 1e-4 and 1 (paper and codes: linear)",
        unless={"simplex_dimension": (0,)},
        kept="assignment_round",
    )
    rescale_signals: bool = setting(
        False,
        "",
        "divide all principal coordinates by the largest, so that the scales fit any learning rate",
        unless={"simplex_dimension": (0,)},
        kept="assignment_round",
    )
    simplex_over: Literal["head", "adapters"] = setting(
        "head",
        "",
        "what has M + 1 endpoints: the weight of the last layer; or a pretrained model's adapters, whose products are "
        "summed",
    )
    legacy_sampler: bool = setting(
        False, "", "reproduce a defect of the public code: draws that leave the simplex", unless={"radius": (0,)}
    )

    @property
    def vertices(self) -> int:
        """d = M + 1, the number of endpoints."""
        return self.simplex_dimension + 1

    def check(self, task: Task, context: RoundContext) -> None:
        if self.simplex_over == "adapters":
            check_products("algorithm.simplex_over=adapters", task.network)
        else:
            check_head("FLOCO", task.network)
        if self.assignment_round < context.rounds and context.num_clients < self.vertices:
            raise ConfigError(
                f"algorithm.simplex_dimension: {self.simplex_dimension} needs at least {self.vertices} clients to "
                f"assign points, there are {context.num_clients}; lower it to {context.num_clients - 1} or less"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.assignment_round < context.rounds:
            return ()
        return (
            f"no client gets a point of the simplex: algorithm.assignment_round is {self.assignment_round}, but the "
            f"run has {context.rounds} rounds; until then the personalized model is the global one",
        )

    def init(self, task: Task, context: RoundContext) -> Tree:
        """Body and endpoint 0 are the initial model of federated averaging; endpoint m is the m-th further draw's."""
        streams, head = context.streams, task.network.head_weight
        names = (head,) if self.simplex_over == "head" else task.network.groups["adapters"]
        model = task.network.initialize(streams.integer("init.global"))
        further = (task.network.initialize(streams.integer("init.endpoint", client=m)) for m in range(1, self.vertices))
        drawn_models = [part(one, names) for one in (model, *further)]
        endpoints = {name: torch.stack([one[name] for one in drawn_models]) for name in names}
        body = {name: model[name] for name in model if name not in endpoints}
        found = {"endpoints": endpoints[head] if self.simplex_over == "head" else endpoints}
        return {"body": body, **found} if body else found

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        simplex = simplex_of(server)
        points: Tensor | None = server.get("points")
        assigned: Tree = {}
        if points is None and clients.context.round >= self.assignment_round:
            points = self.assign_points(simplex, clients)
            assigned = {"points": points}
        payloads = None if points is None else {client: {"point": points[client]} for client in cohort}
        rest = self.remainder(simplex, cohort, clients)
        trained = clients.mean(self.local_update, cohort, broadcast={"model": simplex}, payloads=payloads, also=rest)
        return assigned | trained

    def assign_points(self, simplex: Tree, clients: Clients) -> Tensor:
        """The points alpha_k of all clients, float64 of shape (K, d), from one pass that leaves no other trace."""
        everyone = range(clients.context.num_clients)
        if self.vertices == 1:
            return torch.ones(len(everyone), 1, dtype=torch.float64)
        replies = clients.map(self.signal, everyone, broadcast={"model": simplex}, required=True)
        signals = [replies[client]["signal"].cpu().numpy() for client in everyone]
        coordinates = principal_coordinates(signals, self.vertices)
        largest = np.abs(coordinates).max()
        if self.rescale_signals and largest > 0:
            coordinates = coordinates / largest
        _, points = spread_on_simplex(coordinates, scale_candidates(self.scale_grid), self.energy_on)
        return torch.from_numpy(points)

    async def signal(self, client: Client, model: Tree) -> Tree:
        """How local training over the whole simplex would move the endpoints; the client keeps nothing of it."""
        draw = self.draw_around(None)
        trained = await client.train(model, self.objective, draw=draw, stream=".assignment", keep_optimizer=False)
        return {"signal": _change(trained["endpoints"], model["endpoints"])}

    async def local_update(self, client: Client, model: Tree, point: Tensor | None = None) -> Weighted:
        """Trains the received body and endpoints in the client's subregion, or on the whole simplex.

        Args:
            client: who trains.
            model: ``body`` and ``endpoints`` as received.
            point: the client's alpha_k; None before the assignment.
        """
        trained = await client.train(model, self.objective, draw=self.draw_around(point))
        own = barycenter(self.vertices) if point is None else point
        client.publish(local=Predictor.of(model_at(trained, own, client.task)))
        return self.weighted(client, trained)

    @property
    def objective(self) -> Any:
        """The loss of the model at the drawn point."""
        if self.simplex_over == "adapters":
            return function(_loss_at_point)
        return loss(at=InSimplex(self.vertices, drawn("point")))

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        """The mean change of the endpoints alone (eq. 13)."""
        return _change(trained["endpoints"], received["model"]["endpoints"]).mean(0)

    def why_no_example_privacy(self) -> str:
        of_adapters = "with algorithm.simplex_over=adapters its loss is no term with gradients of single samples"
        return super().why_no_example_privacy() or (of_adapters if self.simplex_over == "adapters" else "")

    def rounds_of_everybody(self, rounds: int) -> int:
        return int(rounds > self.assignment_round and self.vertices > 1)  # the signals of all clients

    def draw_around(self, point: Tensor | None) -> Draw:
        """One point a step: of the whole simplex (None), or of the subregion around ``point``."""
        center = None if point is None else point.cpu().numpy()

        def draw(generator: np.random.Generator, steps: int) -> Tree:
            if center is None:
                return {"point": sample_simplex(generator, self.vertices, steps)}
            sample = sample_ball_legacy if self.legacy_sampler else sample_ball
            return {"point": sample(generator, center, self.radius, steps)}

        return draw

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {"global": Predictor.of(model_at(server, barycenter(self.vertices), task))}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = self.point_of(client, server)
        rows = self.global_predictors(server, client.task)
        return rows | {"personalized": Predictor.of(model_at(server, own, client.task))}

    def point_of(self, client: Client, server: Tree) -> Tensor:
        """alpha_k, float64 of shape (d,); the barycentre before the assignment, and for newcomers."""
        own: Tensor = server["points"][client.id] if self.is_assigned(client, server) else barycenter(self.vertices)
        return own

    def is_assigned(self, client: Client, server: Tree) -> bool:
        """Returns whether the client has a point of its own."""
        return "points" in server and client.id not in client.context.newcomers


def _change(trained: Any, received: Any) -> Tensor:
    """How far the endpoints have moved: shape (d, *head weight), of adapters (d, all factors)."""
    if isinstance(trained, Tensor):
        change: Tensor = trained - received
        return change
    return torch.cat([(leaf - received[name]).flatten(1) for name, leaf in trained.items()], 1)


def _loss_at_point(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    return task.loss(model_at(model, draw["point"], task), batch)
