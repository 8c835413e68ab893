"""SuPerFed: a personalized model on the line between a federated and a local model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

from algorithms.base import setting
from algorithms.parts.lines import coefficients, points
from algorithms.parts.newcomers import TrainedNewcomers
from algorithms.parts.phases import second_phase
from algorithms.parts.products import LossBetween, ProductMixture, check_products, squared_cosine_of_ends
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.scoring.mixtures import Mixture
from rayfl.objectives import Sum, drawn, function, line, loss, squared_cosine
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task


class SuPerFed(TrainedNewcomers):
    """SuPerFed: connects each client's federated model w^f and local model w^l by a low-loss line.

    From round floor(L R) on, every mini-batch draws a mixing coefficient lambda, evaluates the one model
    (1 - lambda) w^f + lambda w^l and trains both ends of the line through it, while

        loss = CE + mu ||w^f - w^g||^2 + nu cos^2(w^f, w^l)

    keeps w^f near the received w^g and the ends apart. ``mm`` mixes all layers with one lambda, ``lm`` draws one
    a layer. Before that round it trains w^f alone.

    Server: w^g. Client: w^l, never sent. Down: w^g. Up: w^f, n_k. Evaluated: lambda = 0 (global), 0.1, ..., 1 (local).

    References:
        Hahn, Jeong, Lee: Connecting Low-Loss Subspace for Personalized Federated Learning, KDD 2022, Alg. 1, eqs. 3-6.
    """

    name: Literal["superfed"] = "superfed"
    personalized: ClassVar[str] = "lambda"
    sweep: ClassVar[str | None] = "lambda"
    citation: ClassVar[str] = "Hahn et al., KDD 2022"
    no_example_privacy: ClassVar[str] = ""
    client_keeps: ClassVar[str] = "w^l_k"
    server_keeps: ClassVar[str] = "w^g"
    newcomer: ClassVar[str] = "w, and in the second phase w^l after a local update"
    running_statistics: ClassVar[str] = "all mixtures are scored with the same ones, which fit none of them"

    mode: Literal["mm", "lm"] = setting("mm", "MM, LM", "one mixing coefficient for the model (mm) or one a layer (lm)")
    start: float = setting(0.4, "L/R", "fraction of the rounds after which mixing begins", ge=0)
    orthogonality_weight: float | None = setting(
        None, "nu (beta)", "weight of the squared cosine; null: 1 for mm, 2 for lm", ge=0
    )
    proximal_weight: float = setting(0.01, "mu (gamma)", "weight of ||w^f - w^g||^2", ge=0)
    proximal_form: Literal["squared", "norm_per_layer"] = setting(
        "squared", "", "squared norm (papers), or sum of weight tensors' norms (code)", unless={"proximal_weight": (0,)}
    )
    local_init: Literal["own", "shared", "copy"] = setting(
        "own", "", "initial w^l: an own draw per client, one draw shared by all, or a copy of the first w^g received"
    )
    lm_lstm_per_layer: bool = setting(
        False, "", "lm: one for each stacked recurrent layer", only={"mode": ("lm",), "fixed_coefficient": (None,)}
    )
    fixed_coefficient: float | None = setting(
        None, "", "use this lambda in every step instead of drawing one (ablations)", ge=0, le=1
    )
    adapters: Literal["factors", "products"] = setting(
        "factors", "", "a pretrained model's adapters: line and angle of factors A and B, or of what they add, s B A"
    )

    @property
    def nu(self) -> float:
        """The orthogonality weight in force."""
        return {"mm": 1.0, "lm": 2.0}[self.mode] if self.orthogonality_weight is None else self.orthogonality_weight

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.adapters == "products":
            check_products("algorithm.adapters=products", task.network)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        never = f"no client trains a local model: algorithm.start={self.start} begins to mix after the run's last round"
        return () if self.course(context.rounds - 1, context.rounds) else (never,)

    def course(self, round: int, rounds: int) -> bool:
        """Returns whether round t (0-indexed) belongs to the second phase, t >= floor(L R)."""
        return second_phase(round, rounds, self.start)

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if self.local_init == "copy":
            client.state.setdefault("local", model)
        if not self.course(client.round, client.context.rounds):
            objective = loss(at="federated") + self.proximal_term
            trained = await client.train({"federated": model}, objective, frozen={"received": model})
            client.publish(local=Predictor.of(trained["federated"]))
            return self.weighted(client, trained["federated"])
        ends = {"federated": model, "local": self._local_model(client, model)}
        draw = coefficients(() if self.mode == "mm" else (len(self._layers(client.task)),), self.fixed_coefficient)
        trained = await client.train(ends, self.objective, frozen={"received": model}, draw=draw)
        client.state["local"] = trained["local"]
        client.publish(**self._line(trained["federated"], trained["local"], client.task))
        return self.weighted(client, trained["federated"])

    def why_no_example_privacy(self) -> str:
        of_products = "with algorithm.adapters=products its loss is no term with gradients of single samples"
        return super().why_no_example_privacy() or (of_products if self.adapters == "products" else "")

    @property
    def proximal_term(self) -> Sum:
        """mu ||w^f - w^g||^2."""
        return self.proximal_weight * proximity(self.proximal_form, "federated", "received")

    @property
    def objective(self) -> Any:
        """The second phase: the mixed model's loss, and the two penalties.

        Buffers of (1 - lambda) w^f + lambda w^l are those of w^f: what training records in them reaches the server.
        """
        if self.adapters == "products":
            mixed, angle = function(LossBetween(self._groups)), function(squared_cosine_of_ends)
        else:
            mixture = line("federated", "local", drawn("coefficient"), groups=self._groups)
            mixed, angle = loss(at=mixture), squared_cosine("federated", "local")
        return mixed + self.proximal_term + self.nu * angle

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model, rows = server["model"], {"global": Predictor.of(server["model"])}
        if self.course(client.round, client.context.rounds):
            rows |= self._line(model, self._local_model(client, model), client.task)
        return rows

    @property
    def _groups(self) -> Any:
        """What gives the names of the parameters that share a coefficient; None: all share one (``mm``)."""
        return self._layers if self.mode == "lm" else None

    def _layers(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return task.network.unstacked_layers if self.lm_lstm_per_layer else task.network.layers

    def _local_model(self, client: Client, received: Tree) -> Tree:
        """w^l, made when it is first needed."""
        if "local" not in client.state and self.local_init != "copy":
            return client.fresh_model(shared=self.local_init == "shared")
        return cast(Tree, client.state.get("local", received))

    def _line(self, federated: Model, local: Model, task: Task) -> dict[str, Predictor]:
        """The models that are evaluated."""
        return points(federated, local, task, Mixture if self.adapters == "factors" else ProductMixture)
